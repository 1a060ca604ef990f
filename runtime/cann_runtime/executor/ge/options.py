"""Which of a graph's options go to GE's start and which to the graph, and the ones that are only known at load.

The artifact stores what TorchAir's `_normalize_ge_option` returned at export, both dictionaries in one; this module
takes them apart again the way TorchAir does.
"""

from __future__ import annotations

from collections.abc import Mapping

from cann_runtime.artifact.manifest import Signature
from cann_runtime.executor.ge.bind import bound_shape

GLOBAL_OPTIONS = frozenset(
    {
        "ge.exec.enableEngineParallel",
        "ge.aicoreNum",
        "ge.enableSingleStream",
        "ge.oo.level",
        "ge.oo.constantFolding",
        "ge.oo.deadCodeElimination",
        "ge.exportCompileStat",
        "ge.optimizationSwitch",
        "ge.autoMultistreamParallelMode",
        "ge.exec.staticMemoryPolicy",
        "ge.opSelectImplmode",
    }
)
"""Options of TorchAir's second dictionary: GE takes them once per process, in InitializeGraphEngine."""


def split_options(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(graph options, global options)."""
    local = {key: value for key, value in options.items() if key not in GLOBAL_OPTIONS}
    return local, {key: value for key, value in options.items() if key in GLOBAL_OPTIONS}


def bind_options(options: Mapping[str, str], signature: Signature, blocks: int) -> dict[str, str]:
    """The graph options with those that hold input shapes made anew for this KV block count."""
    bound = dict(options)
    if "ge.inputHintShape" in bound:
        shapes = [bound_shape(ref, blocks) for ref in signature.inputs]
        bound["ge.inputHintShape"] = ";".join(f"{index}:{shape}" for index, shape in enumerate(shapes))
    return bound


def outputs_in_inputs(options: Mapping[str, str]) -> dict[int, int]:
    """Output index -> index of the input that it is written into, from TorchAir's "input,output|input,output"."""
    pairs = options.get("ge.exec.outputReuseInputMemIndexes", "")
    written = (pair.split(",") for pair in pairs.split("|") if pair)
    return {int(output): int(source) for source, output in written}
