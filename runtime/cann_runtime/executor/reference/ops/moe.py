"""Routing of tokens to experts on one rank: gating, ordering by expert, and putting the results back.

Letters: N tokens, K experts of a token, E experts, H hidden. Flat place n * K + k is token n's k-th expert.
Source: op-plugin npu_moe_gating_top_k, npu_moe_gating_top_k_softmax, npu_moe_init_routing(_v2),
npu_moe_finalize_routing, npu_moe_compute_expert_tokens, npu_moe_re_routing; ops-transformer moe (kernels per op).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.quant import int8_rows, saturate
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {}

_NOWHERE = 1 << 40  # sorts after every expert


def _best(x_NE: Tensor, k: int) -> Tensor:
    """Places of the k largest of each row, in order; of equal ones the lowest comes first."""
    return torch.sort(x_NE, dim=-1, descending=True, stable=True)[1][:, :k]


@implements(OPS, "MoeGatingTopK")
def moe_gating_top_k(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(weights [N, K], experts int32 [N, K], scores [N, E]).

    Scores: softmax (norm_type 0) or sigmoid (1) of x, in float32. bias counts for the choice only. Of group_count
    groups the k_group best are eligible, by their largest score (group_select_mode 0) or the sum of their two largest
    (1).
    Weights are the unbiased scores, divided by their sum + eps with sigmoid or renorm 1, times routed_scaling_factor.
    """
    x, bias, k = call.wide(call["x"]), call.get("bias"), call.integer("k")
    scores = torch.sigmoid(x) if call.choice("norm_type", (0, 1)) else torch.softmax(x, -1)
    chosen = scores if bias is None else scores + call.wide(bias)
    groups, kept = call.integer("group_count"), call.integer("k_group")
    mode = call.choice("group_select_mode", (0, 1))
    if groups > 1:
        by_group = chosen.view(len(x), groups, -1)
        value = by_group.amax(-1) if mode == 0 else by_group.topk(2, -1).values.sum(-1)
        eligible = torch.zeros_like(value, dtype=torch.bool).scatter_(1, _best(value, kept), True)
        chosen = by_group.masked_fill(~eligible.unsqueeze(-1), -torch.inf).view(chosen.shape)
    experts = _best(chosen, k)
    weights = scores.gather(1, experts)
    renormed = call.choice("renorm", (0, 1)) == 1 or call.integer("norm_type") == 1
    epsilon = call.number("eps")
    if renormed:
        weights = weights / (weights.sum(-1, keepdim=True) + epsilon)
    weights = weights * call.number("routed_scaling_factor")
    out = scores if call.flag("out_flag") else call.undefined([0], scores.dtype)
    return weights.to(call["x"].dtype), experts.int(), out


@implements(OPS, "MoeGatingTopKSoftmax")
def moe_gating_top_k_softmax(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, experts int32, rows int32), each [N, K]: the k largest of the softmax, as they are.

    rows[n, k] = k * N + n. A finished token gets the number of experts as its expert.
    """
    x, finished = call.wide(call["x"]), call.get("finished")
    k = call.integer("k")
    scores = torch.softmax(x, -1)
    experts = _best(scores, k)
    weights = scores.gather(1, experts)
    if finished is not None:
        experts = torch.where(finished.reshape(-1, 1).bool(), x.shape[-1], experts)
    rows = torch.arange(k)[None, :] * len(x) + torch.arange(len(x))[:, None]
    return weights.to(call["x"].dtype), experts.int(), rows.int()


@implements(OPS, "MoeInitRouting")
def moe_init_routing(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens by expert, where each k-major row went, its experts): a stable sort by expert of the flat rows.

    row_idx [N, K] holds k-major rows k * N + n, of which token n is row % N; active_num tokens' rows are kept.
    """
    x, rows, experts = call["x"], call["row_idx"].reshape(-1).long(), call["expert_idx"].reshape(-1)
    order = torch.sort(experts, stable=True)[1]
    active = min(call.integer("active_num"), len(x)) * (len(rows) // len(x))
    by_expert = rows[order]
    places = torch.empty(len(rows), dtype=torch.int32)
    places[by_expert] = torch.arange(len(rows), dtype=torch.int32)
    return x[by_expert[:active] % len(x)], places, experts[order]


@implements(OPS, "MoeComputeExpertTokens")
def moe_compute_expert_tokens(call: Call) -> Tensor:
    """int32 [E]: how many rows experts 0 to e have, of sorted expert numbers."""
    experts = torch.arange(call.integer("num_experts"))
    return torch.searchsorted(call["sorted_experts"].long().contiguous(), experts, right=True).int()


@implements(OPS, "MoeInitRoutingV3")
def moe_init_routing_v3(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows of x by expert, row map int32 [N * K], tokens per expert int64, scale per row), without dropping.

    Only experts in active_expert_range count; a stable sort of the flat places by expert gives the order, row = place
    // K; rows beyond them are undefined. row_idx_type 0: each place's row, -1 where it has none; 1: each row's place.
    expert_tokens_num_type 0: cumulative, 1: counts, 2: pairs (expert, count) of the experts that have rows. quant_mode
    -1: scale [N] goes along with its token; 0: rint(x * scale + offset); 1: int8 per row of x * scale[expert].
    """
    x, experts = call["x"], call["expert_idx"].long()
    k, flat = experts.shape[1], experts.reshape(-1)
    call.choice("drop_pad_mode", (0,))
    call.ignore("expert_capacity")
    span = call.integers("active_expert_range") or (0, call.integer("expert_num"))
    call.ignore("expert_num")
    if call.integer("active_num") not in (-1, 0, len(flat)):
        call.refuse(f"active_num is {call.integer('active_num')}, not the {len(flat)} places")
    mine = (flat >= span[0]) & (flat < span[1])
    order = torch.sort(torch.where(mine, flat, _NOWHERE), stable=True)[1][: int(mine.sum())]
    expert = flat[order] - span[0]
    counts = torch.bincount(expert, minlength=span[1] - span[0])
    rows, scales = _quantised_rows(call, x[order // k], order // k, expert)

    places = torch.arange(len(order), dtype=torch.int32)
    if call.choice("row_idx_type", (0, 1)) == 0:
        row_map = torch.full((len(flat),), -1, dtype=torch.int32)
        row_map[order] = places
    else:
        row_map = call.undefined([len(flat)], torch.int32)
        row_map[: len(order)] = order.int()
    tail = len(flat) - len(order)
    rows = torch.cat((rows, call.undefined([tail, rows.shape[1]], rows.dtype)))
    if scales.numel():
        scales = torch.cat((scales, call.undefined([tail], scales.dtype)))
    return rows, row_map, _expert_tokens(call, counts, span[0]), scales


def _expert_tokens(call: Call, counts: Tensor, first: int) -> Tensor:
    kind = call.choice("expert_tokens_num_type", (0, 1, 2))
    if not call.flag("expert_tokens_num_flag"):
        return call.undefined(list(counts.shape), torch.int64)
    if kind == 2:
        used = counts.nonzero().flatten()
        pairs = torch.zeros(len(counts), 2, dtype=torch.int64)
        pairs[: len(used)] = torch.stack((used + first, counts[used]), 1)
        return pairs
    return counts.cumsum(0) if kind == 0 else counts


def _quantised_rows(call: Call, rows: Tensor, tokens: Tensor, expert: Tensor) -> tuple[Tensor, Tensor]:
    mode, scale = call.choice("quant_mode", (-1, 0, 1)), call.get("scale")
    if mode == -1:
        return rows, call.undefined([0], call.precision.compute) if scale is None else call.wide(scale)[tokens]
    if mode == 0:
        return saturate(
            call.wide(rows) * call.wide(call["scale"]) + call.wide(call["offset"]), torch.int8
        ), rows.new_empty(0)
    if scale is None:
        return int8_rows(call, rows)
    smooth = call.wide(scale)
    return int8_rows(call, call.wide(rows) * smooth[expert if len(smooth) > 1 else torch.zeros_like(expert)])


def _finalize(call: Call, rows_of: Tensor, experts: Tensor | None, k_major: bool) -> Tensor:
    """sum over k of scale[n, k] * (row + bias[expert]) + x1 + x2; a row of -1 counts as zero."""
    expanded, scales, bias = call["expanded_x"], call.get("scales"), call.get("bias")
    k = scales.shape[1] if scales is not None else experts.shape[1] if experts is not None else call.integer("k")
    wide = call.wide(expanded.reshape(-1, expanded.shape[-1]))
    count = rows_of.numel() // k
    rows_NK = (rows_of.view(k, count).t() if k_major else rows_of.view(count, k)).long()
    total = torch.zeros(count, wide.shape[-1], dtype=wide.dtype)
    for name in ("x1", "x2"):
        skip = call.get(name)
        if skip is not None:
            total = total + call.wide(skip)
    for j in range(k):
        rows = rows_NK[:, j]
        value = torch.where((rows >= 0)[:, None], wide[rows.clamp(min=0)], 0)
        if bias is not None:
            if experts is None:
                call.refuse("bias needs the experts")
            value = value + call.wide(bias)[experts[:, j].long()]
        total = total + (value if scales is None else value * call.wide(scales)[:, j : j + 1])
    return total.to(expanded.dtype)


@implements(OPS, "MoeFinalizeRoutingV2")
def moe_finalize_routing_v2(call: Call) -> Tensor:
    """[N, H]. drop_pad_mode 0, 1: expanded_row_idx is k-major (pairs with MoeInitRouting); 2, 3: flat places."""
    mode = call.choice("drop_pad_mode", (0, 1, 2, 3))
    call.ignore("k", "expert_idx")
    return _finalize(call, call["expanded_row_idx"], call.get("expert_idx"), k_major=mode < 2)


@implements(OPS, "MoeFinalizeRouting")
def moe_finalize_routing(call: Call) -> Tensor:
    """[N, H]; expanded_row_idx is k-major."""
    return _finalize(call, call["expanded_row_idx"], call["expanded_expert_idx"], k_major=True)


@implements(OPS, "MoeReRouting")
def moe_re_routing(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens, scales, source rows int32, tokens per expert): from rank-major to expert-major order.

    expert_token_num_per_rank [ranks, E] says how many rows each rank sent for each expert. idx_type 0: row i of the
    result came from row idx[i]; 1: row i went to idx[i]. expert_token_num_type 0: cumulative, 1: counts.
    """
    tokens, counts, scales = call["tokens"], call["expert_token_num_per_rank"].long(), call.get("per_token_scales")
    starts = torch.cat((counts.new_zeros(1), counts.reshape(-1).cumsum(0)[:-1])).view_as(counts)
    pieces = [
        torch.arange(int(start), int(start + count))
        for expert in range(counts.shape[1])
        for start, count in zip(starts[:, expert], counts[:, expert])
    ]
    source = torch.cat(pieces)
    tail = len(tokens) - len(source)
    order = torch.cat((tokens[source], call.undefined([tail, *tokens.shape[1:]], tokens.dtype)))
    moved = call.undefined([len(tokens)], call.precision.compute)
    if scales is not None:
        moved = torch.cat((scales[source], call.undefined([tail, *scales.shape[1:]], scales.dtype)))
    index = call.undefined([len(tokens)], torch.int32)
    if call.choice("idx_type", (0, 1)) == 0:
        index[: len(source)] = source.int()
    else:
        index[source] = torch.arange(len(source), dtype=torch.int32)
    per_expert = counts.sum(0)
    if call.choice("expert_token_num_type", (0, 1)) == 0:
        per_expert = per_expert.cumsum(0)
    return order, moved, index, per_expert.to(call["expert_token_num_per_rank"].dtype)
