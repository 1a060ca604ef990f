"""Continuous batching: which sequences run in the next step, and with how many tokens each.

Decodes and prefill chunks share a step where the artifact's graphs allow it; otherwise a step holds one kind, prefill
first. A prompt gets all its blocks when it is admitted; a decode gets one when it needs it, and where the pool is empty
the youngest sequence is preempted: it gives its blocks back and is computed again later. Building the step's tensors is
in `step.py`.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from cann_runtime.buckets import Buckets
from cann_runtime.kv.manager import KVManager
from cann_runtime.request import Request

log = logging.getLogger(__name__)


@dataclass
class Batch:
    """The sequences of one step; `rows[i]` tokens of `requests[i]`, from its num_computed on."""

    requests: list[Request] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    tokens: int = 0
    longest: int = 0

    def add(self, request: Request, rows: int) -> None:
        """Append a sequence."""
        self.requests.append(request)
        self.rows.append(rows)
        self.tokens += rows
        self.longest = max(self.longest, rows)

    def sampled(self) -> list[int]:
        """Indices of the sequences whose last token is in this step: their next token can be chosen."""
        return [i for i, (r, n) in enumerate(zip(self.requests, self.rows)) if r.num_computed + n == len(r.tokens)]


class Scheduler:
    """Waiting and running requests. `running` is in order of admission: its last element is the youngest.

    splits counts prompts and sequences that were ready for a step but, in whole or in part, did not fit any bucket.
    """

    def __init__(self, buckets: Buckets, kv: KVManager, *, mixed_phases: bool, max_batch_size: int) -> None:
        self.buckets = buckets
        self.kv = kv
        self.mixed_phases = mixed_phases
        self.max_running = min(max_batch_size, buckets.max_decode_seqs)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self.splits = 0
        if self.max_running < max_batch_size:
            log.warning(
                "the largest decode bucket holds %d sequences, max_batch_size is %d: the rest waits",
                self.max_running,
                max_batch_size,
            )

    @property
    def busy(self) -> bool:
        """There is something left to compute."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)

    def schedule(self) -> Batch | None:
        """The next step's batch; None where nothing is left. Blocks for its tokens are allocated."""
        if not self.busy:
            return None
        batch = Batch()
        if self.mixed_phases:
            self._add_decodes(batch)
            self._add_prefills(batch)
        else:
            self._add_prefills(batch)
            if not batch.requests:
                self._add_decodes(batch)
        assert batch.requests, "a lone sequence always fits: the engine refuses larger ones"
        return batch

    def _add_decodes(self, batch: Batch) -> None:
        # A copy: preemption takes sequences off the end while we go through it, and those are not reached any more.
        for request in list(self.running):
            if request.row is None or request.pending != 1:
                continue
            if not self.buckets.decode_room(len(batch.requests)):
                self.splits += 1
                return
            while not self.kv.grow(request.row, len(request.tokens)):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            if request.row is not None:
                batch.add(request, 1)

    def _add_prefills(self, batch: Batch) -> None:
        for request in self.running:
            if request.pending > 1 and not self._add_chunk(batch, request):
                return
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            if not self.buckets.prefill_room(len(batch.requests), batch.tokens, batch.longest):
                self.splits += 1
                return
            row = self.kv.open(len(request.tokens))
            if row is None:
                return
            self.waiting.popleft()
            request.row = row
            self.running.append(request)
            self._add_chunk(batch, request)

    def _add_chunk(self, batch: Batch, request: Request) -> bool:
        room = self.buckets.prefill_room(len(batch.requests), batch.tokens, batch.longest)
        if room == 0:
            self.splits += 1
            return False
        batch.add(request, min(room, request.pending))
        if room < request.pending:
            self.splits += 1
        return True

    def _preempt(self, request: Request) -> None:
        self._close(request)
        request.num_computed = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def advance(self, batch: Batch) -> None:
        """The step was computed: its tokens are in the KV cache."""
        for request, rows in zip(batch.requests, batch.rows):
            request.num_computed += rows

    def finish(self, request: Request) -> None:
        """Forget a request, waiting or running, and free its blocks."""
        if request.row is not None:
            self._close(request)
        else:
            self.waiting.remove(request)

    def _close(self, request: Request) -> None:
        assert request.row is not None
        self.kv.close(request.row)
        request.row = None
        self.running.remove(request)
