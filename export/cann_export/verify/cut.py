"""A smaller graph out of a big one: fewer decoder layers and a shorter vocabulary, the rest untouched.

For models that do not fit this machine. The first layers and the last are kept, as they stand in the artifact; the last
then reads what the one before it reads. Layers between are copies of one another, which the linter's and the proof's
whole view of the graph covers.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace

from cann_export.lower.ascend.stamp import in_layer, layer_of_name
from cann_runtime.artifact.manifest import Signature, TensorRef
from cann_runtime.artifact.plan import Param, Part, WeightPlan
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.reference.graph import Attr, ConstTensor, Edge, Graph, Op

_OP = re.compile(r"^layer(\d+)_(.*)$")


@dataclass(frozen=True)
class Layers:
    """Which layers stay, by their old numbers; layer i of the result is kept[i]."""

    kept: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, total: int, count: int) -> Layers:
        """The first count - 1 layers and the last one."""
        return cls((*range(count - 1), total - 1), total)

    def new(self, layer: int | None) -> int | None:
        """A layer's new number; None where it goes."""
        return self.kept.index(layer) if layer in self.kept else None


def cut_layers(graph: Graph, signature: Signature, layers: Layers) -> tuple[Graph, Signature]:
    """The graph of the kept layers only. ArtifactError where layers do not follow each other in one form."""
    of_data = {_index(op): layer_of_name(signature.inputs[_index(op)].name) for op in graph.ops if op.type == "Data"}

    def layer_of(op: Op) -> int | None:
        if op.type == "Data":
            return of_data[_index(op)]
        match = _OP.match(op.name)
        return int(match[1]) if match else None

    by_name = {op.name: op for op in graph.ops}
    number = {op.name: layer_of(op) for op in graph.ops}
    last, before = layers.kept[-1], layers.kept[-2]
    bridge: dict[Edge, Edge] = {}
    if before != last - 1:
        wanted, have = (_incoming(graph, number, by_name, to) for to in (last, before + 1))
        if len(wanted) != len(have):
            raise ArtifactError(f"layer {last} reads {len(wanted)} values of the one before it, not {len(have)}")
        bridge = dict(zip(wanted, have))

    def name(old: str) -> str:
        match = _OP.match(old)
        return old if match is None else f"layer{layers.new(int(match[1]))}_{match[2]}"

    inputs: list[TensorRef] = []
    index: dict[str, int] = {}
    for op in sorted((o for o in graph.ops if o.type == "Data"), key=_index):
        ref, layer = signature.inputs[_index(op)], of_data[_index(op)]
        to = layers.new(layer)
        if layer is not None and to is None:
            continue
        index[op.name] = len(inputs)
        inputs.append(ref if to is None else ref.model_copy(update={"name": in_layer(ref.name, to)}))
    ops = []
    for op in graph.ops:
        if number[op.name] is not None and layers.new(number[op.name]) is None:
            continue
        if op.type == "Data":
            ops.append(replace(op, attrs={**op.attrs, "index": Attr("i", index[op.name])}))
            continue
        fed = []
        for slot, edge in op.inputs:
            edge = bridge.get(edge, edge) if edge is not None and number[op.name] == last else edge
            fed.append((slot, None if edge is None else Edge(name(edge.producer), edge.port)))
        ops.append(replace(op, name=name(op.name), inputs=tuple(fed)))
    flags = ",".join("1" if ref.kind in ("param", "kv") else "0" for ref in inputs)
    update = {
        "inputs": inputs,
        "in_place": [i for i, ref in enumerate(inputs) if ref.kind == "kv"],
        "options": signature.options | {"frozenInput": flags},
    }
    return replace(graph, ops=tuple(ops)), signature.model_copy(update=update)


def _index(op: Op) -> int:
    value = op.attrs["index"].value
    assert isinstance(value, int)
    return value


def _incoming(graph: Graph, number: dict[str, int | None], by_name: dict[str, Op], layer: int) -> list[Edge]:
    """Values that a layer's ops read from the layer before, in the order of first use."""
    found: dict[Edge, None] = {}
    for op in graph.ops:
        if number[op.name] == layer:
            for _, edge in op.inputs:
                if edge and number[edge.producer] == layer - 1 and by_name[edge.producer].type != "Data":
                    found.setdefault(edge)
    return list(found)


def cut_plan(plan: WeightPlan, layers: Layers, vocab: int | None = None, old_vocab: int = 0) -> WeightPlan:
    """The plan of the kept layers; with `vocab`, of that many rows of what had old_vocab rows."""
    params: dict[str, Param] = {}
    for param in plan.params.values():
        layer = layer_of_name(param.name)
        to = layers.new(layer)
        if layer is not None and to is None:
            continue
        if to is not None:
            parts = [p.model_copy(update={"source": in_layer(p.source, to)}) for p in param.parts]
            param = param.model_copy(update={"name": in_layer(param.name, to), "parts": parts})
        elif vocab is not None:
            param = _shorter(param, plan, vocab, old_vocab)
        params[param.name] = param
    return WeightPlan(tp=plan.tp, params=params)


def vocab_rows(plan: WeightPlan, old_vocab: int) -> int | None:
    """Rows that one rank has of the tensors with old_vocab rows."""
    found = {p.shape[0] for p in plan.params.values() if any(_has_vocab(part, old_vocab) for part in p.parts)}
    return found.pop() if len(found) == 1 else None


def _has_vocab(part: Part, vocab: int) -> bool:
    return len(part.shape) == 2 and part.dim == 0 and part.shape[0] == vocab


def _shorter(param: Param, plan: WeightPlan, vocab: int, old: int) -> Param:
    rows = vocab // plan.tp
    if param.kind == "rank_offset":
        return param.model_copy(update={"step": rows})
    if len(param.parts) != 1 or not _has_vocab(param.parts[0], old):
        return param
    part = param.parts[0]
    ranges = [(r * rows, (r + 1) * rows) for r in range(plan.tp)]
    new = part.model_copy(update={"shape": [vocab, *part.shape[1:]], "ranges": ranges})
    return param.model_copy(update={"shape": [rows, *param.shape[1:]], "parts": [new]})


def cut_vocab(
    graph: Graph, signature: Signature, plan: WeightPlan, old_vocab: int, vocab: int
) -> tuple[Graph, Signature]:
    """The graph with `vocab` rows in its embedding and head. plan: the artifact's own, which names those tensors."""
    rows = vocab_rows(plan, old_vocab)
    if rows is None:
        raise ArtifactError("the vocabulary's tensors are not cut alike: it cannot be shortened")
    swap = {rows: vocab // plan.tp, rows * plan.tp: vocab}
    tables = {n for n, p in plan.params.items() if any(_has_vocab(part, old_vocab) for part in p.parts)}
    kept_by_layers = {edge.producer for op in graph.ops if _OP.match(op.name) for _, edge in op.inputs if edge}

    def shape(dims: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(swap.get(d, d) for d in dims)

    ops = []
    for op in graph.ops:
        if op.type == "Data" and signature.inputs[_index(op)].name in tables:
            op = replace(op, output_descs=tuple(replace(d, shape=shape(d.shape)) for d in op.output_descs))
        elif op.type == "NetOutput":
            op = replace(op, input_descs=tuple(replace(d, shape=shape(d.shape)) for d in op.input_descs))
        elif op.type == "Const" and op.name not in kept_by_layers:
            value = op.attrs["value"].value
            if isinstance(value, ConstTensor) and value.dtype in (7, 8) and len(value.data) <= 256:
                form = f"<{len(value.data) // (4 if value.dtype == 7 else 8)}{'i' if value.dtype == 7 else 'q'}"
                data = struct.pack(form, *shape(struct.unpack(form, value.data)))
                op = replace(op, attrs={**op.attrs, "value": Attr("t", replace(value, data=memoryview(data)))})
        ops.append(op)

    def ref(r: TensorRef) -> TensorRef:
        named = r.name in tables or r.kind == "output"
        return r.model_copy(update={"shape": list(shape(tuple(r.shape)))}) if named else r

    update = {"inputs": [ref(r) for r in signature.inputs], "outputs": [ref(r) for r in signature.outputs]}
    return replace(graph, ops=tuple(ops)), signature.model_copy(update=update)
