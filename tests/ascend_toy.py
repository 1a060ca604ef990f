"""A decoder step written directly in fused ops, as the fusion stage would leave it, for the tests of the Ascend target.

Shape letters: T tokens, S sequences, R logits rows, H hidden, N query heads, K kv heads, D head_dim, B blocks,
P block_size, V vocabulary rows on one rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import cann_runtime.ops.atb  # noqa: F401  (registers the ops)
from cann_export.program import STEP_INPUTS, Program, Slot
from cann_runtime.artifact.manifest import Bucket, Phase

atb = torch.ops.atb
c10d = torch.ops._c10d_functional


@dataclass
class Size:
    """Sizes of the toy on one rank."""

    layers: int = 3
    hidden: int = 512
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 128
    inner: int = 256
    vocab: int = 128
    tp: int = 8
    blocks: int = 16
    block: int = 128
    bias: bool = True
    unbiased: tuple[int, ...] = ()  # layers of another kind: without qkv bias

    def kinds(self) -> list[str]:
        return ["unbiased" if i in self.unbiased else "dense" for i in range(self.layers)]


def reduce(x: Tensor, size: Size) -> Tensor:
    if size.tp == 1:
        return x
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", "tp"))


class Layer(nn.Module):
    def __init__(self, size: Size, index: int) -> None:
        super().__init__()
        qkv = (size.heads + 2 * size.kv_heads) * size.head_dim
        self.input_norm = nn.Parameter(torch.empty(size.hidden))
        self.qkv = nn.Parameter(torch.empty(qkv, size.hidden))
        self.qkv_bias = nn.Parameter(torch.empty(qkv)) if size.bias and index not in size.unbiased else None
        self.o = nn.Parameter(torch.empty(size.hidden, size.heads * size.head_dim))
        self.post_norm = nn.Parameter(torch.empty(size.hidden))
        self.gate_up = nn.Parameter(torch.empty(2 * size.inner, size.hidden))
        self.down = nn.Parameter(torch.empty(size.hidden, size.inner))
        self.size = size

    def forward(self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor,
                meta: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:  # fmt: skip
        size, (slots, table, q_lens, kv_lens) = self.size, meta
        if residual is None:
            residual, x = x, atb.rms_norm(x, self.input_norm, 1e-6)
        else:
            x, residual = atb.add_rms_norm(x, residual, self.input_norm, 1e-6)
        widths = [size.heads * size.head_dim] + [size.kv_heads * size.head_dim] * 2
        q, k, v = atb.linear(x, self.qkv, self.qkv_bias).split(widths, -1)
        q, k = (t.view(t.shape[0], -1, size.head_dim) for t in (q, k))
        q, k = atb.rotary(q, k, cos, sin)
        atb.reshape_and_cache(k, v.view(k.shape), k_cache, v_cache, slots)
        o = atb.paged_attention(q, k_cache, v_cache, table, q_lens, kv_lens, size.head_dim**-0.5)
        x = reduce(atb.linear(o.view(o.shape[0], -1), self.o), size)
        x, residual = atb.add_rms_norm(x, residual, self.post_norm, 1e-6)
        return reduce(atb.linear(atb.swiglu(atb.linear(x, self.gate_up)), self.down), size), residual


class Inner(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(size.vocab, size.hidden))
        self.layers = nn.ModuleList(Layer(size, i) for i in range(size.layers))
        self.norm = nn.Parameter(torch.empty(size.hidden))


class Toy(nn.Module):
    """The step: (step inputs, caches) -> logits."""

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.size = size
        with torch.device("meta"):
            self.model = Inner(size).to(dtype)
            self.lm_head = nn.Parameter(torch.empty(size.vocab, size.hidden, dtype=dtype))
            self.rank_offset = nn.Parameter(torch.empty(1, dtype=torch.int64), requires_grad=False)
            self.rope_cos = nn.Parameter(torch.empty(1024, size.head_dim, dtype=dtype))
            self.rope_sin = nn.Parameter(torch.empty(1024, size.head_dim, dtype=dtype))
        self.requires_grad_(False)

    def forward(self, ids: Tensor, pos: Tensor, slots: Tensor, table: Tensor, q_lens: Tensor, kv_lens: Tensor,
                rows: Tensor, *caches: Tensor) -> Tensor:  # fmt: skip
        size, m = self.size, self.model
        local = ids - self.rank_offset
        inside = (local >= 0) & (local < size.vocab)
        x = nn.functional.embedding(local * inside, m.embed) * inside.unsqueeze(-1)
        x = reduce(x, size)
        cos, sin = self.rope_cos[pos], self.rope_sin[pos]
        meta = (slots, table, q_lens, kv_lens)
        residual = None
        for i, layer in enumerate(m.layers):
            x, residual = layer(x, residual, cos, sin, caches[2 * i], caches[2 * i + 1], meta)
        x, _ = atb.add_rms_norm(x[rows], residual[rows], m.norm, 1e-6)
        logits = atb.linear(x, self.lm_head)
        if size.tp == 1:
            return logits
        full = c10d.wait_tensor(c10d.all_gather_into_tensor(logits, size.tp, "tp"))
        return full.view(size.tp, -1, size.vocab).permute(1, 0, 2).reshape(-1, size.tp * size.vocab)


def toy_program(size: Size, bucket: Bucket, phase: Phase, dtype: torch.dtype = torch.bfloat16) -> Program:
    """The toy traced with torch.export at a bucket's sizes."""
    step = Toy(size, dtype)
    tokens, seqs = bucket.tokens, bucket.seqs
    with torch.device("meta"):
        inputs = {name: torch.empty(tokens, dtype=torch.int64) for name in ("input_ids", "position_ids")}
        inputs |= {name: torch.empty(seqs, dtype=torch.int64) for name in ("query_lens", "kv_lens")}
        inputs["slot_mapping"] = torch.empty(tokens, dtype=torch.int32)
        inputs["block_table"] = torch.empty(seqs, bucket.max_blocks, dtype=torch.int32)
        inputs["logits_rows"] = torch.empty(bucket.rows, dtype=torch.int64)
        shape = (size.blocks, size.block, size.kv_heads, size.head_dim)
        caches = [torch.empty(shape, dtype=dtype) for _ in range(2 * size.layers)]
    with torch.no_grad():
        exported = torch.export.export(step, (*(inputs[name] for name in STEP_INPUTS), *caches), strict=False)
    gm = exported.graph_module
    for node in gm.graph.nodes:
        paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        node.meta["source"] = paths[-1] if paths else ""
        if match := re.search(r"layers\.(\d+)", node.meta["source"]):
            node.meta["layer"] = int(match[1])
    names = [*exported.graph_signature.inputs_to_parameters.values()]
    slots = [Slot("param", name) for name in names] + [Slot("input", name) for name in STEP_INPUTS]
    slots += [Slot("kv", f"{kind}_cache_{i}") for i in range(size.layers) for kind in ("k", "v")]
    return Program(gm, slots, phase, bucket, size.layers, size.kinds(), head_dim=size.head_dim)
