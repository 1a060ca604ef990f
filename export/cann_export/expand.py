"""From a traced model of a few layers to the plan of the whole model: which layers to trace, and repeating their plan.

Decoder layers of one kind have equal graphs, so a short model (first, one middle of each kind, last) stands for all.
Repeating the graph itself is the lowering's work (`lower/ascend/stamp.py`).
"""

from __future__ import annotations

import re

from cann_runtime.artifact.plan import Param, WeightPlan

_LAYER = re.compile(r"(\blayers\.)(\d+)(\.)")
SHORT_LAYERS = 3


def short_layers(kinds: list[str]) -> int | None:
    """Layers to trace from which all can be repeated: 3 where all layers are of one kind; None: trace all of them."""
    return SHORT_LAYERS if len(kinds) > SHORT_LAYERS and len(set(kinds)) == 1 else None


def expand_plan(plan: WeightPlan, traced: int, total: int) -> WeightPlan:
    """The plan of `total` layers from that of `traced` ones: first and last stay first and last, the second repeats."""
    if traced == total:
        return plan
    copies: dict[int, list[int]] = {0: [0], traced - 1: [total - 1]}
    for i in range(1, traced - 1):
        copies[i] = [i]
    copies[traced - 2] = list(range(traced - 2, total - 1))
    params: dict[str, Param] = {}
    for name, param in plan.params.items():
        match = _LAYER.search(name)
        for layer in copies[int(match.group(2))] if match else [None]:
            new = param if layer is None else _renamed(param, layer)
            params[new.name] = new
    return WeightPlan(tp=plan.tp, params=params)


def _renamed(param: Param, layer: int) -> Param:
    def rename(name: str) -> str:
        return _LAYER.sub(rf"\g<1>{layer}\g<3>", name, count=1)

    parts = [
        p.model_copy(update={"source": rename(p.source), "alternatives": [rename(a) for a in p.alternatives]})
        for p in param.parts
    ]
    return param.model_copy(update={"name": rename(param.name), "parts": parts})
