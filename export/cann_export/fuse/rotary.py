"""Rotary position embedding in the half mode, for the queries and keys of one attention together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cann_export.fuse.fx import aten, emit, getitem, is_call, nodes, value, view
from cann_export.program import Program
from cann_runtime.artifact.plan import WeightPlan

atb = torch.ops.atb
_END = 2**31


@dataclass
class _Match:
    x: fx.Node  # [1, heads, T, D]
    cos: fx.Node  # [1, T, D] before its unsqueeze
    sin: fx.Node
    out: fx.Node


def rotary(program: Program, plan: WeightPlan) -> int:
    """x * cos + rotate_half(x) * sin, twice with the same cos and sin -> one atb.rotary on [T, heads, D]."""
    graph = program.gm.graph
    pairs: dict[tuple[Any, fx.Node, fx.Node], list[_Match]] = {}
    for node in nodes(graph):
        match = _match(node)
        if match is not None:
            pairs.setdefault((node.meta.get("layer"), match.cos, match.sin), []).append(match)
    count = 0
    for (_, cos, sin), matches in pairs.items():
        if len(matches) != 2:
            continue
        q, k = matches
        cos_TD, sin_TD = _table_rows(graph, cos), _table_rows(graph, sin)
        last = k.out
        with graph.inserting_before(last):
            heads = [_token_major(graph, m.x, last) for m in (q, k)]
            both = emit(graph, atb.rotary.default, (*heads, cos_TD, sin_TD), last)
            outs = []
            for i, m in enumerate((q, k)):
                out_TND = getitem(graph, both, i, last)
                n, d = (int(s) for s in value(out_TND).shape[1:])
                batched = view(graph, out_TND, [1, -1, n, d], m.out)
                outs.append(emit(graph, aten.transpose.int, (batched, 1, 2), m.out))
        for m, out in zip((q, k), outs, strict=True):
            m.out.replace_all_uses_with(out)
        count += 1
    graph.eliminate_dead_code()
    return count


def _table_rows(graph: fx.Graph, node: Any) -> fx.Node:
    """[T, D] rows of cos or sin, made once for the graph, right where they are gathered."""
    for user in list(node.users):
        if is_call(user, aten.view.default) and list(user.args[1]) == [-1, int(value(node).shape[-1])]:
            found: fx.Node = user
            return found
    with graph.inserting_after(node):
        return view(graph, node, [-1, int(value(node).shape[-1])], node)


def _token_major(graph: fx.Graph, x: fx.Node, place: fx.Node) -> fx.Node:
    """[1, heads, T, D] -> [T, heads, D]."""
    swapped = emit(graph, aten.transpose.int, (x, 1, 2), place)
    n, d = (int(s) for s in value(swapped).shape[2:])
    return view(graph, swapped, [-1, n, d], place)


def _match(node: Any) -> _Match | None:
    if not (is_call(node, aten.add.Tensor) and len(node.args) == 2):
        return None
    for plain, turned in (node.args, node.args[::-1]):
        if not (is_call(plain, aten.mul.Tensor) and is_call(turned, aten.mul.Tensor)):
            continue
        for cat, sin in (turned.args, turned.args[::-1]):
            x = _rotated(cat)
            if x is None or x not in plain.args:
                continue
            cos = next(a for a in plain.args if a is not x)
            tables = [_unexpanded(t) for t in (cos, sin)]
            if tables[0] is not None and tables[1] is not None:
                return _Match(x, tables[0], tables[1], node)
    return None


def _unexpanded(node: Any) -> fx.Node | None:
    """cos or sin [1, 1, T, D] as unsqueeze(table rows [1, T, D], 1) -> the rows."""
    if is_call(node, aten.unsqueeze.default) and node.args[1] == 1 and value(node).dim() == 4:
        rows: fx.Node = node.args[0]
        return rows
    return None


def _rotated(cat: Any) -> fx.Node | None:
    """cat(-x[..., D/2:], x[..., :D/2]) -> x."""
    if not (is_call(cat, aten.cat.default) and len(cat.args[0]) == 2):
        return None
    first, second = cat.args[0]
    if not is_call(first, aten.neg.default):
        return None
    upper = first.args[0]
    if not (is_call(upper, aten.slice.Tensor) and is_call(second, aten.slice.Tensor)):
        return None
    x = upper.args[0]
    size = value(x).shape[-1]
    last = value(x).dim() - 1
    if second.args[0] is not x or upper.args[1] % (last + 1) != last or second.args[1] % (last + 1) != last:
        return None
    whole = upper.args[2] == size // 2 and upper.args[3] >= size and tuple(second.args[2:4]) == (0, size // 2)
    return x if whole else None
