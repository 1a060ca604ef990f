"""Small tools for editing a step graph: new nodes with example values, views, and matching on structure.

Every node that a pass adds gets its example value by running the op on the example values of its inputs, and its place
(layer, source) from the node that it stands for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.flatten.using_ints,
)
PLACE = ("layer", "source", "stack_trace", "nn_module_stack")


def nodes(graph: fx.Graph) -> list[Any]:
    """The graph's nodes now, safe to edit while iterating; Any, because an FX argument may be of a dozen types."""
    return list(graph.nodes)


def value(node: Any) -> Any:
    """Example value of an argument: a node's, or the argument itself."""
    return node.meta["val"] if isinstance(node, fx.Node) else node


def emit(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], place: fx.Node, kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """Add a call at the graph's insertion point; its value is computed and its place is that of `place`."""
    with torch.no_grad():
        result = target(*fx.node.map_arg(args, value), **fx.node.map_arg(kwargs or {}, value))
    node = graph.call_function(target, args, kwargs or {})
    node.meta["val"] = result
    copy_place(node, place)
    return node


def copy_place(node: fx.Node, place: fx.Node) -> None:
    """Give a node the layer, module path and source line of another."""
    for key in PLACE:
        if key in place.meta:
            node.meta[key] = place.meta[key]


def same_shape(a: fx.Node, b: fx.Node) -> bool:
    """Are the two tensors' shapes equal, for all values of dynamic sizes?"""
    x, y = value(a).shape, value(b).shape
    return len(x) == len(y) and all(statically_known_true(i == j) for i, j in zip(x, y, strict=True))


def known(size: Any, number: int) -> bool:
    """Is a size, maybe symbolic, surely that number?"""
    return bool(statically_known_true(size == number))


def is_call(node: Any, *targets: Any) -> bool:
    """Is the argument a call of one of the targets?"""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def view(graph: fx.Graph, node: fx.Node, shape: list[int], place: fx.Node) -> fx.Node:
    """`node` in that shape (at most one −1): a view, or where its memory is not in order, a reshape."""
    target = aten.view.default if value(node).is_contiguous() else aten.reshape.default
    return emit(graph, target, (node, shape), place)


def rows(graph: fx.Graph, node: fx.Node, place: fx.Node) -> fx.Node:
    """The tensor as [rows, last]: all leading dimensions in one."""
    val = value(node)
    if val.dim() == 2:
        return node
    return view(graph, node, [-1, int(val.shape[-1])], place)


def getitem(graph: fx.Graph, node: fx.Node, index: int, place: fx.Node) -> fx.Node:
    """Output `index` of a call with several outputs."""
    import operator

    out = graph.call_function(operator.getitem, (node, index))
    out.meta["val"] = node.meta["val"][index]
    copy_place(out, place)
    return out


def is_getitem(node: Any, index: int | None = None) -> bool:
    """Is it `call[index]`?"""
    import operator

    return is_call(node, operator.getitem) and (index is None or node.args[1] == index)


def sort_graph(gm: fx.GraphModule) -> None:
    """Put nodes in an order in which every node follows its inputs, keeping the present order where it can.

    In-place writes stay before the reads that followed them: order among nodes that share an input is kept.
    """
    order: list[fx.Node] = []
    done: set[fx.Node] = set()
    for root in list(gm.graph.nodes):
        stack = [root]
        while stack:
            node = stack[-1]
            if node in done:
                stack.pop()
                continue
            missing = [n for n in node.all_input_nodes if n not in done]
            if missing:
                stack.extend(reversed(missing))
            else:
                done.add(node)
                order.append(node)
                stack.pop()
    previous: fx.Node | None = None
    for node in order:
        if previous is not None:
            previous.append(node)
        previous = node
