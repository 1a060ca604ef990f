"""Cutting the model over tensor-parallel ranks: smaller meta parameters, collectives, and the weight plan.

The starting point is the model class's own `base_model_tp_plan`; `OVERLAY` adds what those plans leave out (the
vocabulary) and wins over them. Modules keep their class: a module that communicates gets its forward replaced on the
instance. Experts and merged projections are not cut here.

Shape letters: T tokens, R logits rows, H hidden, V vocabulary (padded to a multiple of tp).
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cann_export.model import BuiltModel
from cann_runtime.artifact.plan import Param, Part, WeightPlan
from cann_runtime.errors import RecipeError, UnsupportedModelError

# Module name pattern -> style, in the words of transformers' plans and two of ours (vocab_embedding, vocab_head).
OVERLAY = {
    "*embed_tokens": "vocab_embedding",
    "lm_head": "vocab_head",
}
# Projections whose rows are kv heads: where there are fewer heads than ranks, ranks share them.
KV_PROJECTIONS = ("k_proj", "v_proj")
QUERY_PROJECTIONS = ("q_proj",)
ROW_STYLES = ("rowwise",)
COLUMN_STYLES = ("colwise",)
REPLICATED_STYLES = ("replicated_with_grad_allreduce", "sequence_parallel")


def head_counts(config: Any) -> tuple[int, int]:
    """(query heads, kv heads) of a config. Raises UnsupportedModelError where it does not say."""
    if not isinstance(getattr(config, "num_attention_heads", None), int):
        raise UnsupportedModelError(f"model_type {config.model_type!r}: its config has no num_attention_heads")
    heads = int(config.num_attention_heads)
    return heads, int(getattr(config, "num_key_value_heads", None) or heads)


def allowed_tp(heads: int, kv_heads: int) -> list[int]:
    """Tensor-parallel sizes that cut the heads evenly, with kv heads cut or replicated evenly too."""
    return [t for t in range(1, heads + 1) if heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)]


def check_tp(config: Any, tp: int) -> None:
    """Raise RecipeError naming the sizes that work where tp does not cut this model's attention heads."""
    heads, kv_heads = head_counts(config)
    allowed = allowed_tp(heads, kv_heads)
    if tp not in allowed:
        sizes = ", ".join(map(str, allowed))
        raise RecipeError(
            f"parallel.tp: {tp} does not divide {heads} attention heads ({kv_heads} kv heads); allowed: {sizes}"
        )


def style_of(built: BuiltModel, name: str) -> str | None:
    """Sharding style of a module, from our overlay first, then from the class's own plans."""
    for pattern, style in OVERLAY.items():
        if fnmatch.fnmatchcase(name, pattern):
            return style
    plans: dict[str, str] = {}
    base = getattr(built.model, "base_model_prefix", "model")
    for pattern, style in (getattr(built.config, "base_model_tp_plan", None) or {}).items():
        plans[f"{base}.{pattern}"] = style
    for pattern, style in plans.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
            return style
    return None


def all_reduce(x: Tensor) -> Tensor:
    """Sum over the tensor-parallel ranks."""
    out: Tensor = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", "tp"))
    return out


def _row_forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        out = all_reduce(F.linear(x, module.weight))
        return out if module.bias is None else out + module.bias

    return forward


def _head_forward(module: nn.Linear, tp: int) -> Callable[[Tensor], Tensor]:
    def forward(x_1RH: Tensor) -> Tensor:
        part = F.linear(x_1RH, module.weight, module.bias)
        columns = module.weight.shape[0]
        flat = part.reshape(-1, columns)
        gathered = torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_gather_into_tensor(flat, tp, "tp")
        )
        logits: Tensor = gathered.view(tp, -1, columns).permute(1, 0, 2).reshape(1, -1, tp * columns)
        return logits

    return forward


def _embedding_forward(module: nn.Embedding) -> Callable[[Tensor], Tensor]:
    def forward(ids: Tensor) -> Tensor:
        rows = module.weight.shape[0]
        local = ids - module.get_parameter("rank_offset")
        mine = (local >= 0) & (local < rows)
        x = F.embedding(torch.where(mine, local, torch.zeros_like(local)), module.weight)
        return all_reduce(x * mine.unsqueeze(-1).to(x.dtype))

    return forward


class _Cutter:
    """Cuts one model; `parts` collects how every parameter is made, by its name in the graph."""

    def __init__(self, built: BuiltModel, tp: int) -> None:
        self.built = built
        self.tp = tp
        self.params: dict[str, Param] = {}
        self.heads, self.kv_heads = head_counts(built.config)

    def _ranges(self, size: int) -> list[tuple[int, int]]:
        step = math.ceil(size / self.tp)
        return [(r * step, (r + 1) * step) for r in range(self.tp)]

    def _head_ranges(self, size: int, heads: int) -> list[tuple[int, int]]:
        width = size // heads
        if heads >= self.tp:
            step = heads // self.tp * width
            return [(r * step, (r + 1) * step) for r in range(self.tp)]
        starts = [r * heads // self.tp * width for r in range(self.tp)]
        return [(s, s + width) for s in starts]

    def cut(self, module: nn.Module, name: str, leaf: str, dim: int, ranges: list[tuple[int, int]]) -> None:
        """Replace parameter `leaf` of a module by its local shape and note its ranges."""
        param = module.get_parameter(leaf)
        full = list(param.shape)
        part = Part(source=f"{name}.{leaf}", shape=full, dim=dim, ranges=ranges)
        self._set(module, name, leaf, part, param.dtype)

    def _set(self, module: nn.Module, name: str, leaf: str, part: Part, dtype: torch.dtype) -> None:
        shape = part.local_shape()
        setattr(module, leaf, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False))
        full_name = f"{name}.{leaf}"
        self.params[full_name] = Param(
            name=full_name, dtype=str(dtype).removeprefix("torch."), shape=shape, parts=[part]
        )

    def linear(self, module: nn.Linear, name: str, style: str) -> None:
        leaf = name.rpartition(".")[2]
        if style in COLUMN_STYLES:
            size = module.weight.shape[0]
            if leaf in QUERY_PROJECTIONS:
                ranges = self._head_ranges(size, self.heads)
            elif leaf in KV_PROJECTIONS:
                ranges = self._head_ranges(size, self.kv_heads)
            else:
                ranges = self._ranges(size)
            self.cut(module, name, "weight", 0, ranges)
            if module.bias is not None:
                self.cut(module, name, "bias", 0, ranges)
        elif style in ROW_STYLES:
            self.cut(module, name, "weight", 1, self._ranges(module.weight.shape[1]))
            if self.tp > 1:
                module.forward = _row_forward(module)  # type: ignore[method-assign, assignment]
        elif style == "vocab_head":
            self.cut(module, name, "weight", 0, self._ranges(module.weight.shape[0]))
            if module.bias is not None:
                self.cut(module, name, "bias", 0, self._ranges(module.bias.shape[0]))
            if self.tp > 1:
                module.forward = _head_forward(module, self.tp)  # type: ignore[method-assign, assignment]
        else:
            raise UnsupportedModelError(f"{name}: sharding style {style!r} is not supported")

    def embedding(self, module: nn.Embedding, name: str) -> None:
        rows = module.weight.shape[0]
        ranges = self._ranges(rows)
        self.cut(module, name, "weight", 0, ranges)
        if self.tp > 1:
            offset = nn.Parameter(torch.empty(1, dtype=torch.int64, device="meta"), requires_grad=False)
            module.register_parameter("rank_offset", offset)
            full_name = f"{name}.rank_offset"
            self.params[full_name] = Param(
                name=full_name, kind="rank_offset", dtype="int64", shape=[1], step=ranges[0][1] - ranges[0][0]
            )
            module.forward = _embedding_forward(module)  # type: ignore[method-assign, assignment]


def shard(built: BuiltModel, tp: int) -> WeightPlan:
    """Cut the model for `tp` ranks in place; the plan says how every parameter of every rank is made.

    Raises RecipeError where the heads cannot be cut, UnsupportedModelError for a module that no plan covers.
    """
    check_tp(built.config, tp)
    cutter = _Cutter(built, tp)
    model: Any = built.model
    tied = bool(getattr(built.config, "tie_word_embeddings", False))
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    embed = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    uncovered = []
    for name, module in list(model.named_modules()):
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        if name in built.ropes:
            _rope_params(cutter, name, module, built)
            continue
        style = style_of(built, name)
        if isinstance(module, nn.Embedding) and style == "vocab_embedding":
            cutter.embedding(module, name)
        elif isinstance(module, nn.Linear) and style is not None:
            cutter.linear(module, name, style)
        elif (all(p.dim() == 1 for p in own.values()) and (style is None or style in REPLICATED_STYLES)) or tp == 1:
            for leaf, param in own.items():
                cutter._set(module, name, leaf, Part(source=f"{name}.{leaf}", shape=list(param.shape)), param.dtype)
        else:
            uncovered.append(name)
    if uncovered:
        raise UnsupportedModelError(f"no tensor-parallel plan covers {', '.join(uncovered[:5])}")
    params = cutter.params
    if tied and head is not None and embed is not None:
        names = {id(m): n for n, m in model.named_modules()}
        embed_name, head_name = f"{names[id(embed)]}.weight", f"{names[id(head)]}.weight"
        head.weight = embed.weight
        params.pop(head_name, None)
        params[embed_name].parts[0].alternatives = [head_name]
    return WeightPlan(tp=tp, params=params)


def _rope_params(cutter: _Cutter, name: str, module: nn.Module, built: BuiltModel) -> None:
    for leaf in ("cos", "sin"):
        param = module.get_parameter(leaf)
        full_name = f"{name}.{leaf}"
        cutter.params[full_name] = Param(
            name=full_name,
            kind="rope_cos" if leaf == "cos" else "rope_sin",
            dtype=str(param.dtype).removeprefix("torch."),
            shape=list(param.shape),
            constant=f"{name}.inv_freq",
            scaling=built.ropes[name].scaling,
        )


def kv_heads_per_rank(built: BuiltModel, tp: int) -> int:
    """Kv heads that one rank keeps."""
    return max(1, head_counts(built.config)[1] // tp)
