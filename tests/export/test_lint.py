"""Linter rules on ops that our exports do not have yet, and its reading of graphs; the others are in test_faults.py."""

from __future__ import annotations

import time

import pytest
import torch

from cann_export.lint import Facts, check, lint
from cann_export.lint_types import View
from cann_runtime.artifact.manifest import Bucket, KVCacheSpec, Signature, TensorRef, World
from cann_runtime.errors import UnsupportedModelError
from cann_runtime.executor.reference.graph import Attr, ConstTensor, Edge, Graph, Op, TensorDesc

KV = KVCacheSpec(
    layout="per_layer", layers=1, kv_heads=1, head_dim=128, block_size=128, dtype="bfloat16", scratch_blocks=1
)
CODES = {"float32": (1, 0), "bfloat16": (27, 27), "int32": (7, 3), "int64": (8, 9)}


def facts(family: str = "ascend910b", tokens: int = 8, tp: int = 2) -> Facts:
    bucket = Bucket(tokens=tokens, seqs=tokens, rows=tokens, max_blocks=1)
    return Facts(family, "decode", bucket, World(size=tp, tp=tp), KV, "bfloat16")


def graph_of(op: Op, **inputs: tuple[str, list[int]]) -> tuple[Graph, Signature]:
    """A graph of one op that reads these inputs (dtype, shape); its output is that of the first input."""
    ops, refs = [], []
    for i, (name, (dtype, shape)) in enumerate(inputs.items()):
        desc = TensorDesc("y", CODES[dtype][0], tuple(shape), {})
        ops.append(Op(name, "Data", (), (), (), (desc,), {"index": Attr("i", i)}))
        refs.append(TensorRef(name=name, kind="input", dtype=dtype, shape=shape))
    first = refs[0]
    out = TensorDesc("input0", CODES[first.dtype][0], tuple(first.shape), {})
    end = Op("NetOutput_0", "NetOutput", (("input0", Edge(op.name, 0)),), (), (out,), (), {})
    signature = Signature(
        inputs=refs,
        outputs=[TensorRef(name="logits", kind="output", dtype=first.dtype, shape=first.shape)],
        options={"frozenInput": ",".join("0" * len(refs))},
    )
    codes = {"_output_dtypes": Attr("list_i", (CODES[first.dtype][1],))}
    return Graph("g", (*ops, op, end), codes), signature


def op(kind: str, inputs: list[str], **attrs: Attr) -> Op:
    return Op("node", kind, tuple((name, Edge(name, 0)) for name in inputs), (), (), (), attrs)


def rules(found: tuple[Graph, Signature], known: Facts | None = None) -> set[str]:
    return {f.rule for f in lint(*found, known or facts()) if f.severity == "error"}


def test_dispatch_asks_for_int32_experts_its_own_group_and_few_tokens_on_a2() -> None:
    node = op("MoeDistributeDispatchV2", ["x", "expert_ids"], group_ep=Attr("s", "tp"))
    found = graph_of(node, x=("bfloat16", [8, 1024]), expert_ids=("int64", [8, 4]))
    messages = " ".join(f.message for f in lint(*found, facts(tokens=512)) if f.rule == "moe")
    assert "expert_ids is torch.int64, needed: int32" in messages
    assert "group_ep is tp" in messages
    assert "at most 256 on ascend910b" in messages
    assert "at most 256" not in " ".join(f.message for f in lint(*found, facts("ascend910_93", tokens=512)))


def test_shared_graphs_store_no_rank() -> None:
    node = op("MoeInitRoutingV3", ["x"], active_expert_range=Attr("list_i", (8, 16)))
    assert "moe" in rules(graph_of(node, x=("bfloat16", [8, 1024])))


def test_grouped_matmul_asks_for_int64_groups() -> None:
    node = op("GroupedMatmul", ["x", "group_list"])
    assert "moe" in rules(graph_of(node, x=("bfloat16", [8, 64]), group_list=("int32", [4])))


@pytest.mark.parametrize(("family", "refused"), [("ascend910b", True), ("ascend910_93", True), ("ascend950", False)])
def test_interleaved_rotary_needs_its_matrix_before_950(family: str, refused: bool) -> None:
    node = op("RotaryPositionEmbedding", ["x", "cos", "sin"], mode=Attr("i", 1))
    found = graph_of(node, x=("bfloat16", [8, 1, 128]), cos=("bfloat16", [8, 1, 128]), sin=("bfloat16", [8, 1, 128]))
    assert ("rotary-interleave" in rules(found, facts(family))) == refused


def test_fused_product_and_sum_is_for_910b_only() -> None:
    node = op("MatmulAllReduce", ["x1", "x2"], group=Attr("s", "tp"), reduce_op=Attr("s", "sum"))
    found = graph_of(node, x1=("bfloat16", [8, 64]), x2=("bfloat16", [64, 64]))
    assert "mc2" in rules(found, facts("ascend910_93"))
    assert "mc2" not in rules(found)


def test_a_copy_is_a_warning_with_its_node() -> None:
    found = lint(*graph_of(op("TensorMove", ["x"]), x=("bfloat16", [8, 64])), facts())
    assert [(f.severity, f.node, f.rule) for f in found] == [("warning", "node", "copy")]


def test_an_export_stops_at_the_first_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, signature = graph_of(op("Swish", ["x"]), x=("float32", [8, 64]))
    monkeypatch.setattr("cann_export.lint.read_graph", lambda model: graph)
    with pytest.raises(
        UnsupportedModelError, match=r"the decode graph of 8 tokens breaks ascend910b's rules: .*NetOutput"
    ):
        check(b"", signature, facts())


def test_types_follow_constants_and_views() -> None:
    shape = ConstTensor(8, (2,), memoryview(torch.tensor([4, -1]).numpy().tobytes()))
    const = Op("shape", "Const", (), (), (), (), {"value": Attr("t", shape)})
    graph, _ = graph_of(op("Reshape", ["x", "shape"]), x=("bfloat16", [8, 64]))
    view = View.of(Graph("g", (graph.ops[0], const, *graph.ops[1:]), {}))
    assert view.types[Edge("node", 0)] == (torch.bfloat16, (4, 128))


def test_eighty_layers_of_eleven_graphs_take_less_than_three_seconds() -> None:
    weight = ("bfloat16", [64, 64])
    first, signature = graph_of(op("MatMul", ["x1", "x2"]), x1=weight, x2=weight)
    attrs = {"transpose_x1": Attr("b", False), "transpose_x2": Attr("b", True)}
    chain = [
        Op(f"m{i}", "MatMul", (("x1", Edge(f"m{i - 1}" if i else "x1", 0)), ("x2", Edge("x2", 0))), (), (), (), attrs)
        for i in range(80 * 28)
    ]
    graph = Graph("g", (*first.ops[:2], *chain, *first.ops[2:]), first.attrs)
    start = time.process_time()
    for _ in range(11):
        lint(graph, signature, facts())
    assert time.process_time() - start < 3
