"""aten.linear -> atb.linear, and linears that read the same tensor -> one linear on stacked weights.

Merging is by structure: projections of one input whose weights are parameters used nowhere else (q, k, v; gate, up).
The merged parameter's rows are those of the parts one after the other, on every rank; the weight plan says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cann_export.fuse.fx import aten, emit, getitem, is_call, nodes, rows, value, view
from cann_export.program import Program, Slot
from cann_runtime.artifact.plan import Param, WeightPlan

atb = torch.ops.atb
# Names of merged projections that users know; others are joined with '_'.
MERGED_NAMES = {("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}


def linear(program: Program, plan: WeightPlan) -> int:
    """Replace every aten.linear by atb.linear; gives the number replaced."""
    graph = program.gm.graph
    count = 0
    for node in nodes(graph):
        if is_call(node, aten.linear.default):
            with graph.inserting_before(node):
                new = emit(graph, atb.linear.default, node.args, node)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            count += 1
    return count


def merge_linear(program: Program, plan: WeightPlan) -> int:
    """Merge linears that read the same tensor; gives the number of merged groups."""
    graph = program.gm.graph
    groups: dict[tuple[Any, bool], list[Any]] = {}
    for node in nodes(graph):
        if is_call(node, atb.linear.default) and _mergeable(node):
            has_bias = len(node.args) > 2 and node.args[2] is not None
            groups.setdefault((node.args[0], has_bias), []).append(node)
    count = 0
    for (source, has_bias), group in groups.items():
        if len(group) < 2:
            continue
        weight = _merge_params(program, plan, [n.args[1] for n in group])
        args: tuple[fx.Node, ...] = (source, weight)
        if has_bias:
            args = (*args, _merge_params(program, plan, [n.args[2] for n in group]))
        sizes = [int(value(n).shape[-1]) for n in group]
        with graph.inserting_before(group[0]):
            merged = emit(graph, atb.linear.default, args, group[0])
            parts = emit(graph, aten.split_with_sizes.default, (rows(graph, merged, group[0]), sizes, -1), group[0])
            outputs = [getitem(graph, parts, i, n) for i, n in enumerate(group)]
            if value(merged).dim() == 3:
                outputs = [view(graph, o, [1, -1, size], o) for o, size in zip(outputs, sizes, strict=True)]
        for old, new in zip(group, outputs, strict=True):
            old.replace_all_uses_with(new)
            graph.erase_node(old)
        count += 1
    _drop_unused_params(program, plan)
    return count


def _mergeable(node: Any) -> bool:
    params = [a for a in node.args[1:] if a is not None]
    return all(isinstance(p, fx.Node) and p.op == "placeholder" and len(p.users) == 1 for p in params)


def merged_name(names: list[str]) -> str:
    """Name of a merged parameter: model.layers.0.self_attn.{q,k,v}_proj.weight -> ...self_attn.qkv_proj.weight."""
    split = [n.rsplit(".", 2) for n in names]
    leaves = tuple(s[-2] for s in split)
    leaf = MERGED_NAMES.get(leaves, "_".join(leaves))
    return ".".join([*split[0][:-2], leaf, split[0][-1]])


def _merge_params(program: Program, plan: WeightPlan, merged: list[fx.Node]) -> fx.Node:
    placeholders = program.placeholders()
    slots = [program.slots[placeholders.index(n)] for n in merged]
    olds = [plan.params[s.name] for s in slots]
    name = merged_name([s.name for s in slots])
    shape = [sum(o.shape[0] for o in olds), *olds[0].shape[1:]]
    plan.params[name] = Param(name=name, dtype=olds[0].dtype, shape=shape, parts=[p for o in olds for p in o.parts])
    graph = program.gm.graph
    with graph.inserting_before(merged[0]):
        new = graph.placeholder(f"p_{name.replace('.', '_')}")
    new.meta["val"] = value(merged[0]).new_empty(shape)
    program.slots.insert(placeholders.index(merged[0]), Slot("param", name))
    return new


def _drop_unused_params(program: Program, plan: WeightPlan) -> None:
    kept = []
    for node, slot in zip(program.placeholders(), list(program.slots), strict=True):
        if slot.kind == "param" and not node.users:
            program.gm.graph.erase_node(node)
            plan.params.pop(slot.name, None)
        else:
            kept.append(slot)
    program.slots[:] = kept
