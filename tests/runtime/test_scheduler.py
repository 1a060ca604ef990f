"""Which sequences share a step, on buckets of all layouts; no model runs here."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_llama import BLOCK, MAX_SEQ_LEN, manifest

from cann_runtime.buckets import Buckets
from cann_runtime.kv.manager import KVManager
from cann_runtime.request import Request, SamplingParams
from cann_runtime.scheduler import Batch, Scheduler


def make(kind: str, *, blocks: int = 200, max_batch_size: int = 8) -> Scheduler:
    made = manifest(kind, max_batch_size=max_batch_size)
    buckets = Buckets(made, 0)
    kv = KVManager(
        num_blocks=8 + blocks,
        scratch_blocks=8,
        block_size=BLOCK,
        max_seqs=max_batch_size,
        max_blocks=MAX_SEQ_LEN // BLOCK,
    )
    return Scheduler(buckets, kv, mixed_phases=made.mixed_phases, max_batch_size=max_batch_size)


def add(scheduler: Scheduler, *lengths: int) -> list[Request]:
    requests = [Request(i, [3] * n, SamplingParams(), MAX_SEQ_LEN) for i, n in enumerate(lengths)]
    for request in requests:
        scheduler.add(request)
    return requests


def run_step(scheduler: Scheduler) -> Batch:
    """One step whose model always says 3."""
    batch = scheduler.schedule()
    assert batch is not None
    sampled = batch.sampled()
    scheduler.advance(batch)
    for i in sampled:
        batch.requests[i].tokens.append(3)
    return batch


def test_prompts_share_a_step_up_to_the_token_budget() -> None:
    scheduler = make("dynamic")
    requests = add(scheduler, 10, 10, 30)
    assert run_step(scheduler).rows == [10, 10, 12]
    batch = run_step(scheduler)
    assert batch.requests == requests
    assert batch.rows == [1, 1, 18]


def test_a_rectangular_chunk_fits_one_sequence_of_its_bucket() -> None:
    scheduler = make("rectangular")
    add(scheduler, 30, 5, 5)
    # 24 rows exist for a lone sequence only; then the rest of it and another prompt fit 2 x 8.
    assert run_step(scheduler).rows == [24]
    assert run_step(scheduler).rows == [6, 5]
    assert run_step(scheduler).rows == [5]
    assert run_step(scheduler).rows == [1, 1, 1]


def test_requests_are_admitted_in_order_and_wait_for_blocks() -> None:
    scheduler = make("dynamic", blocks=8)
    requests = add(scheduler, 20, 16, 4)  # 5, 4 and 1 blocks
    assert run_step(scheduler).requests == requests[:1]
    assert list(scheduler.waiting) == requests[1:], "a small request does not overtake a large one"
    scheduler.finish(requests[0])
    assert run_step(scheduler).requests == requests[1:]


def test_no_more_sequences_run_than_decode_buckets_hold(caplog: pytest.LogCaptureFixture) -> None:
    made = manifest("flat")
    made.graphs = [g for g in made.graphs if g.phase == "prefill" or g.bucket.seqs <= 2]
    kv = KVManager(num_blocks=100, scratch_blocks=8, block_size=BLOCK, max_seqs=8, max_blocks=MAX_SEQ_LEN // BLOCK)
    with caplog.at_level(logging.WARNING):
        scheduler = Scheduler(Buckets(made, 0), kv, mixed_phases=True, max_batch_size=8)
    assert "holds 2 sequences" in caplog.text
    add(scheduler, 3, 3, 3)
    assert len(run_step(scheduler).requests) == 2
    assert len(run_step(scheduler).requests) == 2


def test_work_that_no_bucket_holds_is_split_and_counted() -> None:
    scheduler = make("dynamic")
    add(scheduler, 40, 32)
    assert run_step(scheduler).rows == [32]
    assert scheduler.splits == 2  # the end of the first prompt, and the whole second one
    assert run_step(scheduler).rows == [8, 24]
    assert scheduler.splits == 3
    assert run_step(scheduler).rows == [1, 8]
    assert scheduler.splits == 3


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["dynamic", "flat", "rectangular"]),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=20),
    st.integers(23, 60),
)
def test_every_request_ends_and_no_block_leaks(kind: str, asked: list[tuple[int, int]], blocks: int) -> None:
    scheduler = make(kind, blocks=blocks)
    requests = add(scheduler, *(n for n, _ in asked))
    ends = {request: n + more for request, (n, more) in zip(requests, asked)}
    for _ in range(5000):
        if not scheduler.busy:
            break
        batch = run_step(scheduler)
        assert scheduler.buckets.pick(len(batch.requests), batch.tokens, batch.longest) is not None
        assert len(set(map(id, batch.requests))) == len(batch.requests)
        for request in batch.requests:
            assert request.row is not None
            if len(request.tokens) == ends[request]:
                scheduler.finish(request)
    assert not scheduler.busy
    assert scheduler.kv.pool.num_free == blocks
    assert all(len(r.tokens) == ends[r] for r in requests)
