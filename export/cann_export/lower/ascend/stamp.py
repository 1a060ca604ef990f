"""Makes the GE graph of an N-layer model from that of a short one by repeating its middle layers.

A decoder's middle layers of one kind differ only in their weights and caches, so converting one of each is enough: 80
layers then cost milliseconds. The graph must be in the canonical form of `proto.py`; the result is byte for byte what
converting all N layers gives.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from cann_export.lower.ascend import proto
from cann_runtime.artifact.manifest import TensorRef

_PARAM_LAYER = re.compile(r"^((?:.*[._])?layers[._])(\d+)([._].*)$")
_CACHE_LAYER = re.compile(r"^([a-z_]+_cache_)(\d+)()$")


@dataclass
class Layered:
    """A converted graph whose layers are known.

    model: a GE ModelDef in canonical form. layers: op or Data name -> layer, None outside the layers. inputs: in Data
    index order. options: GE options that do not list the inputs.
    """

    model: Any
    layers: dict[str, int | None]
    inputs: list[TensorRef]
    output: TensorRef
    options: dict[str, str]


def layer_of_name(name: str) -> int | None:
    """Layer of a parameter or cache, from its name or its Data's name; None for those outside the layers."""
    match = _PARAM_LAYER.match(name) or _CACHE_LAYER.match(name)
    return int(match[2]) if match else None


def in_layer(name: str, layer: int) -> str:
    """The name of the same parameter or cache in another layer."""
    match = _PARAM_LAYER.match(name) or _CACHE_LAYER.match(name)
    return f"{match[1]}{layer}{match[3]}" if match else name


def templates(short: list[str], full: list[str]) -> list[int]:
    """For each layer of the full model, the layer of the short one that it repeats.

    First and last repeat first and last; each other one repeats the last middle layer of its kind. ValueError where the
    short model lacks a kind.
    """
    middle = {kind: i for i, kind in enumerate(short) if 0 < i < len(short) - 1}
    missing = sorted(set(full[1:-1]) - set(middle))
    if len(short) < 3 or len(full) < len(short) or missing or (short[0], short[-1]) != (full[0], full[-1]):
        raise ValueError(f"layers {short} cannot be repeated to {len(full)} layers (no middle layer of kind {missing})")
    return [0, *(middle[kind] for kind in full[1:-1]), len(short) - 1]


def stamp(source: Layered, short: list[str], full: list[str]) -> Layered:
    """The graph with layers of kinds `full`, from one with layers of kinds `short`. `source` is left as it is."""
    plan = templates(short, full)
    ge = source.model.graph[0]
    ops: dict[int, list[Any]] = {i: [] for i in range(len(short))}
    for op in ge.op:
        layer = source.layers[op.name]
        if layer is not None and op.type != "Data":
            ops[layer].append(op)
    live_out = {t: _incoming(ops[t + 1], source.layers, t) for t in range(len(short) - 1)}

    refs = {ref.name: ref for ref in source.inputs}
    names = _repeat_inputs([ref.name for ref in source.inputs], plan)
    inputs = [refs[old].model_copy(update={"name": new}) for old, new in names]
    data = {op.attr["index"].i: op for op in ge.op if op.type == "Data"}
    index = {ref.name: i for i, ref in enumerate(source.inputs)}

    layers: dict[str, int | None] = {}
    made: list[Any] = []

    def copy(op: Any, name: str, layer: int | None) -> Any:
        new = type(op)()
        new.CopyFrom(op)
        new.name = name
        layers[name] = layer
        made.append(new)
        return new

    for i, (old, new) in enumerate(names):
        original = data[index[old]]
        layer = layer_of_name(new)
        clone = copy(original, original.name if layer is None else in_layer(original.name, layer), layer)
        clone.attr["index"].i = i

    emitted = False
    for op in ge.op:
        layer = source.layers[op.name]
        if op.type == "Data":
            continue
        if layer is None:
            clone = copy(op, op.name, None)
            for k, edge in enumerate(op.input):
                if edge and (origin := source.layers[proto.producer(edge)]) is not None:
                    # After the layers: the tail reads the last of them.
                    assert origin == len(short) - 1, f"{op.name} reads layer {origin}"
                    clone.input[k] = _shifted(edge, len(full) - 1)
        elif not emitted:
            emitted = True
            for i, t in enumerate(plan):
                before = live_out[plan[i - 1]] if i else []
                expected = live_out[t - 1] if t else []
                _copy_layer(ops[t], i, t, source.layers, dict(zip(expected, before, strict=True)), copy)

    model = type(source.model)()
    model.CopyFrom(source.model)
    out = model.graph[0]
    del out.op[:]
    out.op.extend(made)
    out.attr["_input_placements"].list.i[:] = [1] * len(inputs)
    return Layered(model, layers, inputs, source.output, dict(source.options))


def _copy_layer(
    ops: list[Any], to: int, template: int, layers: dict[str, int | None], bridge: dict[str, str], copy: Any
) -> None:
    """Copy a template's ops as layer `to`. bridge: edge from the layer before, as the template reads it -> as the layer
    that now stands there writes it."""
    for op in ops:
        clone = copy(op, _shifted(op.name, to), to)
        for k, edge in enumerate(op.input):
            origin = layers[proto.producer(edge)] if edge else None
            if origin is None:
                continue
            if layer_of_name(proto.producer(edge)) is not None:  # a parameter or cache of this layer, or a neighbour's
                source, port = edge.rsplit(":", 1)
                clone.input[k] = f"{in_layer(source, to + origin - template)}:{port}"
            elif origin == template:
                clone.input[k] = _shifted(edge, to)
            else:
                assert origin == template - 1, f"{op.name} of layer {template} reads layer {origin}"
                clone.input[k] = _shifted(bridge[edge], to - 1)


def _incoming(ops: list[Any], layers: dict[str, int | None], previous: int) -> list[str]:
    """Edges that a layer's ops read from the layer before, in the order of first use."""
    edges: dict[str, None] = {}
    for op in ops:
        for edge in op.input:
            source = proto.producer(edge)
            if edge and layers[source] == previous and layer_of_name(source) is None:
                edges.setdefault(edge)
    return list(edges)


def _shifted(name: str, layer: int) -> str:
    """The canonical op name (or edge) in another layer."""
    return re.sub(r"^layer\d+_", f"layer{layer}_", name)


def _repeat_inputs(names: list[str], plan: list[int]) -> list[tuple[str, str]]:
    """(name in the short model, name in the full one) in the full model's order: layers follow each other as before."""
    result: list[tuple[str, str]] = []
    i = 0
    while i < len(names):
        if layer_of_name(names[i]) is None:
            result.append((names[i], names[i]))
            i += 1
            continue
        # A stretch of layer inputs (weights, or caches): split it by layer and repeat the pieces by the plan.
        pieces: dict[int, list[str]] = {}
        while i < len(names) and (layer := layer_of_name(names[i])) is not None and layer >= max(pieces, default=0):
            pieces.setdefault(layer, []).append(names[i])
            i += 1
        for to, template in enumerate(plan):
            result.extend((name, in_layer(name, to)) for name in pieces.get(template, []))
    repeated = [name for name, count in Counter(new for _, new in result).items() if count > 1]
    assert not repeated, f"inputs of layers are not in layer order: {repeated[:3]}"
    return result
