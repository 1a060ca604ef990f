"""Reading and writing elements by index. Indices outside a dimension are an error, as no document gives them a meaning.

Source: REG_OP; op-plugin (npu_scatter_update, npu_scatter_nd_update) for the ops that write in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {}


def _take(call: Call, axis: int, batch_dims: int) -> Tensor:
    """x's slices along axis at the indices, whose shape takes the axis' place after batch_dims shared dimensions."""
    x, indices = call["x"], call["indices"].long()
    axis %= x.dim()
    if batch_dims:
        call.refuse(f"batch_dims = {batch_dims} is not supported")
    if call.flag("negative_index_support"):
        indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    taken = x.index_select(axis, indices.reshape(-1))
    return taken.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


@implements(OPS, "GatherV2")
def gather_v2(call: Call) -> Tensor:
    """Slices of x along axis (an input) at the indices; an index of rank 0 takes the dimension away (REG_OP)."""
    return _take(call, call.value("axis"), call.integer("batch_dims"))


@implements(OPS, "Gather")
def gather(call: Call) -> Tensor:
    """Slices of x along its first dimension at the indices (REG_OP)."""
    return _take(call, 0, call.integer("batch_dims"))


@implements(OPS, "GatherElements")
def gather_elements(call: Call) -> Tensor:
    """torch.gather along dim (REG_OP)."""
    return torch.gather(call["x"], call.integer("dim"), call["index"].long())


@implements(OPS, "GatherNd")
def gather_nd(call: Call) -> Tensor:
    """Slices of x at coordinates, which are the last dimension of the indices (REG_OP, as TensorFlow's)."""
    coordinates = call["indices"].long()
    if not call.flag("negative_index_support") and bool((coordinates < 0).any()):
        call.refuse("negative indices")
    return call["x"][tuple(coordinates.unbind(-1))]


@implements(OPS, "IndexByTensor")
def index_by_tensor(call: Call) -> Tensor:
    """x[...] with a tensor in each dimension whose bit in indices_mask is 1, ':' in the others, as torch (REG_OP)."""
    mask, indices = call.integers("indices_mask"), call.many("indices")
    if sum(mask) != len(indices):
        call.refuse(f"{len(indices)} indices for the mask {list(mask)}")
    given = iter(indices)
    return call["x"][tuple(next(given) if bit else slice(None) for bit in mask)]


@implements(OPS, "ScatterElements")
def scatter_elements(call: Call) -> Tensor:
    """torch.scatter of updates along axis into a copy of data; reduction none, add or mul (REG_OP)."""
    data, axis, indices, updates = call["data"].clone(), call.integer("axis"), call["indices"].long(), call["updates"]
    reduction = call.text("reduction", ("none", "add", "mul"))
    if reduction == "none":
        return data.scatter_(axis, indices, updates)
    if reduction == "add":
        return data.scatter_add_(axis, indices, updates)
    return data.scatter_reduce_(axis, indices, updates, "prod")


@implements(OPS, "ScatterNdUpdate")
def scatter_nd_update(call: Call) -> Tensor:
    """var[indices[i]] = updates[i], coordinates in the indices' last dimension; in place (op-plugin)."""
    var = call["var"]
    var[tuple(call["indices"].long().unbind(-1))] = call["updates"]
    return var


@implements(OPS, "ScatterUpdate")
def scatter_update(call: Call) -> Tensor:
    """var[indices[i]] = updates[i], rows; in place (REG_OP)."""
    var = call["var"]
    var[call["indices"].long()] = call["updates"]
    return var


@implements(OPS, "Scatter")
def scatter(call: Call) -> Tensor:
    """updates[b] go to var[b] from position indices[b] on along axis; indices[b] may be (batch, position). In place
    (op-plugin npu_scatter_update)."""
    var, indices, updates = call["var"], call["indices"], call["updates"]
    call.text("reduce", ("update",))
    axis = call.integer("axis") % var.dim()
    if axis == 0:
        call.refuse("axis 0 is the batch")
    for row, place in enumerate(indices.tolist()):
        batch, start = place if isinstance(place, list) else (row, place)
        var[batch].narrow(axis - 1, start, updates.shape[axis]).copy_(updates[row])
    return var
