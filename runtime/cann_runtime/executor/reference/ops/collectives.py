"""Collective communication. Sums are taken in float32 over the ranks in order, with one rounding, alike on every rank.

Documents leave the order of a device's sum open. Source: REG_OP of Hcom*; op-plugin npu_mm_all_reduce_base.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.elementwise import widened
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {}

_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def _reduce(call: Call, tensors: list[Tensor], how: str) -> Tensor:
    if how not in _REDUCTIONS:
        call.refuse(f"attribute reduction is {how!r}; supported: {', '.join(_REDUCTIONS)}")
    total = widened(tensors[0])
    for tensor in tensors[1:]:
        total = _REDUCTIONS[how](total, widened(tensor))
    return total.to(tensors[0].dtype, copy=True)


def all_reduce(call: Call, x: Tensor, how: str) -> Tensor:
    """The ranks' x reduced, the same on all of them."""
    return _reduce(call, call.comm.gather(x, call.text("group")), how)


@implements(OPS, "HcomAllReduce")
def hcom_all_reduce(call: Call) -> Tensor:
    """x of all ranks reduced by sum, prod, max or min."""
    return all_reduce(call, call["x"], call.text("reduction"))


@implements(OPS, "HcomAllGather")
def hcom_all_gather(call: Call) -> Tensor:
    """The ranks' x along dimension 0, in rank order."""
    _check_size(call)
    return torch.cat(call.comm.gather(call["x"], call.text("group")))


@implements(OPS, "HcomReduceScatter")
def hcom_reduce_scatter(call: Call) -> Tensor:
    """x of all ranks reduced, of which each rank keeps its part of dimension 0."""
    size, group = _check_size(call), call.text("group")
    if call["x"].shape[0] % size:
        call.refuse(f"cuts {call['x'].shape[0]} rows into {size} parts")
    received = call.comm.exchange(call["x"].chunk(size), group)
    return _reduce(call, received, call.text("reduction"))


@implements(OPS, "HcomAllToAll")
def hcom_all_to_all(call: Call) -> Tensor:
    """Equal parts of dimension 0: part i goes to rank i, received parts stand in rank order."""
    group = call.text("group")
    size = call.comm.size(group)
    if call["x"].shape[0] % size:
        call.refuse(f"cuts {call['x'].shape[0]} rows into {size} parts")
    return torch.cat(call.comm.exchange(call["x"].chunk(size), group))


@implements(OPS, "HcomAllToAllV")
def hcom_all_to_all_v(call: Call) -> Tensor:
    """send_counts[i] elements from send_displacements[i] on go to rank i; what comes from rank i lands at
    recv_displacements[i]. Counts are elements of the flattened data; the result has one dimension."""
    group, data = call.text("group"), call["send_data"].reshape(-1)
    size = call.comm.size(group)
    sends = list(zip(call.values("send_counts"), call.values("send_displacements")))
    takes = list(zip(call.values("recv_counts"), call.values("recv_displacements")))
    if len(sends) != size or len(takes) != size:
        call.refuse(f"counts for {len(sends)} ranks in a group of {size}")
    received = call.comm.exchange([data.narrow(0, start, count) for count, start in sends], group)
    result = call.undefined([max((start + count for count, start in takes), default=0)], data.dtype)
    for piece, (count, start) in zip(received, takes):
        if len(piece) != count:
            call.refuse(f"expects {count} elements from a rank that sends {len(piece)}")
        result.narrow(0, start, count).copy_(piece)
    return result


@implements(OPS, "HcomBroadcast")
def hcom_broadcast(call: Call) -> tuple[Tensor, ...]:
    """root_rank's x on every rank."""
    root, group = call.integer("root_rank"), call.text("group")
    return tuple(call.comm.gather(x, group)[root] for x in call.many("x"))


def _check_size(call: Call) -> int:
    size = call.comm.size(call.text("group"))
    if call.integer("rank_size") != size:
        call.refuse(f"rank_size is {call.integer('rank_size')} in a group of {size}")
    return size
