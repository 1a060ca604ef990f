"""What every fused attention op has around its softmax: layouts, lengths, paged caches, masks, quantised keys.

`fused_attention` takes it all in one value; the ops in `attention.py` only say which of their inputs is what.
Letters: B sequences, S rows of one, T rows of all, N query heads, G key heads, D head size, M blocks of a cache, P rows
of a block, C width of an NZ fractal. What lies past a sequence's length in an output is undefined.
Source: op-plugin npu_fused_infer_attention_score; ops-transformer fused_infer_attention_score (README).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.softmax_attention import Sparsity, attend, check_pattern

_FLAT = ("TND", "NTD")
_PERMUTED = {"BSND": (0, 1, 2, 3), "BNSD": (0, 2, 1, 3), "NBSD": (2, 0, 1, 3)}  # from [B, S, N, D]


@dataclass(frozen=True)
class Layout:
    """An input layout and the output's: 'BNSD_NBSD' reads the first and writes the second."""

    given: str
    result: str

    @classmethod
    def of(cls, call: Call, text: str) -> Layout:
        """ArtifactError for a layout that is not supported."""
        given, _, result = text.partition("_")
        layout = cls(given, result or given)
        outputs = _FLAT if layout.flat else ("BSH", *_PERMUTED)
        if given not in ("BSH", "BSND", "BNSD", *_FLAT) or layout.result not in outputs:
            call.refuse(f"layout {text!r} is not supported")
        return layout

    @property
    def flat(self) -> bool:
        return self.given in _FLAT

    def rows(self, x: Tensor, heads: int) -> Tensor:
        """x as [B, S, heads, D], or [T, heads, D] where flat."""
        if self.given == "BSH":
            return x.reshape(*x.shape[:-1], heads, -1)
        if self.given == "BNSD":
            return x.transpose(1, 2)
        return x.transpose(0, 1) if self.given == "NTD" else x

    def output(self, x: Tensor) -> Tensor:
        """From [B, S, N, D], or [T, N, D], to the output's layout."""
        if self.result == "BSH":
            return x.flatten(2)
        if self.flat:
            return x.transpose(0, 1) if self.result == "NTD" else x
        return x.permute(_PERMUTED[self.result])


@dataclass(frozen=True)
class Dequant:
    """How int8 keys (or values) become numbers: (x + offset) * scale.

    mode 0: scale per channel [G, D] (of any rank) or per tensor [1]; mode 1: per token [B, S] or [1, B, S].
    """

    scale: Tensor
    offset: Tensor | None
    mode: int

    def apply(self, call: Call, x_KGD: Tensor, b: int) -> Tensor:
        """Sequence b's first K rows."""
        wide = call.wide(x_KGD)
        if self.offset is not None:
            wide = wide + self._shaped(call, self.offset, x_KGD, b)
        return wide * self._shaped(call, self.scale, x_KGD, b)

    def _shaped(self, call: Call, values: Tensor, x_KGD: Tensor, b: int) -> Tensor:
        wide = call.wide(values)
        if self.mode == 1:
            return wide.reshape(-1, wide.shape[-1])[b, : len(x_KGD)].view(-1, 1, 1)
        return wide.reshape(()) if wide.numel() == 1 else wide.reshape(x_KGD.shape[1:])


@dataclass(frozen=True)
class Attention:
    """One fused attention.

    query, key and value in `layout`; with a block_table key and value are caches [M, P, G * D], [M, G, P, D] or NZ
    [M, G, D / C, P, C]. query_lens, key_lens int64: per sequence (one value stands for all), but cumulative where the
    layout is flat; key lengths under a block table are per sequence in any layout. mask: nonzero is masked. bias: [B or
    1, N, S, keys]. q_rope and k_rope: the rotary parts, laid out as query and key.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    layout: str
    heads: int
    key_heads: int
    scale: float
    sparsity: Sparsity
    mask: Tensor | None = None
    bias: Tensor | None = None
    query_lens: Tensor | None = None
    key_lens: Tensor | None = None
    block_table: Tensor | None = None
    q_rope: Tensor | None = None
    k_rope: Tensor | None = None
    sink: Tensor | None = None
    key_dequant: Dequant | None = None
    value_dequant: Dequant | None = None


def fused_attention(call: Call, a: Attention) -> tuple[Tensor, Tensor]:
    """(output in the output layout, softmax_lse [B, N, S, 1] or [T, N, 1])."""
    layout = Layout.of(call, a.layout)
    if a.heads % a.key_heads:
        call.refuse(f"{a.heads} query heads are no multiple of {a.key_heads} key heads")
    if (a.q_rope is None) != (a.k_rope is None):
        call.refuse("query_rope and key_rope come together")
    if a.block_table is not None and a.block_table.dtype != torch.int32:
        call.refuse(f"block_table is {a.block_table.dtype}, needed: int32")
    q = layout.rows(a.query, a.heads)
    q_rope = layout.rows(a.q_rope, a.heads) if a.q_rope is not None else None
    parts = [part for part in (a.key, a.value, a.k_rope) if part is not None]
    if a.block_table is None:
        parts = [layout.rows(part, a.key_heads) for part in parts]
    queries = _query_lens(call, a, layout, q)
    keys, starts = _key_lens(call, a, layout, parts[0], len(queries))
    # One query sees every key in each of these patterns, and the kernel then ignores the mode and its mask.
    ignored = not layout.flat and q.shape[1] == 1 and q_rope is None
    sparsity, mask = (Sparsity(1), None) if a.sparsity.mode >= 2 and ignored else (a.sparsity, a.mask)
    if a.sparsity.mode >= 2:
        check_pattern(call, a.mask, a.sparsity.mode)

    width = (
        _paged(call, parts[1], a.block_table[0], 1, a).shape[-1] if a.block_table is not None else parts[1].shape[-1]
    )
    out = call.undefined([*q.shape[:-1], width], a.query.dtype)
    lse = call.undefined([*q.shape[:-1], 1], call.precision.compute)
    row = 0
    for b, (count, seen) in enumerate(zip(queries, keys)):
        place = slice(row, row + count) if layout.flat else (b, slice(0, count))
        row += count
        if not count:  # a sequence of padding
            continue
        if a.block_table is not None:
            k, v, *k_extra = (_paged(call, cache, a.block_table[b], seen, a) for cache in parts)
        elif layout.flat:
            k, v, *k_extra = (part[starts[b] : starts[b] + seen] for part in parts)
        else:
            k, v, *k_extra = (part[b, :seen] for part in parts)
        result, sums = attend(
            call,
            q[place],
            a.key_dequant.apply(call, k, b) if a.key_dequant else k,
            a.value_dequant.apply(call, v, b) if a.value_dequant else v,
            scale=a.scale,
            masked=sparsity.masked(count, seen, _mask_of(call, mask, b, count, seen, q, sparsity)),
            bias_NQK=None if a.bias is None else a.bias[b if len(a.bias) > 1 else 0, :, :count, :seen],
            sink_N=a.sink,
            extra=None if q_rope is None else (q_rope[place], k_extra[0]),
        )
        out[place] = result
        lse[place] = sums.unsqueeze(-1)
    return layout.output(out), lse if layout.flat else lse.transpose(1, 2)


def _lens(call: Call, lens: Tensor, what: str) -> list[int]:
    if lens.dtype != torch.int64:
        call.refuse(f"the {what} lengths are {lens.dtype}, needed: int64")
    return [int(value) for value in lens.tolist()]


def _from_ends(call: Call, ends: list[int], total: int, what: str) -> list[int]:
    sizes = [end - start for start, end in zip([0, *ends], ends)]
    if any(size < 0 for size in sizes) or (ends and ends[-1] > total):
        call.refuse(f"the {what} lengths must be cumulative and end at {total} at most: {ends}")
    return sizes


def _query_lens(call: Call, a: Attention, layout: Layout, q: Tensor) -> list[int]:
    """Rows of each sequence's queries."""
    if layout.flat:
        if a.query_lens is None:
            call.refuse("a flat layout needs the query lengths")
        sizes = _from_ends(call, _lens(call, a.query_lens, "query"), q.shape[0], "query")
        if sum(sizes) != q.shape[0]:
            call.refuse(f"the last query length is {sum(sizes)}, but there are {q.shape[0]} rows")
        return sizes
    batch, rows = q.shape[:2]
    if a.query_lens is None or rows == 1:
        return [rows] * batch
    lens = _lens(call, a.query_lens, "query")
    return _spread(call, lens, batch, rows, "query")


def _key_lens(call: Call, a: Attention, layout: Layout, key: Tensor, batch: int) -> tuple[list[int], list[int]]:
    """(keys of each sequence, where each sequence's keys start in a flat layout)."""
    if a.block_table is not None:
        if a.key_lens is None:
            call.refuse("a paged cache needs the key lengths")
        if len(a.block_table) != batch:
            call.refuse(f"block_table has {len(a.block_table)} rows for {batch} sequences")
        return _spread(call, _lens(call, a.key_lens, "key"), batch, None, "key"), []
    if layout.flat:
        if a.key_lens is None:
            call.refuse("a flat layout needs the key lengths")
        ends = _lens(call, a.key_lens, "key")
        sizes = _from_ends(call, ends, key.shape[0], "key")
        if len(sizes) != batch:
            call.refuse(f"{len(sizes)} key lengths for {batch} sequences")
        return sizes, [0, *ends[:-1]]
    if a.key_lens is None:
        return [key.shape[1]] * batch, []
    return _spread(call, _lens(call, a.key_lens, "key"), batch, key.shape[1], "key"), []


def _spread(call: Call, lens: list[int], batch: int, limit: int | None, what: str) -> list[int]:
    lens = lens * batch if len(lens) == 1 else lens
    if len(lens) != batch or min(lens) < 0 or (limit is not None and max(lens) > limit):
        call.refuse(f"the {what} lengths {lens} do not fit {batch} sequences of at most {limit} rows")
    return lens


def _paged(call: Call, cache: Tensor, blocks_M: Tensor, count: int, a: Attention) -> Tensor:
    """A sequence's first `count` rows [count, G, D] out of the blocks that hold them."""
    block_rows = cache.shape[1] if cache.dim() == 3 else cache.shape[-2]
    needed = -(-count // block_rows)
    if needed > len(blocks_M):
        call.refuse(f"{count} keys are more than {len(blocks_M)} blocks of {block_rows} rows hold")
    blocks = blocks_M[:needed].long()
    if needed and not 0 <= int(blocks.min()) <= int(blocks.max()) < cache.shape[0]:
        call.refuse(f"block_table names a block outside a cache of {cache.shape[0]} blocks")
    rows = cache[blocks]
    if cache.dim() == 3:
        rows = rows.flatten(0, 1)
        rows = rows.reshape(len(rows), a.key_heads, rows.shape[1] // a.key_heads)
    elif cache.dim() == 4:
        rows = rows.transpose(1, 2).flatten(0, 1)
    else:
        rows = rows.permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)
    if rows.shape[1] != a.key_heads:
        call.refuse(f"a cache of {list(cache.shape)} does not hold {a.key_heads} key heads")
    return rows[:count]


def _mask_of(
    call: Call, mask: Tensor | None, b: int, queries: int, keys: int, q: Tensor, sparsity: Sparsity
) -> Tensor | None:
    """Sequence b's mask [Q, K] out of [S, keys], [B or 1, S, keys], [B or 1, 1, S, keys]; with one query, [B, keys]."""
    if mask is None or sparsity.mode >= 2:
        return None
    if mask.dim() == 2 and q.dim() == 4 and q.shape[1] == 1 and mask.shape[0] == q.shape[0]:
        mask = mask[:, None]
    if mask.dim() == 4:
        if mask.shape[1] != 1:
            call.refuse(f"atten_mask {list(mask.shape)} differs between heads")
        mask = mask[:, 0]
    if mask.dim() == 3:
        mask = mask[b if len(mask) > 1 else 0]
    if mask.shape[0] < queries or mask.shape[1] < keys:
        call.refuse(f"atten_mask has {list(mask.shape)} entries for {queries} queries of {keys} keys")
    return mask[:queries, :keys]
