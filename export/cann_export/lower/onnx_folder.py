"""Lays an artifact's ONNX models out in a folder that other tools can open: models by name, weights beside them.

In the artifact the models are objects named by their hash, and weights may not be there at all; ONNX readers want a
`.onnx` file with its external data in the same folder. Nothing is changed on the way.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from cann_export.checkpoint import resolve_checkpoint
from cann_export.lower.onnx import WEIGHTS_FILE
from cann_runtime.arguments import Parser
from cann_runtime.artifact.checkpoint_reader import CheckpointReader
from cann_runtime.artifact.manifest import Graph
from cann_runtime.artifact.store import Artifact
from cann_runtime.artifact.weights import check_plan, pack_weights
from cann_runtime.errors import ArtifactError


def model_name(graph: Graph) -> str:
    """File name of a graph's model: phase, and for a static graph its tokens and sequences."""
    if graph.dynamic:
        return f"{graph.phase}.onnx"
    return f"{graph.phase}_{graph.bucket.tokens}_{graph.bucket.seqs}.onnx"


def write_folder(path: Path, folder: Path, rank: int = 0, checkpoint: Path | None = None) -> list[str]:
    """Write the models of a rank, and WEIGHTS_FILE where weights are at hand; gives the names of the files.

    Weights come from the checkpoint folder if given, else from the artifact's packed ones; without either the models
    can be looked at but not run. Raises ArtifactError for an artifact without ONNX, a rank that does not exist, or a
    folder that is in use.
    """
    artifact = Artifact.open(path, check_host=False)
    manifest = artifact.manifest
    graphs = [g for g in manifest.graphs if g.onnx is not None]
    if not graphs:
        raise ArtifactError(f"{path} holds no ONNX models: export it with --emit onnx")
    if not 0 <= rank < manifest.world.size:
        raise ArtifactError(f"--rank: {rank} is not one of the artifact's ranks, 0 to {manifest.world.size - 1}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArtifactError(f"{folder} exists: give a new or an empty folder")
    plan = artifact.plan()
    reader = CheckpointReader(checkpoint) if checkpoint is not None else None
    if reader is not None:
        check_plan(plan, reader)
    names = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for graph in graphs:
            if rank in graph.ranks and graph.onnx is not None:
                shutil.copyfile(artifact.object_path(graph.onnx), folder / model_name(graph))
                names.append(model_name(graph))
        packed = artifact.weights_path(rank) if reader is None else None
        if reader is not None:
            pack_weights(plan, reader, rank % manifest.world.tp, folder / WEIGHTS_FILE, artifact.constants())
        elif packed is not None:
            shutil.copyfile(packed, folder / WEIGHTS_FILE)  # no link: readers of ONNX refuse linked data
    except OSError as error:
        raise ArtifactError(f"cannot write {folder}: {error.strerror or error}") from None
    return [*names, WEIGHTS_FILE] if reader is not None or packed is not None else names


def main(argv: Sequence[str]) -> int:
    """The `cann-export onnx` command."""
    parser = Parser(
        prog="cann-export onnx",
        description="Lay out an artifact's ONNX models (made with --emit onnx) as files, their weights beside them.",
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, help="a new or empty folder")
    parser.add_argument("--rank", type=int, default=0, help="whose models and weights (default: 0)")
    parser.add_argument("--checkpoint", help="where the weights come from (default: the artifact's packed ones)")
    parser.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(list(argv))
    checkpoint = None
    if args.checkpoint is not None:
        checkpoint = resolve_checkpoint(args.checkpoint, lambda text: print(text, file=sys.stderr))
    names = write_folder(args.artifact, args.output, args.rank, checkpoint)
    for name in names:
        print(args.output / name)
    if WEIGHTS_FILE not in names:
        print(f"no {WEIGHTS_FILE}: the models can be looked at; to run them, give --checkpoint", file=sys.stderr)
    return 0
