"""Reads messages in protobuf's wire format, for the few message types of a GE graph, without the protobuf package.

A message type is a table of its fields; bytes that the table does not account for are an error, because a field that
we do not know may change what a graph means. What the fields mean is in `graph.py`.

Source of the format: protobuf.dev, "Encoding" (varints, tags, packed repeated fields).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cann_runtime.errors import ArtifactError

Kind = Literal["int", "bool", "float", "bytes", "text", "message", "skip"]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIRE_TYPES = {"int": _VARINT, "bool": _VARINT, "float": _FIXED32, "bytes": _BYTES, "text": _BYTES, "message": _BYTES}
_PACKABLE = ("int", "bool", "float")


@dataclass(frozen=True)
class Field:
    """One field of a message type. kind 'skip': known to carry nothing that a graph's meaning depends on."""

    name: str
    kind: Kind


def read_message(view: memoryview, fields: Mapping[int, Field], what: str) -> dict[str, list[Any]]:
    """The values of a message's fields by name, in the order in which they stand in `view`; absent fields are absent.

    Values: int and bool as themselves (signed 64 bit), float from float32, bytes and messages as memoryviews into
    `view`, text as str. `what` names the message in errors. Raises ArtifactError for truncated bytes, unknown fields
    and fields of another wire type than the table says.
    """
    values: dict[str, list[Any]] = {}
    position, end = 0, len(view)
    while position < end:
        tag, position = _varint(view, position, what)
        number, wire_type = tag >> 3, tag & 7
        field = fields.get(number)
        if field is None:
            raise ArtifactError(f"{what} holds the unknown field {number}: made by a newer toolchain, or damaged")
        if wire_type == _VARINT:
            raw: Any
            raw, position = _varint(view, position, what)
        else:
            size = {_FIXED64: 8, _FIXED32: 4}.get(wire_type)
            if size is None:
                if wire_type != _BYTES:
                    raise ArtifactError(f"{what} is damaged: wire type {wire_type} at byte {position}")
                size, position = _varint(view, position, what)
            if position + size > end:
                raise ArtifactError(f"{what} is damaged: it ends inside field {field.name}")
            raw = view[position : position + size]
            position += size
        if field.kind == "skip":
            continue
        kept = values.setdefault(field.name, [])
        if wire_type == _BYTES and field.kind in _PACKABLE:
            kept.extend(_unpack(raw, field.kind, what))
        elif wire_type != _WIRE_TYPES[field.kind]:
            raise ArtifactError(f"{what} is damaged: field {field.name} has wire type {wire_type}")
        else:
            kept.append(_value(raw, field.kind, what))
    return values


def _varint(view: memoryview, position: int, what: str) -> tuple[int, int]:
    result = shift = 0
    while position < len(view) and shift < 70:
        byte = view[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & 0xFFFF_FFFF_FFFF_FFFF, position
        shift += 7
    raise ArtifactError(f"{what} is damaged: it ends inside a number")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _value(raw: Any, kind: Kind, what: str) -> Any:
    if kind == "int":
        return _signed(raw)
    if kind == "bool":
        return bool(raw)
    if kind == "float":
        return struct.unpack("<f", raw)[0]
    if kind == "text":
        try:
            text = str(raw, "utf-8")
        except UnicodeDecodeError:
            raise ArtifactError(f"{what} is damaged: a name is not UTF-8") from None
        if not text.isprintable():
            raise ArtifactError(f"{what} is damaged: a name holds control characters")
        return text
    return raw


def _unpack(raw: memoryview, kind: Kind, what: str) -> list[Any]:
    if kind == "float":
        if len(raw) % 4:
            raise ArtifactError(f"{what} is damaged: {len(raw)} bytes of packed floats")
        return list(struct.unpack(f"<{len(raw) // 4}f", raw))
    values, position = [], 0
    while position < len(raw):
        value, position = _varint(raw, position, what)
        values.append(_value(value, kind, what))
    return values
