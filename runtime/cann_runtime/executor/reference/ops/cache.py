"""Writes into paged caches, in place.

Letters: T tokens, N heads, D head size, B blocks, P rows of a block, C width of an NZ fractal (32 bytes of elements).
Source: op-plugin npu_scatter_pa_kv_cache and npu_kv_rmsnorm_rope_cache (documents and tests).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.norm import rstd
from cann_runtime.executor.reference.ops.registry import OpFunction, implements
from cann_runtime.executor.reference.ops.rope import deinterleave, rotate_half

OPS: dict[str, OpFunction] = {}


def fractal_width(dtype: torch.dtype) -> int:
    """C: elements of a row that an NZ layout keeps together. 16 for 16-bit types, 32 for int8; held wider types of mode
    exact stand for 16-bit ones."""
    return 32 if dtype in (torch.int8, torch.uint8) else 16


def check_slots(call: Call, slots_T: Tensor, rows: int) -> Tensor:
    """Indices of the slots that are written (>= 0): the ops forbid duplicates and slots outside the cache."""
    kept = (slots_T >= 0).nonzero().flatten()
    used = slots_T[kept]
    if used.numel() and int(used.max()) >= rows:
        call.refuse(f"slot {int(used.max())} is outside a cache of {rows} rows")
    if len(set(used.tolist())) != used.numel():
        call.refuse("two rows go to the same slot")
    return kept


@implements(OPS, "ScatterPaKvCache")
def scatter_pa_kv_cache(call: Call) -> tuple[Tensor, Tensor]:
    """Row t of key and value goes to slot_mapping[t] = block * P + row of its cache; negative slots are skipped.

    cache_mode Norm: key [T, N, D] into [B, P, N, D]. PA_NZ: into [B, N * D / C, P, C]. key and value may differ in D.
    """
    mode = call.text("cache_mode", ("Norm", "PA_NZ"))
    call.text("scatter_mode", ("None",))
    slots_T = call["slot_mapping"].long()
    for name in ("key", "value"):
        rows, cache = call[name], call[f"{name}_cache"]
        if rows.dtype != cache.dtype:
            call.refuse(f"writes {rows.dtype} into a cache of {cache.dtype}")
        nz = mode == "PA_NZ"
        block_rows = cache.shape[2 if nz else 1]
        kept = check_slots(call, slots_T, cache.shape[0] * block_rows)
        blocks, offsets = slots_T[kept] // block_rows, slots_T[kept] % block_rows
        if nz:
            cache[blocks, :, offsets] = rows[kept].reshape(-1, cache.shape[1], cache.shape[3])
        else:
            cache[blocks, offsets] = rows[kept].reshape(-1, *cache.shape[2:])
    return call["key_cache"], call["value_cache"]


@implements(OPS, "KvRmsNormRopeCache")
def kv_rms_norm_rope_cache(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From kv [batch, 1, S, Dn + Dr]: the first Dn normed (gamma [Dn]), the last Dr de-interleaved and rotated, each
    written into its cache in place; c = kv[..., :Dn] goes to ckv_cache, k = kv[..., Dn:] to k_cache.

    cache_mode Norm: caches [batch, 1, rows, D], index [batch, S] the row. PA, PA_BNSD: caches [B, P, 1, D], index
    [batch * S] the slot. PA_NZ: the same shape, but each block's bytes are [D / C, P, C]. PA_BLK_*: index
    [batch * pages] the first slot of each page. Negative indices are skipped. An int8 cache takes rint(x * scale),
    saturated. The last two outputs, k and c, are valid only with is_output_kv.
    """
    mode = call.text("cache_mode", ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"))
    kv, gamma, cos, sin = call["kv"], call["gamma"], call["cos"], call["sin"]
    batch = kv.shape[0]
    normal, rope = torch.split(call.wide(kv), [gamma.shape[0], kv.shape[-1] - gamma.shape[0]], -1)
    c = normal * rstd(normal, 1, call.number("epsilon")) * call.wide(gamma)
    pairs = deinterleave(rope)
    k = pairs * call.wide(cos) + rotate_half(pairs) * call.wide(sin)
    index = call["index"].long().reshape(batch, -1)
    for cache, rows, scale in (
        (call["k_cache"], k, call.get("k_rope_scale")),
        (call["ckv_cache"], c, call.get("c_kv_scale")),
    ):
        if scale is not None:
            rows = (rows * call.wide(scale)).round().clamp(-128, 127)
        elif cache.dtype == torch.int8:
            call.refuse("an int8 cache needs its scale")
        write_rows(call, cache, rows.to(cache.dtype)[:, 0], index, mode)
    if call.flag("is_output_kv"):
        return call["k_cache"], call["ckv_cache"], k.to(kv.dtype), c.to(kv.dtype)
    unused = (call.undefined(list(x.shape), kv.dtype) for x in (k, c))
    return call["k_cache"], call["ckv_cache"], next(unused), next(unused)


def write_rows(call: Call, cache: Tensor, rows: Tensor, index: Tensor, mode: str) -> None:
    """rows [batch, S, D] into the cache, whose shape and index are as kv_rms_norm_rope_cache says."""
    batch, length, width = rows.shape
    if mode == "Norm":
        for b in range(batch):
            kept = check_slots(call, index[b], cache.shape[2])
            cache[b, 0, index[b][kept]] = rows[b, kept]
        return
    block_rows = cache.shape[1]
    slots = index
    if "BLK" in mode:
        position = torch.arange(length)
        start = index[:, position // block_rows]
        slots = torch.where(start < 0, -1, start // block_rows * block_rows + position % block_rows)
    flat, data = slots.reshape(-1), rows.reshape(-1, width)
    kept = check_slots(call, flat, cache.shape[0] * block_rows)
    blocks, offsets = flat[kept] // block_rows, flat[kept] % block_rows
    if "NZ" in mode:
        fractal = fractal_width(cache.dtype)
        cache.view(cache.shape[0], -1, block_rows, fractal)[blocks, :, offsets] = data[kept].view(
            len(kept), -1, fractal
        )
    else:
        cache[blocks, offsets, 0] = data[kept]
