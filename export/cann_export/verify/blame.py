"""Where a rung goes wrong: the first node whose value differs, with its decoder layer and source module.

A trace is held against transformers' linear modules by their paths, a GE graph against the fused graph op by op: the
k-th op of a kind in a layer stands for the k-th of its counterpart, since lowering keeps their order.

Shape letters: L live tokens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from cann_export.verify.ge import GeRanks
from cann_export.verify.graphs import FxRanks
from cann_export.verify.hf import EagerModel
from cann_export.verify.steps import PreparedStep, Script
from cann_runtime.errors import CannError
from cann_runtime.executor.reference.graph import Op

LOOSE = 1e-4  # of the largest value: a wrong node is off by far more, an exact one by far less
_KINDS = {
    "atb.linear.default": ("MatMul", "MatMulV2"),
    "atb.rms_norm.default": ("RmsNorm",),
    "atb.add_rms_norm.default": ("AddRmsNorm",),
    "atb.rotary.default": ("ApplyRotaryPosEmb",),
    "atb.swiglu.default": ("SwiGlu",),
    "atb.paged_attention.default": ("FusedInferAttentionScore",),
    "_c10d_functional.all_reduce.default": ("HcomAllReduce",),
}
_COUNTERPART = {kind: name for name, kinds in _KINDS.items() for kind in kinds}
_OP = re.compile(r"^(?:layer(\d+)_)?[A-Za-z0-9]+_\d+$")
Key = tuple[int | None, str, int]


@dataclass
class Place:
    """A node that differs. error and peak: largest difference and largest value there."""

    node: str
    layer: int | None
    module: str
    error: float
    peak: float

    def __str__(self) -> str:
        where = f"layer {self.layer}, {self.module}" if self.layer is not None else self.module or "outside the layers"
        return f"{self.node} ({where}): off by {self.error:.3g} of {self.peak:.3g}"


def _first(value: Any) -> Tensor | None:
    while isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value if isinstance(value, Tensor) and value.is_floating_point() else None


def _differs(got: Tensor, want: Tensor) -> tuple[float, float] | None:
    if got.shape != want.shape:
        return float("inf"), float(want.abs().max())
    error = (got.double() - want.double()).abs()
    error = torch.where(error.isnan(), torch.inf, error)
    peak = float(want.abs().max())
    worst = float(error.max()) if error.numel() else 0.0
    return (worst, peak) if worst > LOOSE * max(peak, 1e-6) else None


def in_trace(ranks: FxRanks, script: Script, reference: EagerModel) -> Place | None:
    """The first linear module (or, where ranks share it, its sum) of rank 0 that is off in any step."""
    outputs: dict[str, list[Tensor]] = {}
    for text in script.texts:
        reference.logits(text, [0], lambda path, out: outputs.setdefault(path, []).append(out))
    for step in script.steps:
        seen: list[tuple[fx.Node, str, Tensor]] = []

        def watch(node: fx.Node, value: Any, seen: list[tuple[fx.Node, str, Tensor]] = seen) -> None:
            name, source = str(node.target), str(node.meta.get("source") or "")
            if name in ("aten.linear.default", "atb.linear.default", "_c10d_functional.all_reduce.default"):
                tensor = _first(value)
                if tensor is not None:
                    seen.append((node, source, tensor.reshape(-1, tensor.shape[-1]).clone()))

        ranks.run(step, watch)
        reduced = {source for node, source, _ in seen if "all_reduce" in str(node.target)}
        for node, source, got in seen:
            path = next((p for p in outputs if p.removeprefix("model.") == source), None)
            if path is None or (source in reduced and "all_reduce" not in str(node.target)):
                continue
            if got.shape[0] != sum(step.rows):
                continue  # the head, which sees the wanted rows only
            want = torch.cat([outputs[path][s][p - n + 1 : p + 1] for (s, p), n in zip(step.wanted, step.rows)])
            width = min(want.shape[-1], got.shape[-1])  # a cut or merged projection begins with rank 0's columns
            if (off := _differs(got[:, :width], want[:, :width])) is not None:
                return Place(node.name, node.meta.get("layer"), path, *off)
    return None


def in_graph(ge: GeRanks, fused: FxRanks, script: Script) -> Place | str | None:
    """The first op of a GE graph, on rank 0, whose value is not the fused graph's; a message where it cannot run."""
    for step in script.steps:
        wanted: dict[Key, tuple[fx.Node, Tensor]] = {}
        counts: Counter[tuple[int | None, str]] = Counter()

        def watch(
            node: fx.Node,
            value: Any,
            wanted: dict[Key, tuple[fx.Node, Tensor]] = wanted,
            counts: Counter[tuple[int | None, str]] = counts,
        ) -> None:
            name, layer = str(node.target), node.meta.get("layer")
            if name in _KINDS and (tensor := _first(value)) is not None:
                wanted[layer, name, counts[layer, name]] = node, tensor.clone()
                counts[layer, name] += 1

        logits = fused.run(step, watch)
        got: list[tuple[Op, Key, Tensor]] = []
        ge_counts: Counter[tuple[int | None, str]] = Counter()

        def watch_op(
            op: Op,
            outputs: Sequence[Tensor],
            got: list[tuple[Op, Key, Tensor]] = got,
            ge_counts: Counter[tuple[int | None, str]] = ge_counts,
        ) -> None:
            name, match = _COUNTERPART.get(op.type), _OP.match(op.name)
            if name is None or match is None:
                return
            layer = int(match[1]) if match[1] else None
            got.append((op, (layer, name, ge_counts[layer, name]), outputs[0].clone()))
            ge_counts[layer, name] += 1

        failure, ge_logits = None, logits
        try:
            ge_logits = ge.run(step, watch_op)
        except CannError as error:
            failure = str(error)
        for op, key, value in got:
            if key not in wanted:
                return f"{op.name} ({op.type}) has no counterpart in the fused graph"
            node, want = wanted[key]
            if (off := _differs(_live(value, want, step), want.reshape(want.shape[0], -1))) is not None:
                return Place(op.name, key[0], str(node.meta.get("source") or ""), *off)
        if failure:
            return failure
        missing = [key for key in wanted if key not in {k for _, k, _ in got}]
        if missing:
            layer, name, number = missing[0]
            node = wanted[missing[0]][0]
            return f"the graph lacks number {number} of {name} ({node.meta.get('source')}, layer {layer})"
        if (off := _differs(ge_logits, logits)) is not None:
            return Place("NetOutput_0", None, "between the last product and the output", *off)
    return None


def _live(value: Tensor, want: Tensor, step: PreparedStep) -> Tensor:
    """A GE value's rows that are live, as [rows, columns]: rows of tokens, or of logits."""
    tokens = step.graph.bucket.tokens if step.graph.bucket.query_len is None else len(step.inputs.input_ids_T)
    if (
        want.shape[0] == len(step.live_L)
        and value.numel() % tokens == 0
        and value.numel() // tokens * want.shape[0] == want.numel()
    ):
        return value.reshape(tokens, -1)[step.live_L]
    return value.reshape(value.shape[0], -1)[: want.shape[0]]
