"""Quantisation of tensors, and activations that quantise their result.

Quantising rounds half to even and saturates. Source: ops-nn quant (golden.py and kernels per op); op-plugin
npu_dynamic_quant, npu_quantize, npu_anti_quant, npu_dequant_swiglu_quant, npu_trans_quant_param.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.norm import add_norm
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {}

SCALE_FLAG = 1 << 46
"""Bit that a packed scale carries beside the upper 19 bits of a float32."""

_ROUND = {"round": torch.round, "rint": torch.round, "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc}
_QUANTIZED = {"torch.qint8": torch.int8, "torch.quint8": torch.uint8, "torch.qint32": torch.int32}


def saturate(x: Tensor, dtype: torch.dtype, how: str = "rint") -> Tensor:
    """x rounded and clamped into an integer type."""
    info = torch.iinfo(dtype)
    return _ROUND[how](x).clamp(info.min, info.max).to(dtype)


def int8_rows(call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 rows, scale per row in the compute format): y = rint(x / s), s = max|x| / 127; a row of zeros has scale 0.

    The golden divides; kernels before ascend950 multiply by 127 / max and give the reciprocal of that as the scale,
    which mode npu follows: the two are at most 1 apart.
    """
    wide = call.wide(x)
    top = wide.abs().amax(-1, keepdim=True)
    if call.precision.rounds and call.precision.family != "ascend950":
        factor = 127.0 / top
        y, scale = wide * factor, 1.0 / factor
    else:
        scale = top / 127.0
        y = wide / scale
    return saturate(torch.where(top == 0, 0, y), torch.int8), scale.squeeze(-1)


def pack_scale(scale: Tensor) -> Tensor:
    """float32 scales as int64: their upper 19 bits and SCALE_FLAG (REG_OP TransQuantParamV2)."""
    bits = scale.float().contiguous().view(torch.int32) & -8192
    return (bits.long() & 0xFFFF_FFFF) | SCALE_FLAG


def unpack_scale(call: Call, scale: Tensor) -> Tensor:
    """Scales in the compute format: packed ones (int64, uint64) hold a float32 in their lower half."""
    if scale.dtype not in (torch.int64, torch.uint64):
        return call.wide(scale)
    bits = scale.contiguous().view(torch.int32).reshape(*scale.shape, 2)[..., 0] & -8192
    return call.wide(bits.contiguous().view(torch.float32))


@implements(OPS, "DynamicQuant")
def dynamic_quant(call: Call) -> tuple[Tensor, Tensor]:
    """(int8 y, scale) per row of x * smooth_scales. group_index: cumulative rows of each row of smooth_scales."""
    return int8_rows(call, _smoothed(call))


@implements(OPS, "DynamicQuantV2")
def dynamic_quant_v2(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(int8 y, scale, offset) per row: scale = max((max - min) / 255, 1e-12), offset = 127 - max / scale,
    y = rint(x / scale + offset). is_symmetrical: as DynamicQuant, offset 0."""
    call.text("quant_mode", ("pertoken",))
    x = _smoothed(call)
    if call.flag("is_symmetrical"):
        y, scale = int8_rows(call, x)
        return y, scale, torch.zeros_like(scale)
    high, low = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
    scale = ((high - low) / 255.0).clamp(min=1e-12)
    offset = 127.0 - high / scale
    return saturate(x / scale + offset, torch.int8), scale.squeeze(-1), offset.squeeze(-1)


def _smoothed(call: Call) -> Tensor:
    if call.dtype("dst_type") != torch.int8:
        call.refuse("attribute dst_type: only int8 is supported")
    x, smooth, groups = call.wide(call["x"]), call.get("smooth_scales"), call.get("group_index")
    if smooth is None:
        return x
    factors = call.wide(smooth)
    if groups is not None:
        sizes = torch.diff(groups.long(), prepend=groups.new_zeros(1))
        factors = factors.repeat_interleave(sizes, 0).reshape(x.shape)
    return x * factors


@implements(OPS, "AscendQuantV2")
def ascend_quant_v2(call: Call) -> Tensor:
    """round(x * scale + offset), scale squared with sqrt_mode: the op multiplies. Scales lie along the last dimensions
    from `axis` on."""
    x, offset, scale = call.wide(call["x"]), call.get("offset"), call.wide(call["scale"])
    if call.choice("axis", (-1, -2)) == -2 and scale.dim() < 2 and scale.numel() > 1:
        call.refuse("axis -2 needs a scale of two dimensions")
    y = x * scale * (scale if call.flag("sqrt_mode") else 1)
    if offset is not None:
        y = y + call.wide(offset)
    return saturate(y, call.dtype("dst_type"), call.text("round_mode", ("round", "floor", "ceil", "trunc")))


@implements(OPS, "Quantize")
def quantize(call: Call) -> Tensor:
    """round(x / scales + zero_points): the op divides. Scales have x's rank, or one dimension along `axis`."""
    x, scales, zeros = call.wide(call["x"]), call.wide(call["scales"]), call.get("zero_points")
    axis = call.integer("axis") % x.dim()
    shape = [-1 if dim == axis else 1 for dim in range(x.dim())]
    y = x / (scales.view(shape) if scales.dim() == 1 else scales)
    if zeros is not None:
        y = y + call.wide(zeros.view(shape) if zeros.dim() == 1 else zeros)
    return saturate(y, _QUANTIZED[call.text("dtype", tuple(_QUANTIZED))])


@implements(OPS, "AscendAntiQuantV2")
def ascend_anti_quant_v2(call: Call) -> Tensor:
    """(x + offset) * scale, scale squared with sqrt_mode, in dst_type."""
    x, scale, offset = call.wide(call["x"]), call.wide(call["scale"]), call.get("offset")
    if offset is not None:
        x = x + call.wide(offset)
    return (x * scale * (scale if call.flag("sqrt_mode") else 1)).to(call.dtype("dst_type"))


@implements(OPS, "TransQuantParamV2")
def trans_quant_param_v2(call: Call) -> Tensor:
    """Scales packed for a matrix product; offsets as 9 bits from bit 37 on."""
    call.choice("round_mode", (0,))
    packed, offset = pack_scale(call["scale"]), call.get("offset")
    if offset is not None:
        packed = packed | ((offset.float().round().clamp(-256, 255).long() & 0x1FF) << 37)
    return packed


@implements(OPS, "AddRmsNormDynamicQuant")
def add_rms_norm_dynamic_quant(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(int8 y1, int8 y2, x, scale1, scale2): AddRmsNorm, plus beta, times smooth_scale1 and 2, each quantised per row.

    y2 exists only with smooth_scale2 (op-plugin npu_add_rms_norm_dynamic_quant). output_mask is not supported.
    """
    if call.dtype("dst_type") != torch.int8:
        call.refuse("attribute dst_type: only int8 is supported")
    normed, _, x = add_norm(call)
    beta = call.get("beta")
    if beta is not None:
        normed = normed + call.wide(beta)
    first, second = call.get("smooth_scale1"), call.get("smooth_scale2")
    y1, scale1 = int8_rows(call, normed if first is None else normed * call.wide(first))
    if second is None:
        return (
            y1,
            call.undefined(list(y1.shape), torch.int8),
            x,
            scale1,
            call.undefined(list(scale1.shape), scale1.dtype),
        )
    y2, scale2 = int8_rows(call, normed * call.wide(second))
    return y1, y2, x, scale1, scale2


@implements(OPS, "DequantSwigluQuant")
def dequant_swiglu_quant(call: Call) -> tuple[Tensor, Tensor]:
    """(int8 y, scale per row): x [M, 2 H] dequantised, gated, quantised.

    x * weight_scale[g] * activation_scale[row], g by group_index, the number of rows of each group; rows beyond their
    sum are undefined.

    swiglu_mode 0: with activate_left the first half is the gate (silu), else the second. swiglu_mode 1:
    gate and value alternate, gate min(g, limit), value clamped to limit, g * sigmoid(alpha * g) * (value + bias).
    quant_mode static: y = round(z / quant_scale + quant_offset), dynamic: rows of z * quant_scale to max / 127.
    """
    x, groups = call["x"], call.get("group_index")
    if call.dtype("dst_type") != torch.int8 or call.integer("activate_dim") not in (-1, x.dim() - 1):
        call.refuse("only dst_type int8 and the last dimension are supported")
    rows = x.shape[0]
    used = rows if groups is None else int(groups.sum())
    group = torch.zeros(used, dtype=torch.int64)
    if groups is not None:
        group = torch.arange(len(groups)).repeat_interleave(groups.long())
    z = _gated(call, _dequantised(call, x[:used], group))
    scale, offset = call.get("quant_scale"), call.get("quant_offset")
    if call.text("quant_mode", ("static", "dynamic")) == "static":
        if scale is None:
            call.refuse("quant_mode static needs quant_scale")
        z = z / _of_group(call, scale, group)
        if offset is not None:
            z = z + _of_group(call, offset, group)
        y, scales = saturate(z, torch.int8, call.text("round_mode", tuple(_ROUND))), call.undefined([0], z.dtype)
    else:
        call.text("round_mode", ("rint",))
        y, scales = int8_rows(call, z if scale is None else z * _of_group(call, scale, group))
    tail = rows - used
    if tail:
        y = torch.cat((y, call.undefined([tail, y.shape[1]], torch.int8)))
        scales = torch.cat((scales, call.undefined([tail], scales.dtype))) if scales.numel() else scales
    return y, scales


def _of_group(call: Call, values: Tensor, group: Tensor) -> Tensor:
    """values [G, H], [H] or [1] as one row per row of x."""
    wide = call.wide(values)
    return wide.reshape(-1, wide.shape[-1])[group if wide.dim() > 1 and wide.shape[0] > 1 else torch.zeros_like(group)]


def _dequantised(call: Call, x: Tensor, group: Tensor) -> Tensor:
    wide, weight, row = call.wide(x), call.get("weight_scale"), call.get("activation_scale")
    if x.dtype == torch.int32 and weight is None:
        call.refuse("int32 x needs weight_scale")
    if weight is not None:
        wide = wide * _of_group(call, weight, group)
    if row is not None:
        wide = wide * call.wide(row).reshape(-1)[: len(x), None]
    return wide


def _gated(call: Call, x: Tensor) -> Tensor:
    if call.choice("swiglu_mode", (0, 1)) == 1:
        limit, alpha, bias = call.number("clamp_limit"), call.number("glu_alpha"), call.number("glu_bias")
        gate, value = x[..., 0::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (value + bias)
    call.ignore("clamp_limit", "glu_alpha", "glu_bias")
    first, second = x.chunk(2, -1)
    gate, value = (first, second) if call.flag("activate_left") else (second, first)
    return gate * torch.sigmoid(gate) * value
