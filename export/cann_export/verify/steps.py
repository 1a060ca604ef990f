"""The steps that every rung of the ladder runs: prefill in chunks and several decodes, in padded buckets of all sizes.

Inputs are built by the runtime's own `build_step` over its own block tables. Graphs without buckets (traces) get the
same steps without padding.

Shape letters: T tokens, L live tokens, S sequences.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cann_runtime.artifact.manifest import Graph, Manifest
from cann_runtime.buckets import graph_capacity
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.base import StepInputs
from cann_runtime.kv.manager import KVManager
from cann_runtime.request import Request, SamplingParams
from cann_runtime.scheduler import Batch
from cann_runtime.step import build_step

DECODES = 4
_LENGTHS = (150, 9, 21)  # tokens that are prefilled; the first goes over two blocks and comes in two chunks


@dataclass
class PreparedStep:
    """One step. graph: of the bucket that runs it. inputs: padded for it. live_L: which of its rows are live.

    rows: per sequence, new tokens. wanted: per logits row (sequence, position) whose logits it gives.
    """

    graph: Graph
    inputs: StepInputs
    live_L: Tensor
    rows: list[int]
    wanted: list[tuple[int, int]]

    def flat(self) -> list[Tensor]:
        """The same step without padding: inputs in graph order, lengths cumulative."""
        ends = torch.tensor(self.rows).cumsum(0)
        n = len(self.rows)
        return [
            self.inputs.input_ids_T[self.live_L],
            self.inputs.position_ids_T[self.live_L],
            self.inputs.slot_mapping_T[self.live_L].int(),
            self.inputs.block_table_SM[:n].contiguous(),
            ends,
            self.inputs.kv_lens_S[:n].contiguous(),
            ends - 1,
        ]


@dataclass
class Script:
    """All steps, the token sequences behind them, and how many KV blocks they need."""

    steps: list[PreparedStep]
    texts: list[list[int]]
    blocks: int
    skipped: list[Graph]

    def slots(self) -> Tensor:
        """Every cache slot that a live token was written to, sorted."""
        written = [step.inputs.slot_mapping_T[step.live_L].long() for step in self.steps]
        return torch.tensor(sorted(set(torch.cat(written).tolist())))


def make_script(manifest: Manifest, vocab: int, max_tokens: int, seed: int = 0) -> Script:
    """Steps over every graph of at most `max_tokens` tokens, or the smallest of its phase; the others are `skipped`."""
    rng = random.Random(seed)
    graphs = sorted(manifest.graphs, key=lambda g: g.bucket.tokens)
    decode = [g for g in graphs if g.phase != "prefill"]
    prefill = [g for g in graphs if g.phase != "decode"]
    if not decode or not prefill:
        raise ArtifactError("the artifact has no decode graphs or no prefill graphs")
    decode = [g for g in decode if g.bucket.tokens <= max_tokens] or decode[:1]
    prefill = [g for g in prefill if g.bucket.tokens <= max_tokens] or prefill[:1]
    size = manifest.kv_cache.block_size
    room = max(graph_capacity(0, g).tokens for g in prefill)
    most = max(graph_capacity(0, g).seqs for g in decode)
    decodes = max(DECODES, len(decode))
    longest = min(manifest.max_seq_len, max(g.bucket.max_blocks for g in graphs) * size) - decodes - 1
    lengths = [max(2, min(n, longest, room)) for n in _LENGTHS][: min(3, most)]
    texts = [[rng.randrange(vocab) for _ in range(n + decodes)] for n in lengths]

    columns = max(g.bucket.max_blocks for g in graphs)
    needed = sum(-(-len(text) // size) for text in texts) + 1
    blocks = max(2, manifest.kv_cache.scratch_blocks + needed)
    kv = KVManager(
        num_blocks=blocks,
        scratch_blocks=manifest.kv_cache.scratch_blocks,
        block_size=size,
        max_seqs=len(texts),
        max_blocks=columns,
    )
    requests = [Request(i, text, SamplingParams(), len(text)) for i, text in enumerate(texts)]
    for request in requests:
        request.row = kv.open(len(request.tokens))
    steps: list[PreparedStep] = []

    def run(graph: Graph, who: Sequence[int], counts: Sequence[int]) -> None:
        batch = Batch()
        for i, n in zip(who, counts):
            batch.add(requests[i], n)
        inputs = build_step(manifest, graph, batch, list(range(len(who))), kv)
        steps.append(_prepared(graph, inputs, batch))
        for i, n in zip(who, counts):
            requests[i].num_computed += n

    chunks = _chunks(lengths, alone=prefill[0].bucket.query_len is not None)
    for i, (who, counts) in enumerate(chunks):
        fitting = [g for g in prefill if graph_capacity(0, g).holds(len(who), sum(counts), max(counts))]
        run(fitting[i % len(fitting)], who, counts)
    for i in range(decodes):
        graph = decode[i % len(decode)]
        count = min(len(texts), graph_capacity(0, graph).seqs)
        who = sorted(range(len(texts)), key=lambda s: requests[s].num_computed - lengths[s])[:count]
        run(graph, who, [1] * count)
    ran = {id(step.graph) for step in steps}
    return Script(steps, texts, blocks, [g for g in graphs if id(g) not in ran])


def _chunks(lengths: list[int], alone: bool) -> list[tuple[list[int], list[int]]]:
    """(sequences, tokens of each) of the prefill steps: the first sequence in two chunks, the others beside it."""
    first = -(-lengths[0] * 3 // 5)
    rest = lengths[0] - first
    if alone:
        pieces = [([0], [first]), *(([i], [n]) for i, n in enumerate(lengths) if i), ([0], [rest])]
        return [(who, counts) for who, counts in pieces if counts[0]]
    middle = [i for i in range(1, len(lengths))]
    if not rest:
        return [(list(range(len(lengths))), lengths)]
    one = ([0, *middle[:1]], [first, *(lengths[i] for i in middle[:1])])
    two = ([0, *middle[1:]], [rest, *(lengths[i] for i in middle[1:])])
    return [one, two]


def _prepared(graph: Graph, inputs: StepInputs, batch: Batch) -> PreparedStep:
    rows = torch.tensor(batch.rows)
    live = torch.arange(int(rows.sum()))
    if graph.bucket.query_len is not None:
        starts = torch.arange(len(rows)) * graph.bucket.query_len - (rows.cumsum(0) - rows)
        live = live + starts.repeat_interleave(rows)
    wanted = [(request.id, request.num_computed + n - 1) for request, n in zip(batch.requests, batch.rows)]
    return PreparedStep(graph, inputs, live, list(batch.rows), wanted)
