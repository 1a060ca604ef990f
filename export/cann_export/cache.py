"""The user's cache folder: results that take long to make and are the same for everyone who makes them.

A result is a folder under a key that says all that it depends on. What is kept there is decided by the callers.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def cache_dir() -> Path:
    """$CANN_EXPORT_CACHE, or ~/.cache/cann-export."""
    return Path(os.environ.get("CANN_EXPORT_CACHE") or Path.home() / ".cache" / "cann-export")


def cached_folder(key: str, build: Callable[[Path], None]) -> Path:
    """The folder of a key, made by build(folder) where it is not there yet.

    It appears whole or not at all, and is built by one process at a time; what a killed build left is removed.
    """
    target = cache_dir() / key
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(target.with_name(f".{target.name}.lock"), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if not target.is_dir():
            temporary = target.with_name(f".{target.name}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                build(temporary)
                temporary.rename(target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    finally:
        os.close(fd)
    return target
