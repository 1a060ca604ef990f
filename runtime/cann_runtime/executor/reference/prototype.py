"""What GE knows of an op before it runs: its inputs, its attributes with their defaults, its outputs.

Graphs leave out attributes that have their default value, and optional inputs that are not fed; both are filled in from
here. The table itself is `prototype_table.py`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass

from cann_runtime.errors import ArtifactError
from cann_runtime.executor.reference.graph import Op, Value
from cann_runtime.executor.reference.prototype_table import TABLE

_KINDS = {
    "Int": ("i",),
    "Float": ("f",),
    "Bool": ("b",),
    "String": ("s",),
    "Type": ("dt",),
    "ListInt": ("list_i", "list"),
    "ListBool": ("list_b", "list"),
}
"""Attribute type in the table -> the AttrDef fields that hold such a value."""

_LAYOUT_NOTES = ("input_layout_info", "output_layout_info")
"""Where TorchAir notes in which layout an op's data stands (NCHW ...), for the descriptors that it writes from it."""


@dataclass(frozen=True)
class AttrProto:
    """An attribute: its type in the table and its default; None where a graph must give it."""

    type: str
    default: Value | None


@dataclass(frozen=True)
class Prototype:
    """One op type. inputs: name -> 'required', 'optional' or 'dynamic'; dynamic outputs keep their '*'."""

    type: str
    inputs: Mapping[str, str]
    attrs: Mapping[str, AttrProto]
    outputs: tuple[str, ...]

    @property
    def written(self) -> Mapping[int, str]:
        """Output index -> input that it is: an output with an input's name is that input, written in place."""
        return {index: name for index, name in enumerate(self.outputs) if name in self.inputs}

    def check_inputs(self, op: Op) -> None:
        """Refuse an op with inputs that the prototype does not have, or without one that it needs. ArtifactError."""
        fed = {name for name, edge in op.inputs if edge is not None}
        known = set()
        for name, _ in op.inputs:
            base = name if name in self.inputs else name.rstrip("0123456789")
            if base not in self.inputs or (base != name and self.inputs[base] != "dynamic"):
                raise ArtifactError(f"{op.source} has the unknown input {name!r}; known: {', '.join(self.inputs)}")
            known.add(base if name in fed else "")
        for name, how in self.inputs.items():
            if how == "required" and name not in known:
                raise ArtifactError(f"{op.source} lacks its input {name!r}")

    def attributes(self, op: Op) -> dict[str, Value]:
        """All attributes of an op by name, defaults filled in. ArtifactError for unknown or ill-typed ones.

        TorchAir's bookkeeping is left out, which no op reads: names that begin with an underscore, and layout notes.
        """
        values: dict[str, Value] = {}
        for name, attr in op.attrs.items():
            if name.startswith("_") or name in _LAYOUT_NOTES:
                continue
            proto = self.attrs.get(name)
            if proto is None:
                raise ArtifactError(f"{op.source} has the unknown attribute {name!r}; known: {', '.join(self.attrs)}")
            if attr.kind not in _KINDS[proto.type]:
                raise ArtifactError(f"{op.source}: attribute {name} is of kind {attr.kind!r}, not {proto.type}")
            values[name] = attr.value
        for name, proto in self.attrs.items():
            if name not in values:
                if proto.default is None:
                    raise ArtifactError(f"{op.source} lacks its attribute {name!r}")
                values[name] = proto.default
        return values


@functools.cache
def prototypes() -> Mapping[str, Prototype]:
    """All prototypes by op type."""
    return parse_table(TABLE)


def parse_table(text: str) -> dict[str, Prototype]:
    """Prototypes by op type from a table in the form of `prototype_table.py`."""
    result: dict[str, Prototype] = {}
    for line in text.replace("\n ", " ").splitlines():
        head, attrs, outputs = line.split("|")
        name, *inputs = head.split()
        result[name] = Prototype(
            name,
            dict(_input(word) for word in inputs),
            dict(_attribute(word) for word in attrs.split()),
            tuple(outputs.split()),
        )
    return result


def _input(word: str) -> tuple[str, str]:
    how = {"?": "optional", "*": "dynamic"}.get(word[-1], "required")
    return word.rstrip("?*"), how


def _attribute(word: str) -> tuple[str, AttrProto]:
    name, _, rest = word.partition(":")
    kind, given, default = rest.partition("=")
    if not given:
        return name, AttrProto(kind, None)
    value = json.loads(default)
    return name, AttrProto(kind, tuple(value) if isinstance(value, list) else value)
