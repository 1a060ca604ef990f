"""Fusion: aten subgraphs of the step graph become `atb::` ops, found by structure, never by class name.

`PASSES` is the registry, in order: each pass edits the program and says how often it matched. What one layer must give
is worked out from the layer's modules before the trace (`expectations`); a pass that matches less is an error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import cann_runtime.ops.atb  # noqa: F401  (registers the ops that the passes emit)
from cann_export.fuse.cleanup import drop_leftovers, flatten_batch, simplify_views
from cann_export.fuse.fx import is_call, sort_graph
from cann_export.fuse.linear import linear, merge_linear
from cann_export.fuse.norm import add_rms_norm, rms_norm
from cann_export.fuse.rotary import rotary
from cann_export.fuse.swiglu import swiglu
from cann_export.model import BuiltModel
from cann_export.program import Program
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.errors import UnsupportedModelError

Pass = Callable[[Program, WeightPlan], int]
PASSES: tuple[tuple[str, Pass], ...] = (
    ("linear", linear),
    ("rms_norm", rms_norm),
    ("rotary", rotary),
    ("merge_linear", merge_linear),
)
LATE_PASSES: tuple[tuple[str, Pass], ...] = (("swiglu", swiglu), ("add_rms_norm", add_rms_norm))
COUNTED = {
    "reshape_and_cache": torch.ops.atb.reshape_and_cache.default,
    "paged_attention": torch.ops.atb.paged_attention.default,
}


def _is_norm(module: nn.Module) -> bool:
    params = dict(module.named_parameters(recurse=False))
    has_eps = any(hasattr(module, key) for key in ("variance_epsilon", "eps"))
    return has_eps and list(params) == ["weight"] and params["weight"].dim() == 1


def _gated(module: nn.Module) -> bool:
    return type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def expectations(built: BuiltModel) -> dict[str, int]:
    """How often each pass must match in the whole graph, counted on the model's modules.

    linear: linear modules. rms_norm: norm modules. rotary, reshape_and_cache, paged_attention: attentions. swiglu:
    gated MLPs. merge_linear: groups of at least two column projections that read one input (q/k/v; gate/up).
    """
    modules = list(built.model.modules())
    attentions = [m for m in modules if hasattr(m, "num_key_value_groups")]
    gated = [m for m in modules if _gated(m)]
    separate = [m for m in gated if sum(isinstance(c, nn.Linear) for c in m.children()) >= 3]
    merged_qkv = [m for m in attentions if sum(isinstance(c, nn.Linear) for c in m.children()) >= 4]
    return {
        "linear": sum(isinstance(m, nn.Linear) for m in modules),
        "rms_norm": sum(_is_norm(m) for m in modules),
        "rotary": len(attentions),
        "merge_linear": len(separate) + len(merged_qkv),
        "swiglu": len(gated),
        "reshape_and_cache": len(attentions),
        "paged_attention": len(attentions),
    }


def fuse(program: Program, plan: WeightPlan, expected: dict[str, int]) -> Program:
    """Run every pass in place and give the program back with `report` filled; the plan gets the merged parameters.

    Raises UnsupportedModelError naming each substitution that matched another number of times than expected.
    """
    gm = program.gm
    drop_leftovers(gm)
    report: dict[str, int] = {}
    try:
        for name, run in PASSES:
            report[name] = run(program, plan)
        flatten_batch(gm)
        for name, run in LATE_PASSES:
            report[name] = run(program, plan)
        simplify_views(gm)
    except RuntimeError as error:  # torch's own check of a graph, where an unknown structure was edited wrongly
        raise UnsupportedModelError(f"fusion does not fit this model: {str(error).splitlines()[0]}") from error
    for name, op in COUNTED.items():
        report[name] = sum(is_call(n, op) for n in gm.graph.nodes)
    wrong = [f"{k} matched {report[k]} times, not {n}" for k, n in expected.items() if report[k] != n]
    left = [n for n in gm.graph.nodes if is_call(n, torch.ops.atb.rms_norm.default) and _reads_sum(n)]
    if left:
        wrong.append(f"add_rms_norm missed {len(left)} norms of a sum")
    if wrong:
        raise UnsupportedModelError(f"fusion does not fit this model: {'; '.join(wrong)}")
    sort_graph(gm)
    gm.graph.lint()
    gm.recompile()
    program.report = report
    return program


def _reads_sum(norm: torch.fx.Node) -> bool:
    return is_call(norm.args[0], torch.ops.aten.add.Tensor)
