"""Root-mean-square norms, alone and with the residual addition before them, found by their arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cann_export.fuse.fx import aten, emit, getitem, is_call, nodes, same_shape, value
from cann_export.program import Program
from cann_runtime.artifact.plan import WeightPlan

atb = torch.ops.atb


def _without_cast(node: Any) -> Any:
    while is_call(node, aten.to.dtype, aten._to_copy.default):
        node = node.args[0]
    return node


def rms_norm(program: Program, plan: WeightPlan) -> int:
    """weight * cast(x * rsqrt(mean(x ** 2, -1) + eps)), x cast to float32 first -> atb.rms_norm."""
    graph = program.gm.graph
    count = 0
    for rsqrt in [n for n in nodes(graph) if is_call(n, aten.rsqrt.default)]:
        found = _match_rms(rsqrt)
        if found is None:
            continue
        x, weight, eps, last = found
        with graph.inserting_before(last):
            new = emit(graph, atb.rms_norm.default, (x, weight, eps), last)
        last.replace_all_uses_with(new)
        count += 1
    graph.eliminate_dead_code()
    return count


def _match_rms(rsqrt: Any) -> tuple[fx.Node, fx.Node, float, fx.Node] | None:
    add = rsqrt.args[0]
    if not (is_call(add, aten.add.Tensor) and isinstance(add.args[1], float)):
        return None
    mean = add.args[0]
    if not (is_call(mean, aten.mean.dim) and list(mean.args[1]) == [-1] and mean.args[2:3] == (True,)):
        return None
    square = mean.args[0]
    if not (is_call(square, aten.pow.Tensor_Scalar) and square.args[1] == 2):
        return None
    x32 = square.args[0]
    scaled = _only_user(rsqrt)
    if not (is_call(scaled, aten.mul.Tensor) and set(scaled.args) == {x32, rsqrt}):
        return None
    x = _without_cast(x32)
    product = _only_user(scaled)
    if is_call(product, aten.to.dtype, aten._to_copy.default):
        scaled, product = product, _only_user(product)
    if not is_call(product, aten.mul.Tensor) or scaled not in product.args:
        return None
    weight = next(a for a in product.args if a is not scaled)
    if not isinstance(weight, fx.Node) or value(weight).dim() != 1 or value(product).dtype != value(x).dtype:
        return None
    return x, weight, add.args[1], product


def _only_user(node: fx.Node) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


def add_rms_norm(program: Program, plan: WeightPlan) -> int:
    """atb.rms_norm(a + b) with a and b of equal shapes -> atb.add_rms_norm, whose second output is the sum."""
    graph = program.gm.graph
    count = 0
    for norm in [n for n in nodes(graph) if is_call(n, atb.rms_norm.default)]:
        add = norm.args[0]
        if not (is_call(add, aten.add.Tensor) and len(add.args) == 2 and not add.kwargs):
            continue
        if not (isinstance(add.args[1], fx.Node) and same_shape(*add.args)):
            continue
        with graph.inserting_before(norm):
            both = emit(graph, atb.add_rms_norm.default, (*add.args, *norm.args[1:]), norm)
            normed, total = getitem(graph, both, 0, norm), getitem(graph, both, 1, norm)
        norm.replace_all_uses_with(normed)
        graph.erase_node(norm)
        add.replace_all_uses_with(total, delete_user_cb=lambda user, both=both: user is not both)
        graph.erase_node(add)
        count += 1
    return count
