"""Data types and shapes of every value of a GE graph, worked out from its inputs and constants.

Descriptors inside a converted graph are not kept up to date, so the linter takes nothing from them but those of Data.
What an op gives is unknown (None) where this file does not know the op; rules then say nothing. The rules are in
`lint.py`.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cann_runtime.executor.reference.dtypes import GE_DTYPES, PROTO_DTYPES
from cann_runtime.executor.reference.graph import Attr, ConstTensor, Edge, Graph, Op, TensorDesc, parse_model

Shape = tuple[int, ...]


class Type(NamedTuple):
    """dtype and shape of a value; None where not known, a dimension of -1 where it is only known at load."""

    dtype: torch.dtype | None
    shape: Shape | None


UNKNOWN = Type(None, None)
VIEWS = frozenset({"Reshape", "Identity", "Squeeze", "Unsqueeze", "ExpandDims", "FlattenV2"})
_COMPARE = frozenset({"Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual"})
_ELEMENTWISE = frozenset({"Add", "AddV2", "Sub", "Mul", "RealDiv", "Div", "Maximum", "Minimum", "LogicalAnd"})
_SAME = frozenset({"Identity", "TensorMove", "HcomAllReduce", "ZerosLike", "Swish", "Sigmoid", "Neg", "Rsqrt", "Gelu"})


@dataclass
class View:
    """A graph as rules look at it: ops by name, inputs by name, types of values, integers of constants."""

    graph: Graph
    ops: dict[str, Op] = field(default_factory=dict)
    inputs: dict[str, dict[str, Edge]] = field(default_factory=dict)
    readers: dict[Edge, list[Op]] = field(default_factory=dict)
    types: dict[Edge, Type] = field(default_factory=dict)
    ints: dict[str, Shape] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> View:
        """Index the graph and infer its types; ops must stand after what they read, as lowering leaves them."""
        view = cls(graph)
        for op in graph.ops:
            view.ops[op.name] = op
            view.inputs[op.name] = fed = {name: edge for name, edge in op.inputs if edge is not None}
            for edge in fed.values():
                view.readers.setdefault(edge, []).append(op)
            if op.type == "Const":
                view._constant(op)
            for port, made in enumerate(_infer(view, op)):
                view.types[Edge(op.name, port)] = made
        return view

    def type(self, op: Op, name: str) -> Type:
        """The type of one input of an op; unknown where it is not fed."""
        edge = self.inputs[op.name].get(name)
        return UNKNOWN if edge is None else self.types.get(edge, UNKNOWN)

    def values(self, op: Op, name: str) -> Shape | None:
        """The integers of an input that is a constant."""
        edge = self.inputs[op.name].get(name)
        return None if edge is None else self.ints.get(edge.producer)

    def origin(self, edge: Edge) -> Op | None:
        """The op that made a value, seen through views and casts."""
        op = self.ops.get(edge.producer)
        while op is not None and (op.type in VIEWS or op.type == "Cast") and "x" in self.inputs[op.name]:
            op = self.ops.get(self.inputs[op.name]["x"].producer)
        return op

    def _constant(self, op: Op) -> None:
        value = op.attrs["value"].value if "value" in op.attrs else None
        if isinstance(value, ConstTensor) and len(value.data) <= 256 and value.dtype in (7, 8):
            size = 4 if value.dtype == 7 else 8
            if len(value.data) % size == 0:
                self.ints[op.name] = struct.unpack(f"<{len(value.data) // size}{'i' if size == 4 else 'q'}", value.data)


def attr(op: Op, name: str, default: Any = None) -> Any:
    """An attribute's value, or the default."""
    found = op.attrs.get(name)
    return default if found is None else found.value


def _infer(view: View, op: Op) -> list[Type]:
    kind = op.type
    if kind in ("Data", "Const"):
        if kind == "Const":
            value = attr(op, "value")
            return [Type(PROTO_DTYPES.get(value.dtype), value.shape)] if isinstance(value, ConstTensor) else [UNKNOWN]
        desc = op.output_descs[0] if op.output_descs else None
        return [UNKNOWN if desc is None else Type(PROTO_DTYPES.get(desc.dtype), desc.shape)]
    if kind in _SAME:
        return [view.type(op, "x")]
    if kind in _ELEMENTWISE:
        a, b = view.type(op, "x1"), view.type(op, "x2")
        return [Type(a.dtype if a.dtype == b.dtype else None, _broadcast(a.shape, b.shape))]
    if kind in _COMPARE:
        return [Type(torch.bool, _broadcast(view.type(op, "x1").shape, view.type(op, "x2").shape))]
    made = _RULES.get(kind)
    return [] if made is None else made(view, op)


def _broadcast(a: Shape | None, b: Shape | None) -> Shape | None:
    if a is None or b is None:
        return None
    try:
        return tuple(torch.broadcast_shapes(a, b))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None


def _reshape(view: View, op: Op) -> list[Type]:
    x, wanted = view.type(op, "x"), view.values(op, "shape")
    if wanted is None:
        return [Type(x.dtype, None)]
    if -1 in wanted and x.shape is not None and -1 not in x.shape:
        rest = math.prod(d for d in wanted if d != -1)
        wanted = tuple(math.prod(x.shape) // rest if d == -1 and rest else d for d in wanted)
    return [Type(x.dtype, wanted)]


def _cast(view: View, op: Op) -> list[Type]:
    return [Type(GE_DTYPES.get(attr(op, "dst_type", 0)), view.type(op, "x").shape)]


def _matmul(view: View, op: Op) -> list[Type]:
    a, b = view.type(op, "x1"), view.type(op, "x2")
    if a.shape is None or b.shape is None or len(a.shape) != 2 or len(b.shape) != 2:
        return [Type(a.dtype, None)]
    rows = a.shape[1 if attr(op, "transpose_x1", False) else 0]
    return [Type(a.dtype, (rows, b.shape[0 if attr(op, "transpose_x2", False) else 1]))]


def _split(view: View, op: Op) -> list[Type]:
    x, sizes, axis = view.type(op, "x"), view.values(op, "size_splits"), view.values(op, "split_dim")
    if x.shape is None or sizes is None or axis is None or not -len(x.shape) <= axis[0] < len(x.shape):
        return [Type(x.dtype, None)] * int(attr(op, "num_split", 1))
    at = axis[0] % len(x.shape)
    return [Type(x.dtype, (*x.shape[:at], size, *x.shape[at + 1 :])) for size in sizes]


def _gather(view: View, op: Op) -> list[Type]:
    x, indices, axis = view.type(op, "x"), view.type(op, "indices"), view.values(op, "axis")
    if x.shape is None or indices.shape is None or axis is None or attr(op, "batch_dims", 0):
        return [Type(x.dtype, None)]
    at = axis[0] % len(x.shape)
    return [Type(x.dtype, (*x.shape[:at], *indices.shape, *x.shape[at + 1 :]))]


def _swiglu(view: View, op: Op) -> list[Type]:
    x = view.type(op, "x")
    return [Type(x.dtype, None if x.shape is None else (*x.shape[:-1], x.shape[-1] // 2))]


def _norm(view: View, op: Op) -> list[Type]:
    x = view.type(op, "x" if op.type == "RmsNorm" else "x1")
    rstd = Type(torch.float32, None if x.shape is None else (*x.shape[:-1], 1))
    return [x, rstd] if op.type == "RmsNorm" else [x, rstd, x]


def _all_gather(view: View, op: Op) -> list[Type]:
    x = view.type(op, "x")
    return [Type(x.dtype, None if not x.shape else (x.shape[0] * int(attr(op, "rank_size", 1)), *x.shape[1:]))]


def _transpose(view: View, op: Op) -> list[Type]:
    x, perm = view.type(op, "x"), view.values(op, "perm")
    fits = x.shape is not None and perm is not None and sorted(perm) == list(range(len(x.shape)))
    return [Type(x.dtype, tuple(x.shape[p] for p in perm) if fits and x.shape and perm else None)]


_RULES: dict[str, Callable[[View, Op], list[Type]]] = {
    "Reshape": _reshape,
    "Cast": _cast,
    "MatMul": _matmul,
    "MatMulV2": _matmul,
    "SplitV": _split,
    "GatherV2": _gather,
    "SwiGlu": _swiglu,
    "RmsNorm": _norm,
    "AddRmsNorm": _norm,
    "HcomAllGather": _all_gather,
    "Transpose": _transpose,
    "SelectV2": lambda view, op: [view.type(op, "then")],
    "RotaryMul": lambda view, op: [view.type(op, "x")],
    "ApplyRotaryPosEmb": lambda view, op: [view.type(op, "query"), view.type(op, "key")],
    "ScatterPaKvCache": lambda view, op: [view.type(op, "key_cache"), view.type(op, "value_cache")],
    "FusedInferAttentionScore": lambda view, op: [view.type(op, "query")],
    "Range": lambda view, op: [Type(view.type(op, "start").dtype, None)],
}


# Reading graphs -------------------------------------------------------------------------------------------------------


def read_graph(model: bytes) -> Graph:
    """The graph of a ModelDef. In an export TorchAir's own message classes are loaded, and ten times faster."""
    messages = sys.modules.get("torchair._ge_concrete_graph.ge_ir_pb2")
    if messages is None:
        return parse_model(model)
    ge = messages.ModelDef()
    ge.ParseFromString(model)
    return Graph(ge.graph[0].name, tuple(_op(op) for op in ge.graph[0].op), _attrs(ge.graph[0].attr))


def _op(op: Any) -> Op:
    inputs: list[tuple[str, Edge | None]] = []
    controls: list[Edge] = []
    descs = iter(op.input_desc)
    for text in op.input:
        producer, _, port = text.rpartition(":")
        if port == "-1":  # a control edge has no descriptor
            controls.append(Edge(producer, -1))
            continue
        desc = next(descs)
        if producer:
            inputs.append((desc.name, Edge(producer, int(port))))
    described = op.type in ("Data", "NetOutput")  # the only descriptors that can be trusted, or are needed
    return Op(
        op.name,
        op.type,
        tuple(inputs),
        tuple(controls),
        tuple(_desc(desc) for desc in op.input_desc) if described else (),
        tuple(_desc(desc) for desc in op.output_desc) if described else (),
        _attrs(op.attr),
    )


def _desc(desc: Any) -> TensorDesc:
    return TensorDesc(desc.name, desc.dtype, tuple(desc.shape.dim), {})


def _attrs(attrs: Any) -> dict[str, Attr]:
    return {name: _attr(value) for name, value in attrs.items() if not name.startswith("_") or name == "_output_dtypes"}


def _attr(value: Any) -> Attr:
    kind = value.WhichOneof("value")
    if kind == "s":
        return Attr("s", value.s.decode())
    if kind == "t":
        desc = value.t.desc
        return Attr("t", ConstTensor(desc.dtype, tuple(desc.shape.dim), memoryview(value.t.data)))
    if kind == "list":
        for part in ("i", "f", "b", "s", "dt"):
            if found := getattr(value.list, part):
                return Attr(f"list_{part}", tuple(v.decode() if part == "s" else v for v in found))
        return Attr("list", ())
    if kind in ("i", "f", "b", "dt"):
        return Attr(kind, getattr(value, kind))
    return Attr(kind or "none", ())
