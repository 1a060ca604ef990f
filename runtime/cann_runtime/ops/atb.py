"""The fused ops of the step graph, as torch custom ops in the namespace `atb`.

Each op has a schema, a shape function and a plain-torch definition: the definition is the meaning, which every other
implementation (CPU kernel, Ascend op) is tested against. They are named after the ATB and torch_npu ops they stand for.
Importing this module registers them.

Shape letters: T tokens, S sequences, N query heads, K kv heads, D head_dim, B blocks, P block_size, M block-table
columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

__all__ = ["add_rms_norm", "linear", "paged_attention", "reshape_and_cache", "rms_norm", "rotary", "swiglu"]


@custom_op("atb::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [.., I] times weight [O, I] transposed, plus bias [O]: [.., O] in x's dtype."""
    return torch.nn.functional.linear(x, weight, bias)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


@custom_op("atb::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension: float32 inside, rounded to x's dtype before the weight [H]."""
    return _rms_norm(x, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@custom_op("atb::add_rms_norm", mutates_args=())
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded to x's dtype before the norm."""
    total = x + residual
    return _rms_norm(total, weight, eps), total


@add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


@custom_op("atb::rotary", mutates_args=())
def rotary(q_TND: Tensor, k_TKD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding in the half (GPT-NeoX) mode: x * cos + rotate_half(x) * sin, cos and sin equal for all heads."""
    cos, sin = cos_TD.unsqueeze(1), sin_TD.unsqueeze(1)
    return q_TND * cos + _rotate_half(q_TND) * sin, k_TKD * cos + _rotate_half(k_TKD) * sin


@rotary.register_fake
def _(q_TND: Tensor, k_TKD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    return q_TND.new_empty(q_TND.shape), k_TKD.new_empty(k_TKD.shape)


@custom_op("atb::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    """silu(first half) * second half along the last dimension: [.., 2 I] -> [.., I]."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@swiglu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@custom_op("atb::reshape_and_cache", mutates_args=("k_cache_BPKD", "v_cache_BPKD"))
def reshape_and_cache(
    k_TKD: Tensor, v_TKD: Tensor, k_cache_BPKD: Tensor, v_cache_BPKD: Tensor, slot_mapping_T: Tensor
) -> None:
    """Write row t of k and v at slot block * P + offset of the paged caches, in place. Slots are distinct."""
    slots = slot_mapping_T.long()
    k_cache_BPKD.view(-1, *k_cache_BPKD.shape[2:])[slots] = k_TKD
    v_cache_BPKD.view(-1, *v_cache_BPKD.shape[2:])[slots] = v_TKD


@reshape_and_cache.register_fake
def _(k_TKD: Tensor, v_TKD: Tensor, k_cache_BPKD: Tensor, v_cache_BPKD: Tensor, slot_mapping_T: Tensor) -> None:
    return None


@custom_op("atb::paged_attention", mutates_args=())
def paged_attention(
    q_TND: Tensor,
    k_cache_BPKD: Tensor,
    v_cache_BPKD: Tensor,
    block_table_SM: Tensor,
    query_lens_S: Tensor,
    kv_lens_S: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of S sequences packed in T rows over a paged cache: [T, N, D].

    query_lens is cumulative int64 (the last value is T); kv_lens int64 counts each sequence's keys after this step.
    Row i of a sequence with q rows and n keys sees keys 0 .. n - q + i. Query head h reads kv head h // (N / K).
    Softmax in float32.
    """
    out_TND = torch.zeros_like(q_TND)
    groups = q_TND.shape[1] // k_cache_BPKD.shape[2]
    start = 0
    for s in range(block_table_SM.shape[0]):
        end, n = int(query_lens_S[s]), int(kv_lens_S[s])
        rows = end - start
        if rows > 0 and n > 0:
            blocks = block_table_SM[s].long()
            k_nND = k_cache_BPKD[blocks].flatten(0, 1)[:n].repeat_interleave(groups, 1)
            v_nND = v_cache_BPKD[blocks].flatten(0, 1)[:n].repeat_interleave(groups, 1)
            scores = torch.einsum("tnd,mnd->ntm", q_TND[start:end].float(), k_nND.float()) * scale
            seen = torch.arange(n)[None, :] <= torch.arange(rows)[:, None] + (n - rows)
            probs = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out_TND[start:end] = torch.einsum("ntm,mnd->tnd", probs, v_nND.float()).to(q_TND.dtype)
        start = end
    return out_TND


@paged_attention.register_fake
def _(
    q_TND: Tensor,
    k_cache_BPKD: Tensor,
    v_cache_BPKD: Tensor,
    block_table_SM: Tensor,
    query_lens_S: Tensor,
    kv_lens_S: Tensor,
    scale: float,
) -> Tensor:
    return q_TND.new_empty(q_TND.shape)
