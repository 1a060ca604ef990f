"""Comparisons, boolean and bitwise operations, and choices between tensors.

Source: ops-math (README per op); REG_OP.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {}


def _compare(function: Callable[[Tensor, Tensor], Tensor]) -> OpFunction:
    """bool f(x1, x2), broadcast; both in the dtype that holds either."""

    def run(call: Call) -> Tensor:
        dtype = torch.promote_types(call["x1"].dtype, call["x2"].dtype)
        return function(call["x1"].to(dtype), call["x2"].to(dtype))

    return run


def _two(function: Callable[[Tensor, Tensor], Tensor]) -> OpFunction:
    return lambda call: function(call["x1"], call["x2"])


OPS |= {
    "Equal": _compare(torch.eq),
    "NotEqual": _compare(torch.ne),
    "Greater": _compare(torch.gt),
    "GreaterEqual": _compare(torch.ge),
    "Less": _compare(torch.lt),
    "LessEqual": _compare(torch.le),
    "LogicalAnd": _two(torch.logical_and),
    "LogicalOr": _two(torch.logical_or),
    "LogicalNot": lambda call: torch.logical_not(call["x"]),
    "BitwiseAnd": _two(torch.bitwise_and),
    "BitwiseOr": _two(torch.bitwise_or),
    "IsInf": lambda call: torch.isinf(call["x"]),
    "Invert": lambda call: torch.bitwise_not(call["x"]),
    "RightShift": lambda call: torch.bitwise_right_shift(call["x"], call["y"]),
}


@implements(OPS, "SelectV2")
def select_v2(call: Call) -> Tensor:
    """then where the condition holds, else otherwise; all broadcast as numpy does (REG_OP)."""
    return torch.where(call["condition"], call["then"], call["else"])


@implements(OPS, "Select")
def select(call: Call) -> Tensor:
    """x1 where the condition holds, else x2; a condition of one dimension chooses rows (REG_OP, as TensorFlow's)."""
    condition, x1 = call["condition"], call["x1"]
    if condition.dim() == 1 and x1.dim() > 1:
        condition = condition.reshape(-1, *[1] * (x1.dim() - 1))
    return torch.where(condition, x1, call["x2"])


@implements(OPS, "MaskedFill")
def masked_fill(call: Call) -> Tensor:
    """value (one element) where the mask holds, x elsewhere; x and mask broadcast (REG_OP)."""
    x = call["x"]
    return torch.where(call["mask"], call["value"].reshape(()).to(x.dtype), x)
