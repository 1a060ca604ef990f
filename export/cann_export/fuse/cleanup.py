"""Passes that change no value: drop what tracing left over, work on flat [rows, columns] tensors, cancel views.

Hugging Face models carry a batch dimension of 1 through everything; the step graph has none. Each op that does not care
about leading dimensions is moved to two dimensions, with views around it; then chains of views collapse and pairs of
transposes cancel, which leaves one view where a head dimension is split off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import cann_runtime.ops.atb  # noqa: F401  (registers the ops named below)
from cann_export.fuse.fx import VIEWS, aten, emit, is_call, known, nodes, rows, same_shape, value, view

atb = torch.ops.atb
c10d = torch.ops._c10d_functional
DROPPED = (aten._assert_tensor_metadata.default,)
NO_OPS = (aten.contiguous.default, aten.alias.default, aten.detach.default, aten.clone.default, aten.dropout.default)
ROW_WISE = (
    atb.linear.default,
    atb.rms_norm.default,
    atb.add_rms_norm.default,
    atb.swiglu.default,
    aten.linear.default,
    aten.silu.default,
    c10d.all_reduce.default,
    c10d.wait_tensor.default,
)
ELEMENTWISE = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor)


def drop_leftovers(gm: fx.GraphModule) -> None:
    """Remove assertions, copies and casts that do nothing."""
    for node in nodes(gm.graph):
        if is_call(node, *DROPPED):
            gm.graph.erase_node(node)
        elif (is_call(node, *NO_OPS) and not (node.target is aten.dropout.default and node.args[2])) or (
            is_call(node, aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout)
            and value(node.args[0]).dtype == value(node).dtype
        ):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        elif is_call(node, aten.to.dtype):  # the form that has converters
            with gm.graph.inserting_before(node):
                cast = emit(gm.graph, aten._to_copy.default, (node.args[0],), node, {"dtype": node.args[1]})
            node.replace_all_uses_with(cast)
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()


def _batched(node: Any) -> bool:
    """Is it a [1, rows, columns] tensor?"""
    return isinstance(node, fx.Node) and value(node).dim() == 3 and known(value(node).shape[0], 1)


def flatten_batch(gm: fx.GraphModule) -> None:
    """Move row-wise ops, elementwise ops, gathers and row selections from [1, rows, columns] to [rows, columns]."""
    graph = gm.graph
    for node in nodes(graph):
        if node.op != "call_function":
            continue
        with graph.inserting_before(node):
            new: fx.Node | None = None
            if (node.target in ROW_WISE and _batched(node.args[0])) or (
                node.target in ELEMENTWISE
                and all(_batched(a) for a in node.args)
                and same_shape(node.args[0], node.args[1])
            ):
                args = tuple(rows(graph, a, node) if _batched(a) else a for a in node.args)
                new = emit(graph, node.target, args, node, dict(node.kwargs))
            elif is_call(node, aten.embedding.default) and value(node.args[1]).dim() == 2:
                ids = view(graph, node.args[1], [-1], node)
                new = emit(graph, aten.embedding.default, (node.args[0], ids), node)
            elif is_call(node, aten.index.Tensor) and _batched(node.args[0]) and _second_only(node.args[1]):
                flat = rows(graph, node.args[0], node)
                new = emit(graph, aten.index_select.default, (flat, 0, node.args[1][1]), node)
            elif is_call(node, atb.rms_norm.default) and value(node).dim() == 4:  # norms of single heads
                new = emit(graph, node.target, (rows(graph, node.args[0], node), *node.args[1:]), node)
            if new is None:
                continue
            back = view(graph, new, _shape_args(node) or [1, -1, int(value(new).shape[-1])], node)
        node.replace_all_uses_with(back)
        graph.erase_node(node)
    simplify_views(gm)


def _second_only(indices: Any) -> bool:
    return len(indices) == 2 and indices[0] is None and isinstance(indices[1], fx.Node) and value(indices[1]).dim() == 1


def _is_view(node: Any) -> bool:
    if is_call(node, *VIEWS):
        return True
    return is_call(node, aten.select.int) and known(value(node.args[0]).shape[node.args[1]], 1)


def _shape_args(node: fx.Node) -> list[int] | None:
    """Static shape arguments for a view that gives this node's shape; None where two dimensions are dynamic."""
    sizes = [int(s) if isinstance(s, int) or s.node.is_constant() else -1 for s in value(node).shape]
    return sizes if sizes.count(-1) <= 1 else None


def simplify_views(gm: fx.GraphModule) -> None:
    """Collapse chains of views, drop views that change nothing, cancel pairs of equal transposes."""
    graph = gm.graph
    changed = True
    while changed:
        changed = False
        seen: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
        for node in nodes(graph):
            if _is_view(node):
                source = node.args[0]
                while _is_view(source):
                    source = source.args[0]
                if same_shape(source, node):
                    node.replace_all_uses_with(source)
                    graph.erase_node(node)
                    changed = True
                    continue
                shape = _shape_args(node)
                if shape is None:
                    continue
                key = (source, tuple(shape))
                # A view of an in-layer value may serve later users; a placeholder's view is kept where it is used.
                if key in seen and seen[key].meta.get("layer") == node.meta.get("layer"):
                    node.replace_all_uses_with(seen[key])
                    graph.erase_node(node)
                    changed = True
                    continue
                done = node.target in (aten.view.default, aten.reshape.default) and list(node.args[1]) == shape
                if source is not node.args[0] or not done:
                    with graph.inserting_before(node):
                        new = view(graph, source, shape, node)
                    node.replace_all_uses_with(new)
                    graph.erase_node(node)
                    node = new
                    changed = True
                seen[key] = node
            elif is_call(node, aten.transpose.int) and is_call(node.args[0], aten.transpose.int):
                inner = node.args[0]
                dims = {d % value(node).dim() for d in node.args[1:]}
                if dims == {d % value(inner).dim() for d in inner.args[1:]}:
                    node.replace_all_uses_with(inner.args[0])
                    graph.erase_node(node)
                    changed = True
        graph.eliminate_dead_code()
