"""Fault injection: a good artifact, changed in one way at a time; linter, proof or ladder must catch it and say where.

The faults are what a wrong fusion, lowering pass, stamp or weight plan would make. The artifact is a tiny Qwen2 on two
ranks; the ladder's reference is transformers in float64.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from cann_export.cli import main as cann_export
from cann_export.proof import prove_plan
from cann_export.verify.graphs import FxRanks
from cann_export.verify.ladder import Ladder, Report, Subject, check_graphs, load_subject
from cann_export.verify.weights import RoundedReader
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.artifact.store import Artifact
from cann_runtime.executor.reference.graph import Attr, ConstTensor, Edge, Graph, Op
from tests.tiny_models import save_checkpoint, tiny_config, tiny_model

Fault = Callable[[Subject], Subject]
INT32, BFLOAT16 = 3, 27  # of ge::DataType
PROTO_INT32, PROTO_INT64 = 7, 8  # of ge_ir.proto


@dataclass
class Good:
    """The artifact as it was exported, its ladder after the reference has run, and its fused graph."""

    subject: Subject
    ladder: Ladder
    fused: FxRanks


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    folder = tmp_path_factory.mktemp("faults")
    config = tiny_config("qwen2", head_dim=128, num_hidden_layers=4)
    model = tiny_model(config, dtype=torch.bfloat16)
    checkpoint = save_checkpoint(model, config, folder / "checkpoint")
    where = ["--target", "ascend910b", "--tp", "2", "--dtype", "bfloat16", "-o", str(folder / "artifact"), "--quiet"]
    assert cann_export([str(checkpoint), *where, "--max-batch-size", "4", "--max-seq-len", "256"]) == 0
    subject = load_subject(Artifact.open(folder / "artifact"))
    ladder = Ladder(subject, RoundedReader(checkpoint, torch.bfloat16), Report("tiny"), lambda text: None)
    ladder.reference()
    return Good(subject, ladder, ladder.fx(2, fused=True))


def caught(good: Good, subject: Subject) -> str:
    """What linter, proof and ladder say of a changed artifact; empty where they let it pass."""
    findings, proof = check_graphs(subject)
    said = [str(f) for f in findings if f.severity == "error"] + proof.problems
    if said:
        return "\n".join(said)
    report = Report("changed", peak=good.ladder.report.peak)
    ladder = Ladder(subject, good.ladder.reader, report, lambda text: None)
    ladder.want, ladder.eager_rms = good.ladder.want, good.ladder.eager_rms
    for caches in good.fused.kv:
        for cache in caches.values():
            cache.zero_()
    for step in ladder.script.steps:
        good.fused.run(step)
    ladder.ge("exact", good.fused)
    (rung,) = report.rungs
    return "" if rung.ok else f"{rung.note} {rung.where}"


# Ways to change a graph -----------------------------------------------------------------------------------------------


def on_graphs(change: Callable[[Graph], Graph]) -> Fault:
    def fault(subject: Subject) -> Subject:
        graphs = {key: replace(made, graph=change(made.graph)) for key, made in subject.graphs.items()}
        changed = sum(graphs[key].graph != made.graph for key, made in subject.graphs.items())
        assert changed, "the fault must change a graph"
        return replace(subject, graphs=graphs)

    return fault


def on_op(name: str, change: Callable[[Op], Op]) -> Fault:
    return on_graphs(lambda g: replace(g, ops=tuple(change(op) if op.name == name else op for op in g.ops)))


def with_attr(name: str, key: str, kind: str, value: object) -> Fault:
    return on_op(name, lambda op: replace(op, attrs={**op.attrs, key: Attr(kind, value)}))  # type: ignore[arg-type]


def in_prefill(name: str, change: Callable[[Op], Op]) -> Fault:
    """Only where attention has a mask."""

    def on(op: Op) -> Op:
        masked = any(slot == "atten_mask" and edge is not None for slot, edge in op.inputs)
        return change(op) if masked else op

    return on_op(name, on)


def rewire(name: str, slot: str, producer: str, port: int = 0) -> Fault:
    return on_op(name, lambda op: _rewired(op, slot, Edge(producer, port)))


def _rewired(op: Op, slot: str, edge: Edge | None) -> Op:
    return replace(op, inputs=tuple((s, edge if s == slot else e) for s, e in op.inputs))


def swap(name: str, one: str, other: str) -> Fault:
    def change(op: Op) -> Op:
        edges = dict(op.inputs)
        return _rewired(_rewired(op, one, edges[other]), other, edges[one])

    return on_op(name, change)


def bypass(name: str, slot: str = "x") -> Fault:
    """Remove an op: its readers read its input."""

    def change(graph: Graph) -> Graph:
        source = next((dict(op.inputs)[slot] for op in graph.ops if op.name == name), None)

        def fixed(op: Op) -> Op:
            gone = lambda e: e is not None and e.producer == name  # noqa: E731
            return replace(op, inputs=tuple((s, source if gone(e) else e) for s, e in op.inputs))

        return replace(graph, ops=tuple(fixed(op) for op in graph.ops if op.name != name))

    return on_graphs(change)


def insert(name: str, slot: str, kind: str, attrs: dict[str, Attr], extra: tuple[tuple[str, Edge], ...] = ()) -> Fault:
    """Put a new op before one input of an op."""

    def change(graph: Graph) -> Graph:
        ops: list[Op] = []
        for op in graph.ops:
            edge = dict(op.inputs).get(slot) if op.name == name else None
            if edge is not None:
                first = "x1" if extra else "x"
                ops.append(Op("Inserted_0", kind, ((first, edge), *extra), (), (), (), attrs))
                op = _rewired(op, slot, Edge("Inserted_0", 0))
            ops.append(op)
        return replace(graph, ops=tuple(ops))

    return on_graphs(change)


def constant(reader: str, slot: str, values: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Fault:
    """Change the integers of the constant that an op reads."""

    def change(graph: Graph) -> Graph:
        edge = next((dict(op.inputs).get(slot) for op in graph.ops if op.name == reader), None)
        if edge is None:
            return graph

        def fixed(op: Op) -> Op:
            value = op.attrs["value"].value if op.name == edge.producer else None
            if not isinstance(value, ConstTensor):
                return op
            form = f"<{len(value.data) // (4 if value.dtype == PROTO_INT32 else 8)}"
            form += "i" if value.dtype == PROTO_INT32 else "q"
            data = struct.pack(form, *values(struct.unpack(form, value.data)))
            return replace(op, attrs={"value": Attr("t", replace(value, data=memoryview(data)))})

        return replace(graph, ops=tuple(fixed(op) for op in graph.ops))

    return on_graphs(change)


def data_dtype(name: str, proto: int, torch_name: str) -> Fault:
    """Another data type of a step input, in the graph and in its signature."""

    def fault(subject: Subject) -> Subject:
        def op(op: Op) -> Op:
            return replace(op, output_descs=tuple(replace(d, dtype=proto) for d in op.output_descs))

        changed = on_op(name, op)(subject)
        for made in changed.graphs.values():
            inputs = [
                r.model_copy(update={"dtype": torch_name}) if r.name == name else r for r in made.signature.inputs
            ]
            made.signature = made.signature.model_copy(update={"inputs": inputs})
        return changed

    return fault


def on_signature(**update: object) -> Fault:
    def fault(subject: Subject) -> Subject:
        graphs = {k: replace(g, signature=g.signature.model_copy(update=update)) for k, g in subject.graphs.items()}
        return replace(subject, graphs=graphs)

    return fault


def on_plan(change: Callable[[WeightPlan], None]) -> Fault:
    def fault(subject: Subject) -> Subject:
        plan = subject.plan.model_copy(deep=True)
        change(plan)
        return replace(subject, plan=plan)

    return fault


def parts(name: str, order: list[int]) -> Fault:
    """The parts of a parameter in another order."""

    def change(plan: WeightPlan) -> None:
        plan.params[name].parts = [plan.params[name].parts[i] for i in order]

    return on_plan(change)


def part(name: str, **update: object) -> Fault:
    def change(plan: WeightPlan) -> None:
        param = plan.params[name]
        param.parts[0] = param.parts[0].model_copy(update=update)

    return on_plan(change)


def one_rank_without(name: str) -> Fault:
    """Rank 1 has graphs of its own, which lack a collective."""

    def fault(subject: Subject) -> Subject:
        odd = bypass(name)(subject)
        graphs = dict(subject.graphs) | {f"{key}-odd": made for key, made in odd.graphs.items()}
        listed = [g.model_copy(update={"ranks": [0]}) for g in subject.manifest.graphs]
        listed += [g.model_copy(update={"ranks": [1], "object": f"{g.object}-odd"}) for g in subject.manifest.graphs]
        return replace(subject, manifest=subject.manifest.model_copy(update={"graphs": listed}), graphs=graphs)

    return fault


LAYER = "model.layers.1."
FIA, ROPE, WRITE = "layer1_FusedInferAttentionScore_0", "layer1_ApplyRotaryPosEmb_0", "layer1_ScatterPaKvCache_0"

FAULTS: dict[str, tuple[Fault, str]] = {
    # name: (fault, what the message must name)
    "cos and sin swapped": (swap(ROPE, "cos", "sin"), ROPE),
    "keys written as values": (swap(WRITE, "key", "value"), FIA),
    "caches swapped at the write": (swap(WRITE, "key_cache", "value_cache"), WRITE),
    "caches swapped at the read": (swap(FIA, "key0", "value0"), FIA),
    "wrong softmax scale": (with_attr(FIA, "scale", "f", 0.1), FIA),
    "wrong split sizes": (constant("layer1_SplitV_0", "size_splits", lambda v: (v[1], v[0], v[2])), "layer1_"),
    "wrong split axis": (constant("layer1_SplitV_0", "split_dim", lambda v: (0,)), "layer1_SplitV_0"),
    "dropped mask": (in_prefill(FIA, lambda op: _rewired(op, "atten_mask", None)), FIA),
    "sparse mode 0 in prefill": (
        in_prefill(FIA, lambda op: replace(op, attrs={**op.attrs, "sparse_mode": Attr("i", 0)})),
        FIA,
    ),
    "sparse mode 2 in prefill": (
        in_prefill(FIA, lambda op: replace(op, attrs={**op.attrs, "sparse_mode": Attr("i", 2)})),
        FIA,
    ),
    "mask transposed": (swap("Greater_0", "x1", "x2"), "FusedInferAttentionScore_0"),
    "mask in bfloat16": (insert(FIA, "atten_mask", "Cast", {"dst_type": Attr("i", BFLOAT16)}), FIA),
    "lengths not cumulative": (rewire(FIA, "actual_seq_lengths", "kv_lens"), FIA),
    "key lengths cumulative": (rewire(FIA, "actual_seq_lengths_kv", "query_lens"), FIA),
    "int32 lengths by a cast": (insert(FIA, "actual_seq_lengths_kv", "Cast", {"dst_type": Attr("i", INT32)}), FIA),
    "int32 lengths from the host": (data_dtype("kv_lens", PROTO_INT32, "int32"), FIA),
    "int64 block table": (data_dtype("block_table", PROTO_INT64, "int64"), FIA),
    "slot of another step": (rewire(WRITE, "slot_mapping", "position_ids"), WRITE),
    "stale slot": (insert(WRITE, "slot_mapping", "Sub", {}, (("x2", Edge("Const_0", 0)),)), WRITE),
    "wrong block size": (with_attr(FIA, "block_size", "i", 256), FIA),
    "wrong number of kv heads": (with_attr(FIA, "num_key_value_heads", "i", 2), FIA),
    "layout of another op": (with_attr(FIA, "input_layout", "s", "BSH"), FIA),
    "rotary mode interleave": (with_attr(ROPE, "rotary_mode", "s", "interleave"), ROPE),
    "rotary layout BSND": (with_attr(ROPE, "layout", "i", 1), ROPE),
    "rotated at the wrong positions": (rewire("GatherV2_1", "indices", "input_ids"), "ApplyRotaryPosEmb_0"),
    "rotary skipped for the keys": (rewire(WRITE, "key", "layer1_SplitV_0", 1), "layer1_"),
    "weight transposed": (with_attr("layer1_MatMul_1", "transpose_x2", "b", False), "layer1_"),
    "missing bias": (on_op("layer1_MatMul_0", lambda op: _rewired(op, "bias", None)), "layer1_MatMul_0"),
    "bias of another layer": (
        rewire("layer1_MatMul_0", "bias", "model_layers_2_self_attn_qkv_proj_bias"),
        "layer1_MatMul_0",
    ),
    "weight of another layer": (
        rewire("layer1_MatMul_2", "x2", "model_layers_2_mlp_gate_up_proj_weight"),
        "model_layers_1_mlp_gate_up_proj_weight",
    ),
    "norms swapped": (
        lambda s: rewire("layer1_AddRmsNorm_0", "gamma", "model_layers_1_post_attention_layernorm_weight")(
            rewire("layer1_AddRmsNorm_1", "gamma", "model_layers_1_input_layernorm_weight")(s)
        ),
        "layer1_AddRmsNorm_0",
    ),
    "wrong eps": (with_attr("layer1_AddRmsNorm_0", "epsilon", "f", 1e-5), "layer1_AddRmsNorm_0"),
    "default eps": (
        on_op("layer1_AddRmsNorm_0", lambda op: replace(op, attrs={})),
        "layer1_AddRmsNorm_0",
    ),
    "residual after the norm": (rewire("layer1_AddRmsNorm_1", "x1", "layer1_AddRmsNorm_0", 0), "layer1_AddRmsNorm_1"),
    "gate of another axis": (with_attr("layer1_SwiGlu_0", "dim", "i", 0), "layer1_SwiGlu_0"),
    "gate skipped": (rewire("layer1_MatMul_3", "x1", "layer1_MatMul_2"), "layer1_MatMul_3"),
    "cache copied before the write": (insert(WRITE, "key_cache", "TensorMove", {}), WRITE),
    "cache of another layer": (rewire(WRITE, "key_cache", "k_cache_2"), WRITE),
    "cache read before the write": (rewire("layer1_Reshape_3", "x", "k_cache_1"), FIA),
    "cache not listed as written": (on_signature(in_place=[]), "k_cache_0"),
    "step input frozen": (
        lambda s: on_signature(options=dict.fromkeys(["frozenInput"], ",".join(["1"] * 49)))(s),
        "input_ids",
    ),
    "missing all-reduce in a layer": (bypass("layer1_HcomAllReduce_0"), "layer1_MatMul_1"),
    "missing all-reduce of the embedding": (bypass("HcomAllReduce_0"), "GatherV2_0"),
    "all-reduce on one rank only": (one_rank_without("layer1_HcomAllReduce_1"), "rank 1"),
    "group of one rank": (with_attr("layer1_HcomAllReduce_0", "group", "s", "ep"), "layer1_HcomAllReduce_0"),
    "group of this host": (with_attr("layer1_HcomAllReduce_0", "group", "s", "hccl_world"), "layer1_HcomAllReduce_0"),
    "largest in place of the sum": (
        with_attr("layer1_HcomAllReduce_0", "reduction", "s", "max"),
        "layer1_HcomAllReduce_0",
    ),
    "wrong gather size": (with_attr("HcomAllGather_0", "rank_size", "i", 4), "HcomAllGather_0"),
    "logits not interleaved": (constant("Transpose_0", "perm", lambda v: (0, 1, 2)), "NetOutput_0"),
    "logits of the first row": (insert("GatherV2_3", "indices", "ZerosLike", {}), "MatMul_0"),
    "tokens of other ranks not masked": (bypass("Mul_0", "x1"), "HcomAllReduce_0"),
    "vocabulary not shifted by rank": (bypass("Sub_0", "x1"), "rank_offset"),
    "constant of a view": (
        on_op(
            "Const_1",
            lambda op: replace(
                op,
                attrs={"value": Attr("t", replace(op.attrs["value"].value, data=memoryview(bytes(64))))},  # type: ignore[type-var]
            ),
        ),
        "Const_1",
    ),
    "output type in the other enum": (
        on_graphs(lambda g: replace(g, attrs={**g.attrs, "_output_dtypes": Attr("list_i", (1,))})),
        "NetOutput",
    ),
    "unknown attribute": (with_attr("layer1_SwiGlu_0", "axis", "i", -1), "layer1_SwiGlu_0"),
    # the weight plan
    "weight cut at the wrong place": (part(f"{LAYER}mlp.down_proj.weight", ranges=[(0, 192), (191, 383)]), "down_proj"),
    "ranks in the wrong order": (part(f"{LAYER}self_attn.o_proj.weight", ranges=[(256, 512), (0, 256)]), "o_proj"),
    "the same piece on both ranks": (part(f"{LAYER}mlp.down_proj.weight", ranges=[(0, 192), (0, 192)]), "down_proj"),
    "weight cut along the wrong axis": (
        part(f"{LAYER}self_attn.o_proj.weight", dim=0, ranges=[(0, 128), (128, 256)]),
        "o_proj",
    ),
    "matrix whole on every rank": (part(f"{LAYER}mlp.down_proj.weight", dim=None, ranges=None), "down_proj"),
    "one tensor used twice": (
        part(f"{LAYER}mlp.gate_up_proj.weight", source=f"{LAYER}mlp.up_proj.weight"),
        "up_proj",
    ),
    "gate and up swapped": (parts(f"{LAYER}mlp.gate_up_proj.weight", [1, 0]), "layer1_MatMul_2"),
    "keys and values swapped in the plan": (parts(f"{LAYER}self_attn.qkv_proj.weight", [0, 2, 1]), "layer1_MatMul_0"),
    "rank offset of another size": (
        on_plan(lambda plan: setattr(plan.params["model.embed_tokens.rank_offset"], "step", 257)),
        "rank_offset",
    ),
    "rope table scaled": (
        on_plan(lambda plan: setattr(plan.params["model.rotary_emb.cos"], "scaling", 1.1)),
        "layer0_ApplyRotaryPosEmb_0",
    ),
}


def test_the_good_artifact_passes(good: Good) -> None:
    assert caught(good, good.subject) == ""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_and_its_place_named(good: Good, name: str) -> None:
    fault, place = FAULTS[name]
    said = caught(good, fault(good.subject))
    assert said, "the fault was not caught"
    assert place in said


def test_a_tensor_of_the_checkpoint_that_nothing_uses_is_named(good: Good) -> None:
    proof = prove_plan(good.subject.plan, 2, {"model.layers.1.self_attn.q_norm.weight": [128]})
    assert proof.problems == ["model.layers.1.self_attn.q_norm.weight [128] of the checkpoint is not used"]


def test_a_checkpoint_folder_is_used_whole(good: Good, tmp_path: Path) -> None:
    reader = good.ladder.reader
    assert prove_plan(good.subject.plan, 2, {name: list(reader.info(name).shape) for name in reader}).ok
