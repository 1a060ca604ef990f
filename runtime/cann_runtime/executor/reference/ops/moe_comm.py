"""Tokens to the ranks of their experts and back, as one op each way.

Letters: T tokens of this rank, K experts of a token, E experts of a rank, R ranks, A rows that a rank can receive, H
hidden. Source: op-plugin npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2; ops-transformer mc2.
Shared-expert ranks, tensor parallelism inside the op and special experts are not supported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.quant import int8_rows
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {}

_TRIPLE = 3  # a row of assist information: source rank, token, k


def _experts_per_rank(call: Call) -> int:
    """Check the attributes that both ops share."""
    ranks = call.integer("ep_world_size")
    group = call.text("group_ep")
    if call.comm.size(group) != ranks or call.comm.rank(group) != call.integer("ep_rank_id"):
        call.refuse(f"is rank {call.integer('ep_rank_id')} of {ranks}, the group {group} says otherwise")
    if call.integer("tp_world_size") > 1 or call.integer("shared_expert_rank_num"):
        call.refuse("tensor parallelism inside the op and ranks of shared experts are not supported")
    call.ignore("group_tp", "tp_world_size", "tp_rank_id", "shared_expert_num", "expert_shard_type", "global_bs")
    if call.integer("moe_expert_num") % ranks:
        call.refuse(f"{call.integer('moe_expert_num')} experts on {ranks} ranks")
    return call.integer("moe_expert_num") // ranks


@implements(OPS, "MoeDistributeDispatchV2")
def moe_distribute_dispatch_v2(call: Call) -> tuple[Tensor, ...]:
    """(rows [A, H], scales [A], assist, tokens per expert [E], received counts [E * R], -, -).

    Received rows are ordered by local expert, then source rank, then token; what lies beyond them is undefined.
    quant_mode 2: int8 per row. expert_token_nums_type 0: cumulative, 1: counts. Received counts are cumulative over
    (expert, rank). assist is for MoeDistributeCombineV2 only. Tokens whose x_active_mask is false are not sent.
    """
    x_TH, experts_TK = call["x"], call["expert_ids"].long()
    per_rank, ranks, group = _experts_per_rank(call), call.integer("ep_world_size"), call.text("group_ep")
    tokens, k = experts_TK.shape
    mode = call.choice("quant_mode", (0, 2))
    call.ignore("y_dtype", "expert_scales")
    active = call.get("x_active_mask")
    flat = experts_TK.reshape(-1)
    if active is not None:
        flat = torch.where(active.reshape(-1, 1).expand(-1, k).reshape(-1), flat, -1)
    order = torch.sort(flat, stable=True)[1]
    order = order[flat[order] >= 0]
    rows, scales = x_TH[order // k], torch.zeros(len(order), dtype=call.precision.compute)
    if mode == 2:
        smooth = call.get("scales")
        rows, scales = int8_rows(call, rows if smooth is None else call.wide(rows) * call.wide(smooth)[flat[order]])
    mine = torch.full_like(order, call.comm.rank(group))
    labels = torch.stack((flat[order], mine, order // k, order % k), 1)
    cuts = torch.bincount(flat[order] // per_rank, minlength=ranks).tolist()
    received = [torch.cat(call.comm.exchange(torch.split(tensor, cuts), group)) for tensor in (rows, scales, labels)]
    rows, scales, labels = received
    local = labels[:, 0] - call.comm.rank(group) * per_rank
    order = torch.sort(local, stable=True)[1]
    counts = torch.bincount(local * ranks + labels[:, 1], minlength=per_rank * ranks)
    per_expert = counts.view(per_rank, ranks).sum(1)
    if call.choice("expert_token_nums_type", (0, 1)) == 0:
        per_expert = per_expert.cumsum(0)

    capacity = (call.integer("global_bs") or tokens * ranks) * min(per_rank, k)
    expanded = call.undefined([capacity, rows.shape[1]], rows.dtype)
    expanded[: len(order)] = rows[order]
    moved = call.undefined([capacity], scales.dtype)
    if mode == 2:
        moved[: len(order)] = scales[order]
    assist = call.undefined([max(tokens * k, capacity * 128)], torch.int32)
    assist[: _TRIPLE * len(order)] = labels[order, 1:].reshape(-1).int()
    nothing = call.undefined([0], torch.int32), call.undefined([0], call.precision.compute)
    return expanded, moved, assist, per_expert, counts.cumsum(0).int(), *nothing


@implements(OPS, "MoeDistributeCombineV2")
def moe_distribute_combine_v2(call: Call) -> Tensor:
    """[T, H]: sum over k of expert_scales[t, k] * the row of token t's k-th expert, in float32, + shared_expert_x.

    Rows go back the way that MoeDistributeDispatchV2's assist information says. Tokens not sent are undefined.
    """
    rows, experts_TK, scales_TK = call["expand_x"], call["expert_ids"], call["expert_scales"]
    _experts_per_rank(call)
    call.choice("comm_quant_mode", (0,))
    call.ignore("out_dtype", "group_list_type", "tp_send_counts", "expand_scales")
    ranks, group = call.integer("ep_world_size"), call.text("group_ep")
    total = int(call["ep_send_counts"][-1])
    labels = call["assist_info_for_combine"][: _TRIPLE * total].view(total, _TRIPLE).long()
    order = torch.sort(labels[:, 0], stable=True)[1]
    cuts = torch.bincount(labels[:, 0], minlength=ranks).tolist()
    back = torch.cat(call.comm.exchange(torch.split(rows[:total][order], cuts), group))
    places = torch.cat(call.comm.exchange(torch.split(labels[order, 1:], cuts), group))
    tokens, k = experts_TK.shape
    gathered = call.undefined([tokens, k, rows.shape[1]], call.precision.compute)
    gathered[places[:, 0], places[:, 1]] = call.wide(back)
    active = call.get("x_active_mask")
    sent = torch.zeros(tokens, k, dtype=torch.bool)
    sent[places[:, 0], places[:, 1]] = True
    wanted = torch.ones(tokens, dtype=torch.bool) if active is None else active.reshape(-1).bool()
    if not bool(sent[wanted].all()):
        call.refuse("rows of some tokens did not come back: expert_ids differ from those of the dispatch")
    total_TH = (gathered * call.wide(scales_TK).unsqueeze(-1)).sum(1)
    shared = call.get("shared_expert_x")
    if shared is not None:
        total_TH = total_TH + call.wide(shared).view_as(total_TH)
    return total_TH.to(rows.dtype)
