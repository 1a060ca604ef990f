"""GE graphs of Hugging Face models, run on the CPU, against transformers in float64: the whole Ascend path's numbers.

Four layers are stamped from three; ranks run in lockstep. Shape letters: T tokens, S sequences, R logits rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cann_export.expand import expand_plan
from cann_export.fakeworld import fake_world
from cann_export.fuse import expectations, fuse
from cann_export.lower.ascend.convert import GeGraph, lower_ascend
from cann_export.lower.ascend.soc import layout, resolve_target
from cann_export.lower.ascend.toolchain import ensure_toolchain
from cann_export.model import DTYPES, build_model
from cann_export.shard import shard
from cann_export.trace import trace
from cann_runtime.artifact.checkpoint_reader import CheckpointReader
from cann_runtime.artifact.manifest import Bucket, Phase
from cann_runtime.artifact.weights import stream_params
from tests.ge_interpreter import run_graph
from tests.tiny_models import save_checkpoint, tiny_config, tiny_model

LAYERS, BLOCK, BLOCKS = 4, 128, 6
PROMPTS = [[5, 17, 300, 8, 42, 99, 7], [11, 3, 200, 60]]
NEXT = [31, 19]

FLAT: dict[Phase, Bucket] = {
    "prefill": Bucket(tokens=16, seqs=3, rows=2, max_blocks=2),
    "decode": Bucket(tokens=4, seqs=4, rows=2, max_blocks=2),
}
RECTANGULAR: dict[Phase, Bucket] = {
    "prefill": Bucket(tokens=16, seqs=2, rows=2, max_blocks=2, query_len=8),
    "decode": Bucket(tokens=4, seqs=4, rows=2, max_blocks=2, query_len=1),
}
BUCKETS = {"flat": FLAT, "rectangular": RECTANGULAR}

CASES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "head_dim": 128},
    "qwen2-tied-odd-vocab": {"model_type": "qwen2", "head_dim": 128, "tie_word_embeddings": True, "vocab_size": 333},
    "qwen2-one-kv-head": {"model_type": "qwen2", "head_dim": 128, "num_key_value_heads": 1},
    "llama": {"model_type": "llama", "head_dim": 128},
    "mistral": {"model_type": "mistral", "head_dim": 128},
    "qwen3": {"model_type": "qwen3", "head_dim": 128},
    "llama-64": {"model_type": "llama", "head_dim": 64},
    "qwen2-64": {"model_type": "qwen2", "head_dim": 64},
}


@pytest.fixture(autouse=True, scope="module")
def _toolchain() -> None:
    ensure_toolchain(print)


def lowered(config: dict[str, Any], tp: int, phase: Phase, dtype: str) -> tuple[GeGraph, Any, Any]:
    """(graph of all layers, plan of all layers, built model) by the stages of the pipeline."""
    built = build_model(config, dtype, max_seq_len=256, num_layers=3)
    expected = expectations(built)
    plan = shard(built, tp)
    bucket = BUCKETS[layout(config["head_dim"])][phase]
    with fake_world(tp):
        program = trace(built, phase, bucket, tp=tp, block_size=BLOCK, kv_dtype=DTYPES[dtype])
    program = fuse(program, plan, expected)
    graph = lower_ascend(program, target=resolve_target("ascend910b"), layers_total=LAYERS)
    return graph, expand_plan(plan, 3, LAYERS), built


def step_inputs(phase: Phase, flat: bool) -> dict[str, Tensor]:
    """A prefill of both prompts, or the decode after it, in the padded form that the engine gives to a bucket.

    Sequence s has blocks 1 + 2 s and 2 + 2 s; padding rows write to distinct slots of block 0.
    """
    bucket = BUCKETS["flat" if flat else "rectangular"][phase]
    past = [0 if phase == "prefill" else len(p) for p in PROMPTS]
    new = PROMPTS if phase == "prefill" else [[n] for n in NEXT]
    ids, positions, slots, last = [], [], [], []
    scratch = iter(range(BLOCK))
    for s, tokens in enumerate(new):
        ids += tokens
        where = range(past[s], past[s] + len(tokens))
        positions += where
        slots += [(1 + 2 * s) * BLOCK + p for p in where]
        last.append(len(ids) - 1)
        pad = 0 if flat else (bucket.query_len or 1) - len(tokens)
        ids, positions = ids + [0] * pad, positions + [0] * pad
        slots += [next(scratch) for _ in range(pad)]
    rest = bucket.tokens - len(ids)
    ids, positions, slots = ids + [0] * rest, positions + [0] * rest, slots + [next(scratch) for _ in range(rest)]
    extra = bucket.seqs - len(new)  # padding sequences share the rows that are left
    sizes = [len(t) for t in new] + [rest // extra] * extra if extra else [len(t) for t in new]
    lens = [a + b for a, b in zip(past + [0] * extra, sizes, strict=True)]
    table = torch.zeros(bucket.seqs, bucket.max_blocks, dtype=torch.int32)
    table[: len(new)] = torch.tensor([[1 + 2 * s, 2 + 2 * s] for s in range(len(new))])
    query_lens = torch.tensor(sizes).cumsum(0) if flat else torch.tensor(sizes)
    return {
        "input_ids": torch.tensor(ids),
        "position_ids": torch.tensor(positions),
        "slot_mapping": torch.tensor(slots, dtype=torch.int32),
        "block_table": table,
        "query_lens": query_lens,
        "kv_lens": torch.tensor(lens),
        "logits_rows": torch.tensor(last),
    }


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("qwen2", 2),
        ("qwen2-tied-odd-vocab", 2),
        ("qwen2-one-kv-head", 4),
        ("llama", 1),
        ("mistral", 1),
        ("qwen3", 2),
        ("llama-64", 1),
        ("qwen2-64", 2),
    ],
)
def test_the_graphs_logits_equal_transformers(name: str, tp: int, tmp_path: Path) -> None:
    from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef

    config = tiny_config(**CASES[name], num_hidden_layers=LAYERS)
    model = tiny_model(config)
    checkpoint = save_checkpoint(model, config, tmp_path / "checkpoint")
    double = model.double()
    caches: list[dict[str, Tensor]] = [{} for _ in range(tp)]
    params: list[dict[str, Tensor]] = []
    for phase in ("prefill", "decode"):
        graph, plan, built = lowered(config, tp, phase, "float32")
        if not params:
            constants = {f"{n}.inv_freq": r.inv_freq for n, r in built.ropes.items()}
            reader = CheckpointReader(checkpoint)
            params = [dict(stream_params(plan, reader, rank, constants)) for rank in range(tp)]
        step = step_inputs(phase, layout(config["head_dim"]) == "flat")
        ranks = []
        for rank in range(tp):
            for ref in graph.signature.inputs:
                if ref.kind == "kv":
                    caches[rank].setdefault(ref.name, torch.zeros(BLOCKS, *ref.shape[1:]))
            known = params[rank] | step | caches[rank]
            ranks.append([known[ref.name] for ref in graph.signature.inputs])
        ge = ModelDef()
        ge.ParseFromString(graph.model)
        logits = run_graph(ge.graph[0], ranks)
        texts = PROMPTS if phase == "prefill" else [[*p, n] for p, n in zip(PROMPTS, NEXT, strict=True)]
        want = torch.stack([double(input_ids=torch.tensor([text])).logits[0, -1] for text in texts])
        peak = float(want.abs().max())
        assert peak >= 3, "the model must be sharp enough for an error to show"
        for got in logits:
            assert float((got[:, : config["vocab_size"]].double() - want).abs().max()) <= 2e-5 * peak


def test_dense_families_have_one_histogram_but_for_the_norms_of_qwen3() -> None:
    histograms = {}
    for name in ("qwen2", "llama", "mistral", "qwen3"):
        graph, _, _ = lowered(tiny_config(**CASES[name], num_hidden_layers=LAYERS), 2, "decode", "bfloat16")
        (layer,) = graph.report["layers"].values()
        histograms[name] = layer["histogram"]
    assert histograms["llama"] == histograms["mistral"] == histograms["qwen2"]
    assert sum(histograms["qwen2"].values()) == 19
    # Qwen3 norms each head of q and k; q is one row a head while it is normed.
    assert histograms["qwen3"] == histograms["qwen2"] | {"RmsNorm": 2, "Reshape": 7}
