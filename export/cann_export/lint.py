"""Checks a lowered GE graph against what the device's ops ask for; TorchAir converts graphs that no device takes.

A finding of severity `error` makes an export fail. Rules on single ops are in `lint_rules.py`, here are those on whole
graphs. Numbers are not checked here (`verify` does), nor what other ranks do (`proof.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from cann_export.lint_rules import GE_DOC, OP_RULES, SCATTER_DOC, Facts, Linted, Rule
from cann_export.lint_types import attr, read_graph
from cann_runtime.artifact.manifest import Signature
from cann_runtime.errors import ArtifactError, UnsupportedModelError
from cann_runtime.executor.reference.dtypes import GE_DTYPES, PROTO_DTYPES
from cann_runtime.executor.reference.graph import Edge, Graph
from cann_runtime.executor.reference.hazards import written_values

__all__ = ["Facts", "Finding", "check", "lint"]

_WARNINGS = {"copy", "gelu"}


@dataclass(frozen=True)
class Finding:
    """One broken rule: the op, the rule, what is wrong, and the document that says so."""

    severity: Literal["error", "warning"]
    node: str
    rule: str
    message: str
    document: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.node}: {self.message} [{self.rule}; {self.document}]"


def lint(model: bytes | Graph, signature: Signature, facts: Facts) -> list[Finding]:
    """All findings of one graph, errors first. model: a serialized ModelDef, or the graph read from it."""
    try:
        graph = read_graph(model) if isinstance(model, bytes) else model
        view = Linted.of(graph)
    except ArtifactError as error:
        return [Finding("error", "graph", "format", str(error), GE_DOC)]
    assert isinstance(view, Linted)
    view.given(signature, facts)
    found: list[Finding] = []
    by_type: dict[str, list[tuple[str, str, Rule]]] = {}
    for op in graph.ops:
        if op.type not in by_type:
            by_type[op.type] = [(n, d, rule) for types, n, d, rule in OP_RULES if not types or op.type in types]
        for name, document, rule in by_type[op.type]:
            for message in rule(view, op):
                severity: Literal["error", "warning"] = "warning" if name in _WARNINGS else "error"
                found.append(Finding(severity, op.name, name, message, document))
    for name, document, graph_rule in GRAPH_RULES:
        found.extend(Finding("error", node, name, message, document) for node, message in graph_rule(view))
    return sorted(found, key=lambda f: f.severity)


def check(model: bytes, signature: Signature, facts: Facts) -> list[Finding]:
    """lint, for an export: the warnings; raises UnsupportedModelError, one line, where there are errors."""
    found = lint(model, signature, facts)
    errors = [f for f in found if f.severity == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise UnsupportedModelError(
            f"the {facts.phase} graph of {facts.bucket.tokens} tokens breaks {facts.family}'s rules: {errors[0]}{more}"
        )
    return found


# The whole graph ------------------------------------------------------------------------------------------------------


def _signature_rule(view: Linted) -> Iterator[tuple[str, str]]:
    """Data match the signature in number, data type and shape; only the blocks of a cache are open."""
    data = {attr(op, "index", -1): op for op in view.graph.ops if op.type == "Data"}
    if sorted(data) != list(range(len(view.signature.inputs))):
        yield "graph", f"{len(data)} inputs, {len(view.signature.inputs)} in the signature"
        return
    for index, ref in enumerate(view.signature.inputs):
        got = view.types[Edge(data[index].name, 0)]
        if got.dtype != getattr(torch, ref.dtype) or list(got.shape or ()) != ref.shape:
            yield (
                data[index].name,
                f"is {got.dtype} {list(got.shape or ())}, the signature says {ref.dtype} {ref.shape}",
            )
        if any(d < 0 for d in (ref.shape[1:] if ref.kind == "kv" else ref.shape)):
            yield data[index].name, f"shape {ref.shape}: only a cache's first dimension may be open"


def _in_place_rule(view: Linted) -> Iterator[tuple[str, str]]:
    """Every cache is written in place by one op, and by nothing else; nothing else is written."""
    caches = {i for i, ref in enumerate(view.signature.inputs) if ref.kind == "kv"}
    if set(view.signature.in_place) != caches:
        odd = sorted(caches ^ set(view.signature.in_place))
        yield view.signature.inputs[odd[0]].name, "in_place of the signature is not the list of caches"
    try:
        written = {edge.producer for edge in written_values(view.graph.ops)}
    except (ArtifactError, KeyError) as error:
        yield "graph", str(error)
        return
    for op in view.graph.ops:
        if op.type != "Data":
            continue
        index = attr(op, "index", -1)
        if (index in caches) != (op.name in written):
            yield op.name, "a cache that no op writes in place" if index in caches else "an input that an op overwrites"


def _frozen_rule(view: Linted) -> Iterator[tuple[str, str]]:
    """frozenInput marks weights and caches, which keep their addresses, and not the step's inputs."""
    flags = view.signature.options.get("frozenInput", "").split(",")
    wanted = ["1" if ref.kind in ("param", "kv") else "0" for ref in view.signature.inputs]
    if flags != wanted:
        odd = next((i for i, (a, b) in enumerate(zip(flags, wanted)) if a != b), min(len(flags), len(wanted) - 1))
        yield view.signature.inputs[odd].name, "frozenInput is not 1 for weights and caches and 0 for step inputs"


def _output_rule(view: Linted) -> Iterator[tuple[str, str]]:
    """The output's data type is the model's, in both of GE's enumerations."""
    outputs = [op for op in view.graph.ops if op.type == "NetOutput"]
    codes = view.graph.attrs.get("_output_dtypes")
    if len(outputs) != 1 or codes is None or not isinstance(codes.value, tuple):
        yield "NetOutput", "the graph has not one NetOutput with _output_dtypes"
        return
    out = outputs[0]
    for desc, code, ref in zip(out.input_descs, codes.value, view.signature.outputs):
        dtype = getattr(torch, ref.dtype)
        if PROTO_DTYPES.get(desc.dtype) != dtype or GE_DTYPES.get(code) != dtype:
            yield out.name, f"{ref.name} is written as codes {desc.dtype} and {code}, needed: {ref.dtype} in each enum"
        if list(desc.shape) != ref.shape:
            yield out.name, f"{ref.name} is {list(desc.shape)}, the signature says {ref.shape}"
        if ref.dtype != view.facts.dtype:
            yield out.name, f"{ref.name} is {ref.dtype}, the model {view.facts.dtype}"


GRAPH_RULES: list[tuple[str, str, Callable[[Linted], Iterator[tuple[str, str]]]]] = [
    ("signature", GE_DOC, _signature_rule),
    ("in-place", SCATTER_DOC, _in_place_rule),
    ("frozen", GE_DOC, _frozen_rule),
    ("outputs", GE_DOC, _output_rule),
]
