"""Where GE keeps the graphs that it compiled for this host, so that a second start need not compile.

GE looks up `<folder>/<graph key>.idx` and trusts it: it compares neither CANN version, nor chip, nor graph. So the
folder carries what the host is, and the graph key what the graph is. (GE's file names, its lock file and the
characters that a key may have are those of its open source, compiler/graph/manager/model_cache.cc.)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

LOCK_SUFFIX = ".lock"


def cache_key(cann: str, soc: str, blocks: int) -> str:
    """Name of the folder for this CANN version, chip and number of KV blocks: 'cann8.5.0-Ascend910B3-kv4096'."""
    return "-".join((f"cann{_plain(cann)}", _plain(soc), f"kv{blocks}"))


def graph_key(graph: bytes, options: Mapping[str, str]) -> str:
    """GE's key of one graph: a digest of the bound graph and of every option that can change its compilation."""
    digest = hashlib.sha256(graph)
    digest.update(json.dumps(dict(options), sort_keys=True).encode())
    return f"g{digest.hexdigest()[:40]}"


def is_cached(folder: Path, key: str) -> bool:
    """Has GE an entry of that key in the folder?"""
    return any((folder / f"{key}{suffix}").exists() for suffix in (".idx", ".om"))


def user_cache() -> Path:
    """Where caches go that cannot stay with their artifact: $CANN_RUN_CACHE, else ~/.cache/cann-run."""
    return Path(os.environ.get("CANN_RUN_CACHE") or Path.home() / ".cache" / "cann-run")


def open_cache(artifact: Path, fingerprint: str, key: str, rank: int, world: int, log: Callable[[str], None]) -> Path:
    """The writable folder of this rank's compiled graphs: `<artifact>/cache/<key>/rank<r>of<n>`.

    One folder per rank, as GE writes the rank's device and communicators into what it compiles. Where the artifact is
    read-only a folder of the user's cache takes its place, filled from the artifact's own entries for the same key
    (GE must write a lock file beside an entry even to read it).
    """
    inside = Path("cache", key, f"rank{rank}of{world}")
    shipped = artifact / inside
    if _writable(shipped):
        return shipped
    own = user_cache() / hashlib.sha256(fingerprint.encode()).hexdigest()[:32] / inside
    log(f"{artifact} is read-only: compiled graphs are kept in {own}")
    own.mkdir(parents=True, exist_ok=True)
    if shipped.is_dir():
        for entry in sorted(shipped.rglob("*")):
            copy = own / entry.relative_to(shipped)
            if entry.is_file() and entry.suffix != LOCK_SUFFIX and not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                part = copy.with_name(f".{copy.name}.{os.getpid()}")
                shutil.copyfile(entry, part)
                part.replace(copy)
    return own


def share(folder: Path) -> None:
    """Make the entries readable for other users, whatever the umask: GE writes them for their owner alone."""
    entries = [folder.parent.parent, folder.parent, folder, *sorted(folder.rglob("*"))]
    for path in entries:
        # What another user made is his to share, and another process may be at the same work.
        with suppress(PermissionError, FileNotFoundError):
            if path.suffix == LOCK_SUFFIX:
                path.unlink()
            else:
                path.chmod(0o755 if path.is_dir() else 0o644)


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "_", text) or "unknown"


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
