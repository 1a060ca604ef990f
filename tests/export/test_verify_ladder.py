"""`cann-export verify` on tiny artifacts: passes on good ones, whole or cut; fails on one whose graph was changed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cann_export.cli import main as cann_export
from cann_export.verify.ladder import verify
from cann_runtime.artifact.store import Artifact
from tests.tiny_models import save_checkpoint, tiny_config, tiny_model

SIZES = ["--dtype", "bfloat16", "--quiet", "--max-batch-size", "4", "--max-seq-len", "256"]


def exported(folder: Path, model_type: str, head_dim: int, tp: int, *flags: str, layers: int = 4) -> tuple[Path, Path]:
    """(artifact, checkpoint) of a tiny model."""
    config = tiny_config(model_type, head_dim=head_dim, num_hidden_layers=layers)
    checkpoint = save_checkpoint(tiny_model(config, dtype=torch.bfloat16), config, folder / "checkpoint")
    artifact = folder / "artifact"
    assert cann_export([str(checkpoint), "--tp", str(tp), "-o", str(artifact), *SIZES, *flags]) == 0
    return artifact, checkpoint


def test_every_rung_of_a_rectangular_artifact_on_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact, checkpoint = exported(tmp_path, "llama", 64, 2, "--target", "ascend910_93")
    assert cann_export(["verify", str(artifact), "--checkpoint", str(checkpoint), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    names = [rung["name"].split(",")[0] for rung in report["rungs"]]
    assert names == ["transformers eager"] * 3 + ["traced", "sharded (tp 2)", "fused (tp 2)"] + ["GE graphs"] * 2
    assert report["peak"] >= 3, "the model must be sharp enough for an error to show"
    for rung in report["rungs"][3:-1]:
        assert rung["error"] <= 2e-5 * report["peak"]
    assert not report["findings"] or all(f["severity"] == "warning" for f in report["findings"])


def test_a_cut_artifact_runs_the_first_layers_and_the_last(tmp_path: Path) -> None:
    artifact, _ = exported(tmp_path, "qwen2", 128, 2, "--target", "ascend950", layers=6)
    report = verify(Artifact.open(artifact), None, 3, lambda text: None)
    assert report.ok
    assert "layers 0, 1, 5 of 6" in report.notes
    assert [rung.ok for rung in report.rungs] == [True] * 8


def test_a_short_vocabulary_gives_the_same_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cann_export.verify.ladder._CUT_VOCAB", 64)
    artifact, _ = exported(tmp_path, "qwen2", 128, 2, "--target", "ascend910b")
    report = verify(Artifact.open(artifact), None, 2, lambda text: None)
    assert report.ok
    assert "vocabulary cut from 515 to 128" in report.notes


def test_a_changed_graph_fails_with_its_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact, checkpoint = exported(tmp_path, "qwen2", 128, 1, "--target", "ascend910b")
    _spoil(artifact)
    assert cann_export(["verify", str(artifact), "--checkpoint", str(checkpoint), "--quiet"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL" in shown
    assert "first: layer2_FusedInferAttentionScore_0 (layer 2, model.layers.2.self_attn)" in shown.replace("\n", "")


def _spoil(artifact: Path) -> None:
    """Give one attention of each graph another scale, and keep the artifact whole otherwise."""
    from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef

    manifest = json.loads((artifact / "manifest.json").read_text())
    for graph in manifest["graphs"]:
        model = ModelDef()
        old = artifact / "objects" / graph["object"]
        model.ParseFromString(old.read_bytes())
        (op,) = [op for op in model.graph[0].op if op.name == "layer2_FusedInferAttentionScore_0"]
        op.attr["scale"].f = 0.05
        data = model.SerializeToString(deterministic=True)
        graph["object"] = hashlib.sha256(data).hexdigest()
        (artifact / "objects" / graph["object"]).write_bytes(data)
        manifest["objects"][graph["object"]] = len(data)
    data = json.dumps(manifest).encode()
    (artifact / "manifest.json").write_bytes(data)
    (artifact / "manifest.sha256").write_text(f"{hashlib.sha256(data).hexdigest()}  manifest.json\n")


def test_layers_out_of_range_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact, _ = exported(tmp_path, "qwen2", 128, 1, "--target", "ascend910b")
    assert cann_export(["verify", str(artifact), "--layers", "9", "--quiet"]) == 2
    assert "--layers 9: the artifact has 4; allowed: 2 to 4" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_the_cpu_package_is_a_rung(tp: int, tmp_path: Path) -> None:
    artifact, checkpoint = exported(tmp_path, "qwen2", 64, tp, "--target", "cpu")
    report = verify(Artifact.open(artifact), checkpoint, None, lambda text: None)
    assert report.ok
    assert report.rungs[-1].name == f"CPU package, {tp} ranks"
