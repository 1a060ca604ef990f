"""What each supported GE op computes, one module per family; `OPS` is all of them by op type.

The formulas are those of the vendors' op documents, which every function names, written without a look at
`cann_runtime.ops`: two implementations by the same reading of a formula would prove nothing of each other.

Names of sources in this package: "op-plugin" is the documentation of Ascend's op-plugin repository
(torch_npu.npu_*), "ops-nn", "ops-math" and "ops-transformer" are the kernel repositories of those names (per-op README,
op_def, golden.py), "REG_OP" is the declaration in TorchAir's auto_generated_ge_raw_ops.py.
"""

from cann_runtime.executor.reference.ops import (
    activation,
    attention,
    cache,
    collectives,
    conv,
    elementwise,
    grouped_matmul,
    index,
    logic,
    matmul,
    mla,
    moe,
    moe_comm,
    norm,
    quant,
    quant_matmul,
    reduce,
    rope,
    shape,
)
from cann_runtime.executor.reference.ops.registry import OpFunction

OPS: dict[str, OpFunction] = {
    **activation.OPS,
    **attention.OPS,
    **cache.OPS,
    **collectives.OPS,
    **conv.OPS,
    **elementwise.OPS,
    **grouped_matmul.OPS,
    **index.OPS,
    **logic.OPS,
    **matmul.OPS,
    **mla.OPS,
    **moe.OPS,
    **moe_comm.OPS,
    **norm.OPS,
    **quant.OPS,
    **quant_matmul.OPS,
    **reduce.OPS,
    **rope.OPS,
    **shape.OPS,
}

__all__ = ["OPS", "OpFunction"]
