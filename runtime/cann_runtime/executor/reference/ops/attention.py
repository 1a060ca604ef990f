"""The fused attention ops by name: which of their inputs and attributes is what in `attention_layout.fused_attention`.

Letters: B sequences, S rows of one, T rows of all, N query heads.
Source: op-plugin npu_fused_infer_attention_score, npu_incre_flash_attention, npu_prompt_flash_attention,
npu_fusion_attention; ops-transformer attention (README and op_def per op).
"""

from __future__ import annotations

from torch import Tensor

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.attention_layout import Attention, Dequant, fused_attention
from cann_runtime.executor.reference.ops.registry import OpFunction, implements
from cann_runtime.executor.reference.ops.softmax_attention import Sparsity

OPS: dict[str, OpFunction] = {}

_BAND_MODES = (0, 4)  # the others do not look at pre_tokens and next_tokens


def _sparsity(call: Call, before: str, after: str) -> Sparsity:
    mode = call.choice("sparse_mode", (0, 1, 2, 3, 4))
    if mode in _BAND_MODES:
        return Sparsity(mode, call.integer(before), call.integer(after))
    call.ignore(before, after)
    return Sparsity(mode)


def _single(call: Call, name: str) -> Tensor:
    """key and value are lists of which only one tensor is supported."""
    tensors = call.many(name)
    if len(tensors) != 1:
        call.refuse(f"{len(tensors)} {name} tensors; only one is supported")
    return tensors[0]


def _dequants(call: Call, new_style: bool) -> tuple[Dequant | None, Dequant | None]:
    """Of int8 keys and values: from antiquant_scale [2, ...] (keys, values), or from an input for each."""
    scale, offset = call.get("antiquant_scale"), call.get("antiquant_offset")
    if scale is not None:
        mode = call.choice("antiquant_mode", (0, 1)) if new_style else 0
        pairs = [(scale[i], None if offset is None else offset[i]) for i in range(2)]
        return Dequant(*pairs[0], mode), Dequant(*pairs[1], mode)
    if not new_style:
        return None, None
    found: list[Dequant | None] = []
    for name in ("key", "value"):
        own = call.get(f"{name}_antiquant_scale")
        offset = call.get(f"{name}_antiquant_offset")
        mode = call.choice(f"{name}_antiquant_mode", (0, 1))
        found.append(None if own is None else Dequant(own, offset, mode))
    return found[0], found[1]


@implements(OPS, "FusedInferAttentionScore")
def fused_infer_attention_score(call: Call) -> tuple[Tensor, Tensor]:
    """(attention, softmax_lse). The lse exists only with softmax_lse_flag; without, it is empty.

    Formula and layouts: see Attention. inner_precise steers the precision of float16 and rows without a visible key
    (here always 0); block_size must be that of the caches.
    """
    key, value, table = _single(call, "key"), _single(call, "value"), call.get("block_table")
    call.choice("inner_precise", (0, 1))
    if table is not None:
        rows = key.shape[1] if key.dim() == 3 else key.shape[-2]
        if call.integer("block_size") != rows:
            call.refuse(f"block_size is {call.integer('block_size')}, the cache's blocks have {rows} rows")
    else:
        call.ignore("block_size")
    for side in (key, value):
        scaled = call.get("antiquant_scale") is not None or call.get("key_antiquant_scale") is not None
        if not side.is_floating_point() and not scaled:
            call.refuse("int8 keys or values need their antiquant scales")
    key_dequant, value_dequant = _dequants(call, new_style=True)
    heads = call.integer("num_heads")
    out, lse = fused_attention(
        call,
        Attention(
            query=call["query"],
            key=key,
            value=value,
            layout=call.text("input_layout"),
            heads=heads,
            key_heads=call.integer("num_key_value_heads") or heads,
            scale=call.number("scale"),
            sparsity=_sparsity(call, "pre_tokens", "next_tokens"),
            mask=call.get("atten_mask"),
            bias=call.get("pse_shift"),
            query_lens=call.get("actual_seq_lengths"),
            key_lens=call.get("actual_seq_lengths_kv"),
            block_table=table,
            q_rope=call.get("query_rope"),
            k_rope=call.get("key_rope"),
            sink=call.get("learnable_sink"),
            key_dequant=key_dequant,
            value_dequant=value_dequant,
        ),
    )
    return out, lse if call.flag("softmax_lse_flag") else lse.new_empty(0)


@implements(OPS, "IncreFlashAttention")
def incre_flash_attention(call: Call) -> Tensor:
    """One query per sequence over its keys; actual_seq_lengths are the keys' (op-plugin npu_incre_flash_attention)."""
    call.ignore("inner_precise", "block_size")
    key_dequant, value_dequant = _dequants(call, new_style=False)
    if call["query"].shape[2 if call.text("input_layout") == "BNSD" else 1] != 1:
        call.refuse("takes one query per sequence")
    return fused_attention(
        call,
        Attention(
            query=call["query"],
            key=_single(call, "key"),
            value=_single(call, "value"),
            layout=call.text("input_layout"),
            heads=call.integer("num_heads"),
            key_heads=call.integer("num_key_value_heads") or call.integer("num_heads"),
            scale=call.number("scale_value"),
            sparsity=Sparsity(1),
            mask=call.get("atten_mask"),
            bias=call.get("pse_shift"),
            key_lens=call.get("actual_seq_lengths"),
            block_table=call.get("block_table"),
            key_dequant=key_dequant,
            value_dequant=value_dequant,
        ),
    )[0]


@implements(OPS, "PromptFlashAttention")
def prompt_flash_attention(call: Call) -> Tensor:
    """Many queries per sequence, no caches (op-plugin npu_prompt_flash_attention). next_tokens is 0 by default."""
    call.ignore("inner_precise")
    return fused_attention(
        call,
        Attention(
            query=call["query"],
            key=call["key"],
            value=call["value"],
            layout=call.text("input_layout"),
            heads=call.integer("num_heads"),
            key_heads=call.integer("num_key_value_heads") or call.integer("num_heads"),
            scale=call.number("scale_value"),
            sparsity=_sparsity(call, "pre_tokens", "next_tokens"),
            mask=call.get("atten_mask"),
            bias=call.get("pse_shift"),
            query_lens=call.get("actual_seq_lengths"),
            key_lens=call.get("actual_seq_lengths_kv"),
        ),
    )[0]


@implements(OPS, "FlashAttentionScore")
def flash_attention_score(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(softmax_max, softmax_sum, softmax_out, attention_out) of the training op (op-plugin npu_fusion_attention).

    The first three exist for the backward pass: they are undefined here. Lengths are cumulative, for layout TND only.
    """
    call.ignore("inner_precise")
    if call.number("keep_prob") != 1.0:
        call.refuse("dropout is not supported: keep_prob must be 1")
    layout, heads, key = call.text("input_layout"), call.integer("head_num"), call["key"]
    head_size = call["query"].shape[-1] // (heads if layout == "BSH" else 1)
    key_heads = {"BSH": key.shape[-1] // head_size, "BNSD": key.shape[1]}.get(layout, key.shape[-2])
    out, lse = fused_attention(
        call,
        Attention(
            query=call["query"],
            key=key,
            value=call["value"],
            layout=layout,
            heads=heads,
            key_heads=key_heads,
            scale=call.number("scale_value"),
            sparsity=_sparsity(call, "pre_tockens", "next_tockens"),
            mask=call.get("atten_mask"),
            bias=call.get("real_shift"),
            query_lens=call.get("actual_seq_qlen"),
            key_lens=call.get("actual_seq_kvlen"),
        ),
    )
    unused = call.undefined([*lse.shape[:-1], 8], lse.dtype)
    return unused, unused.clone(), call.undefined([0], out.dtype), out
