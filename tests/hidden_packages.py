"""Hides installed packages, and files of the host, from a program that a test starts.

A `sitecustomize` on PYTHONPATH stands in for what it would cost minutes to set up: an environment without them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_SITECUSTOMIZE = """
import importlib.machinery, pathlib, sys

MODULES, DISTRIBUTIONS, FILES = {modules!r}, {distributions!r}, {files!r}

class Filter(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if any(fullname == name or fullname.startswith(name + ".") for name in MODULES):
            return None
        return super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, context=None, **kwargs):
        for found in super().find_distributions(*([context] if context is not None else [])):
            if found.metadata["Name"] not in DISTRIBUTIONS:
                yield found

sys.meta_path[:] = [Filter if f is importlib.machinery.PathFinder else f for f in sys.meta_path]

if FILES:
    read_text = pathlib.Path.read_text
    def replaced(self, *args, **kwargs):
        return FILES[str(self)] if str(self) in FILES else read_text(self, *args, **kwargs)
    pathlib.Path.read_text = replaced
"""


def hide(
    folder: Path,
    modules: Sequence[str] = (),
    distributions: Sequence[str] = (),
    files: dict[str, str] | None = None,
) -> dict[str, str]:
    """Environment variables for a program that finds none of these modules and distributions; `files` replaces the text
    of host files (path -> content)."""
    folder.mkdir()
    text = _SITECUSTOMIZE.format(modules=list(modules), distributions=list(distributions), files=files or {})
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))}
