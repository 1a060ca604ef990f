"""Which graph runs a step: the sizes each graph can hold, and the smallest one that holds a given batch.

A step is described by its number of sequences, its number of tokens and its longest chunk. Padding a step up to its
graph's sizes is `step.py`'s work.

Shape letters: T tokens, S sequences, R logits rows, Q rows a sequence (rectangular layout).
"""

from __future__ import annotations

from dataclasses import dataclass

from cann_runtime.artifact.manifest import Graph, Manifest
from cann_runtime.errors import ArtifactError


@dataclass(frozen=True)
class Capacity:
    """What one graph holds: live sequences, tokens in all, rows of one sequence. `index` points into Buckets.graphs."""

    index: int
    seqs: int
    tokens: int
    chunk: int

    def room(self, seqs: int, tokens: int, longest: int) -> int:
        """Rows that one more sequence may have in a batch of that size; 0 where it does not fit."""
        if seqs >= self.seqs or longest > self.chunk:
            return 0
        return min(self.tokens - tokens, self.chunk)

    def holds(self, seqs: int, tokens: int, longest: int) -> bool:
        """The whole batch fits."""
        return seqs <= self.seqs and tokens <= self.tokens and longest <= self.chunk

    def covers(self, other: Capacity) -> bool:
        """Everything that fits the other fits here."""
        return self.seqs >= other.seqs and self.tokens >= other.tokens and self.chunk >= other.chunk


def pads_rows_as_sequences(graph: Graph) -> bool:
    """In a static decode graph each padding row is a sequence of its own; elsewhere one sequence takes them all."""
    return graph.phase == "decode"


def graph_capacity(index: int, graph: Graph) -> Capacity:
    """What one graph holds; `index` is its place among the graphs of the rank."""
    bucket = graph.bucket
    if bucket.query_len is not None:
        return Capacity(index, min(bucket.seqs, bucket.rows), bucket.seqs * bucket.query_len, bucket.query_len)
    if graph.phase == "decode":
        seqs = min(bucket.tokens, bucket.seqs, bucket.rows)
        return Capacity(index, seqs, seqs, 1)
    # The last sequence of a static graph is kept for the padding rows.
    seqs = min(bucket.seqs - (0 if graph.dynamic else 1), bucket.rows)
    return Capacity(index, seqs, bucket.tokens, bucket.tokens)


def _maximal(capacities: list[Capacity]) -> list[Capacity]:
    """Those that no other covers: enough to answer 'does it fit anywhere'."""
    kept: list[Capacity] = []
    for capacity in sorted(capacities, key=lambda c: (c.tokens, c.seqs, c.chunk), reverse=True):
        if not any(other.covers(capacity) for other in kept):
            kept.append(capacity)
    return kept


class Buckets:
    """The step graphs of one rank, in the same order on every rank, so that an index names a graph everywhere."""

    def __init__(self, manifest: Manifest, rank: int) -> None:
        self.graphs = sorted(
            (graph for graph in manifest.graphs if rank in graph.ranks),
            key=lambda g: (g.phase, g.bucket.tokens, g.bucket.seqs, g.bucket.rows, g.bucket.query_len or 0),
        )
        capacities = [graph_capacity(i, graph) for i, graph in enumerate(self.graphs)]
        by_size = sorted(capacities, key=lambda c: (c.tokens, c.seqs, c.chunk))
        self._decode = [c for c in by_size if self.graphs[c.index].phase != "prefill"]
        self._prefill = [c for c in by_size if self.graphs[c.index].phase != "decode"]
        if not self._prefill or not self._decode:
            missing = "prefill" if not self._prefill else "decode"
            raise ArtifactError(f"manifest.json: rank {rank} has no {missing} graph")
        self._any = sorted({*self._decode, *self._prefill}, key=lambda c: (c.tokens, c.seqs, c.chunk))
        self._max_decode = _maximal(self._decode)
        self._max_prefill = _maximal(self._prefill)
        self.max_decode_seqs = max(c.seqs for c in self._decode)
        self.max_blocks = min(graph.bucket.max_blocks for graph in self.graphs)
        _check_padding(manifest, self.graphs)

    def decode_room(self, seqs: int) -> bool:
        """One more sequence with one row fits beside `seqs` others with one row each."""
        return any(c.room(seqs, seqs, 1) for c in self._max_decode)

    def prefill_room(self, seqs: int, tokens: int, longest: int) -> int:
        """Rows that one more sequence may have in a step with prefill chunks; 0 where it does not fit."""
        return max(c.room(seqs, tokens, longest) for c in self._max_prefill)

    def pick(self, seqs: int, tokens: int, longest: int) -> int:
        """Index of the smallest graph that holds the batch; decode graphs hold one row a sequence."""
        for capacity in self._any:
            if capacity.holds(seqs, tokens, longest):
                return capacity.index
        raise AssertionError(f"no graph holds {seqs} sequences, {tokens} tokens, {longest} rows: room() was not asked")


def _check_padding(manifest: Manifest, graphs: list[Graph]) -> None:
    """Every padding row needs a scratch slot of its own (the cache write forbids duplicates)."""
    kv = manifest.kv_cache
    for graph in graphs:
        if graph.dynamic:
            continue
        needed = -(-(graph.bucket.tokens - 1) // kv.block_size)
        limit = kv.scratch_blocks
        if not pads_rows_as_sequences(graph) and graph.bucket.query_len is None:
            limit = min(limit, graph.bucket.max_blocks)
        if needed > limit:
            raise ArtifactError(
                f"manifest.json: the {graph.phase} graph of {graph.bucket.tokens} tokens needs {needed} scratch blocks "
                f"for padding rows, kv_cache.scratch_blocks and its block table allow {limit}"
            )
