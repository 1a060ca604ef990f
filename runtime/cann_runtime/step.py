"""Builds the input tensors of one step from a scheduled batch, padded to the sizes of the graph that will run it.

Padding never touches a live sequence: each padding row writes to its own slot of the scratch blocks and belongs to a
padding sequence that reads scratch blocks only. What may share a step was decided by `scheduler.py`.

Shape letters: T tokens (rows), S sequences, R logits rows, M block-table columns, L live rows, N live sequences.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cann_runtime.artifact.manifest import Graph, Manifest
from cann_runtime.buckets import pads_rows_as_sequences
from cann_runtime.executor.base import StepInputs
from cann_runtime.kv.manager import KVManager
from cann_runtime.scheduler import Batch

Ints = npt.NDArray[np.int64]


def build_step(manifest: Manifest, graph: Graph, batch: Batch, sampled: list[int], kv: KVManager) -> StepInputs:
    """The inputs of the batch for that graph.

    Live sequences come first, in batch order; `sampled` are the indices of those whose last row's logits are wanted:
    they are the first rows of the output, in that order. Flat layout: a sequence's rows follow each other, then come
    the padding rows. Rectangular layout: sequence i owns rows i * Q .. (i + 1) * Q - 1, its own first.
    """
    block_size = manifest.kv_cache.block_size
    bucket = graph.bucket
    live, num_seqs = batch.tokens, len(batch.requests)
    rows_N: Ints = np.array(batch.rows, np.int64)
    start_N: Ints = np.array([request.num_computed for request in batch.requests], np.int64)
    end_N: Ints = rows_N.cumsum()
    first_N = end_N - rows_N
    table_NM = kv.tables([r.row for r in batch.requests if r.row is not None], bucket.max_blocks)

    tokens: list[int] = []
    for request, rows in zip(batch.requests, batch.rows):
        tokens.extend(request.tokens[request.num_computed : request.num_computed + rows])

    if batch.longest == 1:
        sequence_L: Ints = np.arange(live)
        position_L = start_N
    else:
        sequence_L = np.repeat(np.arange(num_seqs), rows_N)
        position_L = np.arange(live) + np.repeat(start_N - first_N, rows_N)
    slot_L = table_NM[sequence_L, position_L // block_size].astype(np.int64) * block_size + position_L % block_size

    # Sizes of the graph: exactly the batch's on a dynamic one.
    T, S, R = bucket.tokens, bucket.seqs, bucket.rows
    if graph.dynamic:
        T, S, R = live, num_seqs, max(1, len(sampled))
    last_N = end_N - 1
    row_L: Ints | slice = slice(0, live)
    if bucket.query_len is not None:
        T = S * bucket.query_len
        row_L = np.arange(live) + np.repeat(np.arange(num_seqs) * bucket.query_len - first_N, rows_N)
        last_N = np.arange(num_seqs) * bucket.query_len + rows_N - 1

    input_ids_T = np.zeros(T, np.int64)
    input_ids_T[row_L] = tokens
    position_ids_T = np.zeros(T, np.int64)
    position_ids_T[row_L] = position_L
    slot_T = np.empty(T, np.int32 if manifest.slot_dtype == "int32" else np.int64)
    padding = T - live
    if padding:
        padding_T = np.ones(T, bool)
        padding_T[row_L] = False
        slot_T[padding_T] = np.arange(padding)
    slot_T[row_L] = slot_L

    block_table_SM = np.zeros((S, bucket.max_blocks), np.int32)
    block_table_SM[:num_seqs, : table_NM.shape[1]] = table_NM
    query_S = np.zeros(S, np.int64)
    query_S[:num_seqs] = rows_N
    kv_lens_S = np.zeros(S, np.int64)
    kv_lens_S[:num_seqs] = start_N + rows_N
    if bucket.query_len is not None or pads_rows_as_sequences(graph):
        # A padding sequence has one row that sees one key. Its table holds block 0, a scratch block.
        query_S[num_seqs:] = 1
        kv_lens_S[num_seqs:] = 1
    elif padding:
        query_S[-1] = kv_lens_S[-1] = padding
        blocks = -(-padding // block_size)
        block_table_SM[-1, :blocks] = np.arange(blocks)

    logits_rows_R = np.zeros(R, np.int64)
    logits_rows_R[: len(sampled)] = last_N[sampled]

    return StepInputs(
        torch.from_numpy(input_ids_T),
        torch.from_numpy(position_ids_T),
        torch.from_numpy(slot_T),
        torch.from_numpy(block_table_SM),
        torch.from_numpy(query_S.cumsum() if manifest.query_lens == "cumulative" else query_S),
        torch.from_numpy(kv_lens_S),
        torch.from_numpy(logits_rows_R),
    )
