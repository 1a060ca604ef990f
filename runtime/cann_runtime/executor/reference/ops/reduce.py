"""Reductions, sorting and softmax; float16 and bfloat16 are reduced in float32 and rounded once.

Source: REG_OP; ops-math and ops-nn (README per op).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.dtypes import UNDEFINED_GE
from cann_runtime.executor.reference.ops.elementwise import widened
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {}


def _axes(call: Call) -> list[int]:
    """The dimensions to reduce, none of them negative; an empty list in the graph means all."""
    rank = call["x"].dim()
    return sorted({axis % rank for axis in call.values("axes")}) if call["axes"].numel() else list(range(rank))


def _each(function: Callable[[Tensor, int], Tensor]) -> OpFunction:
    """Reduce one dimension after the other with function(x, dim), which keeps the dimension as size 1."""

    def run(call: Call) -> Tensor:
        x, axes = widened(call["x"]), _axes(call)
        for axis in axes:
            x = function(x, axis)
        return (x if call.flag("keep_dims") or not axes else x.squeeze(axes)).to(call["x"].dtype)

    return run


OPS |= {
    "ReduceMax": _each(lambda x, dim: x.amax(dim, keepdim=True)),
    "ReduceMin": _each(lambda x, dim: x.amin(dim, keepdim=True)),
    "ReduceProd": _each(lambda x, dim: x.prod(dim, keepdim=True)),
    "ReduceAny": _each(lambda x, dim: x.any(dim, keepdim=True)),
    "ReduceAll": _each(lambda x, dim: x.all(dim, keepdim=True)),
}


@implements(OPS, "ReduceSum")
def reduce_sum(call: Call) -> Tensor:
    """Sum over axes, all where the list is empty, in x's dtype (REG_OP)."""
    axes = _axes(call)
    if not axes:
        return call["x"].clone()
    return widened(call["x"]).sum(axes, keepdim=call.flag("keep_dims")).to(call["x"].dtype)


def _mean(call: Call) -> Tensor:
    x = widened(call["x"])
    if not call["axes"].numel() and call.flag("noop_with_empty_axes"):
        call.ignore("keep_dims")
        return x
    call.ignore("noop_with_empty_axes")
    axes = _axes(call)
    return x.mean(axes, keepdim=call.flag("keep_dims")) if axes else x


@implements(OPS, "ReduceMean")
def reduce_mean(call: Call) -> Tensor:
    """Mean over axes; an empty list means none of them where noop_with_empty_axes, else all (REG_OP)."""
    return _mean(call).to(call["x"].dtype)


@implements(OPS, "ReduceMeanWithCast")
def reduce_mean_with_cast(call: Call) -> Tensor:
    """ReduceMean with a result in `dtype`, in x's where that is DT_UNDEFINED (REG_OP)."""
    undefined = call.integer("dtype") == UNDEFINED_GE
    return _mean(call).to(call["x"].dtype if undefined else call.dtype("dtype"))


@implements(OPS, "ArgMaxV2")
def arg_max(call: Call) -> Tensor:
    """Place of the first maximum along dimension, without that dimension (REG_OP)."""
    return _first(call["x"], call.value("dimension"), largest=True).to(call.dtype("dtype"))


@implements(OPS, "ArgMin")
def arg_min(call: Call) -> Tensor:
    """Place of the first minimum along dimension, without that dimension (REG_OP)."""
    return _first(call["x"], call.value("dimension"), largest=False).to(call.dtype("dtype"))


@implements(OPS, "ArgMaxWithValue")
def arg_max_with_value(call: Call) -> tuple[Tensor, Tensor]:
    """(int32 place of the first maximum, the maximum) along dimension (REG_OP)."""
    return _with_value(call, largest=True)


@implements(OPS, "ArgMinWithValue")
def arg_min_with_value(call: Call) -> tuple[Tensor, Tensor]:
    """(int32 place of the first minimum, the minimum) along dimension (REG_OP)."""
    return _with_value(call, largest=False)


def _with_value(call: Call, *, largest: bool) -> tuple[Tensor, Tensor]:
    x, dim, keep = call["x"], call.integer("dimension"), call.flag("keep_dims")
    place = _first(x, dim, largest=largest).unsqueeze(dim)
    value = x.gather(dim, place)
    return (place if keep else place.squeeze(dim)).int(), (value if keep else value.squeeze(dim))


def _first(x: Tensor, dim: int, *, largest: bool) -> Tensor:
    extreme = x.amax(dim, keepdim=True) if largest else x.amin(dim, keepdim=True)
    # torch says nothing of which of several equal elements it takes; argmax of a 0/1 tensor in int32 takes the first.
    places = torch.arange(x.shape[dim]).view([-1] + [1] * (x.dim() - 1 - dim % x.dim()))
    return torch.where(x == extreme, places, x.shape[dim]).amin(dim)


@implements(OPS, "TopKV2")
def top_k(call: Call) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) along dim with int32 places, in order; of equal ones the first come first.

    REG_OP does not say how ties are broken: the lowest index first is an assumption.
    """
    call.ignore("sorted")  # sorted is one of the orders that unsorted allows
    call.choice("sort_policy", (1,))  # what TorchAir always writes, without a document
    values, places = torch.sort(call["x"], dim=call.integer("dim"), descending=call.flag("largest"), stable=True)
    count = call.value("k")
    dim = call.integer("dim")
    return values.narrow(dim, 0, count), places.narrow(dim, 0, count).int()


@implements(OPS, "Sort")
def sort(call: Call) -> tuple[Tensor, Tensor]:
    """Sorted values and int32 places along axis (REG_OP); equal elements keep their order."""
    call.ignore("stable")  # a stable order is one of those that an unstable sort allows
    values, places = torch.sort(call["x"], dim=call.integer("axis"), descending=call.flag("descending"), stable=True)
    return values, places.int()


@implements(OPS, "Cumsum")
def cumsum(call: Call) -> Tensor:
    """Running sums along axis; exclusive: of the elements before; reverse: from the end (REG_OP)."""
    x, dim = widened(call["x"]), call.value("axis")
    reverse = call.flag("reverse")
    ordered = x.flip(dim) if reverse else x
    total = ordered.cumsum(dim, dtype=x.dtype)
    if call.flag("exclusive"):
        total = total.roll(1, dim)
        total.select(dim, 0).zero_()
    return (total.flip(dim) if reverse else total).to(call["x"].dtype)


@implements(OPS, "SoftmaxV2")
def softmax(call: Call) -> Tensor:
    """exp(x - max) / sum over axes; half_to_float keeps the float32 result (REG_OP, ops-nn)."""
    x, axes = widened(call["x"]), list(call.integers("axes"))
    powers = torch.exp(x - x.amax(axes, keepdim=True))
    y = powers / powers.sum(axes, keepdim=True)
    return y if call.flag("half_to_float") else y.to(call["x"].dtype)


@implements(OPS, "LogSoftmaxV2")
def log_softmax(call: Call) -> Tensor:
    """x - max - log(sum(exp(x - max))) over axes (REG_OP)."""
    x, axes = widened(call["logits"]), list(call.integers("axes"))
    shifted = x - x.amax(axes, keepdim=True)
    return (shifted - torch.log(torch.exp(shifted).sum(axes, keepdim=True))).to(call["logits"].dtype)
