"""The value that travels from trace to lowering: one step graph with its named inputs.

A `Program` is an FX graph whose placeholders are, in this order, parameters, step inputs and KV caches. It holds aten
ops before fusion and `atb::` ops (cann_runtime.ops.atb) after it. Each stage takes a Program and gives a new one.

Shape letters: T tokens, S sequences, N query heads, K kv heads, D head_dim, B blocks, P block_size, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from cann_runtime.artifact.manifest import Bucket, Phase

STEP_INPUTS = (
    "input_ids",
    "position_ids",
    "slot_mapping",
    "block_table",
    "query_lens",
    "kv_lens",
    "logits_rows",
)
"""Names of the step inputs, in order: int64 [T], int64 [T], int32 [T], int32 [S, max_blocks], int64 [S], int64 [S],
int64 [R]. `query_lens` is cumulative in the flat layout and per sequence in the rectangular one."""


@dataclass
class Slot:
    """What a placeholder stands for.

    kind 'param': `name` is a parameter of the weight plan. kind 'input': one of STEP_INPUTS. kind 'kv': `name` is
    'k_cache_{layer}' or 'v_cache_{layer}', a tensor [B, P, K, D] that the graph writes in place.
    """

    kind: Literal["param", "input", "kv"]
    name: str


@dataclass
class Program:
    """One step graph of one rank.

    gm: FX graph; every node has meta['val'] (a FakeTensor or meta tensor), and where it comes from a decoder layer
    meta['layer'] (int) and meta['source'] (module path). Output: a tuple with logits [R, V].
    slots: for each placeholder, in graph order. bucket: its sizes (upper bounds where `dynamic`).
    num_layers: decoder layers in this graph; `layer_kinds[i]` names the kind of layer i (equal kinds, equal bodies).
    """

    gm: fx.GraphModule
    slots: list[Slot]
    phase: Phase
    bucket: Bucket
    num_layers: int
    layer_kinds: list[str]
    dynamic: bool = False
    head_dim: int = 0
    report: dict[str, int] = field(default_factory=dict)  # fusion name -> matches in the whole graph

    def placeholders(self) -> list[fx.Node]:
        """Placeholder nodes in graph order, one for each slot."""
        return [n for n in self.gm.graph.nodes if n.op == "placeholder"]

    def node_of(self, kind: str, name: str) -> fx.Node:
        """The placeholder of that slot; KeyError where the graph has none."""
        for node, slot in zip(self.placeholders(), self.slots, strict=True):
            if (slot.kind, slot.name) == (kind, name):
                return node
        raise KeyError(f"{kind} {name}")

    def param_names(self) -> list[str]:
        """Names of the parameters, in graph order."""
        return [s.name for s in self.slots if s.kind == "param"]


def tensor_meta(node: fx.Node) -> torch.Tensor:
    """The node's example value; its shape and dtype are what the graph computes there."""
    val = node.meta["val"]
    assert isinstance(val, torch.Tensor), node
    return val
