"""Rewrites a fused Program to the operators that TorchAir converts: `atb::` to `npu::` and `air::`.

KV caches become functional writes with an `aten.copy_` epilogue: the form from which TorchAir makes in-place writes
without a copy. Converting the result to a GE graph is in `convert.py`. Operator constraints are those of the op-plugin
and ops-transformer documents.

Shape letters: T tokens, S sequences, Q query rows a sequence, N query heads, K kv heads, D head_dim, B blocks,
P block_size, M block-table columns, H hidden, I inner size.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import cann_runtime.ops.atb  # noqa: F401  (registers the ops)
from cann_export.lower.ascend.soc import layout
from cann_export.program import Program, tensor_meta

CAUSAL_MASK = 2048
"""Side of the mask that sparse_mode 3 (bottom-right causal) asks for, whatever the lengths."""

Image = fx.Node | tuple[fx.Node, ...]
"""What a node became: one node, or one for each of its results."""

_VIEWS = {
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.squeeze.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
}
_COPIES = {
    "aten.clone.default",
    "aten.alias.default",
    "aten.detach.default",
    "aten.lift_fresh_copy.default",
    "aten.contiguous.default",
    "_c10d_functional.wait_tensor.default",  # GE orders by data edges; TorchAir would make it an Identity
}
_SYNONYMS: dict[str, Any] = {  # operators that a trace may keep and that TorchAir knows by another name
    "aten.__and__.Tensor": torch.ops.aten.bitwise_and.Tensor,
    "aten.__or__.Tensor": torch.ops.aten.bitwise_or.Tensor,
    "aten.less.Scalar": torch.ops.aten.lt.Scalar,
    "aten.greater_equal.Scalar": torch.ops.aten.ge.Scalar,
}
_CHECKS = {"aten._assert_tensor_metadata.default", "aten._assert_scalar.default"}


@dataclass
class _Rewrite:
    """State of one pass over a graph: what exists once per graph, and the current value of each cache."""

    program: Program
    graph: fx.Graph
    images: dict[fx.Node, Image] = field(default_factory=dict)
    rope_tables: dict[fx.Node, fx.Node] = field(default_factory=dict)
    caches: dict[fx.Node, fx.Node] = field(default_factory=dict)  # placeholder -> value after its last write
    causal_mask: fx.Node | None = None
    made: list[fx.Node] = field(default_factory=list)  # nodes made for the node at hand

    def image(self, node: fx.Node) -> fx.Node:
        image = self.images[node]
        assert isinstance(image, fx.Node), f"{node} has several results"
        return self.caches.get(image, image)

    def call(self, target: Any, args: tuple[Any, ...], val: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = val
        self.made.append(node)
        return node

    def view(self, x: fx.Node, shape: list[int]) -> fx.Node:
        """x in another shape; a dimension given as -1 stays -1 in the GE graph."""
        return self.call(torch.ops.aten.view.default, (x, shape), tensor_meta(x).view(shape))

    def item(self, x: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, (x, index), x.meta["val"][index])


def is_flat(program: Program) -> bool:
    """May the Program's attention use the flat TND layout? Otherwise it is rectangular, [S, Q] rows."""
    return layout(program.head_dim) == "flat" and program.bucket.query_len is None


def to_npu(program: Program) -> fx.GraphModule:
    """A copy of the Program's graph in npu::, air:: and aten operators, with meta-device example values.

    Nodes keep meta['layer'] and meta['source'] of the node that they come from; what exists once a graph has no layer.
    """
    graph = fx.Graph()
    state = _Rewrite(program, graph)
    for node in program.gm.graph.nodes:
        if node.op == "output":
            _output(state, node)
        else:
            _emit(state, node)
        while state.made:
            new = state.made.pop()
            for key in ("layer", "source", "stack_trace"):
                if key in node.meta:
                    new.meta.setdefault(key, node.meta[key])
    _merge_views(graph)
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)


def _emit(state: _Rewrite, node: fx.Node) -> None:
    name = str(node.target)
    if node.op == "call_function":
        if name in _CHECKS:
            return
        if name in _COPIES:
            state.images[node] = state.images[node.all_input_nodes[0]]
            return
        if name == "aten.index.Tensor" and _gathers_rows(node):
            state.images[node] = _index_select(state, *(state.image(n) for n in node.all_input_nodes))
            return
        if name in _LOWERINGS:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), state.image)
            made = _LOWERINGS[name](state, *args, **kwargs)
            if made is not None:
                state.images[node] = made
            return
        if node.target is operator.getitem and isinstance(made := state.images[node.args[0]], tuple):  # type: ignore[index]
            state.images[node] = made[node.args[1]]  # type: ignore[index]
            return
        if name in _VIEWS:
            x = state.image(node.all_input_nodes[0])
            state.images[node] = state.view(x, [int(d) for d in tensor_meta(node).shape])
            return
    new = state.graph.node_copy(node, state.image)
    new.target = _SYNONYMS.get(name, new.target)
    new.meta = {"val": on_meta(node.meta.get("val"))}
    state.made.append(new)
    state.images[node] = new


def on_meta(val: Any) -> Any:
    """The value's shape and dtype as a contiguous tensor on the meta device, which TorchAir places on the NPU."""
    if isinstance(val, torch.Tensor):
        return torch.empty([int(d) for d in val.shape], dtype=val.dtype, device="meta")
    if isinstance(val, (list, tuple)):
        return type(val)(on_meta(v) for v in val)
    return val


def _output(state: _Rewrite, node: fx.Node) -> None:
    for cache, value in state.caches.items():
        copy = state.call(torch.ops.aten.copy_.default, (cache, value), cache.meta["val"])
        copy.meta["layer"] = None
    results = node.args[0]
    assert isinstance(results, (list, tuple))
    state.graph.output(tuple(state.image(x) for x in results if isinstance(x, fx.Node)))


def _linear(state: _Rewrite, x: fx.Node, weight_OI: fx.Node, bias: fx.Node | None = None) -> Image:
    # MatMul with transpose_x2: the weight is read as it lies, [out, in].
    x_shape, out = list(tensor_meta(x).shape), tensor_meta(weight_OI).shape[0]
    rows = x if len(x_shape) == 2 else state.view(x, [math.prod(x_shape[:-1]), x_shape[-1]])
    val = tensor_meta(x).new_empty(tensor_meta(rows).shape[0], out)
    y = state.call(torch.ops.npu.npu_linear.default, (rows, weight_OI) + (() if bias is None else (bias,)), val)
    return y if rows is x else state.view(y, [*x_shape[:-1], out])


def _rms_norm(state: _Rewrite, x: fx.Node, weight_H: fx.Node, eps: float) -> Image:
    xv = tensor_meta(x)
    vals = (xv, xv.new_empty(*xv.shape[:-1], 1, dtype=torch.float32))
    return state.item(state.call(torch.ops.npu.npu_rms_norm.default, (x, weight_H, eps), vals), 0)


def _add_rms_norm(state: _Rewrite, x: fx.Node, residual: fx.Node, weight_H: fx.Node, eps: float) -> Image:
    xv = tensor_meta(x)
    vals = (xv, xv.new_empty(*xv.shape[:-1], 1, dtype=torch.float32), xv)
    node = state.call(torch.ops.npu.npu_add_rms_norm.default, (x, residual, weight_H, eps), vals)
    return state.item(node, 0), state.item(node, 2)


def _swiglu(state: _Rewrite, x: fx.Node) -> Image:
    xv = tensor_meta(x)
    return state.call(torch.ops.npu.npu_swiglu.default, (x, -1), xv.new_empty(*xv.shape[:-1], xv.shape[-1] // 2))


def _rotary(state: _Rewrite, q_TND: fx.Node, k_TKD: fx.Node, cos_TD: fx.Node, sin_TD: fx.Node) -> Image:
    for table in (cos_TD, sin_TD):
        if table not in state.rope_tables:
            tokens, dim = tensor_meta(table).shape
            state.rope_tables[table] = _shared(state.view(table, [tokens, 1, dim]))
    args = (q_TND, k_TKD, state.rope_tables[cos_TD], state.rope_tables[sin_TD])
    vals = (tensor_meta(q_TND), tensor_meta(k_TKD))
    node = state.call(torch.ops.npu.npu_apply_rotary_pos_emb.default, args, vals, layout="TND")
    return state.item(node, 0), state.item(node, 1)


def _reshape_and_cache(
    state: _Rewrite, k_TKD: fx.Node, v_TKD: fx.Node, k_cache: fx.Node, v_cache: fx.Node, slots_T: fx.Node
) -> None:
    vals = (tensor_meta(k_cache), tensor_meta(v_cache))
    write = torch.ops.npu.npu_scatter_pa_kv_cache_functional.default
    node = state.call(write, (k_TKD, v_TKD, k_cache, v_cache, slots_T), vals, cache_mode="Norm")
    for i, before in enumerate((k_cache, v_cache)):
        # `before` is the placeholder, or its value after an earlier write in this graph
        holder = next((p for p, value in state.caches.items() if value is before), before)
        state.caches[holder] = state.item(node, i)


def _paged_attention(
    state: _Rewrite,
    q_TND: fx.Node,
    k_cache_BPKD: fx.Node,
    v_cache_BPKD: fx.Node,
    block_table_SM: fx.Node,
    query_lens_S: fx.Node,
    kv_lens_S: fx.Node,
    scale: float,
) -> Image:
    # The variant of the op whose lengths are tensors: the one in torch.ops.npu would bake them into the graph.
    tokens, heads, dim = tensor_meta(q_TND).shape
    _, block, kv_heads, _ = tensor_meta(k_cache_BPKD).shape
    bucket = state.program.bucket
    options: dict[str, Any] = {
        "block_table": block_table_SM,
        "actual_seq_lengths_kv": kv_lens_S,
        "num_heads": heads,
        "scale": scale,
        "num_key_value_heads": kv_heads,
        "block_size": block,
    }
    if is_flat(state.program):
        one_row = state.program.phase == "decode" and bucket.tokens == bucket.seqs
        query, options["input_layout"], options["actual_seq_lengths"] = q_TND, "TND", query_lens_S
    else:
        rows = bucket.query_len or 1
        assert tokens == bucket.seqs * rows, f"rectangular layout: {tokens} tokens are not {bucket.seqs} x {rows}"
        one_row = rows == 1
        query, options["input_layout"] = state.view(q_TND, [tokens // rows, rows, heads * dim]), "BSH"
        if not one_row:  # with one row a sequence the op does not read it
            options["actual_seq_lengths"] = query_lens_S
    if not one_row:
        options["atten_mask"], options["sparse_mode"] = _causal_mask(state), 3
    key = state.view(k_cache_BPKD, [-1, block, kv_heads * dim])
    value = state.view(v_cache_BPKD, [-1, block, kv_heads * dim])
    vals = (tensor_meta(query), tensor_meta(query).new_empty(1, dtype=torch.float32))
    op = torch.ops.air.npu_fused_infer_attention_score.default
    out = state.item(state.call(op, (query, key, value), vals, **options), 0)
    return out if query is q_TND else state.view(out, [tokens, heads, dim])


def _causal_mask(state: _Rewrite) -> fx.Node:
    """True where key j > row i, made once per graph from a range (a constant would add 4 MB to every graph)."""
    if state.causal_mask is None:
        shape = (CAUSAL_MASK,)
        line = torch.empty(shape, dtype=torch.int32, device="meta")
        keys = _shared(state.call(torch.ops.aten.arange.default, shape, line, dtype=torch.int32))
        rows = _shared(state.view(keys, [CAUSAL_MASK, 1]))
        mask = torch.empty(CAUSAL_MASK, CAUSAL_MASK, dtype=torch.bool, device="meta")
        state.causal_mask = _shared(state.call(torch.ops.aten.gt.Tensor, (keys, rows), mask))
    return state.causal_mask


def _shared(node: fx.Node) -> fx.Node:
    """Marks a node that exists once per graph, whichever layer asked for it first."""
    node.meta["layer"] = None
    return node


def _gathers_rows(index: fx.Node) -> bool:
    """Is it x[rows] with one vector of row numbers? Then a gather does it, without the general indexing kernel."""
    indices = index.args[1]
    assert isinstance(indices, (list, tuple))
    return len(indices) == 1 and isinstance(indices[0], fx.Node) and tensor_meta(indices[0]).dim() == 1


def _index_select(state: _Rewrite, x: fx.Node, rows: fx.Node) -> Image:
    val = tensor_meta(x).new_empty(tensor_meta(rows).shape[0], *tensor_meta(x).shape[1:])
    return state.call(torch.ops.aten.index_select.default, (x, 0, rows), val)


_LOWERINGS: dict[str, Callable[..., Image | None]] = {
    "atb.linear.default": _linear,
    "atb.rms_norm.default": _rms_norm,
    "atb.add_rms_norm.default": _add_rms_norm,
    "atb.swiglu.default": _swiglu,
    "atb.rotary.default": _rotary,
    "atb.reshape_and_cache.default": _reshape_and_cache,
    "atb.paged_attention.default": _paged_attention,
}


def is_rewritten(name: str) -> bool:
    """Does `to_npu` replace operators of that name by others?"""
    return any(name in table for table in (_LOWERINGS, _VIEWS, _COPIES, _CHECKS, _SYNONYMS))


def _merge_views(graph: fx.Graph) -> None:
    """view of view -> one view; view to the same shape -> nothing; then drop what nothing reads."""
    view = torch.ops.aten.view.default
    for node in list(graph.nodes):
        if node.target is not view:
            continue
        source = node.args[0]
        while source.target is view:
            source = source.args[0]
        node.args = (source, node.args[1])
        if tensor_meta(source).shape == tensor_meta(node).shape:
            node.replace_all_uses_with(source)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node.target is not torch.ops.aten.copy_.default:
            graph.erase_node(node)
