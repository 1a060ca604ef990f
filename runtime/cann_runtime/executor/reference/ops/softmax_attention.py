"""Attention of one sequence: which keys a query sees, and the weighted sum, with the roundings of the fused kernels.

Layouts and lengths of the fused ops are in `attention.py`.
Letters: Q queries, K keys, N query heads, G key heads, D head size of keys, E of values.
Source: op-plugin npu_fused_infer_attention_score; ops-transformer fused_infer_attention_score.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from cann_runtime.executor.reference.call import Call

PATTERN_SIZE = 2048
"""Sparse modes 2, 3 and 4 take a mask of this size; it only confirms the pattern."""

UNBOUNDED = 2147483647


@dataclass(frozen=True)
class Sparsity:
    """Which keys are masked beside what a mask tensor says.

    mode 0: the band from `before` to `after` keys around the query, where a mask is given; 1: the mask alone; 2: causal
    from the upper left; 3: causal from the lower right; 4: the band from the lower right.
    """

    mode: int
    before: int = UNBOUNDED
    after: int = UNBOUNDED

    def masked(self, queries: int, keys: int, mask_QK: Tensor | None) -> Tensor | None:
        """bool [Q, K], or [N, Q, K] as the mask is; None where every query sees every key."""
        i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
        corner = keys - queries
        if self.mode == 2:
            return j > i
        if self.mode == 3:
            return j > i + corner
        if self.mode == 4:
            return (j > i + corner + self.after) | (j < i + corner - self.before)
        if mask_QK is None:
            return None
        masked = mask_QK != 0
        if self.mode == 0:
            masked = masked | (j > i + self.after) | (j < i - self.before)
        return masked


@functools.cache
def _triangle() -> Tensor:
    return torch.ones(PATTERN_SIZE, PATTERN_SIZE, dtype=torch.bool).triu(1)


def check_pattern(call: Call, mask: Tensor | None, mode: int) -> None:
    """Sparse modes 2, 3 and 4 need the 2048 x 2048 upper triangle of ones as bool, int8 or uint8."""
    if mask is None:
        call.refuse(f"sparse_mode {mode} needs an atten_mask of {PATTERN_SIZE} x {PATTERN_SIZE}")
    if mask.dtype not in (torch.bool, torch.int8, torch.uint8):
        call.refuse(f"atten_mask is {mask.dtype}; allowed: bool, int8, uint8")
    if list(mask.shape[-2:]) != [PATTERN_SIZE] * 2 or mask.numel() != PATTERN_SIZE**2:
        call.refuse(
            f"sparse_mode {mode} needs an atten_mask of {PATTERN_SIZE} x {PATTERN_SIZE}, not {list(mask.shape)}"
        )
    if not torch.equal(mask.view(PATTERN_SIZE, PATTERN_SIZE).bool(), _triangle()):
        call.refuse(f"sparse_mode {mode} needs an atten_mask of ones above the diagonal")


def attend(
    call: Call,
    q_QND: Tensor,
    k_KGD: Tensor,
    v_KGE: Tensor,
    *,
    scale: float,
    masked: Tensor | None,
    bias_NQK: Tensor | None = None,
    sink_N: Tensor | None = None,
    extra: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(softmax(q k^T * scale + bias) v [Q, N, E] in q's dtype, log of the softmax's denominator [Q, N] float32).

    Query head n reads key head n * G // N. extra: (q [Q, N, R], k [K, G, R]) whose product is added to q k^T (the
    rotary part of latent attention). sink: exp(sink) joins the denominator. A query that sees no key gives 0. Scores
    and softmax are float32; the unnormalised weights are rounded to q's dtype before they meet v; the quotient is
    rounded once.
    """
    heads, key_heads = q_QND.shape[1], k_KGD.shape[1]
    scores_NQK = _scores(call, q_QND, k_KGD)
    if extra is not None:
        scores_NQK = scores_NQK + _scores(call, *extra)
    scores_NQK = scores_NQK * scale
    if bias_NQK is not None:
        scores_NQK = scores_NQK + call.wide(bias_NQK)
    if masked is not None:
        scores_NQK = scores_NQK.masked_fill(masked, -torch.inf)
    top_NQ1 = (
        scores_NQK.amax(-1, keepdim=True) if k_KGD.shape[0] else scores_NQK.new_full((heads, len(q_QND), 1), -torch.inf)
    )
    if sink_N is not None:
        top_NQ1 = torch.maximum(top_NQ1, call.wide(sink_N).view(-1, 1, 1))
    finite_NQ1 = torch.where(top_NQ1 == -torch.inf, 0, top_NQ1)
    weights_NQK = torch.exp(scores_NQK - finite_NQ1)
    total_NQ1 = weights_NQK.sum(-1, keepdim=True)
    if sink_N is not None:
        total_NQ1 = total_NQ1 + torch.exp(call.wide(sink_N).view(-1, 1, 1) - finite_NQ1)
    rounded = call.wide(weights_NQK.to(q_QND.dtype))
    grouped = rounded.view(key_heads, heads // key_heads * len(q_QND), len(k_KGD))  # [G, N / G * Q, K]
    sums_NQE = (grouped @ call.wide(v_KGE).transpose(0, 1)).view(heads, len(q_QND), v_KGE.shape[-1])
    out_NQE = sums_NQE / torch.where(total_NQ1 > 0, total_NQ1, 1)
    lse_QN = (finite_NQ1 + total_NQ1.log()).squeeze(-1).t()
    return out_NQE.transpose(0, 1).to(q_QND.dtype), lse_QN


def _scores(call: Call, q_QND: Tensor, k_KGD: Tensor) -> Tensor:
    queries, heads, width = q_QND.shape
    key_heads = k_KGD.shape[1]
    q_GMD = call.wide(q_QND).transpose(0, 1).reshape(key_heads, -1, width)
    return (q_GMD @ call.wide(k_KGD).permute(1, 2, 0)).view(heads, queries, len(k_KGD))
