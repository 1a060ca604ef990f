"""A GE graph as immutable Python values, read from the bytes of a serialized ModelDef.

It reads the subset of TorchAir's ge_ir.proto that its converters write for one static graph; fields outside that subset
(subgraphs, functions, attribute groups ...) are refused. What ops mean is in `ops/`, the order of execution in
`program.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cann_runtime.errors import ArtifactError
from cann_runtime.executor.reference.wire import Field, read_message


@dataclass(frozen=True)
class ConstTensor:
    """A constant: dtype is a code of ge_ir.proto's DataType, data the elements' raw little-endian bytes."""

    dtype: int
    shape: tuple[int, ...]
    data: memoryview


Value = int | float | bool | str | tuple[Any, ...] | ConstTensor


@dataclass(frozen=True)
class Attr:
    """An attribute. kind is the field that holds it: i, f, b, s, dt, t, list_i, list_f, list_b, list_s, list_dt,
    list_list_int, list_list_float.

    'list' is an empty list, which has no element type; 'list_mixed' one with elements of several types (the values type
    by type); 'none' has no value: TorchAir leaves such behind where it looked whether an attribute is there.
    """

    kind: str
    value: Value


@dataclass(frozen=True)
class TensorDesc:
    """What an op says of one of its inputs or outputs. dtype (ge_ir.proto's DataType) and shape can be trusted at Data
    and NetOutput only: TorchAir does not keep the others up to date."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    attrs: Mapping[str, Attr]


@dataclass(frozen=True)
class Edge:
    """An input: output `port` of op `producer`. port -1 is a control edge."""

    producer: str
    port: int


@dataclass(frozen=True)
class Op:
    """One node. inputs: by input_desc's name, None where an optional input is not fed; controls: control edges."""

    name: str
    type: str
    inputs: tuple[tuple[str, Edge | None], ...]
    controls: tuple[Edge, ...]
    input_descs: tuple[TensorDesc, ...]
    output_descs: tuple[TensorDesc, ...]
    attrs: Mapping[str, Attr]

    @property
    def source(self) -> str:
        """The op in an error message: its name, type and, where the graph kept it, the FX node that it comes from."""
        for holder in (self.attrs, *(desc.attrs for desc in self.output_descs)):
            fx = holder.get("_fx_tensor_name")
            if fx is not None:
                return f"op {self.name} ({self.type}, from {fx.value})"
        return f"op {self.name} ({self.type})"


@dataclass(frozen=True)
class Graph:
    """The one graph of a ModelDef."""

    name: str
    ops: tuple[Op, ...]
    attrs: Mapping[str, Attr]


def _fields(spec: str) -> dict[int, Field]:
    """A field table from 'number name kind' triples separated by commas."""
    table: dict[int, Field] = {}
    for triple in spec.split(","):
        number, name, kind = triple.split()
        table[int(number)] = Field(name, kind)  # type: ignore[arg-type]  # the tables below hold Kinds only
    return table


_MODEL = _fields("1 name text, 2 version int, 3 custom_version skip, 7 graph message, 11 attr skip")
_GRAPH = _fields("1 name text, 4 input text, 5 output text, 6 op message, 11 attr message")
_MAP = _fields("1 key text, 2 value message")
_SHAPE = _fields("1 dim int")
_TENSOR = _fields("1 desc message, 2 data bytes")
# Memory planning fields of descriptors and ops (sizes, reuse, streams ...) are GE's own notes.
_DESC = _fields(
    "1 name text, 2 dtype int, 3 shape message, 4 layout skip, 5 attr message, 9 has_out_attr skip, 10 size skip,"
    "11 weight_size skip, 12 reuse_input skip, 13 output_tensor skip, 14 device_type skip, 15 input_tensor skip,"
    "16 real_dim_cnt skip, 17 reuse_input_index skip, 18 data_offset skip"
)
_OP = _fields(
    "1 name text, 2 type text, 5 input text, 10 attr message, 20 has_out_attr skip, 21 id skip, 22 stream_id skip,"
    "33 input_desc message, 34 output_desc message"
)
_ATTR = _fields(
    "1 list message, 2 s bytes, 3 i int, 4 f float, 5 b bool, 12 t message, 14 list_list_int message, 15 dt int,"
    "16 list_list_float message"
)
_LIST = _fields("2 s bytes, 3 i int, 4 f float, 5 b bool, 12 dt int, 20 val_type skip")
_LIST_LIST_INT, _LIST_INT = _fields("1 list_list_i message"), _fields("1 list_i int")
_LIST_LIST_FLOAT, _LIST_FLOAT = _fields("1 list_list_f message"), _fields("1 list_f float")


def parse_model(data: bytes | memoryview) -> Graph:
    """The graph of a serialized ModelDef. Raises ArtifactError for anything that it does not fully understand."""
    model = read_message(memoryview(data), _MODEL, "the GE model")
    graphs = model.get("graph", [])
    if len(graphs) != 1:
        raise ArtifactError(f"the GE model holds {len(graphs)} graphs; subgraphs are not supported")
    fields = read_message(graphs[0], _GRAPH, "the GE graph")
    ops = tuple(_op(view) for view in fields.get("op", []))
    names = {op.name for op in ops}
    if len(names) != len(ops):
        raise ArtifactError("the GE graph is damaged: two ops have the same name")
    for op in ops:
        for edge in (*(edge for _, edge in op.inputs if edge), *op.controls):
            if edge.producer not in names:
                raise ArtifactError(f"{op.source} reads op {edge.producer}, which the graph does not have")
    return Graph(_one(fields, "name", ""), ops, _attrs(fields, "the GE graph"))


def _one(fields: Mapping[str, list[Any]], name: str, default: Any) -> Any:
    """The value of a field that is not repeated: the last one given, as protobuf has it."""
    return fields[name][-1] if name in fields else default


def _op(view: memoryview) -> Op:
    fields = read_message(view, _OP, "an op of the GE graph")
    name, kind = _one(fields, "name", ""), _one(fields, "type", "")
    what = f"op {name} ({kind})"
    descs = tuple(_desc(desc, what) for desc in fields.get("input_desc", []))
    edges = [_edge(text, what) for text in fields.get("input", [])]
    controls = tuple(edge for edge in edges if edge is not None and edge.port < 0)
    data = [edge for edge in edges if edge is None or edge.port >= 0]
    # A Data has a descriptor of what the caller feeds, and no edge. Control edges have no descriptor.
    inputs: tuple[tuple[str, Edge | None], ...] = ()
    if kind not in ("Data", "RefData"):
        if len(data) != len(descs):
            raise ArtifactError(f"{what} is damaged: {len(data)} inputs with {len(descs)} descriptors")
        inputs = tuple((desc.name, edge) for desc, edge in zip(descs, data))
    outputs = tuple(_desc(desc, what) for desc in fields.get("output_desc", []))
    return Op(name, kind, inputs, controls, descs, outputs, _attrs(fields, what))


def _edge(text: str, what: str) -> Edge | None:
    if not text:
        return None
    producer, _, port = text.rpartition(":")
    if not producer or not port.removeprefix("-").isdecimal():
        raise ArtifactError(f"{what} is damaged: input {text!r} is not of the form name:port")
    return Edge(producer, int(port))


def _desc(view: memoryview, what: str) -> TensorDesc:
    fields = read_message(view, _DESC, f"a descriptor of {what}")
    shape = _one(fields, "shape", None)
    dims = read_message(shape, _SHAPE, f"a shape of {what}").get("dim", []) if shape is not None else []
    return TensorDesc(_one(fields, "name", ""), _one(fields, "dtype", 0), tuple(dims), _attrs(fields, what))


def _attrs(fields: Mapping[str, list[Any]], what: str) -> dict[str, Attr]:
    result: dict[str, Attr] = {}
    for view in fields.get("attr", []):
        entry = read_message(view, _MAP, f"an attribute of {what}")
        key = _one(entry, "key", "")
        result[key] = _attr(_one(entry, "value", memoryview(b"")), f"attribute {key} of {what}")
    return result


def _attr(view: memoryview, what: str) -> Attr:
    fields = read_message(view, _ATTR, what)
    if not fields:
        return Attr("none", ())
    kind, values = next(reversed(fields.items()))
    value = values[-1]
    if kind == "s":
        return Attr("s", _text(value, what))
    if kind == "t":
        return Attr("t", _const(value, what))
    if kind == "list":
        return _list(value, what)
    if kind == "list_list_int":
        rows = read_message(value, _LIST_LIST_INT, what).get("list_list_i", [])
        return Attr(kind, tuple(tuple(read_message(row, _LIST_INT, what).get("list_i", [])) for row in rows))
    if kind == "list_list_float":
        rows = read_message(value, _LIST_LIST_FLOAT, what).get("list_list_f", [])
        return Attr(kind, tuple(tuple(read_message(row, _LIST_FLOAT, what).get("list_f", [])) for row in rows))
    return Attr(kind, value)


def _list(view: memoryview, what: str) -> Attr:
    fields = read_message(view, _LIST, what)
    lists = {kind: tuple(_text(v, what) for v in vs) if kind == "s" else tuple(vs) for kind, vs in fields.items()}
    if len(lists) > 1:
        return Attr("list_mixed", tuple(lists.values()))
    for kind, values in lists.items():
        return Attr(f"list_{kind}", values)
    return Attr("list", ())


def _text(raw: memoryview, what: str) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        raise ArtifactError(f"{what} is not UTF-8 text") from None


def _const(view: memoryview, what: str) -> ConstTensor:
    fields = read_message(view, _TENSOR, what)
    desc = _desc(_one(fields, "desc", memoryview(b"")), what)
    return ConstTensor(desc.dtype, desc.shape, _one(fields, "data", memoryview(b"")))
