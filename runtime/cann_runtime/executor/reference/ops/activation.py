"""Activation functions, float32 inside with one rounding at the end.

Source: ops-nn activation (README and golden per op); REG_OP.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.elementwise import widened
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {}


@implements(OPS, "Swish")
def swish(call: Call) -> Tensor:
    """x * sigmoid(scale * x) (REG_OP)."""
    x = widened(call["x"])
    return (x * torch.sigmoid(call.number("scale") * x)).to(call["x"].dtype)


@implements(OPS, "Softplus")
def softplus(call: Call) -> Tensor:
    """log(1 + exp(x)) (REG_OP)."""
    x = widened(call["x"])
    return torch.logaddexp(x, torch.zeros_like(x)).to(call["x"].dtype)


@implements(OPS, "Gelu")
def gelu(call: Call) -> Tensor:
    """The tanh formula, always (REG_OP), also where the source asked for the exact one."""
    return functional.gelu(widened(call["x"]), approximate="tanh").to(call["x"].dtype)


@implements(OPS, "GeluV2")
def gelu_v2(call: Call) -> Tensor:
    """With erf ('none') or the tanh formula (REG_OP)."""
    how = call.text("approximate", ("none", "tanh"))
    return functional.gelu(widened(call["x"]), approximate=how).to(call["x"].dtype)


@implements(OPS, "FastGelu")
def fast_gelu(call: Call) -> Tensor:
    """x * exp(0.851 (x - |x|)) / (1 + exp(-1.702 |x|)) (REG_OP)."""
    x = widened(call["x"])
    return (x * torch.exp(0.851 * (x - x.abs())) / (1 + torch.exp(-1.702 * x.abs()))).to(call["x"].dtype)


@implements(OPS, "SwiGlu")
def swiglu(call: Call) -> Tensor:
    """silu(first half) * second half along dim (ops-nn swi_glu)."""
    gate, up = widened(call["x"]).chunk(2, call.integer("dim"))
    return (gate * torch.sigmoid(gate) * up).to(call["x"].dtype)
