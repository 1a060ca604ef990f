"""Matrix products: float32 accumulation, the bias added in float32, one rounding.

The device's float32 products are real float32 (TorchAir switches HF32 off). Source: ops-nn matmul (README per op).
"""

from __future__ import annotations

from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {}


def _product(call: Call, x1: Tensor, x2: Tensor, bias: Tensor | None) -> Tensor:
    y = call.wide(x1) @ call.wide(x2)
    if bias is not None:
        y = y + call.wide(bias)
    return y.to(call["x1"].dtype)


@implements(OPS, "MatMul", "MatMulV2")
def matmul(call: Call) -> Tensor:
    """y [M, N] = x1 [M, K] @ x2 [K, N] + bias [N]; transpose_x1: x1 is [K, M], transpose_x2: x2 is [N, K]."""
    x1, x2 = call["x1"], call["x2"]
    if x1.dim() != 2 or x2.dim() != 2:
        call.refuse(f"multiplies {list(x1.shape)} by {list(x2.shape)}; both must be matrices")
    return _product(
        call, x1.t() if call.flag("transpose_x1") else x1, x2.t() if call.flag("transpose_x2") else x2, call.get("bias")
    )


@implements(OPS, "BatchMatMul", "BatchMatMulV2")
def batch_matmul(call: Call) -> Tensor:
    """As MatMul over leading dimensions, which broadcast; adj_x1, adj_x2: the last two dimensions are swapped."""
    x1, x2 = call["x1"], call["x2"]
    return _product(call, x1.mT if call.flag("adj_x1") else x1, x2.mT if call.flag("adj_x2") else x2, call.get("bias"))


@implements(OPS, "TransposeBatchMatMul")
def transpose_batch_matmul(call: Call) -> Tensor:
    """permute(permute(x1, perm_x1) @ permute(x2, perm_x2), perm_y) for [B, M, K] and [B, K, N]; an empty perm changes
    nothing (op-plugin npu_transpose_batchmatmul)."""
    x1, x2 = call["x1"], call["x2"]
    x1 = x1.permute(call.integers("perm_x1") or tuple(range(x1.dim())))
    x2 = x2.permute(call.integers("perm_x2") or tuple(range(x2.dim())))
    y = _product(call, x1, x2, call.get("bias"))
    return y.permute(call.integers("perm_y") or tuple(range(y.dim())))
