"""Rotary position embedding in the forms of the rotary ops.

half: element i is paired with i + D/2; interleave: 2i with 2i + 1. Formula: x * cos + rotate(x) * sin.
Rounding: bfloat16 in float32 with one rounding; float16 and float32 natively, step by step.
Source: op-plugin (npu_rotary_mul, npu_apply_rotary_pos_emb, npu_interleave_rope), ops-transformer posembedding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {}


def rotate_half(x: Tensor) -> Tensor:
    """(-second half, first half) of the last dimension."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate_interleaved(x: Tensor) -> Tensor:
    """(-x1, x0, -x3, x2 ...) along the last dimension."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((-odd, even), -1).flatten(-2)


def deinterleave(x: Tensor) -> Tensor:
    """Even elements, then odd ones, of the last dimension."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)


def rotary(call: Call, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x * cos + rotate(x) * sin in x's dtype."""
    if x.shape[-1] != cos.shape[-1]:
        call.refuse(f"rotates {x.shape[-1]} elements with a table of {cos.shape[-1]}")
    rotate = rotate_interleaved if interleaved else rotate_half
    if x.dtype == torch.float16:
        return x * cos + rotate(x) * sin
    wide = call.wide(x)
    return (wide * call.wide(cos) + rotate(wide) * call.wide(sin)).to(x.dtype)


@implements(OPS, "RotaryMul")
def rotary_mul(call: Call) -> Tensor:
    """Half rotation with r1 = cos, r2 = sin, broadcast; the op has no other mode."""
    return rotary(call, call["x"], call["r1"], call["r2"])


@implements(OPS, "RotaryPositionEmbedding")
def rotary_position_embedding(call: Call) -> Tensor:
    """mode 0 half, 1 interleave; modes 2 (quarter) and 3 (interleave-half) are not supported.

    `rotate` is the matrix that makes the interleaved rotation a product; here the rotation is done as it is.
    """
    mode = call.choice("mode", (0, 1))
    matrix = call.get("rotate")
    if matrix is not None and not torch.equal(
        call.wide(matrix), rotate_interleaved(torch.eye(len(matrix)).to(call.precision.compute))
    ):
        call.refuse("input rotate is not the matrix of the interleaved rotation")
    return rotary(call, call["x"], call["cos"], call["sin"], interleaved=mode == 1)


@implements(OPS, "ApplyRotaryPosEmb")
def apply_rotary_pos_emb(call: Call) -> tuple[Tensor, Tensor]:
    """Rotate query and key in place. layout 1 BSND, 2 SBND, 3 BNSD, 4 TND: cos and sin have size 1 for the heads."""
    layout = call.choice("layout", (1, 2, 3, 4))
    mode = call.text("rotary_mode", ("half", "interleave"))
    query, key, cos, sin = call["query"], call["key"], call["cos"], call["sin"]
    rank, heads = {1: (4, 2), 2: (4, 2), 3: (4, 1), 4: (3, 1)}[layout]
    for name, x in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
        if x.dim() != rank or (name in ("cos", "sin") and x.shape[heads] != 1):
            call.refuse(f"layout {layout} takes {rank} dimensions, one head of cos and sin; {name} is {list(x.shape)}")
    for x in (query, key):
        x.copy_(rotary(call, x, cos, sin, interleaved=mode == "interleave"))
    return query, key


@implements(OPS, "InterleaveRope")
def interleave_rope(call: Call) -> Tensor:
    """De-interleave x [B, N, S, 64], then rotate halves; the result stays so. cos, sin [B, 1, S or 1, 64]."""
    return rotary(call, deinterleave(call["x"]), call["cos"], call["sin"])
