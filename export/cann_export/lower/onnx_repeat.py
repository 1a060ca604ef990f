"""Makes the step graph of all layers from one of a few layers, by repeating a middle layer's nodes.

The exporter traces a first, a middle and a last layer where all layers are of one kind; GE graphs are completed in
`lower/ascend/stamp.py`, ONNX models here, before they are written. The plan is completed by expand.expand_plan.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from cann_export.program import Program, Slot

_LAYER = re.compile(r"(\blayers\.|\b[kv]_cache_)(\d+)\b")


def repeat_layers(program: Program, total: int) -> Program:
    """A Program of `total` layers: first and last stay first and last, the last but one is repeated between them.

    The given Program is left as it is; one that has all its layers already is given back.
    """
    traced = program.num_layers
    if total == traced:
        return program
    last, middle = traced - 1, traced - 2
    nodes = [n for n in program.gm.graph.nodes if n.op != "placeholder"]
    bodies: dict[int, list[fx.Node]] = {i: [n for n in nodes if n.meta.get("layer") == i] for i in (middle, last)}
    into_middle, into_last = _carried(bodies[middle]), _carried(bodies[last])
    assert len(into_middle) == len(into_last), "a middle layer reads other values than the last one"
    assert nodes.index(bodies[middle][-1]) < nodes.index(bodies[last][0]), "layers overlap"

    graph = fx.Graph()
    slots: list[Slot] = []
    made = _placeholders(program, graph, slots, total)
    fixed = {n: made[_moved(s.name, {last: total - 1})] for n, s in _pairs(program) if _layer_of(s.name) != middle}
    names_of = {n: s.name for n, s in _pairs(program) if _layer_of(s.name) == middle}

    def copy(node: fx.Node, values: dict[fx.Node, fx.Node], layer: int | None) -> fx.Node:
        new = graph.node_copy(node, lambda arg: values[arg])
        if layer is not None:
            new.meta["layer"] = layer
            new.meta["source"] = _moved(new.meta["source"], {node.meta["layer"]: layer})
        return new

    values = fixed | {n: made[name] for n, name in names_of.items()}
    for node in nodes:
        if node is bodies[last][0]:
            for layer in range(middle + 1, total - 1):
                inside = values | {n: made[_moved(name, {middle: layer})] for n, name in names_of.items()}
                inside |= {old: values[new] for old, new in zip(into_middle, into_last, strict=True)}
                for inner in bodies[middle]:
                    inside[inner] = copy(inner, inside, layer)
                values |= {n: inside[n] for n in bodies[middle]}
        layer = node.meta.get("layer")
        values[node] = copy(node, values, total - 1 if layer == last else layer)
    kinds = [program.layer_kinds[0], *[program.layer_kinds[middle]] * (total - 2), program.layer_kinds[last]]
    module = fx.GraphModule(torch.nn.Module(), graph)
    return replace(program, gm=module, slots=slots, num_layers=total, layer_kinds=kinds)


def _pairs(program: Program) -> list[tuple[fx.Node, Slot]]:
    return list(zip(program.placeholders(), program.slots, strict=True))


def _layer_of(name: str) -> int | None:
    match = _LAYER.search(name)
    return int(match[2]) if match else None


def _moved(name: str, layers: dict[int, int]) -> str:
    """The name with its layer number changed as `layers` says."""
    return _LAYER.sub(lambda m: f"{m[1]}{layers.get(int(m[2]), int(m[2]))}", name, count=1)


def _carried(body: list[Any]) -> list[fx.Node]:
    """Values from outside that a layer's nodes read, placeholders apart, in the order of their first use."""
    inside = set(body)
    read = (a for n in body for a in n.all_input_nodes if a not in inside and a.op != "placeholder")
    return list(dict.fromkeys(read))


def _placeholders(program: Program, graph: fx.Graph, slots: list[Slot], total: int) -> dict[str, fx.Node]:
    """New placeholders by slot name, in the order that Program asks for: parameters, step inputs, caches by layer."""
    last, middle = program.num_layers - 1, program.num_layers - 2
    found: list[tuple[Slot, fx.Node]] = []
    for node, slot in _pairs(program):
        layer = _layer_of(slot.name)
        targets = range(middle, total - 1) if layer == middle else [total - 1 if layer == last else layer or 0]
        for target in targets:
            moved = slot.name if layer is None else _moved(slot.name, {layer: target})
            found.append((Slot(slot.kind, moved), node))
    # A stable sort: keys before values within a layer, as they were.
    found.sort(key=lambda f: (("param", "input", "kv").index(f[0].kind), _layer_of(f[0].name) or 0))
    made: dict[str, fx.Node] = {}
    for slot, node in found:
        new = graph.placeholder(re.sub(r"\W", "_", slot.name))
        new.meta = dict(node.meta)
        made[slot.name] = new
        slots.append(slot)
    return made
