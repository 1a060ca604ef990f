"""Root mean square norms, layer norms and group norms.

Where the device rounds inside an op, the function says so; in mode exact those roundings do nothing.
Source: ops-nn norm (golden.py and kernels per op).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {}


def rstd(x: Tensor, dims: int, epsilon: float) -> Tensor:
    """1 / sqrt(mean(x^2) + epsilon) over the last `dims` dimensions, which stay as size 1."""
    return torch.rsqrt(x.square().mean(tuple(range(-dims, 0)), keepdim=True) + epsilon)


@implements(OPS, "RmsNorm")
def rms_norm(call: Call) -> tuple[Tensor, Tensor]:
    """(x * rstd * gamma with one rounding, rstd float32) over gamma's dimensions (ops-nn rms_norm)."""
    x, gamma = call["x"], call["gamma"]
    wide = call.wide(x)
    scale = rstd(wide, gamma.dim(), call.number("epsilon"))
    return (wide * scale * call.wide(gamma)).to(x.dtype), scale


def add_norm(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(normed float32 before the last rounding, rstd, x1 + x2 rounded), as AddRmsNorm's kernels do it.

    ascend910b and ascend910_93 norm the rounded sum; with bfloat16 they round x * rstd before gamma, with float16 they
    multiply by gamma in float16. ascend950 norms the sum as it is and rounds once.
    """
    x1, x2, gamma = call["x1"], call["x2"], call["gamma"]
    total = call.wide(x1) + call.wide(x2)
    x = total.to(x1.dtype)
    newer = call.precision.family == "ascend950"
    wide = total if newer else call.wide(x)
    scale = rstd(wide, gamma.dim(), call.number("epsilon"))
    normed = wide * scale
    if not newer and x1.dtype in (torch.bfloat16, torch.float16):
        normed = call.wide(normed.to(x1.dtype))
    return normed * call.wide(gamma), scale, x


@implements(OPS, "AddRmsNorm")
def add_rms_norm(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(y, rstd, x): x = x1 + x2, y = x * rstd * gamma (ops-nn add_rms_norm)."""
    y, scale, x = add_norm(call)
    return y.to(x.dtype), scale, x


@implements(OPS, "AddRmsNormCast")
def add_rms_norm_cast(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y in float32, y, rstd, x) of AddRmsNorm (op-plugin npu_add_rms_norm_cast); y1 is the cast of y."""
    y, scale, x = add_norm(call)
    rounded = y.to(x.dtype)
    return call.wide(rounded), rounded, scale, x


def _layer_norm(call: Call, dims: int, gamma: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    x = call.wide(call["x"])
    over = tuple(range(-dims, 0))
    mean = x.mean(over, keepdim=True)
    centred = x - mean
    scale = torch.rsqrt(centred.square().mean(over, keepdim=True) + call.number("epsilon"))
    y = centred * scale
    if gamma is not None:
        y = y * call.wide(gamma)
    if beta is not None:
        y = y + call.wide(beta)
    return y.to(call["x"].dtype), mean, scale


@implements(OPS, "LayerNormV4")
def layer_norm_v4(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) over the last len(normalized_shape) dimensions (ops-nn layer_norm_v4)."""
    sizes = call.values("normalized_shape")
    if list(call["x"].shape[-len(sizes) :]) != sizes:
        call.refuse(f"norms {sizes} of {list(call['x'].shape)}")
    return _layer_norm(call, len(sizes), call.get("gamma"), call.get("beta"))


@implements(OPS, "LayerNormV3")
def layer_norm_v3(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) over the dimensions from begin_norm_axis on (ops-nn layer_norm_v3)."""
    rank = call["x"].dim()
    first = call.integer("begin_norm_axis") % rank
    if call.integer("begin_params_axis") % rank != rank - call["gamma"].dim():
        call.refuse("begin_params_axis does not fit gamma")
    return _layer_norm(call, rank - first, call["gamma"], call["beta"])


def _group_norm(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(y float32, mean, variance), the latter two [N, groups]. Channels are dimension 1, whatever data_format says:
    TorchAir leaves it at its default."""
    x, groups = call["x"], call.integer("num_groups")
    flat = call.wide(x).reshape(x.shape[0], groups, -1)
    mean = flat.mean(-1, keepdim=True)
    variance = (flat - mean).square().mean(-1, keepdim=True)
    y = ((flat - mean) * torch.rsqrt(variance + call.number("eps"))).reshape(x.shape)
    per_channel = [1, -1] + [1] * (x.dim() - 2)
    gamma, beta = call.get("gamma"), call.get("beta")
    if gamma is not None:
        y = y * call.wide(gamma).view(per_channel)
    if beta is not None:
        y = y + call.wide(beta).view(per_channel)
    return y, mean.squeeze(-1), variance.squeeze(-1)


@implements(OPS, "GroupNorm")
def group_norm(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, variance), not rstd: TorchAir adds the reciprocal root itself (ops-nn group_norm)."""
    call.ignore("data_format", "is_training")
    y, mean, variance = _group_norm(call)
    dtype = call["x"].dtype
    return y.to(dtype), mean.to(dtype), variance.to(dtype)


@implements(OPS, "GroupNormV2")
def group_norm_v2(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) (REG_OP)."""
    call.ignore("data_format", "is_training")
    y, mean, variance = _group_norm(call)
    dtype = call["x"].dtype
    return y.to(dtype), mean.to(dtype), torch.rsqrt(variance + call.number("eps")).to(dtype)


@implements(OPS, "GroupNormSilu")
def group_norm_silu(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(silu of the group norm, mean, rstd) (op-plugin npu_group_norm_silu, whose outputs are out, mean, rstdOut)."""
    y, mean, variance = _group_norm(call)
    dtype = call["x"].dtype
    return (y * torch.sigmoid(y)).to(dtype), mean.to(dtype), torch.rsqrt(variance + call.number("eps")).to(dtype)
