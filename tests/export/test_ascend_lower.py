"""Lowering a fused step for Ascend: what the GE graph holds, what it computes, and what its bytes depend on."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from cann_export.fakeworld import fake_world
from cann_export.lower.ascend.convert import GeGraph, lower_ascend
from cann_export.lower.ascend.pin import cann_version, pinned_target
from cann_export.lower.ascend.soc import FAMILIES, resolve_target
from cann_export.lower.ascend.toolchain import ensure_toolchain
from cann_export.program import Program, Slot
from cann_runtime.artifact.manifest import Bucket, Phase
from cann_runtime.errors import RecipeError, UnsupportedModelError
from tests.ascend_toy import Size, toy_program
from tests.ge_interpreter import run_graph

TARGET = resolve_target("ascend910b")
DECODE = Bucket(tokens=4, seqs=4, rows=4, max_blocks=2)
PREFILL = Bucket(tokens=20, seqs=3, rows=3, max_blocks=2)
DECODE_64 = Bucket(tokens=4, seqs=4, rows=4, max_blocks=2, query_len=1)
PREFILL_64 = Bucket(tokens=32, seqs=2, rows=2, max_blocks=2, query_len=16)

LAYER = {
    "Reshape": 6,
    "MatMul": 4,
    "AddRmsNorm": 2,
    "HcomAllReduce": 2,
    "ApplyRotaryPosEmb": 1,
    "FusedInferAttentionScore": 1,
    "ScatterPaKvCache": 1,
    "SplitV": 1,
    "SwiGlu": 1,
}
"""One middle layer of a flat decode or prefill graph, tp > 1."""


@pytest.fixture(autouse=True, scope="module")
def _toolchain() -> None:
    ensure_toolchain(print)


def graph_of(lowered: GeGraph) -> Any:
    from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef

    model = ModelDef()
    model.ParseFromString(lowered.model)
    return model.graph[0]


def count(lowered: GeGraph, kind: str) -> int:
    return sum(op.type == kind for op in graph_of(lowered).op)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("bucket", "phase"), [(DECODE, "decode"), (PREFILL, "prefill")])
def test_a_flat_layer_is_19_nodes_of_which_13_are_kernels(family: str, bucket: Bucket, phase: Phase) -> None:
    lowered = lower_ascend(toy_program(Size(), bucket, phase), target=resolve_target(family))
    layer = lowered.report["layers"]["dense"]
    assert layer == {"nodes": 19, "kernels": 13, "histogram": LAYER}
    assert not {"TensorMove", "Assign", "Identity"} & set(lowered.report["histogram"])
    assert lowered.report["histogram"]["Transpose"] == 1  # of the gathered logits, once per graph


@pytest.mark.parametrize(("bucket", "phase"), [(DECODE_64, "decode"), (PREFILL_64, "prefill")])
def test_head_size_64_takes_the_rectangular_layout(bucket: Bucket, phase: Phase) -> None:
    lowered = lower_ascend(toy_program(Size(head_dim=64, kv_heads=2), bucket, phase), target=TARGET)
    attention = [op for op in graph_of(lowered).op if op.type == "FusedInferAttentionScore"]
    assert {op.attr["input_layout"].s for op in attention} == {b"BSH"}
    assert lowered.report["layers"]["dense"]["histogram"] == LAYER | {"Reshape": 7}
    inputs = [ref.name for ref in lowered.signature.inputs]
    assert ("query_lens" in inputs) == (phase == "prefill"), "with one row a sequence the op does not read it"


def test_the_causal_mask_is_made_once_per_prefill_graph_and_never_in_decode() -> None:
    prefill = lower_ascend(toy_program(Size(), PREFILL, "prefill"), target=TARGET)
    decode = lower_ascend(toy_program(Size(), DECODE, "decode"), target=TARGET)
    assert (count(prefill, "Range"), count(decode, "Range")) == (1, 0)
    assert len(prefill.model) < len(decode.model) + 10_000


def test_several_rows_a_sequence_in_decode_are_causal() -> None:
    bucket = Bucket(tokens=8, seqs=4, rows=8, max_blocks=2)
    lowered = lower_ascend(toy_program(Size(), bucket, "decode"), target=TARGET)
    assert {op.attr["sparse_mode"].i for op in graph_of(lowered).op if op.type == "FusedInferAttentionScore"} == {3}


def test_caches_are_written_in_place_with_an_open_block_count() -> None:
    lowered = lower_ascend(toy_program(Size(blocks=16), DECODE, "decode"), target=TARGET)
    signature = lowered.signature
    names = [f"{kind}_cache_{i}" for i in range(3) for kind in ("k", "v")]
    assert [signature.inputs[i].name for i in signature.in_place] == names
    assert all(signature.inputs[i].shape == [-1, 128, 1, 128] for i in signature.in_place)
    caches = {op.name: op for op in graph_of(lowered).op if op.name in names}
    assert all(list(op.output_desc[0].shape.dim) == [-1, 128, 1, 128] for op in caches.values())
    writes = [op for op in graph_of(lowered).op if op.type == "ScatterPaKvCache"]
    written = {edge.removesuffix(":0") for op in writes for edge in op.input}
    assert set(names) <= written, "the write op reads the input itself, not a copy"
    more_blocks = lower_ascend(toy_program(Size(blocks=24), DECODE, "decode"), target=TARGET)
    assert more_blocks == lowered


def test_the_signature_follows_the_graphs_inputs() -> None:
    lowered = lower_ascend(toy_program(Size(), DECODE, "decode"), target=TARGET)
    data = {op.attr["index"].i: op for op in graph_of(lowered).op if op.type == "Data"}
    assert sorted(data) == list(range(len(lowered.signature.inputs)))
    for i, ref in enumerate(lowered.signature.inputs):
        assert data[i].name == ref.name.replace(".", "_")
        assert list(data[i].output_desc[0].shape.dim) == ref.shape
    frozen = lowered.signature.options["frozenInput"].split(",")
    assert frozen == ["0" if ref.kind == "input" else "1" for ref in lowered.signature.inputs]
    assert lowered.signature.options["ge.tiling_schedule_optimize"] == "1"
    assert [(ref.dtype, ref.shape) for ref in lowered.signature.outputs] == [("bfloat16", [4, 8 * 128])]


def test_an_input_that_no_op_reads_is_not_in_the_signature() -> None:
    program = toy_program(Size(layers=1, tp=1), DECODE_64, "decode")
    assert "query_lens" not in [r.name for r in lower_ascend(program, target=TARGET).signature.inputs]


def test_groups_are_logical_and_graphs_are_equal_on_all_ranks() -> None:
    models = []
    for rank in (0, 5):
        with fake_world(tp=8, rank=rank):
            models.append(lower_ascend(toy_program(Size(), DECODE, "decode"), target=TARGET))
    assert models[0] == models[1]
    groups = {op.attr["group"].s for op in graph_of(models[0]).op if "group" in op.attr}
    assert groups == {b"tp"}


def test_a_group_that_the_runtime_cannot_bind_is_refused() -> None:
    program = toy_program(Size(layers=1), DECODE, "decode")
    for node in program.gm.graph.nodes:
        if "all_reduce" in str(node.target):
            node.args = (*node.args[:2], "0")
    with pytest.raises(ValueError, match="'0': collectives must name one of tp, ep, world"):
        lower_ascend(program, target=TARGET)


def digest(lowered: GeGraph) -> str:
    return hashlib.sha256(lowered.model + lowered.signature.model_dump_json().encode()).hexdigest()


def test_bytes_do_not_depend_on_the_process() -> None:
    lower_ascend(toy_program(Size(layers=1), DECODE, "decode"), target=TARGET)  # moves every counter of this process
    here = digest(lower_ascend(toy_program(Size(), PREFILL, "prefill"), target=TARGET))
    code = """
import tests.export.test_ascend_lower as t
t.ensure_toolchain(print)
print(t.digest(t.lower_ascend(t.toy_program(t.Size(), t.PREFILL, "prefill"), target=t.TARGET)))
"""
    folders = [str(Path(__file__).parents[2]), *sys.path]
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == here


def test_lowering_leaves_the_program_as_it_was() -> None:
    program = toy_program(Size(), DECODE, "decode")
    before = str(program.gm.graph)
    first = lower_ascend(program, target=TARGET)
    assert str(program.gm.graph) == before
    assert lower_ascend(program, target=TARGET) == first


def test_pinning_is_seen_by_the_converters_and_undone() -> None:
    import torch_npu
    from torchair._utils.check_platform import is_arch35

    before = torch_npu.npu.get_device_name, torch_npu.npu.utils._is_gte_cann_version
    for soc, new in (("Ascend910B3", False), ("Ascend950PR_9599", True)):
        with pinned_target(soc, "8.3.RC1"):
            assert is_arch35() is new
            assert torch_npu.npu.utils._is_gte_cann_version("8.2.RC1")
            assert not torch_npu.npu.utils._is_gte_cann_version("8.3.0")
    assert (torch_npu.npu.get_device_name, torch_npu.npu.utils._is_gte_cann_version) == before
    with pytest.raises(RecipeError, match=r"cann: 'eight' is no CANN version; write it like 8\.5\.0"):
        cann_version("eight")


def test_all_operators_without_a_converter_are_listed_before_lowering() -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            y = torch.index_copy(x, 0, i, x)
            return torch.bincount(i, minlength=3) + torch.amax(y, 1).sum()

    with torch.device("meta"):
        args = (torch.empty(3, 4), torch.empty(3, dtype=torch.int64))
    exported = torch.export.export(Odd(), args, strict=False)
    program = Program(exported.graph_module, [Slot("param", "x"), Slot("param", "i")], "decode", DECODE, 0, [])
    with pytest.raises(UnsupportedModelError) as error:
        lower_ascend(program, target=TARGET)
    message = str(error.value)
    assert "aten.index_copy.default" in message
    assert "aten.amax.default" in message
    assert "aten.bincount.default" in message
    assert "test_ascend_lower.py:" in message
    assert "\n" not in message


def test_an_operator_that_its_converter_refuses_is_named() -> None:
    class Mixed(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.eq(x, y)

    with torch.device("meta"):
        args = (torch.empty(3, dtype=torch.bfloat16), torch.empty(3))
    exported = torch.export.export(Mixed(), args, strict=False)
    program = Program(exported.graph_module, [Slot("param", "x"), Slot("param", "y")], "decode", DECODE, 0, [])
    with pytest.raises(UnsupportedModelError, match=r"^aten\.eq\.Tensor \(eq.*\) cannot be lowered for Ascend: "):
        lower_ascend(program, target=TARGET)


def test_a_length_of_the_wrong_dtype_is_refused() -> None:
    program = toy_program(Size(layers=1), DECODE, "decode")
    node = program.node_of("input", "kv_lens")
    node.meta["val"] = node.meta["val"].to(torch.int32)
    with pytest.raises(TypeError, match=r"kv_lens is torch.int32, needed: torch.int64"):
        lower_ascend(program, target=TARGET)


# --- what the graph computes --------------------------------------------------------------------------------------


def run_program(gm: fx.GraphModule, ranks: list[list[Tensor]]) -> list[Tensor]:
    """The source graph on all ranks in lockstep, in plain torch: the meaning that the GE graph must keep."""
    values: list[dict[fx.Node, Any]] = [{} for _ in ranks]
    queues = [iter(own) for own in ranks]
    for node in gm.graph.nodes:
        args = [fx.map_arg(node.args, known.__getitem__) for known in values]
        name = str(node.target)
        if node.op == "placeholder":
            results: list[Any] = [next(queue) for queue in queues]
        elif node.op == "output":
            return [a[0][0] for a in args]
        elif "all_reduce" in name:
            results = [torch.stack([a[0] for a in args]).sum(0)] * len(ranks)
        elif "all_gather" in name:
            results = [torch.cat([a[0] for a in args])] * len(ranks)
        elif "wait_tensor" in name:
            results = [a[0] for a in args]
        else:
            results = [node.target(*a, **node.kwargs) for a in args]
        for known, result in zip(values, results, strict=True):
            known[node] = result
    raise AssertionError("no output")


def step_values(program: Program, rank: int, seed: int) -> list[Tensor]:
    """Random weights of a rank, random caches, and a step in which sequences have histories of several lengths."""
    own, shared = torch.Generator().manual_seed(seed + 1000 * (rank + 1)), torch.Generator().manual_seed(seed)
    bucket, rows = program.bucket, program.bucket.query_len
    ends = torch.tensor([(i + 1) * bucket.tokens // bucket.seqs for i in range(bucket.seqs)])
    lens = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64))
    past = torch.tensor([0 if i == 0 else 37 * i + 100 for i in range(bucket.seqs)])
    table = torch.arange(1, 1 + bucket.seqs * bucket.max_blocks, dtype=torch.int32).view(bucket.seqs, -1)
    positions = torch.cat([past[s] + torch.arange(int(n)) for s, n in enumerate(lens)])
    owner = torch.repeat_interleave(torch.arange(bucket.seqs), lens)
    values = {
        "input_ids": torch.randint(0, 128, (bucket.tokens,), generator=shared),
        "position_ids": positions,
        "slot_mapping": (table[owner, positions // 128] * 128 + positions % 128).to(torch.int32),
        "block_table": table,
        "query_lens": ends if rows is None else lens,
        "kv_lens": past + lens,
        "logits_rows": ends - 1,
        "rank_offset": torch.tensor([64 * rank]),
    }
    result = []
    for slot, node in zip(program.slots, program.placeholders(), strict=True):
        val = node.meta["val"]
        if slot.name not in values:
            scale = 1.5 / val.shape[-1] ** 0.5 if val.dim() == 2 and "rope" not in slot.name else 0.4
            base = 1.0 if "norm" in slot.name else 0.0
            values[slot.name] = base + scale * torch.randn(val.shape, generator=shared if "rope" in slot.name else own)
        result.append(values[slot.name])
    return result


@pytest.mark.parametrize(
    ("size", "bucket", "phase"),
    [
        (Size(tp=2, vocab=64), DECODE, "decode"),
        (Size(tp=2, vocab=64, kv_heads=2), PREFILL, "prefill"),
        (Size(tp=1, vocab=128, head_dim=64, kv_heads=2), DECODE_64, "decode"),
        (Size(tp=2, vocab=64, head_dim=64, bias=False), PREFILL_64, "prefill"),
    ],
)
def test_the_graph_computes_what_the_program_does(size: Size, bucket: Bucket, phase: Phase) -> None:
    program = toy_program(size, bucket, phase, torch.float32)
    lowered = lower_ascend(program, target=TARGET)
    seeded = [step_values(program, rank, seed=3) for rank in range(size.tp)]
    by_name = [dict(zip((s.name for s in program.slots), own, strict=True)) for own in seeded]
    inputs = [[own[ref.name].clone() for ref in lowered.signature.inputs] for own in by_name]
    if bucket.query_len is not None:  # the ops' definition takes cumulative lengths in both layouts
        for own in by_name:
            own["query_lens"] = own["query_lens"].cumsum(0)
    wanted = run_program(program.gm, [list(own.values()) for own in by_name])
    got = run_graph(graph_of(lowered), inputs)
    for rank in range(size.tp):
        assert wanted[rank].abs().max() > 1
        torch.testing.assert_close(got[rank], wanted[rank], rtol=0, atol=1e-4 * float(wanted[rank].abs().max()))
        for i in lowered.signature.in_place:
            after = by_name[rank][lowered.signature.inputs[i].name]
            torch.testing.assert_close(inputs[rank][i], after, rtol=1e-4, atol=1e-4)


# --- repeating layers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bucket", "phase"), [(DECODE, "decode"), (PREFILL, "prefill")])
def test_stamped_layers_are_byte_for_byte_the_lowered_ones(bucket: Bucket, phase: Phase) -> None:
    size = Size()
    whole = lower_ascend(toy_program(dataclasses.replace(size, layers=6), bucket, phase), target=TARGET)
    stamped = lower_ascend(toy_program(size, bucket, phase), target=TARGET, layers_total=6)
    assert stamped == whole


def test_stamping_repeats_every_kind_of_layer() -> None:
    short = Size(layers=5, unbiased=(2, 3))
    long = Size(layers=9, unbiased=(1, 4, 5, 7))
    whole = lower_ascend(toy_program(long, DECODE, "decode"), target=TARGET)
    stamped = lower_ascend(
        toy_program(short, DECODE, "decode"), target=TARGET, layers_total=9, layer_kinds=long.kinds()
    )
    assert stamped == whole
    assert set(stamped.report["layers"]) == {"dense", "unbiased"}


def test_stamping_refuses_a_kind_that_it_has_not_seen() -> None:
    program = toy_program(Size(), DECODE, "decode")
    with pytest.raises(ValueError, match=r"no middle layer of kind \['unbiased'\]"):
        lower_ascend(
            program, target=TARGET, layers_total=5, layer_kinds=["dense", "dense", "unbiased", "dense", "dense"]
        )
