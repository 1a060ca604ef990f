"""Passes over a GE graph in its protobuf form: what TorchAir leaves to do before the graph is worth storing.

Each pass takes the GraphDef and changes it. Field and attribute meanings: TorchAir's ge_ir.proto and the op prototypes
in its auto_generated_ge_raw_ops.py. Making N layers out of three is in `stamp.py`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

FREE_OPS = frozenset(
    {"Reshape", "Squeeze", "SqueezeV2", "SqueezeV3", "Unsqueeze", "UnsqueezeV2", "UnsqueezeV3", "ExpandDims"}
    | {"Flatten", "FlattenV2", "Bitcast", "PartitionedCall", "Identity"}
)
"""Ops that cost nothing in a static graph: GE deletes them or runs no kernel for them."""

STRUCTURE_OPS = frozenset({"Data", "RefData", "Const", "NetOutput"})
"""Nodes that are no computation."""

_VIEW_OPS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "ExpandDims"})
_BOOKKEEPING = ("_fx_tensor_name", "_readable_value", "_meta")
"""Attributes that only help debugging a conversion; some name this process's FX nodes."""

Graph = Any  # a GraphDef: the message classes exist only once torch_npu is imported
Op = Any  # an OpDef


def producer(edge: str) -> str:
    """Name of the op that an input string 'name:port' comes from."""
    return edge.rsplit(":", 1)[0]


def drop_identities(graph: Graph) -> None:
    """Connect the readers of each Identity to its input."""
    _bypass(graph, {op.name: op.input[0] for op in graph.op if op.type == "Identity"})


def drop_tensor_moves(graph: Graph) -> None:
    """Remove copies made in front of an in-place op where nothing else can read the copied value.

    Safe where every link from the computed value to the copy has one reader and the value is no graph input or
    constant. (GE's own TensorMoveDeletePass, in newer CANN releases, has the same rule.)
    """
    readers = Counter(edge for op in graph.op for edge in op.input if edge)
    by_name = {op.name: op for op in graph.op}
    moves = {}
    for op in graph.op:
        if op.type != "TensorMove":
            continue
        edge = op.input[0]
        while readers[edge] == 1 and by_name[producer(edge)].type in _VIEW_OPS:
            edge = by_name[producer(edge)].input[0]
        if readers[edge] == 1 and by_name[producer(edge)].type not in STRUCTURE_OPS:
            moves[op.name] = op.input[0]
    _bypass(graph, moves)


def merge_constants(graph: Graph) -> None:
    """Keep one of each set of equal Consts."""
    kept: dict[tuple[bytes, ...], str] = {}
    merged = {}
    for op in graph.op:
        if op.type != "Const":
            continue
        key = tuple(part.SerializeToString(deterministic=True) for part in (op.attr["value"].t, *op.output_desc))
        first = kept.setdefault(key, op.name)
        if first != op.name:
            merged[op.name] = first + ":0"
    _bypass(graph, merged)


def drop_unread(graph: Graph) -> None:
    """Remove ops, other than inputs, that no op reads; TorchAir leaves constants behind."""
    while True:
        read = {producer(edge) for op in graph.op for edge in op.input if edge}
        dead = [op for op in graph.op if op.name not in read and op.type not in ("Data", "NetOutput")]
        if not dead:
            return
        _remove(graph, {op.name for op in dead})


def drop_bookkeeping(graph: Graph) -> None:
    """Remove attributes that say where an op comes from."""
    for op in graph.op:
        for holder in (op, *op.input_desc, *op.output_desc):
            for key in _BOOKKEEPING:
                holder.attr.pop(key, None)


def free_first_dim(graph: Graph, names: set[str]) -> None:
    """Write -1 as dimension 0 of these Data: the runtime sets it (the number of KV blocks) before GE compiles."""
    for op in graph.op:
        if op.type == "Data" and op.name in names:
            for desc in (*op.input_desc, *op.output_desc):
                desc.shape.dim[0] = -1


def canonical_order(graph: Graph, layers: dict[str, int | None]) -> None:
    """Order ops as: Data by index, Consts by first use, what needs no layer, layer by layer, the rest."""
    by_name = {op.name: op for op in graph.op}
    group: dict[str, float] = {}
    compute = _topological([op for op in graph.op if op.type not in ("Data", "Const")])
    for op in compute:
        sources = [group.get(producer(edge), -1.0) for edge in op.input if edge]
        after_layers = math.inf if max(sources, default=-1.0) >= 0 else -1.0
        layer = layers.get(op.name)
        group[op.name] = after_layers if layer is None else float(layer)
        assert group[op.name] >= max(sources, default=-1.0), f"{op.name} of layer {layer} reads a later layer"
    compute.sort(key=lambda op: group[op.name])
    used = dict.fromkeys(producer(e) for op in compute for e in op.input if e and by_name[producer(e)].type == "Const")
    data = sorted((op for op in graph.op if op.type == "Data"), key=lambda op: op.attr["index"].i)
    replace_ops(graph, [*data, *(by_name[name] for name in used), *compute])


def rename_ops(graph: Graph, layers: dict[str, int | None]) -> dict[str, int | None]:
    """Give every op but Data a name made of its layer, type and position; returns `layers` by the new names."""
    counts: Counter[tuple[int | None, str]] = Counter()
    names = {}
    renamed: dict[str, int | None] = {}
    for op in graph.op:
        layer = layers.get(op.name)
        if op.type == "Data":
            renamed[op.name] = layer
            continue
        new = op_name(op.type, layer, counts[layer, op.type])
        counts[layer, op.type] += 1
        names[op.name] = new
        renamed[new] = layer
    for op in graph.op:
        op.name = names.get(op.name, op.name)
        for i, edge in enumerate(op.input):
            if edge:
                source, port = edge.rsplit(":", 1)
                op.input[i] = f"{names.get(source, source)}:{port}"
    return renamed


def op_name(kind: str, layer: int | None, number: int) -> str:
    """The canonical name of the number-th op of a type in a layer, or outside the layers."""
    return f"{kind}_{number}" if layer is None else f"layer{layer}_{kind}_{number}"


def replace_ops(graph: Graph, ops: list[Op]) -> None:
    """Make `ops` (members or copies) the graph's ops, in that order."""
    copies = []
    for op in ops:
        copy = type(op)()
        copy.CopyFrom(op)
        copies.append(copy)
    del graph.op[:]
    graph.op.extend(copies)


def histogram(ops: list[Op]) -> dict[str, int]:
    """Op type -> how many, without inputs, constants and the output node; most frequent first."""
    counts = Counter(op.type for op in ops if op.type not in STRUCTURE_OPS)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def kernels(counts: dict[str, int]) -> int:
    """How many of the counted ops run a kernel on the device."""
    return sum(count for kind, count in counts.items() if kind not in FREE_OPS)


def _topological(ops: list[Op]) -> list[Op]:
    names = {op.name for op in ops}
    waiting: dict[str, list[Op]] = defaultdict(list)
    missing: dict[str, int] = {}
    ordered: list[Op] = []
    done: set[str] = set()

    def emit(op: Op) -> None:
        stack = [op]
        while stack:
            ready = stack.pop()
            ordered.append(ready)
            done.add(ready.name)
            for reader in reversed(waiting.pop(ready.name, [])):
                missing[reader.name] -= 1
                if not missing[reader.name]:
                    stack.append(reader)

    for op in ops:
        sources = {producer(e) for e in op.input if e} & names - done
        if sources:
            missing[op.name] = len(sources)
            for source in sources:
                waiting[source].append(op)
        else:
            emit(op)
    assert len(ordered) == len(ops), "the graph has a cycle"
    return ordered


def _bypass(graph: Graph, instead: dict[str, str]) -> None:
    """Let every reader of output 0 of these ops read the given edge, and remove the ops."""
    if not instead:
        return

    def follow(edge: str) -> str:
        while producer(edge) in instead:
            edge = instead[producer(edge)]
        return edge

    for op in graph.op:
        for i, edge in enumerate(op.input):
            if edge and producer(edge) in instead:
                op.input[i] = follow(edge)
    _remove(graph, set(instead))


def _remove(graph: Graph, names: set[str]) -> None:
    replace_ops(graph, [op for op in graph.op if op.name not in names])
