"""A small decoder written directly in `atb` ops, as the exporter's programs look after fusion, for the tests of the CPU
target: the same module runs eagerly (what results are compared with) and is exported to a Program.

Shape letters: T tokens, S sequences, R logits rows, M block-table columns, N heads, K kv heads, D head_dim,
P block_size, B blocks, V vocabulary, H hidden, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import cann_runtime.ops.atb  # noqa: F401  (registers the ops)
from cann_export.program import STEP_INPUTS, Program, Slot
from cann_runtime.artifact.manifest import Bucket
from cann_runtime.executor.base import StepInputs

atb = torch.ops.atb


@dataclass(frozen=True)
class Config:
    """Sizes on one rank; `tp` only decides whether the collectives are there."""

    layers: int = 2
    hidden: int = 64
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 96
    vocab: int = 131
    block_size: int = 16
    max_seq_len: int = 256
    dtype: torch.dtype = torch.float32
    qk_norm: bool = False
    qkv_bias: bool = True
    rotary: bool = True
    tp: int = 1

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


def parameters(c: Config) -> dict[str, Tensor]:
    """Seeded values of every parameter by name, in graph order; the embedding is also the lm_head."""
    g = torch.Generator().manual_seed(1)

    def rand(*shape: int, scale: float = 0.15, shift: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * scale + shift).to(c.dtype)

    columns = (c.heads + 2 * c.kv_heads) * c.head_dim
    params = {"embed": rand(c.vocab, c.hidden, scale=1.0)}
    for i in range(c.layers):
        params[f"layers.{i}.norm1"] = rand(c.hidden, shift=1.0)
        params[f"layers.{i}.qkv"] = rand(columns, c.hidden)
        if c.qkv_bias:
            params[f"layers.{i}.qkv_bias"] = rand(columns)
        if c.qk_norm:
            params[f"layers.{i}.q_norm"] = rand(c.head_dim, shift=1.0)
            params[f"layers.{i}.k_norm"] = rand(c.head_dim, shift=1.0)
        params[f"layers.{i}.o"] = rand(c.hidden, c.heads * c.head_dim)
        params[f"layers.{i}.norm2"] = rand(c.hidden, shift=1.0)
        params[f"layers.{i}.gate_up"] = rand(2 * c.intermediate, c.hidden)
        params[f"layers.{i}.down"] = rand(c.hidden, c.intermediate)
    params["norm"] = rand(c.hidden, shift=1.0)
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
    angles = torch.outer(torch.arange(c.max_seq_len).float(), inv_freq).repeat(1, 2)
    params["rope_cos"], params["rope_sin"] = angles.cos().to(c.dtype), angles.sin().to(c.dtype)
    return params


class ToyStep(nn.Module):
    """forward(parameters, step inputs, caches) -> logits; caches are k_0, v_0, k_1 ... [B, P, K, D]."""

    def __init__(self, config: Config, names: list[str]) -> None:
        super().__init__()
        self.config = config
        self.names = names

    def _reduce(self, x: Tensor) -> Tensor:
        if self.config.tp == 1:
            return x
        functional = torch.ops._c10d_functional
        return functional.wait_tensor(functional.all_reduce(x, "sum", "tp"))  # type: ignore[no-any-return]

    def forward(self, params: list[Tensor], step: list[Tensor], kv: list[Tensor]) -> tuple[Tensor]:
        c, p = self.config, dict(zip(self.names, params, strict=True))
        input_ids, position_ids, slots, table, query_lens, kv_lens, logits_rows = step
        cos, sin = torch.embedding(p["rope_cos"], position_ids), torch.embedding(p["rope_sin"], position_ids)
        x = torch.embedding(p["embed"], input_ids)
        residual, sizes = x, [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        for i in range(c.layers):
            name = f"layers.{i}."
            if i == 0:
                x = atb.rms_norm(x, p[name + "norm1"], 1e-5)
            else:
                x, residual = atb.add_rms_norm(x, residual, p[name + "norm1"], 1e-5)
            qkv = atb.linear(x, p[name + "qkv"], p.get(name + "qkv_bias"))
            q, k, v = qkv.split_with_sizes(sizes, dim=-1)
            q = q.view(-1, c.heads, c.head_dim)
            k, v = k.view(-1, c.kv_heads, c.head_dim), v.view(-1, c.kv_heads, c.head_dim)
            if c.qk_norm:
                q, k = atb.rms_norm(q, p[name + "q_norm"], 1e-5), atb.rms_norm(k, p[name + "k_norm"], 1e-5)
            if c.rotary:
                q, k = atb.rotary(q, k, cos, sin)
            atb.reshape_and_cache(k, v, kv[2 * i], kv[2 * i + 1], slots)
            y = atb.paged_attention(q, kv[2 * i], kv[2 * i + 1], table, query_lens, kv_lens, c.scale)
            x = self._reduce(atb.linear(y.reshape(-1, c.heads * c.head_dim), p[name + "o"]))
            x, residual = atb.add_rms_norm(x, residual, p[name + "norm2"], 1e-5)
            x = atb.swiglu(atb.linear(x, p[name + "gate_up"]))
            x = self._reduce(atb.linear(x, p[name + "down"]))
        x, _ = atb.add_rms_norm(x, residual, p["norm"], 1e-5)
        return (atb.linear(x[logits_rows], p["embed"]),)


def caches(c: Config, blocks: int) -> list[Tensor]:
    return [torch.zeros(blocks, c.block_size, c.kv_heads, c.head_dim, dtype=c.dtype) for _ in range(2 * c.layers)]


def program(c: Config) -> Program:
    """The toy as a dynamic Program, in torch.export's training IR."""
    with FakeTensorMode():
        shapes = parameters(c)
    fakes = [torch.empty(value.shape, dtype=value.dtype) for value in shapes.values()]
    step = [torch.zeros(size, dtype=torch.int64) for size in ((15,), (15,), (15,), (3, 7), (3,), (3,), (5,))]
    step[2], step[3] = step[2].int(), step[3].int()
    T, S, R, M = (torch.export.Dim(name, min=1) for name in "TSRM")
    dims: list[Any] = [{0: T}, {0: T}, {0: T}, {0: S, 1: M}, {0: S}, {0: S}, {0: R}]
    blocks = torch.export.Dim("B", min=2)
    kv = caches(c, 9)
    exported = torch.export.export(
        ToyStep(c, list(shapes)),
        (fakes, step, kv),
        dynamic_shapes=([None] * len(fakes), dims, [{0: blocks}] * len(kv)),
        strict=False,
    )
    slots = [Slot("param", name) for name in shapes] + [Slot("input", name) for name in STEP_INPUTS]
    slots += [Slot("kv", f"{kind}_cache_{i}") for i in range(c.layers) for kind in "kv"]
    bucket = Bucket(tokens=512, seqs=16, rows=64, max_blocks=16)
    return Program(exported.graph_module, slots, "mixed", bucket, c.layers, ["dense"] * c.layers, True, c.head_dim)


def eager(c: Config, params: dict[str, Tensor], step: StepInputs, kv: list[Tensor]) -> Tensor:
    """Logits by the plain definitions of the `atb` ops; the caches are written in place."""
    with torch.inference_mode():
        return ToyStep(c, list(params))(list(params.values()), step.tensors(), kv)[0]


@dataclass
class Batch:
    """Sequences that share a paged cache with scattered blocks; block 0 is never used."""

    config: Config
    num_blocks: int
    seed: int = 0
    lengths: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        order = torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(self.seed)) + 1
        self.free: list[int] = order.tolist()
        self.random = torch.Generator().manual_seed(self.seed + 1)

    def step(self, rows: dict[int, int], all_logits: bool = True) -> StepInputs:
        """The next step of the sequences in `rows` (index -> new random tokens); a new index starts one."""
        position, slot, query, seen, last = [], [], [], [], []
        for seq, count in rows.items():
            while len(self.lengths) <= seq:
                self.lengths.append(0)
                self.tables.append([])
            for _ in range(count):
                at = self.lengths[seq]
                if at % self.config.block_size == 0:
                    self.tables[seq].append(self.free.pop())
                position.append(at)
                slot.append(self.tables[seq][-1] * self.config.block_size + at % self.config.block_size)
                self.lengths[seq] += 1
            query.append(len(position))
            seen.append(self.lengths[seq])
            last.append(len(position) - 1)
        width = max(len(self.tables[s]) for s in rows)
        table = [self.tables[s] + [0] * (width - len(self.tables[s])) for s in rows]
        ids = torch.randint(0, self.config.vocab, (len(position),), generator=self.random)
        picked = list(range(len(position))) if all_logits else last
        return StepInputs(
            input_ids_T=ids,
            position_ids_T=torch.tensor(position),
            slot_mapping_T=torch.tensor(slot, dtype=torch.int32),
            block_table_SM=torch.tensor(table, dtype=torch.int32),
            query_lens_S=torch.tensor(query),
            kv_lens_S=torch.tensor(seen),
            logits_rows_R=torch.tensor(picked),
        )
