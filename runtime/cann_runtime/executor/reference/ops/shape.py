"""Ops that move, repeat or make elements without computing.

Outputs may be views of inputs: where a later op writes into one, the program gives it memory of its own.
Source: REG_OP, whose ops are TensorFlow's of the same names; ops-math.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.dtypes import ge_dtype
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {
    "Identity": lambda call: call["x"],
    "TensorMove": lambda call: call["x"].clone(memory_format=torch.contiguous_format),
    "Transpose": lambda call: call["x"].permute(call.values("perm")),
    "ExpandDims": lambda call: call["x"].unsqueeze(call.value("axis")),
    "BroadcastTo": lambda call: call["x"].broadcast_to(call.values("shape")),
    "Expand": lambda call: call["x"].expand(call.values("shape")),  # -1 keeps a size
    "Tile": lambda call: call["x"].tile(call.values("multiples")),
    "ZerosLike": lambda call: torch.zeros_like(call["x"]),
    "OnesLike": lambda call: torch.ones_like(call["x"]),
    "ReverseV2": lambda call: call["x"].flip(call.values("axis")),
    "Tril": lambda call: torch.tril(call["x"], call.integer("diagonal")),
    "Triu": lambda call: torch.triu(call["x"], call.integer("diagonal")),
}

_OPEN = 2147483647  # a slice's end that means "to the end"


@implements(OPS, "Assign")
def assign(call: Call) -> Tensor:
    """Write value into ref; the output is ref (REG_OP)."""
    return call["ref"].copy_(call["value"])


@implements(OPS, "Reshape")
def reshape(call: Call) -> Tensor:
    """x with another shape, of which one size may be -1 (REG_OP)."""
    return call["x"].reshape(call.values("shape"))


@implements(OPS, "Unsqueeze")
def unsqueeze(call: Call) -> Tensor:
    """New dimensions of size 1 at `axes`, which are places in the output, added in order (REG_OP)."""
    x = call["x"]
    for axis in call.integers("axes"):
        x = x.unsqueeze(axis)
    return x


@implements(OPS, "Squeeze")
def squeeze(call: Call) -> Tensor:
    """Without the dimensions `axis`, which must have size 1; without all of size 1 where the list is empty (REG_OP)."""
    x, axes = call["x"], call.integers("axis")
    if not axes:
        return x.squeeze()
    if any(x.shape[axis] != 1 for axis in axes):
        call.refuse(f"squeezes axes {list(axes)} of {list(x.shape)}, not all of size 1")
    return x.squeeze(axes)


@implements(OPS, "FlattenV2")
def flatten(call: Call) -> Tensor:
    """Dimensions axis to end_axis as one (REG_OP)."""
    return call["x"].flatten(call.integer("axis"), call.integer("end_axis"))


@implements(OPS, "ConcatV2")
def concat(call: Call) -> Tensor:
    """All x along concat_dim, an input (REG_OP)."""
    return torch.cat(call.many("x"), call.value("concat_dim"))


@implements(OPS, "ConcatD")
def concat_d(call: Call) -> Tensor:
    """All x along concat_dim, an attribute (REG_OP)."""
    return torch.cat(call.many("x"), call.integer("concat_dim"))


@implements(OPS, "Pack")
def pack(call: Call) -> Tensor:
    """All x along a new dimension (REG_OP)."""
    return torch.stack(call.many("x"), call.integer("axis"))


@implements(OPS, "Unpack")
def unpack(call: Call) -> tuple[Tensor, ...]:
    """The slices of x along axis (REG_OP)."""
    return call["x"].unbind(call.integer("axis"))


@implements(OPS, "Split")
def split(call: Call) -> tuple[Tensor, ...]:
    """num_split equal parts along split_dim, an input (REG_OP)."""
    return _equal_parts(call, call.value("split_dim"))


@implements(OPS, "SplitD")
def split_d(call: Call) -> tuple[Tensor, ...]:
    """num_split equal parts along split_dim, an attribute (REG_OP)."""
    return _equal_parts(call, call.integer("split_dim"))


def _equal_parts(call: Call, dim: int) -> tuple[Tensor, ...]:
    size, parts = call["x"].shape[dim], call.integer("num_split")
    if size % parts:
        call.refuse(f"splits {size} into {parts} parts")
    return torch.split(call["x"], size // parts, dim)


@implements(OPS, "SplitV")
def split_v(call: Call) -> tuple[Tensor, ...]:
    """Parts of the sizes size_splits along split_dim; one size may be -1: what is left (REG_OP)."""
    x, sizes, dim = call["x"], call.values("size_splits"), call.value("split_dim")
    rest = x.shape[dim] - sum(size for size in sizes if size >= 0)
    return torch.split(x, [size if size >= 0 else rest for size in sizes], dim)


@implements(OPS, "StridedSliceV2")
def strided_slice_v2(call: Call) -> Tensor:
    """x[begin:end:strides] on the dimensions `axes`, all where it is not fed (REG_OP)."""
    x, begin, end = call["x"], call.values("begin"), call.values("end")
    axes = call.values("axes") if call.get("axes") is not None else list(range(len(begin)))
    strides = call.values("strides") if call.get("strides") is not None else [1] * len(begin)
    if any(call.integer(name) for name in ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask")):
        call.refuse("ellipsis_mask, new_axis_mask and shrink_axis_mask are not supported")
    for i, axis in enumerate(axes):
        low = None if call.integer("begin_mask") >> i & 1 else begin[i]
        high = None if call.integer("end_mask") >> i & 1 or end[i] >= _OPEN else end[i]
        x = _slice(x, axis, low, high, strides[i])
    return x


def _slice(x: Tensor, axis: int, low: int | None, high: int | None, step: int) -> Tensor:
    if step < 0:
        return x.index_select(axis, torch.tensor(range(x.shape[axis])[low:high:step], dtype=torch.int64))
    index = [slice(None)] * x.dim()
    index[axis] = slice(low, high, step)
    return x[tuple(index)]


@implements(OPS, "StridedSlice")
def strided_slice(call: Call) -> Tensor:
    """TensorFlow's strided slice: bit k of each mask speaks of the k-th entry of begin, end and strides (REG_OP)."""
    masks = {name: call.integer(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    index: list[slice | int | None] = []
    entries = zip(call.values("begin"), call.values("end"), call.values("strides"))
    for k, (begin, end, step) in enumerate(entries):
        if masks["ellipsis"] >> k & 1:
            call.refuse("ellipsis_mask is not supported")
        if masks["new_axis"] >> k & 1:
            index.append(None)
        elif masks["shrink_axis"] >> k & 1:
            index.append(begin)
        else:
            if step < 1:
                call.refuse(f"stride {step} is not supported")
            low, high = None if masks["begin"] >> k & 1 else begin, None if masks["end"] >> k & 1 else end
            index.append(slice(low, high, step))
    return call["x"][tuple(index)]


@implements(OPS, "Slice")
def slice_(call: Call) -> Tensor:
    """size elements from offsets on, in each dimension; size -1 is to the end (REG_OP)."""
    return _window(call, call.values("offsets"), call.values("size"))


@implements(OPS, "SliceD")
def slice_d(call: Call) -> Tensor:
    """As Slice, with attributes (REG_OP)."""
    return _window(call, list(call.integers("offsets")), list(call.integers("size")))


def _window(call: Call, offsets: list[int], sizes: list[int]) -> Tensor:
    x = call["x"]
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        x = x.narrow(dim, offset, x.shape[dim] - offset if size == -1 else size)
    return x


@implements(OPS, "Shape")
def shape(call: Call) -> Tensor:
    """x's sizes, in the integer type `dtype` (REG_OP)."""
    return torch.tensor(call["x"].shape, dtype=ge_dtype(call.integer("dtype"), call.source))


@implements(OPS, "Fill")
def fill(call: Call) -> Tensor:
    """A tensor of sizes dims, full of value (REG_OP)."""
    value = call["value"].reshape(())
    return value.expand(call.values("dims")).clone()


@implements(OPS, "Range")
def range_(call: Call) -> Tensor:
    """start, start + delta ... below limit, in the type that holds all three (REG_OP)."""
    bounds = [call[name].reshape(()) for name in ("start", "limit", "delta")]
    dtype = torch.promote_types(torch.promote_types(bounds[0].dtype, bounds[1].dtype), bounds[2].dtype)
    return torch.arange(*(bound.item() for bound in bounds), dtype=dtype)


@implements(OPS, "PadV3")
def pad(call: Call) -> Tensor:
    """x with paddings (before, after) per dimension from the first on; negative ones crop. mode constant, reflect or
    edge; constant_values is 0 where not fed (REG_OP)."""
    x, paddings = call["x"], call.values("paddings")
    if not call.flag("paddings_contiguous"):
        half = len(paddings) // 2
        paddings = [p for pair in zip(paddings[:half], paddings[half:]) for p in pair]
    pairs = [paddings[2 * dim : 2 * dim + 2] for dim in range(x.dim())]
    mode = call.text("mode", ("constant", "reflect", "edge"))
    value = call.get("constant_values")
    if mode == "constant":
        flat = [p for pair in reversed(pairs) for p in pair]
        return functional.pad(x, flat, value=0 if value is None else value.reshape(()).item())
    for dim, (before, after) in enumerate(pairs):
        size = x.shape[dim]
        places = torch.arange(-before, size + after)
        if mode == "edge":
            places = places.clamp(0, size - 1)
        else:
            if max(before, after) >= size:
                call.refuse(f"reflects {max(before, after)} of {size} elements")
            places = (size - 1) - ((size - 1) - places.abs()).abs()
        x = x.index_select(dim, places)
    return x
