"""Artifacts of tiny Hugging Face models, run by the reference executor under the real engine, against transformers.

Requests of different lengths come and go, so that steps mix prefill and decode where the layout allows it, and every
bucket has padding. Tolerance in exact mode: 2e-5 x max |logit| against transformers in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cann_export.cli import main as cann_export
from cann_runtime.artifact.manifest import Graph
from cann_runtime.artifact.store import Artifact
from cann_runtime.engine import Engine, Output
from cann_runtime.executor.base import StepInputs
from cann_runtime.executor.reference.world import ReferenceWorld
from cann_runtime.loader import rank_params
from cann_runtime.request import SamplingParams
from tests.tiny_models import save_checkpoint, tiny_config, tiny_model

LAYERS = 4
PROMPTS = [[5, 17, 300, 8, 42, 99, 7], [11, 3, 200, 60], [1] + [7 * i % 320 for i in range(150)]]
NEW_TOKENS = 4
TOLERANCE = 2e-5

CASES: dict[str, dict[str, Any]] = {
    "qwen2-flat": {"model_type": "qwen2", "head_dim": 128},
    "qwen2-tied-odd-vocab-one-kv-head": {
        "model_type": "qwen2",
        "head_dim": 128,
        "tie_word_embeddings": True,
        "vocab_size": 333,
        "num_key_value_heads": 1,
    },
    "llama-rectangular": {"model_type": "llama", "head_dim": 64},
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Ranks are threads here, and the tensors are too small to share out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Recorder:
    """Keeps what the engine asked for last and what it got."""

    world: ReferenceWorld
    step: StepInputs | None = None
    logits: Tensor | None = None
    phases: tuple[str, ...] = ()

    def execute(self, graph: Graph, step: StepInputs) -> Tensor:
        self.step, self.phases = step, (*self.phases, graph.phase)
        self.logits = self.world.execute(graph, step)
        return self.logits

    def allocate_kv(self, num_blocks: int) -> None:
        self.world.allocate_kv(num_blocks)

    @property
    def kv_spec(self) -> Any:
        return self.world.kv_spec


@dataclass
class Run:
    """An artifact in bfloat16, the model of its weights in float64, and an engine over all its ranks."""

    model: Any
    recorder: Recorder
    engine: Engine
    vocab: int

    @classmethod
    def make(cls, name: str, tp: int, folder: Path, precision: str) -> Run:
        config = tiny_config(**CASES[name], num_hidden_layers=LAYERS)
        model = tiny_model(config)
        for param in model.parameters():  # not model.bfloat16(): that would round the rotary frequencies too
            param.copy_(param.bfloat16())
        checkpoint = save_checkpoint(model, config, folder / "checkpoint")
        where = [
            "--target",
            "ascend910b",
            "--tp",
            str(tp),
            "--dtype",
            "bfloat16",
            "-o",
            str(folder / "artifact"),
            "--quiet",
        ]
        assert cann_export([str(checkpoint), *where, "--max-batch-size", "4", "--max-seq-len", "256"]) == 0
        artifact = Artifact.open(folder / "artifact")
        world = ReferenceWorld(artifact, lambda rank: rank_params(artifact, checkpoint, rank), precision=precision)
        recorder = Recorder(world)
        blocks = artifact.manifest.kv_cache.scratch_blocks + 8
        recorder.allocate_kv(blocks)
        return cls(model.double(), recorder, Engine(artifact.manifest, recorder, blocks), config["vocab_size"])

    def eager(self) -> Any:
        """The model in bfloat16, with the rotary frequencies of float32, as transformers loads it."""
        model = copy.deepcopy(self.model).to(torch.bfloat16)
        for mine, theirs in zip(model.buffers(), self.model.buffers(), strict=True):
            mine.data = theirs.float()
        return model

    def outputs(self) -> list[list[Output]]:
        """Run all prompts, the last two entering after the first has begun; what each step gave."""
        params = SamplingParams(0.0, 0, 1.0, None, NEW_TOKENS, ignore_eos=True)
        requests = [self.engine.add_request(PROMPTS[0], params)]
        steps = [self.check(self.engine.step())]
        requests += [self.engine.add_request(prompt, params) for prompt in PROMPTS[1:]]
        while not all(request.finished for request in requests):
            steps.append(self.check(self.engine.step()))
        return steps

    def check(self, outputs: list[Output]) -> list[Output]:
        """Hold each logits row of the last step against transformers on the same text."""
        assert self.recorder.logits is not None
        for row, output in enumerate(outputs):
            want = self.model(input_ids=torch.tensor([output.request.tokens[:-1]])).logits[0, -1]
            got = self.recorder.logits[row, : self.vocab].double()
            error, peak = float((got - want).abs().max()), float(want.abs().max())
            assert error <= TOLERANCE * peak
        return outputs

    def check_caches(self, outputs: list[Output]) -> None:
        """Hold each sequence's keys and values, over all ranks, against transformers' own cache."""
        step, ranks = self.recorder.step, self.recorder.world.ranks
        assert step is not None
        for s, output in enumerate(outputs):
            cache = self.model(input_ids=torch.tensor([output.request.tokens[:-1]]), use_cache=True).past_key_values
            length, blocks = int(step.kv_lens_S[s]), step.block_table_SM[s].long()
            for layer in range(LAYERS):
                wanted = (cache.layers[layer].keys, cache.layers[layer].values)
                for name, want in zip((f"k_cache_{layer}", f"v_cache_{layer}"), wanted, strict=True):
                    got = torch.cat([rank.kv[name][blocks].flatten(0, 1)[:length] for rank in ranks], 1)
                    got = got[
                        :, :: got.shape[1] // want.shape[1]
                    ]  # where there are more ranks than heads, each has a copy
                    assert got.shape[0] == want.shape[2]
                    difference = got.transpose(0, 1).double() - want[0]
                    assert float(difference.abs().max()) <= TOLERANCE * float(want.abs().max())


@pytest.mark.parametrize(
    ("name", "tp"),
    [("qwen2-flat", 1), ("qwen2-tied-odd-vocab-one-kv-head", 2), ("llama-rectangular", 2)],
)
def test_logits_and_caches_of_every_step_equal_transformers(name: str, tp: int, tmp_path: Path) -> None:
    run = Run.make(name, tp, tmp_path, "exact")
    steps = run.outputs()
    assert {len(outputs) for outputs in steps} >= {1, 3}
    assert set(run.recorder.phases) == {"prefill", "decode"}
    assert run.engine.stats.padding_rows > 0
    run.check_caches(steps[-1])


def test_device_roundings_are_as_far_from_float64_as_transformers_in_bfloat16(tmp_path: Path) -> None:
    """Mode npu on the bfloat16 graph, rms over all rows and columns, beside eager transformers in bfloat16."""
    run = Run.make("qwen2-flat", 1, tmp_path, "npu")
    eager = run.eager()
    errors: dict[str, list[Tensor]] = {"npu": [], "eager": []}
    params = SamplingParams(0.0, 0, 1.0, None, NEW_TOKENS, ignore_eos=True)
    requests = [run.engine.add_request(prompt, params) for prompt in PROMPTS]
    while not all(request.finished for request in requests):
        for row, output in enumerate(run.engine.step()):
            text = torch.tensor([output.request.tokens[:-1]])
            assert run.recorder.logits is not None
            want = run.model(input_ids=text).logits[0, -1]
            errors["npu"].append(run.recorder.logits[row, : run.vocab].double() - want)
            errors["eager"].append(eager(input_ids=text).logits[0, -1].double() - want)
    rms = {name: float(torch.stack(rows).square().mean().sqrt()) for name, rows in errors.items()}
    assert 1e-3 < rms["npu"] <= 1.5 * rms["eager"]


def test_float64_is_closer_than_float32(tmp_path: Path) -> None:
    run = Run.make("qwen2-flat", 1, tmp_path, "exact64")
    run.engine.generate([PROMPTS[0]], SamplingParams(0.0, 0, 1.0, None, 1, ignore_eos=True))
    want = run.model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1]
    assert run.recorder.logits is not None
    assert run.recorder.logits.dtype == torch.float64
    # The rope tables are float32, as transformers' own are.
    assert float((run.recorder.logits[0, : run.vocab] - want).abs().max()) <= 1e-6 * float(want.abs().max())
