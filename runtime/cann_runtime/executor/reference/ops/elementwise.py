"""Arithmetic on elements. On the device float16 and bfloat16 are computed in float32 and rounded once at the end.

Source: ops-math (README and tests/assets/golden.py per op); REG_OP where an op has attributes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {}

_HALVES = (torch.float16, torch.bfloat16)


def widened(x: Tensor) -> Tensor:
    """x in float32 where it is half precision; others, integers too, as they are."""
    return x.float() if x.dtype in _HALVES else x


def _unary(function: Callable[[Tensor], Tensor]) -> OpFunction:
    """y = f(x), in x's dtype."""
    return lambda call: function(widened(call["x"])).to(call["x"].dtype)


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> OpFunction:
    """y = f(x1, x2), broadcast as numpy does. Mixed dtypes (a scalar of another type) are promoted as torch does; the
    graph then casts."""

    def run(call: Call) -> Tensor:
        x1, x2 = call["x1"], call["x2"]
        dtype = x1.dtype if x1.dtype == x2.dtype else torch.result_type(x1, x2)
        wide = torch.float32 if dtype in _HALVES else dtype
        return function(x1.to(wide), x2.to(wide)).to(dtype)

    return run


OPS |= {
    "Abs": _unary(torch.abs),
    "Neg": _unary(torch.neg),
    "Sqrt": _unary(torch.sqrt),
    "Rsqrt": _unary(torch.rsqrt),
    "Expm1": _unary(torch.expm1),
    "Log1p": _unary(torch.log1p),
    "Sin": _unary(torch.sin),
    "Cos": _unary(torch.cos),
    "Tanh": _unary(torch.tanh),
    "Sigmoid": _unary(torch.sigmoid),
    "Erf": _unary(torch.erf),
    "Relu": _unary(torch.relu),
    "Square": _unary(torch.square),
    "Reciprocal": _unary(torch.reciprocal),
    "Floor": _unary(torch.floor),
    "Ceil": _unary(torch.ceil),
    "Round": _unary(torch.round),  # half to even
    "Sign": _unary(torch.sign),
    "Add": _binary(torch.add),
    "AddV2": _binary(torch.add),
    "Sub": _binary(torch.sub),
    "Mul": _binary(torch.mul),
    "Pow": _binary(torch.pow),
    "Maximum": _binary(torch.maximum),
    "Minimum": _binary(torch.minimum),
    "FloorDiv": _binary(functools.partial(torch.div, rounding_mode="floor")),
    "TruncateDiv": _binary(functools.partial(torch.div, rounding_mode="trunc")),
}


@implements(OPS, "RealDiv")
def real_div(call: Call) -> Tensor:
    """x1 / x2 of floats (REG_OP); TorchAir casts integers before."""
    if not call["x1"].is_floating_point():
        call.refuse(f"divides {call['x1'].dtype}; only floats are supported")
    return _binary(torch.true_divide)(call)  # type: ignore[return-value]


@implements(OPS, "Div")
def div(call: Call) -> Tensor:
    """x1 / x2; integers truncate (REG_OP)."""
    floats = call["x1"].is_floating_point() or call["x2"].is_floating_point()
    divide = torch.true_divide if floats else functools.partial(torch.div, rounding_mode="trunc")
    return _binary(divide)(call)  # type: ignore[return-value]


@implements(OPS, "FloorMod")
def floor_mod(call: Call) -> Tensor:
    """Remainder with the sign of x2 (golden); an integer modulo 0 is -1 on the device."""
    x1, x2 = call["x1"], call["x2"]
    if x1.is_floating_point() or x2.is_floating_point():
        return _binary(torch.remainder)(call)  # type: ignore[return-value]
    return torch.where(x2 == 0, -1, torch.remainder(x1, torch.where(x2 == 0, 1, x2)))


@implements(OPS, "Mod")
def mod(call: Call) -> Tensor:
    """Remainder with the sign of x1, as C's fmod (REG_OP)."""
    return _binary(torch.fmod)(call)  # type: ignore[return-value]


@implements(OPS, "Muls")
def muls(call: Call) -> Tensor:
    """x * value, in x's dtype (REG_OP)."""
    return (widened(call["x"]) * call.number("value")).to(call["x"].dtype)


@implements(OPS, "Adds")
def adds(call: Call) -> Tensor:
    """x + value, in x's dtype (REG_OP)."""
    return (widened(call["x"]) + call.number("value")).to(call["x"].dtype)


@implements(OPS, "Axpy")
def axpy(call: Call) -> Tensor:
    """x1 + alpha * x2, alpha an attribute (REG_OP)."""
    return (widened(call["x1"]) + call.number("alpha") * widened(call["x2"])).to(call["x1"].dtype)


@implements(OPS, "AxpyV2")
def axpy_v2(call: Call) -> Tensor:
    """x1 + alpha * x2, alpha a tensor of one element (REG_OP)."""
    x1, x2 = call["x1"], call["x2"]
    alpha = widened(call["alpha"]).reshape(())
    return (widened(x1) + alpha * widened(x2)).to(torch.promote_types(x1.dtype, x2.dtype))


@implements(OPS, "Sxpy")
def sxpy(call: Call) -> Tensor:
    """x1 - alpha * x2, alpha 1 where not fed: TorchAir makes torch's rsub(x2, x1) of it."""
    x1, x2, alpha = call["x1"], call["x2"], call.get("alpha")
    scaled = widened(x2) if alpha is None else widened(alpha).reshape(()) * widened(x2)
    return (widened(x1) - scaled).to(torch.promote_types(x1.dtype, x2.dtype))


@implements(OPS, "Addcmul")
def addcmul(call: Call) -> Tensor:
    """input_data + value * x1 * x2, value a tensor of one element (REG_OP)."""
    x, value = call["input_data"], widened(call["value"]).reshape(())
    return (widened(x) + value * widened(call["x1"]) * widened(call["x2"])).to(x.dtype)


@implements(OPS, "Lerp")
def lerp(call: Call) -> Tensor:
    """start + weight * (end - start) (REG_OP)."""
    start, end, weight = (widened(call[name]) for name in ("start", "end", "weight"))
    return (start + weight * (end - start)).to(call["start"].dtype)


@implements(OPS, "Exp")
def exp(call: Call) -> Tensor:
    """base ** (scale * x + shift); base -1 stands for e (REG_OP)."""
    base = call.number("base")
    power = call.number("scale") * widened(call["x"]) + call.number("shift")
    return torch.exp(power if base == -1 else power * math.log(base)).to(call["x"].dtype)


@implements(OPS, "Log")
def log(call: Call) -> Tensor:
    """Logarithm to `base` of scale * x + shift; base -1 stands for e (REG_OP)."""
    base = call.number("base")
    value = torch.log(call.number("scale") * widened(call["x"]) + call.number("shift"))
    return (value if base == -1 else value / math.log(base)).to(call["x"].dtype)


@implements(OPS, "ClipByValueV2")
def clip_by_value(call: Call) -> Tensor:
    """min(max(x, clip_value_min), clip_value_max); the bounds are tensors (REG_OP)."""
    x = call["x"]
    low, high = call["clip_value_min"].to(x.dtype), call["clip_value_max"].to(x.dtype)
    return torch.minimum(torch.maximum(x, low), high)


@implements(OPS, "Cast")
def cast(call: Call) -> Tensor:
    """x in dst_type: floats to integers truncate, anything to bool is != 0 (REG_OP)."""
    return call["x"].to(call.dtype("dst_type"), copy=True)


@implements(OPS, "Bitcast")
def bitcast(call: Call) -> Tensor:
    """x's bytes read as `type` (REG_OP). A smaller type appends a dimension, a larger one takes the last away, as
    TensorFlow's; with keep_dim the last dimension changes its size."""
    x, dtype = call["x"].contiguous(), call.dtype("type")
    if call.precision.held(torch.float16) != torch.float16 and (x.is_floating_point() or dtype.is_floating_point):
        call.refuse("bytes of floats are only meaningful in mode npu")
    if call.flag("keep_dim") or dtype.itemsize == x.dtype.itemsize:
        return x.view(dtype)
    if dtype.itemsize < x.dtype.itemsize:
        return x.unsqueeze(-1).view(dtype)
    return x.view(dtype).squeeze(-1)
