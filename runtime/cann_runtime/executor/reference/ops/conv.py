"""Convolutions, accumulated in float32 with one rounding. Source: REG_OP Conv2D, Conv3D; ops-nn conv (README)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {}


def _conv(call: Call, dims: int, data_format: str) -> Tensor:
    """strides and dilations speak of all dimensions of the format; pads: before and after, per space dimension."""
    call.text("data_format", (data_format,))
    strides, dilations, pads = call.integers("strides"), call.integers("dilations"), call.integers("pads")
    if strides[:2] != (1, 1) or dilations[:2] != (1, 1) or len(pads) != 2 * dims:
        call.refuse(f"strides {strides}, dilations {dilations} and pads {pads} do not fit {data_format}")
    flat = [pad for dim in reversed(range(dims)) for pad in pads[2 * dim : 2 * dim + 2]]
    x, bias = functional.pad(call.wide(call["x"]), flat), call.get("bias")
    function = functional.conv2d if dims == 2 else functional.conv3d
    y = function(
        x,
        call.wide(call["filter"]),
        None if bias is None else call.wide(bias),
        strides[2:],
        0,
        dilations[2:],
        call.integer("groups"),
    )
    return y.to(call["x"].dtype)


@implements(OPS, "Conv2D")
def conv2d(call: Call) -> Tensor:
    """NCHW, pads top, bottom, left, right."""
    return _conv(call, 2, "NCHW")


@implements(OPS, "Conv3D")
def conv3d(call: Call) -> Tensor:
    """NCDHW, pads front, back, top, bottom, left, right."""
    return _conv(call, 3, "NCDHW")
