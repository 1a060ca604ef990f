"""The linter's rules on single ops: what each kind of op asks for on the device, with the document that says so.

A rule yields one message for each thing that is wrong; running them, and rules on a whole graph, are in `lint.py`.
Documents: op-plugin and ops-transformer pages of the ops' names; op prototypes (REG_OP) as TorchAir lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from cann_export.lint_types import View, attr
from cann_runtime.artifact.manifest import Bucket, KVCacheSpec, Phase, Signature, World
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.reference.dtypes import GE_DTYPES, PROTO_DTYPES
from cann_runtime.executor.reference.graph import ConstTensor, Edge, Op
from cann_runtime.executor.reference.prototype import prototypes

FIA = "FusedInferAttentionScore"
FIA_DOC = "op-plugin: npu_fused_infer_attention_score"
ROPE_DOC = "op-plugin: npu_apply_rotary_pos_emb"
SCATTER_DOC = "op-plugin: npu_scatter_pa_kv_cache"
MATMUL_DOC = "op prototype MatMulV2"
NORM_DOC = "op-plugin: npu_rms_norm, npu_add_rms_norm"
HCOM_DOC = "op prototypes Hcom*"
GE_DOC = "TorchAir: ge_ir.proto and GE options"
MOE_DOC = "op-plugin: npu_moe_distribute_dispatch_v2, npu_moe_gating_top_k, npu_grouped_matmul"

GROUPS = ("tp", "ep", "world")
HALF = (torch.bfloat16, torch.float16)
_LENGTHS = {"actual_seq_lengths": "query_lens", "actual_seq_lengths_kv": "kv_lens"}
_EPS_KEYS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


@dataclass(frozen=True)
class Facts:
    """What the rules may know beside the graph. config: the model's config.json, empty where not known."""

    family: str
    phase: Phase
    bucket: Bucket
    world: World
    kv: KVCacheSpec
    dtype: str
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def rows_per_sequence(self) -> int:
        """Most query rows that one sequence may have."""
        if self.bucket.query_len is not None:
            return self.bucket.query_len
        return 1 if self.phase == "decode" and self.bucket.tokens == self.bucket.seqs else self.bucket.tokens

    def group_size(self, group: str) -> int:
        """Ranks in a logical group."""
        return {"tp": self.world.tp, "ep": self.world.ep, "world": self.world.size}[group]


class Linted(View):
    """A View with the names of the signature's inputs, and the facts."""

    signature: Signature
    facts: Facts
    names: frozenset[str]

    def given(self, signature: Signature, facts: Facts) -> None:
        """Say what the graph is for."""
        self.signature, self.facts = signature, facts
        self.names = frozenset(ref.name for ref in signature.inputs)

    def input_name(self, edge: Edge | None) -> str | None:
        """Name of the graph input that a value is, seen through views and casts."""
        op = None if edge is None else self.origin(edge)
        if op is None or op.type != "Data":
            return None
        index = attr(op, "index", -1)
        return self.signature.inputs[index].name if 0 <= index < len(self.signature.inputs) else None


Rule = Callable[[Linted, Op], Iterator[str]]
OP_RULES: list[tuple[frozenset[str], str, str, Rule]] = []


def _op_rule(name: str, document: str, *types: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        OP_RULES.append((frozenset(types), name, document, rule))
        return rule

    return add


# Every op -------------------------------------------------------------------------------------------------------------


@_op_rule("prototype", "op prototypes (REG_OP)")
def _prototype(view: Linted, op: Op) -> Iterator[str]:
    if op.type in ("Data", "Const", "NetOutput"):
        return
    prototype = prototypes().get(op.type)
    if prototype is None:
        return
    for name, edge in op.inputs:
        if edge is not None and edge.producer not in view.ops:
            yield f"input {name} reads op {edge.producer}, which the graph does not have"
    try:
        prototype.check_inputs(op)
        prototype.attributes(op)
    except ArtifactError as error:
        yield str(error)


@_op_rule("constant-bytes", GE_DOC, "Const")
def _constant(view: Linted, op: Op) -> Iterator[str]:
    value = attr(op, "value")
    if not isinstance(value, ConstTensor) or value.dtype not in PROTO_DTYPES:
        yield "the constant has no value of a known data type"
        return
    wanted = torch.Size(value.shape).numel() * PROTO_DTYPES[value.dtype].itemsize
    if len(value.data) != wanted:  # TorchAir writes the whole storage of a view
        yield f"{len(value.data)} bytes for a constant of {wanted}: it was made from a view"


@_op_rule("copy", "GE: TensorMove runs a kernel", "TensorMove", "Assign")
def _copy(view: Linted, op: Op) -> Iterator[str]:
    yield f"{op.type} copies a tensor at every step"


@_op_rule("gelu", "TorchAir converts aten.gelu to the tanh form", "Gelu")
def _gelu(view: Linted, op: Op) -> Iterator[str]:
    yield "Gelu is the tanh formula, whatever the model asked for"


@_op_rule("bitcast", "op prototype Bitcast", "Bitcast")
def _bitcast(view: Linted, op: Op) -> Iterator[str]:
    x, to = view.type(op, "x").dtype, GE_DTYPES.get(attr(op, "type", 28))
    if not attr(op, "keep_dim", False) and x is not None and to is not None and x.itemsize != to.itemsize:
        yield f"from {x} to {to} without keep_dim changes the rank"


@_op_rule("reshape", "op prototype Reshape", "Reshape")
def _reshape(view: Linted, op: Op) -> Iterator[str]:
    wanted, x = view.values(op, "shape"), view.type(op, "x").shape
    if wanted is None or x is None:
        return
    if sum(d == -1 for d in wanted) > 1:
        yield f"shape {list(wanted)} has more than one -1"
    elif -1 not in x:
        size, rest = torch.Size(x).numel(), 1
        for d in wanted:
            rest *= d if d != -1 else 1
        if (rest and size % rest) or (-1 not in wanted and size != rest):
            yield f"{list(x)} does not fit the shape {list(wanted)}"


# Matrix products and norms --------------------------------------------------------------------------------------------


@_op_rule("matmul", MATMUL_DOC, "MatMul", "MatMulV2")
def _matmul(view: Linted, op: Op) -> Iterator[str]:
    a, b, bias = (view.type(op, name) for name in ("x1", "x2", "bias"))
    if a.dtype is not None and b.dtype is not None and a.dtype != b.dtype:
        yield f"multiplies {a.dtype} by {b.dtype}"
    if a.shape is None or b.shape is None:
        return
    if len(a.shape) != 2 or len(b.shape) != 2:
        yield f"takes matrices, not {list(a.shape)} and {list(b.shape)}"
        return
    inner = a.shape[0 if attr(op, "transpose_x1", False) else 1]
    other = b.shape[1 if attr(op, "transpose_x2", False) else 0]
    if inner != other:
        yield f"inner sizes {inner} and {other} differ"
    columns = b.shape[0 if attr(op, "transpose_x2", False) else 1]
    if bias.shape is not None and bias.shape != (columns,):
        yield f"bias {list(bias.shape)} for {columns} columns"
    name = view.input_name(view.inputs[op.name].get("x2"))
    wanted = None if name is None or not name.endswith(".weight") else name.removesuffix("weight") + "bias"
    given = view.input_name(view.inputs[op.name].get("bias"))
    if wanted in view.names and given != wanted:
        yield f"the bias of {name} is {given or 'not added'}"


@_op_rule("unread-input", GE_DOC, "Data")
def _unread(view: Linted, op: Op) -> Iterator[str]:
    if Edge(op.name, 0) not in view.readers:
        yield f"input {view.input_name(Edge(op.name, 0))} is not read by any op"


@_op_rule("norm", NORM_DOC, "RmsNorm", "AddRmsNorm")
def _norm(view: Linted, op: Op) -> Iterator[str]:
    x, gamma = view.type(op, "x" if op.type == "RmsNorm" else "x1"), view.type(op, "gamma")
    if None not in (x.dtype, gamma.dtype) and x.dtype != gamma.dtype:
        yield f"x is {x.dtype}, gamma {gamma.dtype}"
    if x.shape is not None and gamma.shape is not None and x.shape[-len(gamma.shape) :] != gamma.shape:
        yield f"gamma {list(gamma.shape)} does not fit x {list(x.shape)}"
    if op.type == "AddRmsNorm":
        other = view.type(op, "x2")
        if None not in (x.shape, other.shape) and x.shape != other.shape:
            yield f"adds {list(x.shape or ())} and {list(other.shape or ())}"
        ends = [view.inputs[op.name].get(name) for name in ("x1", "x2")]
        if ends[0] == ends[1]:
            yield "adds a value to itself"
    eps = attr(op, "epsilon", 1e-6 if op.type == "RmsNorm" else 1e-5)
    known = [float(view.facts.config[key]) for key in _EPS_KEYS if view.facts.config.get(key) is not None]
    if known and not any(abs(eps - k) <= 1e-5 * k for k in known):
        yield f"epsilon is {eps:g}, the model's is {known[0]:g}"


@_op_rule("swiglu", "op-plugin: npu_swiglu", "SwiGlu")
def _swiglu(view: Linted, op: Op) -> Iterator[str]:
    x = view.type(op, "x")
    if x.shape is not None and (x.shape[-1] % 2 or attr(op, "dim", -1) not in (-1, len(x.shape) - 1)):
        yield f"splits dimension {attr(op, 'dim', -1)} of {list(x.shape)}; the last one, even, is needed"


@_op_rule("split", "op prototype SplitV", "SplitV")
def _split(view: Linted, op: Op) -> Iterator[str]:
    x, sizes, axis = view.type(op, "x").shape, view.values(op, "size_splits"), view.values(op, "split_dim")
    if x is None or sizes is None or axis is None:
        return
    if len(axis) != 1 or not -len(x) <= axis[0] < len(x) or sum(sizes) != x[axis[0]]:
        yield f"sizes {list(sizes)} along dimension {list(axis)} of {list(x)}"


# Attention, caches, rotary --------------------------------------------------------------------------------------------


@_op_rule("fia-lengths", FIA_DOC, FIA)
def _lengths(view: Linted, op: Op) -> Iterator[str]:
    for name, wanted in _LENGTHS.items():
        edge = view.inputs[op.name].get(name)
        if edge is None:
            if name == "actual_seq_lengths" and view.facts.rows_per_sequence == 1 and attr(op, "input_layout") != "TND":
                continue
            yield f"{name} is missing"
            continue
        dtype = view.types[edge].dtype
        if dtype not in (None, torch.int64):
            yield f"{name} is {dtype}, needed: int64"
        got = view.input_name(edge)
        if got != wanted:
            yield f"{name} is {got or 'computed'}, needed: the step input {wanted}"


@_op_rule("fia-block-table", FIA_DOC, FIA)
def _block_table(view: Linted, op: Op) -> Iterator[str]:
    edge = view.inputs[op.name].get("block_table")
    if edge is None:
        return
    table = view.types[edge]
    if table.dtype not in (None, torch.int32) or (table.shape is not None and len(table.shape) != 2):
        yield f"block_table is {table.dtype} {list(table.shape or ())}, needed: int32 with two dimensions"
    if (got := view.input_name(edge)) != "block_table":
        yield f"block_table is {got or 'computed'}, needed: the step input block_table"
    size, kv = attr(op, "block_size", 0), view.facts.kv.block_size
    if size != kv:
        yield f"block_size is {size}, the caches have {kv}"
    flat = attr(op, "input_layout") == "TND"
    step, most = (128, 512) if view.facts.rows_per_sequence > 1 or flat else (16, 512)
    if size % step or not 0 < size <= most:
        yield f"block_size is {size}; a multiple of {step}, at most {most}, is needed"


@_op_rule("fia-mask", FIA_DOC, FIA)
def _mask(view: Linted, op: Op) -> Iterator[str]:
    mode, mask = attr(op, "sparse_mode", 0), view.type(op, "atten_mask")
    fed = "atten_mask" in view.inputs[op.name]
    if mode in (2, 3, 4) and not fed:
        yield f"sparse_mode {mode} needs atten_mask"
    if fed and mask.dtype not in (None, torch.bool, torch.int8, torch.uint8):
        yield f"atten_mask is {mask.dtype}; bool, int8 or uint8 is needed"
    if view.facts.rows_per_sequence > 1 and mode != 3:
        yield f"sparse_mode is {mode}: a step with several rows a sequence needs 3 (causal from the lower right)"
    if mode == 0 and not fed and view.facts.rows_per_sequence == 1:
        return
    if mode == 3 and fed:
        made = view.ops[view.inputs[op.name]["atten_mask"].producer]
        ends = {k: view.values(view.ops[e.producer], "shape") for k, e in view.inputs[made.name].items()}
        if made.type == "Greater" and not (ends.get("x1") is None and ends.get("x2") == (2048, 1)):
            yield "atten_mask is not the upper triangle: column > row"


@_op_rule("fia-layout", FIA_DOC, FIA)
def _layout(view: Linted, op: Op) -> Iterator[str]:
    layout, heads, kv_heads = attr(op, "input_layout", "BSH"), attr(op, "num_heads", 0), attr(op, "num_key_value_heads")
    kv_heads = kv_heads or heads
    if not kv_heads or heads % kv_heads or heads // kv_heads > 64:
        yield f"{heads} heads over {kv_heads} kv heads: a multiple, at most 64, is needed"
        return
    query, key = view.type(op, "query"), view.type(op, "key0")
    for name in ("query", "key0", "value0"):
        if view.type(op, name).dtype not in (None, *HALF, torch.int8):
            yield f"{name} is {view.type(op, name).dtype}; bfloat16, float16 or int8 is needed"
    if kv_heads != view.facts.kv.kv_heads:
        yield f"num_key_value_heads is {kv_heads}, the caches hold {view.facts.kv.kv_heads}"
    dim = view.facts.kv.head_dim
    width = {"TND": (heads, dim), "BSH": (heads * dim,), "BSND": (heads, dim)}.get(layout)
    if width and query.shape is not None and query.shape[-len(width) :] != width:
        yield f"query {list(query.shape)} does not end in {list(width)} (layout {layout})"
    if key.shape is not None and len(key.shape) == 3 and key.shape[1:] != (view.facts.kv.block_size, kv_heads * dim):
        yield f"key {list(key.shape)} is not [blocks, {view.facts.kv.block_size}, {kv_heads * dim}]"
    if layout == "TND" and dim != 128:
        yield f"layout TND takes head_dim 128, not {dim}"
    if dim % 16 or dim > 512:
        yield f"head_dim {dim}: a multiple of 16, at most 512, is needed"
    if layout == "TND" and (view.facts.bucket.seqs > 4096 or view.facts.bucket.tokens > 1048576):
        yield f"layout TND takes at most 4096 sequences and 1048576 tokens, not {view.facts.bucket}"


@_op_rule("cache-read", FIA_DOC, FIA)
def _cache_read(view: Linted, op: Op) -> Iterator[str]:
    writers = []
    for name, port in (("key0", 0), ("value0", 1)):
        edge = view.inputs[op.name].get(name)
        while edge is not None and view.ops[edge.producer].type in ("Reshape", "Identity"):
            edge = view.inputs[edge.producer].get("x")
        writer = None if edge is None else view.ops[edge.producer]
        if writer is None or writer.type != "ScatterPaKvCache" or edge is None:
            what = "nothing" if writer is None else writer.type
            yield f"{name} comes from {what}: reading a cache must follow its write (output of ScatterPaKvCache)"
        elif edge.port != port:
            yield f"{name} reads the {'key' if edge.port == 0 else 'value'} cache"
        else:
            writers.append(writer.name)
    if len(set(writers)) > 1:
        yield f"key and value come from two writes: {', '.join(writers)}"


@_op_rule("cache-write", SCATTER_DOC, "ScatterPaKvCache")
def _cache_write(view: Linted, op: Op) -> Iterator[str]:
    names = [view.input_name(view.inputs[op.name].get(name)) for name in ("key_cache", "value_cache")]
    for name, got, letter in zip(("key_cache", "value_cache"), names, "kv"):
        made = view.inputs[op.name].get(name)
        if made is None or view.ops[made.producer].type != "Data":
            yield f"{name} is a copy of the cache, not the cache itself: the write would be lost"
        elif got is None or not got.startswith(f"{letter}_cache_"):
            yield f"{name} is {got}, not a {'key' if letter == 'k' else 'value'} cache"
        rows, cache = view.type(op, name.removesuffix("_cache")), view.type(op, name)
        if None not in (rows.dtype, cache.dtype) and rows.dtype != cache.dtype:
            yield f"writes {rows.dtype} into a cache of {cache.dtype}"
        if cache.shape is not None and (len(cache.shape) != 4 or attr(op, "cache_mode", "Norm") != "Norm"):
            yield f"{name} is {list(cache.shape)} in mode {attr(op, 'cache_mode', 'Norm')}; 4 dimensions and Norm"
        elif rows.shape is not None and cache.shape is not None and rows.shape[1:] != cache.shape[2:]:
            yield f"rows {list(rows.shape)} do not fit the cache {list(cache.shape)}"
    if None not in names and str(names[0])[2:] != str(names[1])[2:]:
        yield f"writes caches of two layers: {names[0]} and {names[1]}"
    slots = view.inputs[op.name].get("slot_mapping")
    if slots is not None:
        dtype = view.types.get(slots)
        if dtype is not None and dtype.dtype not in (None, torch.int32, torch.int64):
            yield f"slot_mapping is {dtype.dtype}; int32 or int64 is needed"
        if (got := view.input_name(slots)) != "slot_mapping":
            yield f"slot_mapping is {got or 'computed'}, needed: the step input slot_mapping"
    edge = view.inputs[op.name].get("key")
    made_by = None if edge is None else view.origin(edge)
    if made_by is not None and edge is not None and made_by.type == "ApplyRotaryPosEmb" and edge.port != 1:
        yield "key is the rotated query, not the rotated key"


@_op_rule("rotary", ROPE_DOC, "ApplyRotaryPosEmb")
def _rotary(view: Linted, op: Op) -> Iterator[str]:
    query, cos = view.type(op, "query"), view.type(op, "cos")
    mode = attr(op, "rotary_mode", "half")
    if mode != "half" and view.facts.family in ("ascend910b", "ascend910_93"):
        yield f"rotary_mode is {mode!r}: {view.facts.family} computes half whatever it says"
    for name in ("key", "cos", "sin"):
        dtype = view.type(op, name).dtype
        if None not in (dtype, query.dtype) and dtype != query.dtype:
            yield f"{name} is {dtype}, query {query.dtype}"
    if attr(op, "layout", 1) != 4 and query.shape is not None and len(query.shape) == 3:
        yield f"layout is {attr(op, 'layout', 1)}: three dimensions are TND (4)"
    if query.shape is not None and query.shape[-1] not in (64, 128):
        yield f"head_dim {query.shape[-1]}; 64 or 128 is needed"
    if None not in (query.shape, cos.shape) and cos.shape != (query.shape[0], 1, query.shape[-1]):  # type: ignore[index]
        yield f"cos {list(cos.shape or ())} for query {list(query.shape or ())}"
    for name in ("cos", "sin"):
        edge = view.inputs[op.name].get(name)
        made = None if edge is None else view.origin(edge)
        table = None if made is None or made.type != "GatherV2" else view.input_name(view.inputs[made.name].get("x"))
        if table is not None and not table.endswith(f".{name}"):
            yield f"{name} is read from {table}"
        if made is not None and made.type == "GatherV2":
            rows = view.input_name(view.inputs[made.name].get("indices"))
            if rows != "position_ids":
                yield f"{name} is read at {rows or 'computed rows'}, not at position_ids"


@_op_rule("rotary-interleave", "op-plugin: npu_rotary_mul", "RotaryMul", "RotaryPositionEmbedding")
def _rotary_mul(view: Linted, op: Op) -> Iterator[str]:
    paired = op.type == "RotaryPositionEmbedding" and attr(op, "mode", 0)
    if paired and view.facts.family != "ascend950" and "rotate" not in view.inputs[op.name]:
        yield f"mode {attr(op, 'mode', 0)} needs the rotate matrix on {view.facts.family}"


# Mixture of experts ---------------------------------------------------------------------------------------------------


@_op_rule("moe", MOE_DOC, "MoeDistributeDispatchV2", "MoeDistributeCombineV2")
def _distribute(view: Linted, op: Op) -> Iterator[str]:
    ids = view.type(op, "expert_ids").dtype
    if ids not in (None, torch.int32):
        yield f"expert_ids is {ids}, needed: int32"
    scales = view.type(op, "expert_scales").dtype
    if scales not in (None, torch.float32):
        yield f"expert_scales is {scales}, needed: float32"
    if attr(op, "group_ep") == "tp":
        yield "group_ep is tp: its communicator may carry no other op"
    if view.facts.family == "ascend910b" and view.facts.bucket.tokens > 256:
        yield f"{view.facts.bucket.tokens} tokens; at most 256 on ascend910b"
    if attr(op, "ep_rank_id", 0) != 0:
        yield f"ep_rank_id is {attr(op, 'ep_rank_id')}: a shared graph stores 0"


@_op_rule("moe", MOE_DOC, "GroupedMatmul", "MoeInitRoutingV3")
def _grouped(view: Linted, op: Op) -> Iterator[str]:
    groups = view.type(op, "group_list").dtype
    if op.type == "GroupedMatmul" and groups not in (None, torch.int64):
        yield f"group_list is {groups}, needed: int64"
    experts = attr(op, "active_expert_range", ())
    if experts and experts[0] != 0:
        yield f"active_expert_range {list(experts)}: a shared graph stores it from 0"


@_op_rule("mc2", "op-plugin: npu_mm_all_reduce_base", "MatmulAllReduce")
def _mc2(view: Linted, op: Op) -> Iterator[str]:
    if view.facts.family != "ascend910b":
        yield f"MatmulAllReduce is documented for ascend910b only, not {view.facts.family}"


@_op_rule("conv3d", "op prototype Conv3D", "Conv3D")
def _conv3d(view: Linted, op: Op) -> Iterator[str]:
    if view.type(op, "x").dtype is torch.bfloat16:
        yield "x is bfloat16; float16 is needed"


# Collectives ----------------------------------------------------------------------------------------------------------


@_op_rule("group", HCOM_DOC)
def _group(view: Linted, op: Op) -> Iterator[str]:
    for name in ("group", "group_ep", "group_tp"):
        if name not in op.attrs or (op.attrs[name].value == "" and name != "group"):
            continue
        group = op.attrs[name].value
        if group not in GROUPS:
            yield f"{name} is {group!r}; a stored graph names one of {', '.join(GROUPS)}"
            continue
        size = view.facts.group_size(str(group))
        if size == 1:
            yield f"communicates over {group}, which has one rank"
        if op.type in ("HcomAllGather", "HcomReduceScatter") and attr(op, "rank_size", 0) != size:
            yield f"rank_size is {attr(op, 'rank_size', 0)}, {group} has {size} ranks"
    if op.type == "HcomAllReduce" and attr(op, "reduction") != "sum":
        yield f"reduction is {attr(op, 'reduction')!r}; partial results are summed"
