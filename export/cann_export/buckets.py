"""Which step graphs an artifact holds: phases and bucket sizes, from the settings and the attention layout.

Decode buckets count sequences of one token; prefill buckets count tokens. In the flat layout a prefill step packs
chunks of many sequences, and its last sequence takes the padding rows; in the rectangular layout it holds one sequence.
"""

from __future__ import annotations

import math

from cann_runtime.artifact.manifest import Bucket, Phase
from cann_runtime.recipe import Settings

CPU_STEP_TOKENS = 2048  # most tokens of one step on the CPU target, where sizes are dynamic


def static_buckets(settings: Settings, flat: bool) -> list[tuple[Phase, Bucket]]:
    """The (phase, bucket) pairs of an Ascend artifact, decode first, ascending."""
    out: list[tuple[Phase, Bucket]] = []
    columns = math.ceil(settings.max_seq_len / settings.block_size)
    for n in settings.decode_buckets:
        query_len = None if flat else 1
        out.append(("decode", Bucket(tokens=n, seqs=n, rows=n, max_blocks=columns, query_len=query_len)))
    for tokens in settings.prefill_buckets:
        # The sequence of the padding rows needs table columns for a whole step of padding.
        wide = max(columns, math.ceil(tokens / settings.block_size))
        if flat:
            seqs = settings.max_batch_size + 1
            out.append(("prefill", Bucket(tokens=tokens, seqs=seqs, rows=seqs, max_blocks=wide)))
        else:
            out.append(("prefill", Bucket(tokens=tokens, seqs=1, rows=1, max_blocks=wide, query_len=tokens)))
    return out


def dynamic_bucket(settings: Settings) -> tuple[Phase, Bucket]:
    """The one graph of a CPU artifact: any step up to these sizes. Logits may be asked for every row."""
    tokens = max(min(CPU_STEP_TOKENS, settings.max_seq_len), settings.max_batch_size)
    columns = math.ceil(settings.max_seq_len / settings.block_size)
    return "mixed", Bucket(tokens=tokens, seqs=settings.max_batch_size, rows=tokens, max_blocks=columns)


def scratch_blocks(buckets: list[tuple[Phase, Bucket]], block_size: int, dynamic: bool) -> int:
    """KV blocks that padding rows write to: every padding row of a step has a slot of its own there."""
    return 1 if dynamic else math.ceil(max(b.tokens for _, b in buckets) / block_size)
