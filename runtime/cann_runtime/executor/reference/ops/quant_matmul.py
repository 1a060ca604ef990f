"""Matrix products of quantised operands. Integer products are exact.

Letters: M rows, K inner, N columns, E experts. Source: ops-nn matmul/quant_batch_matmul_v3 and
weight_quant_batch_matmul_v2 (README, golden); op-plugin npu_quant_matmul, npu_weight_quant_batchmatmul,
npu_mm_all_reduce_base.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.collectives import all_reduce
from cann_runtime.executor.reference.ops.quant import saturate, unpack_scale
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {}


def exact_product(x1: Tensor, x2: Tensor) -> Tensor:
    """x1 @ x2 of integers, exact, as float64 (which holds every integer that such sums can reach)."""
    return x1.double() @ x2.double()


def dequantized_product(
    call: Call,
    x1_MK: Tensor,
    x2_KN: Tensor,
    *,
    scale: Tensor | None,
    pertoken_M: Tensor | None,
    bias: Tensor | None,
    out: torch.dtype,
    offset: Tensor | None = None,
) -> Tensor:
    """(int8 product + int32 bias) * scale * pertoken + float bias, in dtype `out`; int32 out is the raw product, int8
    out is quantised again: rint(y + offset)."""
    total = exact_product(x1_MK, x2_KN)
    if bias is not None and bias.dtype == torch.int32:
        total = total + bias.double()
    if out == torch.int32:
        return total.to(torch.int32)
    y = total.to(call.precision.compute)
    if scale is not None:
        y = y * unpack_scale(call, scale)
    if pertoken_M is not None:
        y = y * call.wide(pertoken_M).unsqueeze(-1)
    if bias is not None and bias.dtype != torch.int32:
        y = y + call.wide(bias)
    if out == torch.int8:
        return saturate(y if offset is None else y + call.wide(offset), torch.int8)
    return y.to(out)


@implements(OPS, "QuantBatchMatmulV3")
def quant_batch_matmul_v3(call: Call) -> Tensor:
    """int8 x1 [.., M, K] @ int8 x2 [.., K, N], dequantised: see dequantized_product. scale [N] or [1], packed ones with
    19 bits."""
    x1, x2 = call["x1"], call["x2"]
    for x in (x1, x2):
        if x.dtype != torch.int8:
            call.refuse(f"multiplies {x.dtype}; only int8 is supported")
    out = call.dtype("dtype")
    offset = call.get("offset") if out == torch.int8 else None
    return dequantized_product(
        call,
        x1.mT if call.flag("transpose_x1") else x1,
        x2.mT if call.flag("transpose_x2") else x2,
        scale=call["scale"],
        pertoken_M=call.get("pertoken_scale"),
        bias=call.get("bias"),
        out=out,
        offset=offset,
    )


def weight_values(call: Call, weight_KN: Tensor, scale: Tensor, offset: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(w + offset) rounded to dtype, * scale rounded to dtype, in the compute format. scale and offset: [N], [1, N] or
    [1] per channel or tensor, [K / group, N] per group of rows."""
    grouped = scale.dim() == 2 and scale.shape[0] > 1
    if grouped:
        size = weight_KN.shape[0] // scale.shape[0]
        scale = scale.repeat_interleave(size, 0)
        offset = None if offset is None else offset.repeat_interleave(size, 0)
    wide = call.wide(weight_KN)
    if offset is not None:
        wide = call.wide((wide + call.wide(offset)).to(dtype))
    return call.wide((wide * call.wide(scale)).to(dtype))


@implements(OPS, "WeightQuantBatchMatmulV2")
def weight_quant_batch_matmul_v2(call: Call) -> Tensor:
    """x [M, K] @ dequantised weight [K, N] + bias, accumulated in float32, in x's dtype or, with quant_scale, int8.

    antiquant_group_size: rows of the weight that share a scale; 0 where scales are per channel or tensor.
    """
    x, weight = call["x"], call["weight"]
    scale, offset = call["antiquant_scale"], call.get("antiquant_offset")
    call.choice("dtype", (-1,))
    call.ignore("inner_precise")
    if weight.dtype != torch.int8:
        call.refuse(f"the weight is {weight.dtype}; only int8 is supported")
    if call.flag("transpose_weight"):  # weight, scale and offset are all stored transposed
        weight = weight.t()
        scale = scale.t() if scale.dim() > 1 else scale
        offset = offset.t() if offset is not None and offset.dim() > 1 else offset
    group = call.integer("antiquant_group_size")
    grouped = scale.dim() == 2 and scale.shape[0] > 1
    if grouped != (group > 0) or (grouped and scale.shape[0] * group != weight.shape[0]):
        call.refuse(f"antiquant_group_size {group} does not fit scales {list(scale.shape)}")
    values = weight_values(call, weight, scale, offset, x.dtype)
    y = call.wide(x.t() if call.flag("transpose_x") else x) @ values
    bias, quant = call.get("bias"), call.get("quant_scale")
    if bias is not None:
        y = y + call.wide(bias)
    if quant is None:
        return y.to(x.dtype)
    y, shift = y * unpack_scale(call, quant), call.get("quant_offset")
    return saturate(y if shift is None else y + call.wide(shift), torch.int8)


@implements(OPS, "MatmulAllReduce")
def matmul_all_reduce(call: Call) -> Tensor:
    """x1 @ x2 + bias + x3 on every rank, then summed over the ranks, bias and x3 included on each.

    The product is rounded before it is sent. Quantised forms are not supported.
    """
    x1, x2, dtype = call["x1"], call["x2"], call["x1"].dtype
    y = call.wide(x1.mT if call.flag("is_trans_a") else x1) @ call.wide(x2.mT if call.flag("is_trans_b") else x2)
    for name in ("bias", "x3"):
        term = call.get(name)
        if term is not None:
            y = y + call.wide(term)
    return all_reduce(call, y.to(dtype), call.text("reduce_op", ("sum",)))
