"""Writing an artifact so that readers see the old one whole or the new one whole, whenever the writer is killed.

Files are built in a temporary folder beside the target, under a lock, and exchanged with it in one rename at the end.
What goes into the manifest is the pipeline's work; the folder's form and its checks are in cann_runtime.artifact.store.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cann_runtime.artifact.canonical import canonical_json, sha256_file
from cann_runtime.artifact.manifest import Manifest, StoredFile
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.artifact.store import (
    MANIFEST,
    MANIFEST_HASH,
    OBJECTS,
    TOKENIZER,
    WEIGHT_PLAN,
    WEIGHTS,
    unlisted_references,
    weights_name,
)
from cann_runtime.errors import ArtifactError

if TYPE_CHECKING:
    from torch import Tensor

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # renameat2(2)
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_CACHE = "cache"
_OLD = ".old-"
_VERSION = ".v-"


class ArtifactWriter:
    """Builds one artifact; use as a context manager and call finish() last. Without finish() the target is untouched.

    Only one export writes to a target at a time: a second one waits, and says so through `log`.
    """

    def __init__(self, target: Path | str, log: Callable[[str], None] = print) -> None:
        """target: the artifact's folder; it may exist only as an artifact or as an empty folder."""
        self.target = _resolved(Path(target))
        self.objects: dict[str, int] = {}
        self.bytes_by_kind: dict[str, int] = {}
        self._log = log
        self._lock: int | None = None
        self._lock_path = self.target.with_name(f".{self.target.name}.lock")
        self._made_parents: list[Path] = []
        self._folder = self.target.with_name(f".{self.target.name}.tmp-{os.getpid()}")

    def __enter__(self) -> ArtifactWriter:
        if self.target.exists() and not _replaceable(self.target):
            raise ArtifactError(f"{self.target} exists and is no artifact: give a new or an empty folder")
        try:
            self._made_parents = [path for path in self.target.parents if not path.exists()]
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self._lock_path, self.target, self._log)
            self._remove_leftovers()
            for folder in (self._folder, self._folder / OBJECTS):
                _make_folder(folder)
        except OSError as error:
            self._unlock()
            raise ArtifactError(f"cannot write beside {self.target}: {error.strerror or error}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            _remove(self._folder)
        finally:
            self._unlock()
        if error is not None:
            for path in self._made_parents:
                with contextlib.suppress(OSError):  # not empty: another export writes there
                    path.rmdir()
        if isinstance(error, OSError) and error.errno in _FULL:
            raise ArtifactError(f"cannot write {self.target}: {error.strerror}; it is as it was before") from error

    def add_object(self, content: bytes | Path, kind: str = "object") -> str:
        """Store a file by its content, once, and return its sha256. `kind` only groups sizes for the report."""
        sha = hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else sha256_file(content)
        if sha not in self.objects:
            stored = _store(content, self._folder / OBJECTS / sha)
            if stored.sha256 != sha:
                raise ArtifactError(f"{content!s} changed while it was being packed")
            self.objects[sha] = stored.size
            self.bytes_by_kind[kind] = self.bytes_by_kind.get(kind, 0) + stored.size
        return sha

    def add_json(self, value: Any, kind: str = "json") -> str:
        """Store a JSON value or a pydantic model (a Signature) in canonical form, and return its sha256."""
        return self.add_object(canonical_json(value), kind)

    def add_file(self, content: bytes | Path, kind: str = "object") -> StoredFile:
        """add_object, for the manifest's fields that carry the size too (libraries)."""
        sha = self.add_object(content, kind)
        return StoredFile(sha256=sha, size=self.objects[sha])

    def object_bytes(self, sha: str) -> bytes:
        """The content of an object that was added."""
        return (self._folder / OBJECTS / sha).read_bytes()

    def add_constants(self, constants: dict[str, Tensor]) -> StoredFile:
        """Store the weight plan's tables as one safetensors object, for Manifest.constants."""
        from safetensors.torch import save

        return self.add_file(save({name: constants[name].contiguous() for name in sorted(constants)}), "constants")

    def add_weight_plan(self, plan: WeightPlan) -> StoredFile:
        """Write weight_plan.json, for Manifest.weight_plan."""
        return _store(canonical_json(plan), self._folder / WEIGHT_PLAN)

    def add_tokenizer(self, files: dict[str, Path]) -> dict[str, StoredFile]:
        """Copy tokenizer files, by the name each has in the artifact, for Manifest.tokenizer."""
        if files:
            _make_folder(self._folder / TOKENIZER)
        return {name: _store(files[name], self._folder / TOKENIZER / name) for name in sorted(files)}

    def weights_path(self, rank: int) -> Path:
        """Where to write the packed weights of a rank (cann_runtime.artifact.weights.pack_weights)."""
        _make_folder(self._folder / WEIGHTS)
        return self._folder / WEIGHTS / weights_name(rank)

    def finish(self, manifest: Manifest) -> Manifest:
        """Write the manifest with the list of objects, flush everything to disk, and put it in the target's place.

        Returns the manifest as written. Same content, same bytes: nothing of the time, place or process goes in.
        """
        manifest = manifest.model_copy(update={"objects": dict(sorted(self.objects.items()))})
        if unlisted := unlisted_references(manifest):
            raise ArtifactError(f"the manifest of {self.target} refers to {unlisted[0]}, which was not added")
        stored = _store(canonical_json(manifest, indent=1), self._folder / MANIFEST)
        _store(f"{stored.sha256}  {MANIFEST}\n".encode(), self._folder / MANIFEST_HASH)
        _flush(self._folder)
        _replace(self.target, self._folder, self._log)
        return manifest

    def _remove_leftovers(self) -> None:
        """Remove what killed exports left; safe under the lock, since every writer of this target holds it."""
        name, parent = self.target.name, self.target.parent
        current = os.readlink(self.target) if self.target.is_symlink() else None
        for path in parent.iterdir():
            if path.name.startswith(f".{name}{_OLD}") and not self.target.exists():
                os.rename(path, self.target)  # killed between the two renames of a file system without exchange
            elif (
                path.name.startswith((f".{name}.tmp-", f".{name}{_VERSION}", f".{name}{_OLD}")) and path.name != current
            ):
                _remove(path)

    def _unlock(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock_path.unlink()  # while it is held, see _lock
            os.close(self._lock)
            self._lock = None


def _resolved(target: Path) -> Path:
    """The real place of the target: a link that a user made is followed, our own version link is what gets replaced."""
    target = Path(os.path.abspath(target))
    if target.is_symlink() and not os.readlink(target).startswith(f".{target.name}{_VERSION}"):
        return target.resolve()
    return target


def _replaceable(target: Path) -> bool:
    return target.is_dir() and ((target / MANIFEST).exists() or not any(target.iterdir()))


def _lock(path: Path, target: Path, log: Callable[[str], None]) -> int:
    """Lock the file at that path; its holder removes it at the end, so only a lock on the file that is there counts."""
    said = False
    while True:
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not said:
                log(f"another export is writing {target}: waiting for it to end")
                said = True
            fcntl.flock(fd, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        os.close(fd)


def _remove(path: Path) -> None:
    """Remove a link or a tree, one that was made read-only too."""
    if path.is_symlink():
        path.unlink()
        return
    for parent, _, _ in os.walk(path):
        os.chmod(parent, 0o755)
    shutil.rmtree(path, ignore_errors=True)


def _make_folder(path: Path) -> None:
    path.mkdir(exist_ok=True)
    path.chmod(0o755)  # whatever the umask: another user may run what this one exported


def _store(content: bytes | Path, path: Path) -> StoredFile:
    """Write a file, readable by everyone, and say what was written."""
    if isinstance(content, bytes):
        path.write_bytes(content)
        stored = StoredFile(sha256=hashlib.sha256(content).hexdigest(), size=len(content))
    else:
        shutil.copyfile(content, path)
        stored = StoredFile(sha256=sha256_file(path), size=path.stat().st_size)
    return stored


def _flush(folder: Path) -> None:
    """Set the modes and flush a folder tree, so that after a power cut the rename never shows unwritten files."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(parent, name)
            path.chmod(0o644)
            _fsync(path)
        _fsync(Path(parent))


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _replace(target: Path, folder: Path, log: Callable[[str], None]) -> None:
    """Put folder in target's place; target's old content, if any, ends in folder and is removed by the caller."""
    if target.is_symlink():
        _replace_link(target, folder)
    elif not target.exists():
        os.rename(folder, target)
    elif not any(target.iterdir()):
        os.rename(folder, target)  # rename(2) takes the place of an empty folder
    elif _exchange(folder, target):
        _keep_cache(old=folder, new=target)
    else:
        # No exchange on this file system. A real folder cannot give way in one step, so this one time there is a moment
        # without an artifact; from then on the target is a link, which can be replaced in one step.
        log(f"the file system of {target} cannot exchange folders: {target.name} becomes a link beside its content")
        old = target.with_name(f".{target.name}{_OLD}{os.getpid()}")
        os.rename(target, old)
        _replace_link(target, folder)
        _keep_cache(old=old, new=target)
        _remove(old)
    _fsync(target.parent)


def _replace_link(target: Path, folder: Path) -> None:
    """Keep content in a versioned folder beside a link, and turn the link in one rename."""
    old = target.parent / os.readlink(target) if target.is_symlink() else None
    names = (target.with_name(f".{target.name}{_VERSION}{number}") for number in itertools.count())
    version = next(path for path in names if not path.exists())
    link = folder.with_name(folder.name + "-link")
    os.rename(folder, version)
    link.symlink_to(version.name)
    os.rename(link, target)
    if old is not None and old.exists():
        _keep_cache(old=old, new=version)
        _remove(old)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two paths in one step; False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise ArtifactError(f"cannot replace {b}: {os.strerror(code)}")


def _keep_cache(old: Path, new: Path) -> None:
    """Graphs compiled on a device stay valid where the new artifact is the old one to the byte."""
    if (old / _CACHE).is_dir() and sha256_file(old / MANIFEST) == sha256_file(new / MANIFEST):
        os.rename(old / _CACHE, new / _CACHE)
