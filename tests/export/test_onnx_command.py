"""ONNX models as the command line makes them, run by onnxruntime under the real engine, against transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from tiny_models import save_checkpoint, tiny_config, tiny_model
from torch import Tensor

from cann_export.cli import main as cann_export
from cann_export.lower.onnx_folder import model_name
from cann_export.model import DTYPES
from cann_export.program import STEP_INPUTS
from cann_runtime.artifact.manifest import Graph, KVCacheSpec
from cann_runtime.artifact.store import Artifact
from cann_runtime.engine import Engine
from cann_runtime.executor.base import StepInputs
from cann_runtime.request import SamplingParams

PROMPTS = [[5, 17, 300, 8, 42, 99, 7], [11, 3, 200, 60], [1] + [7 * i % 320 for i in range(30)]]
NEW_TOKENS = 4
ASCEND = ("--target", "ascend910b", "--decode-buckets", "1,4", "--prefill-buckets", "64")
SMALL = ("--max-batch-size", "4", "--max-seq-len", "256", "--quiet")


class OnnxExecutor:
    """Runs the models of a folder; caches go in and come out of every step."""

    def __init__(self, artifact: Artifact, folder: Path) -> None:
        self.kv_spec: KVCacheSpec = artifact.manifest.kv_cache
        self.sessions = {}
        for graph in artifact.manifest.graphs:
            path = folder / model_name(graph)
            onnx.checker.check_model(str(path), full_check=True)
            self.sessions[graph.object] = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.logits = torch.empty(0)
        self.phases: set[str] = set()

    def allocate_kv(self, num_blocks: int) -> None:
        spec, names = self.kv_spec, [i.name for i in next(iter(self.sessions.values())).get_inputs()[7:]]
        shape = (num_blocks, spec.block_size, spec.kv_heads, spec.head_dim)
        self.kv = {name: torch.zeros(shape, dtype=DTYPES[spec.dtype]).numpy() for name in names}

    def execute(self, graph: Graph, step: StepInputs) -> Tensor:
        self.phases.add(graph.phase)
        inputs = {name: t.numpy() for name, t in zip(STEP_INPUTS, step.tensors(), strict=True)}
        logits, *after = self.sessions[graph.object].run(None, inputs | self.kv)
        self.kv = dict(zip(self.kv, after, strict=True))
        self.logits = torch.from_numpy(logits)
        return self.logits


def _check_engine(artifact: Artifact, executor: OnnxExecutor, model: Any, tolerance: float) -> Engine:
    """Requests of different lengths come and go; every step's logits are transformers' own within the tolerance."""
    blocks = artifact.manifest.kv_cache.scratch_blocks + 64
    executor.allocate_kv(blocks)
    engine = Engine(artifact.manifest, executor, blocks)
    params = SamplingParams(0.0, 0, 1.0, None, NEW_TOKENS, ignore_eos=True)
    requests = [engine.add_request(PROMPTS[0], params)]
    while not all(r.finished for r in requests):
        for row, output in enumerate(engine.step()):
            with torch.no_grad():
                want = model(input_ids=torch.tensor([output.request.tokens[:-1]])).logits[0, -1]
            assert float((executor.logits[row] - want).abs().max()) <= tolerance
        if len(requests) == 1:
            requests += [engine.add_request(p, params) for p in PROMPTS[1:]]
    return engine


def _make(tmp_path: Path, **changes: Any) -> tuple[Any, Path]:
    config = tiny_config(**changes)
    model = tiny_model(config)
    return model, save_checkpoint(model, config, tmp_path / "checkpoint")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_static_models_under_the_engine(head_dim: int, tmp_path: Path) -> None:
    # More layers than are traced; head_dim decides the layout: rectangular, or flat with a padding sequence.
    model, checkpoint = _make(tmp_path, model_type="qwen2", head_dim=head_dim, num_hidden_layers=4)
    for param in model.parameters():  # not model.half(): that would round the rotary frequencies too
        param.copy_(param.half())
    flags = [str(checkpoint), *ASCEND, *SMALL, "--dtype", "float16"]
    assert cann_export([*flags, "--emit", "onnx", "-o", str(tmp_path / "artifact")]) == 0
    artifact = Artifact.open(tmp_path / "artifact")
    folder = tmp_path / "onnx"
    assert cann_export(["onnx", str(artifact.path), "-o", str(folder), "--checkpoint", str(checkpoint)]) == 0
    executor = OnnxExecutor(artifact, folder)
    # Ascend targets have no float32: logits of about 5 after some thirty roundings to float16 (unit roundoff 5e-4).
    engine = _check_engine(artifact, executor, model.double(), 2e-2)
    assert executor.phases == {"prefill", "decode"}
    assert engine.stats.padding_rows > 0


def test_dynamic_model_with_packed_weights_under_the_engine(tmp_path: Path) -> None:
    model, checkpoint = _make(tmp_path, model_type="llama", num_hidden_layers=1)
    flags = [str(checkpoint), "--target", "cpu", *SMALL, "--dtype", "float32", "--pack-weights", "--emit", "onnx"]
    assert cann_export([*flags, "-o", str(tmp_path / "artifact")]) == 0
    artifact = Artifact.open(tmp_path / "artifact")
    folder = tmp_path / "onnx"
    assert cann_export(["onnx", str(artifact.path), "-o", str(folder)]) == 0
    _check_engine(artifact, OnnxExecutor(artifact, folder), model, 1e-4)


def test_onnx_changes_nothing_else_and_refusals_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, checkpoint = _make(tmp_path, model_type="qwen2", head_dim=128)
    flags = [str(checkpoint), *ASCEND, *SMALL, "--dtype", "bfloat16"]
    assert cann_export([*flags, "-o", str(tmp_path / "plain")]) == 0
    assert cann_export([*flags, "--emit", "onnx", "-o", str(tmp_path / "both")]) == 0
    plain, both = (Artifact.open(tmp_path / name).manifest for name in ("plain", "both"))
    models = {g.onnx for g in both.graphs}
    assert len(models) == len(both.graphs) == 3
    assert {sha: size for sha, size in both.objects.items() if sha not in models} == plain.objects
    assert both.fingerprint == plain.fingerprint
    for sha in models:  # bfloat16 has no kernels in onnxruntime on a CPU, but the model is a valid one
        model = onnx.load(Artifact.open(tmp_path / "both").object_path(str(sha)), load_external_data=False)
        types = {i.type.tensor_type.elem_type for i in model.graph.input if "cache" in i.name}
        assert types == {onnx.TensorProto.BFLOAT16}
    capsys.readouterr()
    for args, message in (
        (["plain", "-o", "out"], "export it with --emit onnx"),
        (["both", "-o", "out", "--rank", "1"], "--rank: 1 is not one of the artifact's ranks, 0 to 0"),
        (["both", "-o", "plain"], "give a new or an empty folder"),
    ):
        paths = [str(tmp_path / a) if a in ("plain", "both", "out") else a for a in args]
        assert cann_export(["onnx", *paths]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert cann_export(["onnx", str(tmp_path / "both"), "-o", str(tmp_path / "out")]) == 0
    assert "no weights.safetensors" in capsys.readouterr().err


def test_missing_onnx_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "onnx" else found(name, *rest))
    for args in (["qwen2.5-7b", "--emit", "onnx", "-o", "out"], ["onnx", "out", "-o", "folder"]):
        assert cann_export(args) == 2
        assert capsys.readouterr().err.splitlines() == [
            "cann-export: error: ONNX models need onnx, which is not installed: pip install 'cann-export[onnx]'"
        ]
