"""One rule for each op that a fused step graph may hold: how it reads in ONNX.

aten ops become standard ops; `atb::` ops become calls of the functions in `onnx_functions.py`; collectives become ops
of our own domain that have no body, since ONNX has no notion of ranks. Order, names and the model are `onnx.py`'s work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from onnx import TensorProto, helper
from torch import fx

import cann_runtime.ops.atb  # noqa: F401  (registers the ops named below)
from cann_export.lower.onnx_functions import ATB, COLLECTIVES
from cann_export.program import tensor_meta

aten = torch.ops.aten
atb = torch.ops.atb
c10d = torch.ops._c10d_functional

ELEMENT_TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int8: TensorProto.INT8,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}


class Emitter(Protocol):
    """What a rule needs of the graph under construction."""

    query_len: int | None  # rows of each sequence in the rectangular layout

    def name(self, arg: Any) -> str:
        """The ONNX value of an FX argument."""

    def constant(self, values: list[Any], shape: list[int], dtype: torch.dtype) -> str:
        """A small constant."""

    def op(self, node: fx.Node, kind: str, inputs: list[str], outputs: int = 1, **attributes: Any) -> list[str]:
        """Add a node of the standard domain, or of `domain`; gives its outputs."""

    def replace(self, cache: fx.Node, value: str) -> None:
        """From here on, reads of that KV cache see `value`."""


Rule = Callable[[Emitter, fx.Node], list[str]]


def _call(kind: str, inputs: int, outputs: int = 1, attributes: tuple[str, ...] = ()) -> Rule:
    """A call of the ATB function `kind`: the first arguments are its inputs, those after them its attributes."""

    def rule(graph: Emitter, node: fx.Node) -> list[str]:
        values = dict(zip(attributes, map(_number, node.args[inputs:]), strict=True))
        names = [graph.name(a) for a in node.args[:inputs]]
        return graph.op(node, kind, names, outputs, domain=ATB, **values)

    return rule


def _number(arg: Any) -> float:
    return float(arg)


def _linear(graph: Emitter, node: fx.Node) -> list[str]:
    inputs = [graph.name(a) for a in node.args if a is not None]
    return graph.op(node, "linear_bias" if len(inputs) == 3 else "linear", inputs, domain=ATB)


def _reshape_and_cache(graph: Emitter, node: fx.Node) -> list[str]:
    after = graph.op(node, "reshape_and_cache", [graph.name(a) for a in node.args], 2, domain=ATB)
    for cache, value in zip(node.args[2:4], after, strict=True):
        assert isinstance(cache, fx.Node)
        graph.replace(cache, value)
    return []


def _paged_attention(graph: Emitter, node: fx.Node) -> list[str]:
    inputs, scale = [graph.name(a) for a in node.args[:6]], _number(node.args[6])
    if graph.query_len is None:
        return graph.op(node, "paged_attention", inputs, domain=ATB, scale=scale)
    return graph.op(node, "paged_attention_rectangular", inputs, domain=ATB, scale=scale, query_len=graph.query_len)


def _binary(kind: str) -> Rule:
    def rule(graph: Emitter, node: fx.Node) -> list[str]:
        dtype = next(tensor_meta(a).dtype for a in node.args if isinstance(a, fx.Node))
        inputs = [graph.name(a) if isinstance(a, fx.Node) else graph.constant([a], [], dtype) for a in node.args]
        return graph.op(node, kind, inputs)

    return rule


def _unary(kind: str) -> Rule:
    return lambda graph, node: graph.op(node, kind, [graph.name(node.args[0])])


def _reshape(graph: Emitter, node: fx.Node) -> list[str]:
    sizes: Any = node.args[1]
    shape = graph.constant(list(sizes), [len(sizes)], torch.int64)
    return graph.op(node, "Reshape", [graph.name(node.args[0]), shape])


def _split(graph: Emitter, node: fx.Node) -> list[str]:
    source, sizes, axis = (*node.args, 0)[:3]
    assert isinstance(sizes, (list, tuple))
    lengths = graph.constant(list(sizes), [len(sizes)], torch.int64)
    return graph.op(node, "Split", [graph.name(source), lengths], len(sizes), axis=axis)


def _transpose(graph: Emitter, node: fx.Node) -> list[str]:
    dims: Any = node.args[1:]
    perm = list(range(tensor_meta(node).dim()))
    a, b = dims[0] % len(perm), dims[1] % len(perm)
    perm[a], perm[b] = perm[b], perm[a]
    return graph.op(node, "Transpose", [graph.name(node.args[0])], perm=perm)


def _permute(graph: Emitter, node: fx.Node) -> list[str]:
    perm: Any = node.args[1]
    return graph.op(node, "Transpose", [graph.name(node.args[0])], perm=[p % len(perm) for p in perm])


def _gather(graph: Emitter, source: Any, index: Any, axis: int, node: fx.Node) -> list[str]:
    return graph.op(node, "Gather", [graph.name(source), graph.name(index)], axis=axis)


def _index_select(graph: Emitter, node: fx.Node) -> list[str]:
    source, axis, index = node.args
    assert isinstance(axis, int)
    return _gather(graph, source, index, axis, node)


def _zeros_like(graph: Emitter, node: fx.Node) -> list[str]:
    shape = graph.op(node, "Shape", [graph.name(node.args[0])])
    value = helper.make_tensor("value", ELEMENT_TYPES[tensor_meta(node).dtype], [1], [0])
    return graph.op(node, "ConstantOfShape", shape, value=value)


def _cast(graph: Emitter, node: fx.Node) -> list[str]:
    return graph.op(node, "Cast", [graph.name(node.args[0])], to=ELEMENT_TYPES[tensor_meta(node).dtype])


def _all_reduce(graph: Emitter, node: fx.Node) -> list[str]:
    x, reduction, group = node.args
    return graph.op(node, "all_reduce", [graph.name(x)], domain=COLLECTIVES, reduction=reduction, group=group)


def _all_gather(graph: Emitter, node: fx.Node) -> list[str]:
    x, size, group = node.args
    return graph.op(node, "all_gather", [graph.name(x)], domain=COLLECTIVES, group_size=size, group=group)


RULES: dict[Any, Rule] = {
    atb.linear.default: _linear,
    atb.rms_norm.default: _call("rms_norm", 2, attributes=("eps",)),
    atb.add_rms_norm.default: _call("add_rms_norm", 3, 2, ("eps",)),
    atb.rotary.default: _call("rotary", 4, 2),
    atb.swiglu.default: _call("swiglu", 1),
    atb.reshape_and_cache.default: _reshape_and_cache,
    atb.paged_attention.default: _paged_attention,
    aten.add.Tensor: _binary("Add"),
    aten.sub.Tensor: _binary("Sub"),
    aten.mul.Tensor: _binary("Mul"),
    aten.ge.Scalar: _binary("GreaterOrEqual"),
    aten.lt.Scalar: _binary("Less"),
    aten.__and__.Tensor: _binary("And"),
    aten.bitwise_and.Tensor: _binary("And"),
    aten.logical_and.default: _binary("And"),
    aten.where.self: lambda graph, node: graph.op(node, "Where", [graph.name(a) for a in node.args]),
    aten.zeros_like.default: _zeros_like,
    aten._to_copy.default: _cast,
    aten.neg.default: _unary("Neg"),
    aten.sigmoid.default: _unary("Sigmoid"),
    aten.tanh.default: _unary("Tanh"),
    aten.view.default: _reshape,
    aten.reshape.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.split_with_sizes.default: _split,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.embedding.default: lambda graph, node: _gather(graph, node.args[0], node.args[1], 0, node),
    aten.index_select.default: _index_select,
    c10d.all_reduce.default: _all_reduce,
    c10d.all_gather_into_tensor.default: _all_gather,
    # A traced collective is asynchronous; ONNX has no such thing.
    c10d.wait_tensor.default: lambda graph, node: [graph.name(node.args[0])],
}
"""Every op that can be written as ONNX, with its rule; a rule gives the values of the node's outputs."""

BOOLEAN_ONLY = (aten.__and__.Tensor, aten.bitwise_and.Tensor)


def refusal(node: fx.Node) -> str | None:
    """Why a call cannot be written as ONNX; None where it can."""
    name = str(node.target)
    if node.target not in RULES:
        return name
    if node.target in BOOLEAN_ONLY and tensor_meta(node).dtype != torch.bool:
        return f"{name} of integers"
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and node.kwargs.get("alpha", 1) != 1:
        return f"{name} with alpha"
    sizes = node.args[1] if node.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default) else ()
    if not all(isinstance(s, int) for s in sizes):  # type: ignore[union-attr]
        return f"{name} with a computed size"
    if node.target is atb.reshape_and_cache.default and any(
        not (isinstance(a, fx.Node) and a.op == "placeholder") for a in node.args[2:4]
    ):
        return f"{name} into a view"
    return None
