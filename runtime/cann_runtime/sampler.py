"""Chooses the next token of each sequence from its logits: greedy, or temperature, top-k and top-p with its own seed.

A request's choice depends on its own logits, parameters and random generator only, never on its neighbours in the
batch: cut-offs are found by value (not by rank in a sort, which may order ties either way), and each request draws one
uniform number a token from its own generator. Stopping is the engine's work.

Shape letters: R rows, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cann_runtime.request import SamplingParams

# Rows are sorted this far first: nearly always enough for top-p, and far cheaper than sorting a whole vocabulary.
_CANDIDATES = 1024


def sample(
    logits_RV: Tensor, vocab_size: int, params: Sequence[SamplingParams], generators: Sequence[torch.Generator]
) -> list[int]:
    """The chosen token of each row; logits in any float dtype, columns from `vocab_size` on are padding."""
    logits_RV = logits_RV[: len(params), :vocab_size]
    # Both give the first of equal values, but argmax is several times slower than max in bfloat16.
    tokens: list[int] = logits_RV.max(-1).indices.tolist()
    random = [i for i, p in enumerate(params) if not p.greedy]
    if random:
        probs = token_probs(logits_RV[random].float(), [params[i] for i in random])
        uniform = [float(torch.rand((), generator=generators[i], dtype=torch.float64)) for i in random]
        for i, token in zip(random, _draw(probs, uniform)):
            tokens[i] = token
    return tokens


def token_probs(logits_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities [R, V] float32 after temperature, top-k and top-p, in this order, as transformers' warpers do.

    Up to a factor a row: after top-p the rest is not scaled up to 1 again. Tokens that tie with the last one kept are
    kept too. All temperatures must be above 0.
    """
    logits_RV = logits_RV / torch.tensor([[max(p.temperature, 1e-5)] for p in params])
    vocab = logits_RV.shape[1]

    top_k = [min(p.top_k, vocab) for p in params]
    if any(top_k):
        values_RK = logits_RV.topk(max(top_k), -1).values
        last_R1 = torch.tensor([[max(k - 1, 0)] for k in top_k])
        off_R1 = torch.tensor([[k == 0] for k in top_k])
        floor_R1 = values_RK.gather(1, last_R1).masked_fill(off_R1, float("-inf"))
        logits_RV = logits_RV.masked_fill(logits_RV < floor_R1, float("-inf"))

    probs_RV = logits_RV.softmax(-1)
    if any(p.top_p < 1 for p in params):
        floor_R1 = _top_p_floor(probs_RV, params)
        probs_RV = probs_RV.masked_fill(probs_RV < floor_R1, 0.0)
    return probs_RV


def _top_p_floor(probs_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Per row the smallest probability of the smallest set of most likely tokens whose sum reaches top_p: [R, 1]."""
    top_p_R1 = torch.tensor([[p.top_p if p.top_p < 1 else 0.0] for p in params], dtype=torch.float64)
    values_RK = probs_RV.topk(min(_CANDIDATES, probs_RV.shape[1]), -1).values
    sums_RK = values_RK.cumsum(-1, dtype=torch.float64)
    if bool((sums_RK[:, -1:] < top_p_R1).any()):
        # numpy sorts values several times faster than torch.
        values_RK = torch.from_numpy(np.sort(probs_RV.numpy(), axis=-1)).flip(-1)
        sums_RK = values_RK.cumsum(-1, dtype=torch.float64)
    # The first token whose running sum reaches top_p is the last one kept.
    last_R1 = torch.searchsorted(sums_RK, top_p_R1).clamp(max=values_RK.shape[1] - 1)
    off_R1 = torch.tensor([[p.top_p == 1] for p in params])
    return values_RK.gather(1, last_R1).masked_fill(off_R1, 0.0)


def _draw(probs_RV: Tensor, uniform: list[float]) -> list[int]:
    """Invert each row's cumulative distribution at its uniform number in [0, 1)."""
    sums_RV = probs_RV.cumsum(-1, dtype=torch.float64)
    total_R1 = sums_RV[:, -1:]
    target_R1 = torch.tensor(uniform, dtype=torch.float64).unsqueeze(1) * total_R1
    # Rounding must not reach the total: the first sum above the target then belongs to a token that can be chosen.
    target_R1 = torch.minimum(target_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    tokens: list[int] = torch.searchsorted(sums_RV, target_R1, right=True).squeeze(1).tolist()
    return tokens
