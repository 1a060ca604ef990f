"""Which of a graph's options go to GE's start and which to the graph, and the ones that are only known at load.

A signature's options are what TorchAir's `_normalize_ge_option` returned at export, the second of its two dictionaries
marked by a prefix. Options that hold input shapes are made here, as TorchAir's `_append_real_input_shape` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping

from cann_runtime.artifact.manifest import Signature
from cann_runtime.executor.ge.bind import bound_shape

ENGINE_PREFIX = "global:"
"""Marks options that GE takes once per process, in InitializeGraphEngine; the others belong to the graph."""


def graph_options(signature: Signature, blocks: int) -> dict[str, str]:
    """Options to load the graph with, for that number of KV blocks."""
    options = {key: value for key, value in signature.options.items() if not key.startswith(ENGINE_PREFIX)}
    shapes = [bound_shape(ref, blocks) for ref in signature.inputs]
    options["ge.inputHintShape"] = ";".join(f"{index}:{shape}" for index, shape in enumerate(shapes))
    return options


def engine_options(signature: Signature) -> dict[str, str]:
    """Options to start GE with; all graphs of a process must agree on them."""
    marked = {key: value for key, value in signature.options.items() if key.startswith(ENGINE_PREFIX)}
    return {key.removeprefix(ENGINE_PREFIX): value for key, value in marked.items()}


def outputs_in_inputs(options: Mapping[str, str]) -> dict[int, int]:
    """Output index -> index of the input that it is written into, from TorchAir's "input,output|input,output"."""
    pairs = options.get("ge.exec.outputReuseInputMemIndexes", "")
    written = (pair.split(",") for pair in pairs.split("|") if pair)
    return {int(output): int(source) for source, output in written}
