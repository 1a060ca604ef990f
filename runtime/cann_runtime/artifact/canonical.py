"""One byte form for one JSON value, and the hashes that are taken of it.

Object names and byte-identical exports rest on this form; nothing here knows what the values mean.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel


def canonical_json(value: Any, indent: int | None = None) -> bytes:
    """UTF-8 JSON with sorted keys; floats in Python's shortest round-trip form; NaN and infinity are a ValueError.

    `indent` is for files that people read; hashes are taken of the compact form.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    separators = (",", ":") if indent is None else (",", ": ")
    text = json.dumps(value, sort_keys=True, separators=separators, indent=indent, ensure_ascii=False, allow_nan=False)
    return (text + ("" if indent is None else "\n")).encode()


def sha256_file(path: Path) -> str:
    """The sha256 of a file, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
