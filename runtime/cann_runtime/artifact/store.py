"""Opening an artifact folder: every check that can be made before any compute, then its files by content.

A damaged, foreign or misplaced artifact ends here, with one line that says what is wrong. Writing artifacts is the
exporter's work; a device's own checks (ISA, SoC) are the executor's.

    manifest.json           the Manifest; manifest.sha256 holds its hash, in the form that `sha256sum -c` reads
    weight_plan.json        the WeightPlan
    objects/<sha256>        graphs, signatures, kernel libraries, constants
    tokenizer/<name>        tokenizer files, where a checkpoint was at hand at export
    weights/rank<r>.safetensors   packed weights, where asked for
    cache/                  graphs compiled on the inference host; not part of the content, never hashed
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from cann_runtime.artifact.canonical import sha256_file
from cann_runtime.artifact.manifest import SCHEMA_VERSION, Manifest, Signature, StoredFile
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.errors import ArtifactError

if TYPE_CHECKING:  # torch takes a second to import, which opening and inspecting an artifact need not wait for
    from torch import Tensor

MANIFEST = "manifest.json"
MANIFEST_HASH = "manifest.sha256"
WEIGHT_PLAN = "weight_plan.json"
OBJECTS = "objects"
TOKENIZER = "tokenizer"
WEIGHTS = "weights"

HASH_LIMIT = 1 << 30
"""Packed weights up to this many bytes are hashed at every load; larger ones are checked by size and header only
(hashing 18 GB takes longer than loading it), unless `verify` is given. All other files are always hashed."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_Model = TypeVar("_Model", bound=BaseModel)


def weights_name(tp_rank: int) -> str:
    """File name of a tp rank's packed weights under weights/."""
    return f"rank{tp_rank}.safetensors"


@dataclass(frozen=True)
class Artifact:
    """An artifact folder whose files have been checked."""

    path: Path
    manifest: Manifest
    verify: bool = False

    @classmethod
    def open(
        cls, path: Path | str, *, world_size: int | None = None, check_host: bool = True, verify: bool = False
    ) -> Artifact:
        """Read the manifest and check all files against it. Raises ArtifactError, one line.

        world_size: the launch's number of ranks, compared with the artifact's where given. check_host: also refuse an
        artifact whose graphs need another torch than this host has (inspection does without). verify: hash packed
        weights of any size, see HASH_LIMIT.
        """
        root = Path(path)
        for _ in range(3):
            before = _stamp(root)
            try:
                artifact = cls(root, _read_manifest(root), verify)
                if world_size is not None:
                    artifact.check_world(world_size)
                if check_host:
                    artifact.check_torch()
                artifact._check_files()
                return artifact
            except ArtifactError:
                # An export that ends just now exchanges the whole folder: then look again, at the new one.
                if _stamp(root) == before:
                    raise
        raise ArtifactError(f"{root} is being replaced again and again: wait for the exports to end")

    def check_world(self, world_size: int) -> None:
        """Refuse a launch with another number of ranks than the graphs were cut for."""
        world = self.manifest.world
        if world_size != world.size:
            raise ArtifactError(
                f"{self.path} was exported for {world.size} ranks (tp {world.tp}, ep {world.ep}, "
                f"nnodes {world.nnodes}), this launch has {world_size}: start {world.size} ranks, "
                "or export again with --tp, --ep and --nnodes"
            )

    def check_torch(self) -> None:
        """Refuse CPU graphs compiled against another torch: its C++ interface holds for one minor version."""
        built = self.manifest.toolchain.get("torch")
        if self.manifest.target.kind != "cpu" or built is None:
            return
        here = metadata.version("torch")
        if built.split(".")[:2] != here.split(".")[:2]:
            raise ArtifactError(
                f"{self.path} was compiled against torch {built}, this host has torch {here}: "
                f"install torch {'.'.join(built.split('.')[:2])} or export again here"
            )

    def object_path(self, sha: str) -> Path:
        """The file of an object. Raises ArtifactError for a hash that the manifest does not list."""
        if sha not in self.manifest.objects:
            raise ArtifactError(f"{self.path} has no object {sha}")
        path = self.path / OBJECTS / sha
        if not path.exists():  # it was there when the artifact was opened
            raise self._replaced()
        return path

    def plan(self) -> WeightPlan:
        """The weight plan."""
        return _parse(WeightPlan, self.path / WEIGHT_PLAN)

    def signature(self, sha: str) -> Signature:
        """A graph's signature, by Graph.signature."""
        return _parse(Signature, self.object_path(sha))

    def constants(self) -> dict[str, Tensor]:
        """The small tables that the weight plan names (inverse frequencies), by name; empty where it names none."""
        if self.manifest.constants is None:
            return {}
        from cann_runtime.artifact.weights import stream_packed

        return dict(stream_packed(self.object_path(self.manifest.constants.sha256)))

    @property
    def tokenizer_dir(self) -> Path | None:
        """The folder of tokenizer files, or None where the artifact was exported without a checkpoint."""
        return self.path / TOKENIZER if self.manifest.tokenizer else None

    def weights_path(self, rank: int) -> Path | None:
        """A rank's packed weights (one file per tp rank), checked on the way, or None where the artifact has none.

        A rank checks its own file only, so that the ranks of a host share the work.
        """
        tp_rank = rank % self.manifest.world.tp
        stored = self.manifest.weights.get(str(tp_rank))
        if stored is None:
            return None
        path = self.path / WEIGHTS / weights_name(tp_rank)
        try:
            _check_file(path, stored, hashed=self.verify or stored.size <= HASH_LIMIT)
        except ArtifactError:
            if _read_manifest(self.path) != self.manifest:
                raise self._replaced() from None
            raise
        return path

    def files(self) -> dict[Path, StoredFile]:
        """Every file that the manifest describes, but packed weights, by path. Raises ArtifactError for bad names."""
        manifest = self.manifest
        for sha in manifest.objects:
            if not _SHA256.fullmatch(sha):
                raise ArtifactError(f"{self.path / MANIFEST} lists an object that is not named by a sha256: {sha!r}")
        for name in manifest.tokenizer:
            if Path(name).name != name:
                raise ArtifactError(f"{self.path / MANIFEST} lists a tokenizer file outside its folder: {name!r}")
        files = {self.path / OBJECTS / sha: StoredFile(sha256=sha, size=size) for sha, size in manifest.objects.items()}
        files |= {self.path / TOKENIZER / name: stored for name, stored in manifest.tokenizer.items()}
        files[self.path / WEIGHT_PLAN] = manifest.weight_plan
        return files

    def _replaced(self) -> ArtifactError:
        return ArtifactError(f"{self.path} was replaced by another export while it was being loaded: start again")

    def _check_files(self) -> None:
        if unlisted := unlisted_references(self.manifest):
            raise ArtifactError(f"{self.path / MANIFEST} refers to {unlisted[0]}, which is not among its objects")
        for path, stored in self.files().items():
            _check_file(path, stored)
        for rank, stored in self.manifest.weights.items():
            if not rank.isdecimal() or int(rank) >= self.manifest.world.tp:
                raise ArtifactError(
                    f"{self.path / MANIFEST} lists packed weights of a rank that does not exist: {rank!r}"
                )
            _check_file(self.path / WEIGHTS / weights_name(int(rank)), stored, hashed=False)


def unlisted_references(manifest: Manifest) -> list[str]:
    """What the manifest refers to by hash but does not list in `objects`; empty for a consistent one."""
    references: list[tuple[str, str]] = []
    for graph in manifest.graphs:
        references += [(f"{graph.phase} graph", graph.object), (f"{graph.phase} signature", graph.signature)]
        if graph.onnx is not None:
            references.append((f"{graph.phase} ONNX model", graph.onnx))
    references += [("kernel library", library.sha256) for library in manifest.libraries]
    if manifest.constants is not None:
        references.append(("constants", manifest.constants.sha256))
    return [f"{what} {sha}" for what, sha in references if sha not in manifest.objects]


def _stamp(root: Path) -> tuple[int, int] | None:
    """What changes when the folder is exchanged for another."""
    try:
        status = (root / MANIFEST).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _check_file(path: Path, stored: StoredFile, hashed: bool = True) -> None:
    try:
        size = path.stat().st_size
        if size != stored.size:
            raise ArtifactError(f"{path} is damaged: it has {size} bytes, the manifest says {stored.size}")
        if hashed and sha256_file(path) != stored.sha256:
            raise ArtifactError(f"{path} is damaged: its content does not have the sha256 that the manifest says")
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing: the artifact is incomplete, copy or export it again") from None
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror or error}") from None


def _read_manifest(root: Path) -> Manifest:
    path = root / MANIFEST
    document = _read_json(path)
    # Before anything else is looked at: a foreign schema may have changed all of it.
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise ArtifactError(
            f"{path} has schema version {version}, this version of cann-run reads {SCHEMA_VERSION}: "
            "export the artifact again, or install the version that wrote it"
        )
    recorded = root / MANIFEST_HASH
    if recorded.exists() and recorded.read_text(errors="replace").split()[:1] != [sha256_file(path)]:
        raise ArtifactError(f"{path} is damaged or was edited: it does not have the sha256 that {MANIFEST_HASH} says")
    return _validate(Manifest, document, path)


def _parse(model: type[_Model], path: Path) -> _Model:
    return _validate(model, _read_json(path), path)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing: {path.parent} is not an artifact, or not a whole one") from None
    except NotADirectoryError:
        raise ArtifactError(f"{path.parent} is not a folder, so not an artifact") from None
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise ArtifactError(f"{path} is damaged: it is not JSON") from None


def _validate(model: type[_Model], document: Any, path: Path) -> _Model:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(key) for key in first["loc"])
        raise ArtifactError(f"{path} does not hold a {model.__name__}: {where}: {first['msg']}") from None
