"""silu(gate) * up, where gate and up are the two halves of one tensor."""

from __future__ import annotations

from typing import Any

import torch

from cann_export.fuse.fx import aten, emit, is_call, is_getitem, nodes, value
from cann_export.program import Program
from cann_runtime.artifact.plan import WeightPlan

atb = torch.ops.atb
SPLITS = (aten.split_with_sizes.default, aten.chunk.default, aten.split.Tensor)


def swiglu(program: Program, plan: WeightPlan) -> int:
    """silu(x[.., :I]) * x[.., I:] -> atb.swiglu(x); gives the number of matches."""
    graph = program.gm.graph
    count = 0
    for node in [n for n in nodes(graph) if is_call(n, aten.mul.Tensor)]:
        for silu, up in (node.args, node.args[::-1]):
            if not (is_call(silu, aten.silu.default) and is_getitem(up, 1) and is_getitem(silu.args[0], 0)):
                continue
            split = up.args[0]
            if silu.args[0].args[0] is not split or not _halves(split):
                continue
            with graph.inserting_before(node):
                new = emit(graph, atb.swiglu.default, (split.args[0],), node)
            node.replace_all_uses_with(new)
            count += 1
            break
    graph.eliminate_dead_code()
    return count


def _halves(split: Any) -> bool:
    if not is_call(split, *SPLITS) or len(split.meta["val"]) != 2:
        return False
    first, second = split.meta["val"]
    whole = value(split.args[0]).shape[-1]
    return bool(first.shape[-1] == second.shape[-1] and 2 * first.shape[-1] == whole)
