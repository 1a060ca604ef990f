"""The loss of a model on a text: how well each token was foreseen from those before it (teacher forcing).

This is how artifacts of one model are compared (bfloat16 with float32, quantized with not): the same text, the same
windows, the numbers that `cann-run` really computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cann_runtime.engine import Engine
from cann_runtime.request import Request, SamplingParams
from cann_runtime.scheduler import Batch


@torch.inference_mode()
def token_losses(engine: Engine, tokens: Sequence[int]) -> list[float]:
    """-log p(token | tokens before it) in nats, for every token but the first of each window of the longest sequence.

    A graph that can give logits for every row takes whole chunks; others go token by token, with the same numbers.
    """
    window = engine.kv.max_tokens
    losses: list[float] = []
    for start in range(0, len(tokens) - 1, window):
        losses += _window_losses(engine, list(tokens[start : start + window]))
    return losses


def _window_losses(engine: Engine, tokens: list[int]) -> list[float]:
    graph = max(engine.buckets.graphs, key=lambda g: g.bucket.tokens)
    chunk = graph.bucket.tokens if graph.dynamic and graph.bucket.rows >= graph.bucket.tokens else 1
    request = Request(-1, tokens, SamplingParams(), len(tokens))
    request.row = engine.kv.open(len(tokens))
    assert request.row is not None, "the engine is idle, so a window of its longest sequence fits"
    losses: list[float] = []
    try:
        for start in range(0, len(tokens) - 1, chunk):
            batch = Batch()
            batch.add(request, min(chunk, len(tokens) - start))
            logits_RV = engine.execute(batch, [0], all_rows=chunk > 1)[: batch.tokens, : engine.manifest.vocab_size]
            request.num_computed += batch.tokens
            targets = torch.tensor(tokens[start + 1 : start + 1 + batch.tokens])
            rows = logits_RV[: len(targets)].float()
            losses += torch.nn.functional.cross_entropy(rows, targets, reduction="none").tolist()
    finally:
        engine.kv.close(request.row)
    return losses
