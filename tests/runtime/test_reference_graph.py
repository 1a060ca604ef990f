"""Reading GE graphs and making them executable: against protobuf's own reader, and what is refused.

The protobuf package and TorchAir's message classes are a test's means only; the runtime has neither.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import npu_toy
import pytest
import torch
from ge_convert import convert
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cann_export.lower.ascend.toolchain import ensure_toolchain
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.reference.bind import bind_rank
from cann_runtime.executor.reference.comm import Alone
from cann_runtime.executor.reference.dtypes import GE_DTYPES, PROTO_DTYPES
from cann_runtime.executor.reference.graph import Attr, ConstTensor, parse_model
from cann_runtime.executor.reference.ops import OPS
from cann_runtime.executor.reference.precision import Precision
from cann_runtime.executor.reference.program import Program
from cann_runtime.executor.reference.prototype import prototypes

NPU = Precision.of("npu")


@pytest.fixture(autouse=True, scope="module")
def _toolchain() -> None:
    ensure_toolchain(print)


@functools.cache
def toy_model() -> bytes:
    """A step graph with caches, a collective and constants."""
    return npu_toy.convert(4).model


@pytest.fixture
def toy() -> bytes:
    return toy_model()


def message(data: bytes) -> Any:
    from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef

    model = ModelDef()
    model.ParseFromString(data)
    return model


def edited(data: bytes, edit: Callable[[Any], None]) -> bytes:
    """The model after a change to its GraphDef."""
    model = message(data)
    edit(model.graph[0])
    changed: bytes = model.SerializeToString()
    return changed


def op_of(graph: Any, kind: str) -> Any:
    return next(op for op in graph.op if op.type == kind)


def attribute(value: Any) -> Any:
    """An AttrDef in the form of our Attr.value."""
    kind = value.WhichOneof("value")
    if kind is None:  # TorchAir has asked for an attribute that is not there
        return ()
    if kind == "list":
        lists = [list(getattr(value.list, name)) for name in ("s", "i", "f", "b", "dt")]
        filled = [tuple(v.decode() if isinstance(v, bytes) else v for v in values) for values in lists if values]
        return filled[0] if filled else ()
    if kind == "t":
        return (value.t.desc.dtype, tuple(value.t.desc.shape.dim), value.t.data)
    return value.s.decode() if kind == "s" else getattr(value, kind)


def ours(attr: Attr) -> Any:
    value = attr.value
    return (value.dtype, value.shape, bytes(value.data)) if isinstance(value, ConstTensor) else value


def test_every_field_is_read_as_protobuf_reads_it(toy: bytes) -> None:
    want, got = message(toy).graph[0], parse_model(toy)
    assert [op.name for op in got.ops] == [op.name for op in want.op]
    for mine, theirs in zip(got.ops, want.op, strict=True):
        assert mine.type == theirs.type
        assert {k: ours(a) for k, a in mine.attrs.items()} == {k: attribute(a) for k, a in theirs.attr.items()}
        edges = [f"{edge.producer}:{edge.port}" if edge else "" for _, edge in mine.inputs]
        assert edges + [f"{edge.producer}:{edge.port}" for edge in mine.controls] == list(theirs.input)
        if theirs.type != "Data":
            assert [name for name, _ in mine.inputs] == [desc.name for desc in theirs.input_desc]
        for desc, other in zip(mine.output_descs, theirs.output_desc, strict=True):
            assert (desc.name, desc.dtype, list(desc.shape)) == (other.name, other.dtype, list(other.shape.dim))
    assert {k: ours(a) for k, a in got.attrs.items()} == {k: attribute(a) for k, a in want.attr.items()}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_damaged_bytes_are_an_error_and_nothing_worse(data: st.DataObject) -> None:
    """A graph cut short or with changed bytes either reads as some graph or raises our own error."""
    toy = toy_model()
    place = data.draw(st.integers(0, len(toy) - 1))
    damaged = bytearray(toy[:place]) if data.draw(st.booleans()) else bytearray(toy)
    if len(damaged) == len(toy):
        damaged[place] = data.draw(st.integers(0, 255))
    problem = ""
    try:
        Program(parse_model(bytes(damaged)), NPU)
    except ArtifactError as error:
        problem = str(error)
    assert "\n" not in problem


def test_prototypes_are_those_that_torchair_declares() -> None:
    """Inputs, outputs and attributes of each op, as the REG_OP text of TorchAir's function for it says."""
    import torchair._ge_concrete_graph.auto_generated_ge_raw_ops as raw
    import torchair._ge_concrete_graph.dynamic_output_ops as dynamic

    text = "".join(Path(module.__file__ or "").read_text() for module in (raw, dynamic))
    declared = {}
    for match in re.finditer(r'"""REG_OP\((\w+)\)(.*?)"""', text, re.S):
        entries = re.findall(r"\.(\w+)\((\w+)", match[2])
        defaults = dict(re.findall(r"\.AT[TR]R\((\w+), ?\w+, ?(.*?)\)(?:\\n)?\s*\n", match[2]))
        declared.setdefault(
            match[1],
            (
                [name for kind, name in entries if kind in ("INPUT", "OPTIONAL_INPUT", "DYNAMIC_INPUT")],
                [name for kind, name in entries if kind in ("OUTPUT", "DYNAMIC_OUTPUT")],
                {name: defaults.get(name) for kind, name in entries if kind in ("ATTR", "ATRR", "REQUIRED_ATTR")},
            ),
        )
    # Attributes that TorchAir writes though its own texts do not have them, or under another name.
    beyond = {
        "TopKV2": {"sort_policy"},
        "DynamicQuantV2": {"is_symmetrical", "quant_mode", "dst_type_max"},
        "MoeFinalizeRoutingV2": {"k"},
    }
    assert prototypes().keys() - declared.keys() == {"Cast"}, "of Cast TorchAir has no text"
    for kind, prototype in prototypes().items():
        if kind == "Cast":
            continue
        inputs, outputs, attrs = declared[kind]
        assert list(prototype.inputs) == inputs, kind
        assert [name.rstrip("*") for name in prototype.outputs] == outputs, kind
        assert prototype.attrs.keys() - beyond.get(kind, set()) == attrs.keys() - {"K"}, kind
        for name in prototype.attrs.keys() & attrs.keys():
            assert prototype.attrs[name].default == declared_default(attrs[name]), f"{kind}.{name}"


def declared_default(text: str | None) -> Any:
    """A default in a REG_OP text, as our table has it; None where the attribute is required."""
    from torchair.ge._ge_graph import DataType

    if text is None:
        return None
    text = text.strip().strip("'\"")
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.startswith(("{", "[")):
        return tuple(int(number) for number in text.strip("{}[]").split(",") if number.strip())
    if text.startswith("DT_"):
        return int(vars(DataType)[text])
    try:
        return float(text.rstrip("f")) if text else ""
    except ValueError:
        return text


def test_every_prototype_has_an_implementation_and_the_reverse() -> None:
    assert OPS.keys() == prototypes().keys()


def test_data_types_are_those_of_torchairs_enums() -> None:
    from torchair._ge_concrete_graph.ge_ir_pb2 import DataType as ProtoType
    from torchair.ge._ge_graph import DataType as GeType

    names = {torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.bfloat16: "BF16"}
    for table, enum in ((PROTO_DTYPES, dict(ProtoType.items())), (GE_DTYPES, vars(GeType))):
        for code, dtype in table.items():
            name = names.get(dtype, str(dtype).removeprefix("torch.").upper())
            assert int(enum[f"DT_{name}"]) == code, name


# What is refused -----------------------------------------------------------------------------------------------------


def unknown_op(graph: Any) -> None:
    op_of(graph, "RmsNorm").type = "RmsNormNew"


def unknown_attribute(graph: Any) -> None:
    op_of(graph, "RmsNorm").attr["plus_one"].b = True


def attribute_of_another_type(graph: Any) -> None:
    op_of(graph, "RmsNorm").attr["epsilon"].i = 1


def missing_attribute(graph: Any) -> None:
    del op_of(graph, "HcomAllReduce").attr["reduction"]


def unknown_input(graph: Any) -> None:
    op_of(graph, "RmsNorm").input_desc[1].name = "beta"


def missing_input(graph: Any) -> None:
    op_of(graph, "RmsNorm").input[1] = ""


def unknown_producer(graph: Any) -> None:
    op_of(graph, "RmsNorm").input[0] = "nowhere:0"


def unsupported_data_type(graph: Any) -> None:
    op_of(graph, "Data").output_desc[0].dtype = 35


def subgraph(graph: Any) -> None:
    op_of(graph, "RmsNorm").subgraph_name.append("body")


def no_output(graph: Any) -> None:
    kept = [op for op in graph.op if op.type != "NetOutput"]
    del graph.op[:]
    graph.op.extend(kept)


def two_of_a_name(graph: Any) -> None:
    op_of(graph, "RmsNorm").name = op_of(graph, "NetOutput").name


def constant_of_another_size(graph: Any) -> None:
    op_of(graph, "Const").attr["value"].t.data += b"\0\0\0\0"


def cycle(graph: Any) -> None:
    norm = op_of(graph, "RmsNorm")
    norm.input[0] = f"{norm.name}:0"


def race(graph: Any) -> None:
    """Some other op reads the cache itself: before the write, or after?"""
    cache = next(op for op in graph.op if op.type == "ScatterPaKvCache").input[1]
    reader = next(op for op in graph.op if op.type == "GatherV2" and "ScatterPaKvCache" in op.input[0])
    reader.input[0] = cache


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (unknown_op, r"\(RmsNormNew.* does not know"),
        (unknown_attribute, r"RmsNorm.* unknown attribute 'plus_one'; known: epsilon"),
        (attribute_of_another_type, r"RmsNorm.* epsilon is of kind 'i', not Float"),
        (missing_attribute, r"HcomAllReduce.* lacks its attribute 'reduction'"),
        (unknown_input, r"RmsNorm.* unknown input 'beta'"),
        (missing_input, r"RmsNorm.* lacks its input 'gamma'"),
        (unknown_producer, r"RmsNorm.* reads op nowhere"),
        (unsupported_data_type, r"data type 35 of ge_ir.proto is not supported"),
        (subgraph, r"unknown field 35"),
        (no_output, r"no NetOutput"),
        (two_of_a_name, r"two ops have the same name"),
        (constant_of_another_size, r"Const.* bytes for"),
        (cycle, r"cycle"),
        (race, r"reads what op .*ScatterPaKvCache.* writes in place, and no edge orders the two"),
    ],
)
def test_a_graph_that_is_not_understood_is_refused(toy: bytes, edit: Callable[[Any], None], text: str) -> None:
    Program(parse_model(toy), NPU)
    with pytest.raises(ArtifactError, match=text):
        Program(parse_model(edited(toy, edit)), NPU)


def test_ops_may_stand_in_any_order() -> None:
    x = torch.randn(3, 4)
    graph = convert(lambda x: (torch.tanh(x) @ torch.exp(x).t() + 1,), [x])

    def reverse(definition: Any) -> None:
        ops = [type(op).FromString(op.SerializeToString()) for op in reversed(definition.op)]
        del definition.op[:]
        definition.op.extend(ops)

    program = Program(parse_model(edited(graph.model, reverse)), NPU)
    torch.testing.assert_close(program.run([x], Alone())[0], torch.tanh(x) @ torch.exp(x).t() + 1)


def test_outputs_are_held_against_what_the_graph_says() -> None:
    x = torch.randn(3, 4)
    graph = convert(lambda x: (-x,), [x])

    def claim(definition: Any) -> None:
        op_of(definition, "NetOutput").input_desc[0].shape.dim[:] = [4, 3]

    program = Program(parse_model(edited(graph.model, claim)), NPU)
    with pytest.raises(ArtifactError, match=r"\[3, 4\], NetOutput says torch.float32 \[4, 3\]"):
        program.run([x], Alone())


def test_inputs_are_held_against_what_the_graph_says() -> None:
    program = Program(parse_model(convert(lambda x: (-x,), [torch.randn(3, 4)]).model), NPU)
    for wrong in (torch.randn(4, 3), torch.randn(3, 4).double()):
        with pytest.raises(ArtifactError, match=r"takes torch.float32 \[3, 4\], got"):
            program.run([wrong], Alone())
    with pytest.raises(ArtifactError, match="2 inputs for a GE graph that takes 1"):
        program.run([torch.randn(3, 4)] * 2, Alone())


def test_memory_of_a_value_is_given_back_at_its_last_use() -> None:
    def deep(x: Tensor) -> tuple[Tensor]:
        for _ in range(30):
            x = torch.tanh(x) * 2
        return (x,)

    x = torch.randn(8)
    program = Program(parse_model(convert(deep, [x]).model), NPU)
    alive: list[Any] = []
    most = 0

    def observe(_: Any, outputs: Any) -> None:
        nonlocal most
        alive.extend(weakref.ref(output) for output in outputs)
        most = max(most, sum(reference() is not None for reference in alive))

    program.run([x], Alone(), observe)
    assert most <= 4


def test_a_rank_gets_its_own_experts() -> None:
    x, experts = torch.randn(4, 64).bfloat16(), torch.zeros(4, 2, dtype=torch.int32)

    def route(x: Tensor, experts: Tensor) -> tuple[Tensor]:
        result: Tensor = torch.ops.npu.npu_moe_init_routing_v2(
            x, experts, expert_num=16, active_expert_range=[0, 4], expert_tokens_num_flag=True
        )[2]
        return (result,)

    graph = parse_model(convert(route, [x, experts]).model)
    ranges = [
        next(op for op in bind_rank(graph, rank).ops if op.type == "MoeInitRoutingV3")
        .attrs["active_expert_range"]
        .value
        for rank in (0, 3)
    ]
    assert ranges == [(0, 4), (12, 16)]
