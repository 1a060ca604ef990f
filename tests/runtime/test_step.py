"""Step inputs against a plain per-token definition, for every layout; and padding touches nothing live.

Shape letters: T rows, S sequences, B blocks, P block size.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_llama import BLOCK, MAX_BATCH, MAX_SEQ_LEN, check_shapes, manifest

from cann_runtime.artifact.manifest import Graph, Manifest
from cann_runtime.buckets import Buckets
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.base import StepInputs
from cann_runtime.kv.manager import KVManager
from cann_runtime.request import Request, SamplingParams
from cann_runtime.scheduler import Batch
from cann_runtime.step import build_step

NUM_BLOCKS = 8 + MAX_BATCH * MAX_SEQ_LEN // BLOCK
KINDS = ("dynamic", "flat", "rectangular")


def make_batch(spans: list[tuple[int, int, int]]) -> tuple[Batch, KVManager]:
    """Sequences (computed tokens, rows in this step, tokens still to come), with scattered blocks."""
    kv = KVManager(
        num_blocks=NUM_BLOCKS, scratch_blocks=8, block_size=BLOCK, max_seqs=MAX_BATCH, max_blocks=MAX_SEQ_LEN // BLOCK
    )
    batch = Batch()
    requests = []
    for i, (computed, rows, left) in enumerate(spans):
        request = Request(i, [10 * i + j for j in range(computed + rows + left)], SamplingParams(), MAX_SEQ_LEN)
        request.row = kv.open(1)
        request.num_computed = computed
        requests.append((request, rows))
    # Grown in turns, so that no sequence has neighbouring blocks.
    for length in range(1, MAX_SEQ_LEN, BLOCK):
        for request, rows in requests:
            assert request.row is not None
            kv.grow(request.row, min(length, request.num_computed + rows))
    for request, rows in requests:
        assert request.row is not None
        kv.grow(request.row, request.num_computed + rows)
        batch.add(request, rows)
    return batch, kv


def build(kind: str, spans: list[tuple[int, int, int]]) -> tuple[Manifest, Graph, Batch, KVManager, StepInputs]:
    made = manifest(kind)
    batch, kv = make_batch(spans)
    buckets = Buckets(made, 0)
    graph = buckets.graphs[buckets.pick(len(spans), batch.tokens, batch.longest)]
    return made, graph, batch, kv, build_step(made, graph, batch, batch.sampled(), kv)


def live_rows(kind: str, graph: Graph, batch: Batch) -> list[tuple[int, int, int]]:
    """(row, sequence, position) of every live token, by the definition of the layout."""
    found, row = [], 0
    for s, (request, rows) in enumerate(zip(batch.requests, batch.rows)):
        first = s * graph.bucket.query_len if graph.bucket.query_len else row
        found += [(first + i, s, request.num_computed + i) for i in range(rows)]
        row += rows
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[tuple[int, int, int]]]:
    kind = draw(st.sampled_from(KINDS))
    computed, left = st.integers(0, 60), st.integers(0, 5)
    decode = draw(st.booleans())
    most, longest, seqs = (
        (MAX_BATCH, 1, MAX_BATCH) if decode else {"rectangular": (16, 8, 2)}.get(kind, (32, 32, MAX_BATCH))
    )
    rows = draw(st.lists(st.integers(1, longest), min_size=1, max_size=seqs).filter(lambda r: sum(r) <= most))
    return kind, [(draw(computed), n, draw(left)) for n in rows]


@settings(max_examples=150, deadline=None)
@given(cases())
def test_inputs_follow_the_definition(case: tuple[str, list[tuple[int, int, int]]]) -> None:
    kind, spans = case
    made, graph, batch, kv, step = build(kind, spans)
    check_shapes(made, graph, step)
    rows = live_rows(kind, graph, batch)
    for row, s, position in rows:
        request = batch.requests[s]
        assert request.row is not None
        block = int(kv.table_NM[request.row, position // BLOCK])
        assert block >= 8
        assert int(step.input_ids_T[row]) == request.tokens[position]
        assert int(step.position_ids_T[row]) == position
        assert int(step.slot_mapping_T[row]) == block * BLOCK + position % BLOCK
    padding = sorted(set(range(len(step.input_ids_T))) - {row for row, _, _ in rows})
    for row in padding:
        assert int(step.slot_mapping_T[row]) < 8 * BLOCK
        assert int(step.input_ids_T[row]) == int(step.position_ids_T[row]) == 0

    lens = step.query_lens_S.tolist()
    if made.query_lens == "cumulative":
        lens = [b - a for a, b in zip([0, *lens], lens)]
    assert lens[: len(spans)] == [n for _, n, _ in spans]
    assert step.kv_lens_S[: len(spans)].tolist() == [c + n for c, n, _ in spans]
    for s in range(len(spans), len(lens)):
        assert int(step.kv_lens_S[s]) == lens[s], "a padding sequence sees its own rows only"
        assert bool((step.block_table_SM[s] < 8).all())
    for s, request in enumerate(batch.requests):
        assert request.row is not None
        table = kv.table_NM[request.row].tolist()
        assert step.block_table_SM[s].tolist() == table + [0] * (graph.bucket.max_blocks - len(table))

    wanted = [max(row for row, s, _ in rows if s == i) for i, (_, _, left) in enumerate(spans) if left == 0]
    assert step.logits_rows_R[: len(wanted)].tolist() == wanted
    assert step.logits_rows_R[len(wanted) :].tolist() == [0] * (len(step.logits_rows_R) - len(wanted))


@pytest.mark.parametrize(
    ("kind", "spans"),
    [
        ("flat", [(5, 1, 0), (33, 1, 0), (0, 1, 0)]),
        ("flat", [(5, 1, 0), (8, 9, 2)]),
        ("rectangular", [(5, 1, 0), (33, 1, 0), (0, 1, 0)]),
        ("rectangular", [(5, 3, 0), (8, 8, 2)]),
    ],
)
def test_padding_writes_leave_live_keys_alone(kind: str, spans: list[tuple[int, int, int]]) -> None:
    _, graph, batch, _, step = build(kind, spans)
    pattern = torch.arange(NUM_BLOCKS * BLOCK).float().view(NUM_BLOCKS, BLOCK, 1, 1)
    cache = pattern.clone()
    live = torch.tensor([row for row, _, _ in live_rows(kind, graph, batch)])
    written = torch.full((len(step.input_ids_T), 1, 1), -1.0)
    written[live] = -2.0
    torch.ops.atb.reshape_and_cache(written, written, cache, cache.clone(), step.slot_mapping_T)
    changed = (cache != pattern).flatten()
    changed[: 8 * BLOCK] = False  # scratch blocks
    assert changed.nonzero().flatten().tolist() == sorted(step.slot_mapping_T[live].tolist())
    assert bool((cache[8:][cache[8:] < 0] == -2.0).all())


def test_the_padding_sequence_of_a_prefill_reads_the_slots_that_its_rows_wrote() -> None:
    _, graph, batch, _, step = build("flat", [(0, 5, 0), (4, 6, 0)])
    padding = graph.bucket.tokens - batch.tokens
    assert step.query_lens_S.tolist() == [5, *[11] * (graph.bucket.seqs - 2), graph.bucket.tokens]
    assert int(step.kv_lens_S[-1]) == padding
    table, slots = step.block_table_SM[-1].tolist(), step.slot_mapping_T[-padding:].tolist()
    assert slots == [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(padding)]


def test_a_graph_without_scratch_blocks_for_its_padding_is_refused() -> None:
    made = manifest("flat")
    made.kv_cache.scratch_blocks = 7  # 32 tokens: up to 31 padding rows in blocks of 4
    with pytest.raises(ArtifactError, match="scratch"):
        Buckets(made, 0)


def test_the_smallest_bucket_that_holds_a_batch_is_picked() -> None:
    flat, rectangular = (Buckets(manifest(kind), 0) for kind in ("flat", "rectangular"))

    def picked(buckets: Buckets, *size: int) -> tuple[str, int, int]:
        graph = buckets.graphs[buckets.pick(*size)]
        return graph.phase, graph.bucket.tokens, graph.bucket.seqs

    assert picked(flat, 1, 1, 1) == ("decode", 1, 1)
    assert picked(flat, 5, 5, 1) == ("decode", 8, 8)
    assert picked(flat, 2, 5, 4) == ("prefill", 16, 9)
    assert picked(flat, 8, 17, 3) == ("prefill", 32, 9)
    assert picked(rectangular, 1, 3, 3) == ("prefill", 8, 1)
    assert picked(rectangular, 2, 3, 2) == ("prefill", 16, 2)
    assert picked(rectangular, 1, 9, 9) == ("prefill", 24, 1)
