"""The engine: requests in, tokens out, one step at a time.

It ties the scheduler, the step builder, the executor and the sampler together, and decides when a request ends. With
several ranks this is rank 0; the others follow (`parallel.follow`). Text is the caller's concern.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from cann_runtime.artifact.manifest import Manifest
from cann_runtime.buckets import Buckets
from cann_runtime.errors import ArtifactError, RequestError
from cann_runtime.executor.base import Executor
from cann_runtime.kv.manager import KVManager
from cann_runtime.parallel import Comm
from cann_runtime.request import FinishReason, Request, SamplingParams
from cann_runtime.sampler import sample
from cann_runtime.scheduler import Batch, Scheduler
from cann_runtime.step import build_step


@dataclass
class Output:
    """What one step gave one request; `request.finish_reason` is set with its last token."""

    request: Request
    token: int


@dataclass
class Stats:
    """Counters since the engine was made. `padding_rows` of `rows` held no token; splits: see Scheduler."""

    steps: int = 0
    rows: int = 0
    padding_rows: int = 0
    execute_seconds: float = 0.0


class Engine:
    """One artifact on an executor whose KV caches have `num_blocks` blocks (scratch blocks included).

    comm: the ranks that follow this one, or None for a single rank. eos_token_ids replaces the manifest's. concurrency
    caps the sequences that run at once below the manifest's max_batch_size.
    """

    def __init__(
        self,
        manifest: Manifest,
        executor: Executor,
        num_blocks: int,
        comm: Comm | None = None,
        *,
        eos_token_ids: Iterable[int] | None = None,
        concurrency: int | None = None,
    ) -> None:
        self.manifest = manifest
        self.executor = executor
        self.comm = comm
        self.eos = frozenset(manifest.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.buckets = Buckets(manifest, comm.rank if comm else 0)
        spec = manifest.kv_cache
        if num_blocks <= spec.scratch_blocks:
            raise ArtifactError(
                f"{num_blocks} KV blocks leave none for requests: the artifact keeps {spec.scratch_blocks} for padding"
            )
        max_batch = min(manifest.max_batch_size, concurrency or manifest.max_batch_size)
        max_running = min(max_batch, self.buckets.max_decode_seqs)
        self.kv = KVManager(
            num_blocks=num_blocks,
            scratch_blocks=spec.scratch_blocks,
            block_size=spec.block_size,
            max_seqs=max_running,
            max_blocks=self.buckets.max_blocks,
        )
        self.scheduler = Scheduler(self.buckets, self.kv, mixed_phases=manifest.mixed_phases, max_batch_size=max_batch)
        self.stats = Stats()
        self._ids = itertools.count()

    @property
    def max_total(self) -> int:
        """Tokens of the longest sequence, prompt included. Its last token is chosen but never enters the KV cache."""
        return min(self.manifest.max_seq_len, self.kv.max_tokens + 1)

    def add_request(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Request:
        """Queue a prompt of token ids. RequestError where it can never fit, or a token is not in the vocabulary."""
        params = params or SamplingParams()
        limit = self.max_total
        wanted = len(prompt) + (params.max_tokens or 1)
        if wanted > limit:
            where = "max_seq_len" if limit == self.manifest.max_seq_len else "the KV cache"
            raise RequestError(
                f"{len(prompt)} prompt tokens and {params.max_tokens or 1} to generate are more than "
                f"the {limit} that {where} allows"
            )
        if prompt and (min(prompt) < 0 or max(prompt) >= self.manifest.vocab_size):
            raise RequestError(f"a prompt token is outside the vocabulary of {self.manifest.vocab_size}")
        total = limit if params.max_tokens is None else wanted
        request = Request(next(self._ids), list(prompt), params, total)
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now; nothing happens where it has ended."""
        if not request.finished:
            self._finish(request, "abort")

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Run one step: a new token for each sequence whose known tokens are all computed. Empty where idle."""
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        sampled = batch.sampled()
        logits_RV = self.execute(batch, sampled)
        self.scheduler.advance(batch)
        if not sampled:
            return []
        requests = [batch.requests[i] for i in sampled]
        tokens = sample(
            logits_RV, self.manifest.vocab_size, [r.params for r in requests], [r.generator for r in requests]
        )
        return [self._append(request, token) for request, token in zip(requests, tokens)]

    def execute(self, batch: Batch, sampled: list[int], *, all_rows: bool = False) -> Tensor:
        """Run a batch on all ranks: logits [R, V], a row for each sequence in `sampled`, or for every token."""
        index = self.buckets.pick(len(batch.requests), batch.tokens, batch.longest)
        graph = self.buckets.graphs[index]
        inputs = build_step(self.manifest, graph, batch, sampled, self.kv)
        if all_rows:
            inputs.logits_rows_R = torch.arange(batch.tokens)
        if self.comm is not None:
            self.comm.send_step(index, inputs)
        started = perf_counter()
        logits_RV = self.executor.execute(graph, inputs)
        self.stats.execute_seconds += perf_counter() - started
        self.stats.steps += 1
        self.stats.rows += len(inputs.input_ids_T)
        self.stats.padding_rows += len(inputs.input_ids_T) - batch.tokens
        return logits_RV

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Request]:
        """Run prompts of token ids as one continuous batch; the finished requests, in the order of the prompts."""
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        requests = [self.add_request(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        while not all(request.finished for request in requests):
            self.step()
        return requests

    def _append(self, request: Request, token: int) -> Output:
        request.tokens.append(token)
        if request.first_token_at is None:
            request.first_token_at = perf_counter()
        if token in self.eos and not request.params.ignore_eos:
            self._finish(request, "stop")
        elif len(request.tokens) >= request.max_total:
            self._finish(request, "length")
        return Output(request, token)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request)
        request.finish_reason = reason
        request.finished_at = perf_counter()
