"""Seeded weights and rounded checkpoints: slices are slices of the whole, values are the dtype's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cann_export.verify.weights import RoundedReader, SeededReader
from cann_runtime.artifact.plan import Param, Part, WeightPlan
from tests.tiny_models import save_checkpoint, tiny_config, tiny_model


def plan(**shapes: list[int]) -> WeightPlan:
    named = {name.replace("__", "."): shape for name, shape in shapes.items()}
    params = {
        name: Param(name=name, dtype="bfloat16", shape=shape, parts=[Part(source=name, shape=shape)])
        for name, shape in named.items()
    }
    return WeightPlan(tp=1, params=params)


@pytest.mark.parametrize("room", [0, 1 << 30])
def test_any_slice_is_that_slice_of_the_whole(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cann_export.verify.weights._KEEP", room)
    reader = SeededReader(plan(a__weight=[96, 40], b__bias=[96]), torch.bfloat16)
    whole = reader.narrow("a.weight")
    assert whole.dtype == torch.bfloat16
    assert torch.equal(reader.narrow("a.weight", 0, 10, 31), whole[10:31])
    assert torch.equal(reader.narrow("a.weight", 1, 7, 40), whole[:, 7:])
    assert torch.equal(reader.narrow("b.bias", 0, 90, 96), reader.narrow("b.bias")[90:])


def test_seeded_weights_differ_by_name_and_repeat() -> None:
    shapes = plan(a__weight=[64, 32], b__weight=[64, 32], c__bias=[4000], d__norm__weight=[4000])
    one, two = SeededReader(shapes, torch.float32), SeededReader(shapes, torch.float32)
    assert torch.equal(one.narrow("a.weight"), two.narrow("a.weight"))
    assert not torch.equal(one.narrow("a.weight"), one.narrow("b.weight"))
    assert float(one.narrow("c.bias").std()) == pytest.approx(0.5, rel=0.1)
    assert float(one.narrow("d.norm.weight").mean()) == pytest.approx(1, abs=0.02)


def test_a_checkpoint_is_rounded_to_the_artifacts_dtype(tmp_path: Path) -> None:
    config = tiny_config(num_hidden_layers=1)
    model = tiny_model(config)
    reader = RoundedReader(save_checkpoint(model, config, tmp_path / "checkpoint"), torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(reader.narrow(name), model.state_dict()[name].to(torch.bfloat16))
