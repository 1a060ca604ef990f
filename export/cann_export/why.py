"""`cann-export why A B`: which settings make the graphs of two artifacts differ.

Two artifacts with one fingerprint hold the same graphs, whatever weights they were exported with. What is hashed is
decided in `fingerprint.py`; this only compares what the manifests recorded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cann_runtime.artifact.store import Artifact

_ABSENT = "(absent)"
_LIMIT = 8  # weights that are named before the rest is counted

# What follows from the fingerprinted fields, or is a name for them.
_DERIVED = {"schema_version", "name", "fingerprint", "fingerprint_fields", "graphs", "objects", "report"}


def why(a: Path, b: Path) -> int:
    """Print what differs; the exit status is 0 where the graphs are the same, 1 where they differ.

    Raises ArtifactError (exit status 2) where one is damaged.
    """
    first, second = (Artifact.open(path, check_host=False) for path in (a, b))
    found = differences(first.manifest.fingerprint_fields, second.manifest.fingerprint_fields)
    if not found:
        print(f"same fingerprint {first.manifest.fingerprint}: the graphs are the same")
        graphs = [{graph.object for graph in artifact.manifest.graphs} for artifact in (first, second)]
        if graphs[0] != graphs[1]:
            print("but their bytes differ: one of the two exports was not reproducible")
        for path, x, y in differences(_other(first), _other(second)):
            print(f"  other than the graphs: {path}: {_show(x)} / {_show(y)}")
        return 0
    print(f"the graphs differ: {len(found)} field{'s' if len(found) > 1 else ''} (first value {a}, second {b})")
    for path, x, y in found:
        print(f"  {path}: {_show(x)} / {_show(y)}")
        if path == "weights":
            _print_sources(first, second)
    return 1


def _other(artifact: Artifact) -> dict[str, Any]:
    """What the manifest says beside its graphs."""
    return artifact.manifest.model_dump(mode="json", exclude=_DERIVED)


def differences(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(nested path, value in a, value in b) of everything that differs; of two lists only the items that one lacks."""
    if isinstance(a, dict) and isinstance(b, dict):
        found: list[tuple[str, Any, Any]] = []
        for key in sorted({*a, *b}):
            inner = f"{path}.{key}" if path else str(key)
            found += differences(a.get(key, _ABSENT), b.get(key, _ABSENT), inner)
        return found
    if a == b:
        return []
    if isinstance(a, list) and isinstance(b, list):
        only_a, only_b = [x for x in a if x not in b], [x for x in b if x not in a]
        if only_a or only_b:
            return [(path, only_a or _ABSENT, only_b or _ABSENT)]
    return [(path, a, b)]


def _print_sources(first: Artifact, second: Artifact) -> None:
    """The checkpoint tensors behind the hash of the weights' names and shapes."""
    sources = [
        {part.source: part.shape for param in artifact.plan().params.values() for part in param.parts}
        for artifact in (first, second)
    ]
    names = [name for name in sorted({*sources[0], *sources[1]}) if sources[0].get(name) != sources[1].get(name)]
    for name in names[:_LIMIT]:
        print(f"    {name}: {_show(sources[0].get(name, _ABSENT))} / {_show(sources[1].get(name, _ABSENT))}")
    if len(names) > _LIMIT:
        print(f"    and {len(names) - _LIMIT} more")


def _show(value: Any) -> str:
    return _ABSENT if value is _ABSENT else json.dumps(value, ensure_ascii=False, sort_keys=True)
