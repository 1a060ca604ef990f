"""The last rung of a CPU artifact: its compiled package, every rank in a process of its own, over gloo.

As a program it is one rank: it reads a job (JSON) and the steps' inputs, and writes the logits of its steps.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cann_export.verify.weights import RoundedReader, SeededReader, rank_weights
from cann_runtime.artifact.manifest import World
from cann_runtime.artifact.store import Artifact
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.base import StepInputs
from cann_runtime.parallel import Comm, Launch

if TYPE_CHECKING:
    from cann_export.verify.ladder import Ladder

_PATIENCE = 1800.0  # seconds for all steps of all ranks
_SHOWN = 300  # characters of a rank's last words


def cpu_rung(ladder: Ladder, artifact: Artifact, checkpoint: Path | None) -> None:
    """Add the package's line to the ladder. checkpoint: as given to `verify`; None for seeded weights."""
    manifest = artifact.manifest

    def run() -> list[Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            return _run_ranks(ladder, artifact, checkpoint, Path(folder))

    exact = manifest.dtype == "float32"
    ladder.rung(
        f"CPU package, {manifest.world.size} ranks",
        run,
        lambda: "the compiled package itself, or its weights: the fused graph passes",
        rounded=not exact,
    )


def _run_ranks(ladder: Ladder, artifact: Artifact, checkpoint: Path | None, folder: Path) -> list[Tensor]:
    world = artifact.manifest.world
    steps = ladder.script.steps
    inputs = {f"{i}.{k}": t.contiguous() for i, s in enumerate(steps) for k, t in enumerate(s.inputs.tensors())}
    save_file(inputs, folder / "steps.safetensors")
    job = {
        "artifact": str(artifact.path.resolve()),
        "checkpoint": None if checkpoint is None else str(Path(checkpoint).resolve()),
        "blocks": ladder.script.blocks,
        "steps": len(steps),
    }
    (folder / "job.json").write_text(json.dumps(job))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = [part for part in sys.path if part] + [os.environ.get("PYTHONPATH", "")]
    ranks = []
    for rank in range(world.size):
        env = os.environ | {"RANK": str(rank), "MASTER_PORT": port, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        command = [sys.executable, "-m", "cann_export.verify.cpu", str(folder)]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    try:
        for rank, process in enumerate(ranks):
            _, said = process.communicate(timeout=_PATIENCE)
            if process.returncode:
                last = (said.strip().splitlines() or ["no message"])[-1]
                raise ArtifactError(f"rank {rank} of the CPU package: {last[:_SHOWN]}")
    except subprocess.TimeoutExpired:
        raise ArtifactError(f"the ranks of the CPU package did not end in {_PATIENCE:.0f} s") from None
    finally:
        for process in ranks:
            process.kill()
    logits = [load_file(folder / f"logits{rank}.safetensors") for rank in range(world.size)]
    for rank, other in enumerate(logits):
        if any(not torch.equal(other[key], logits[0][key]) for key in logits[0]):
            raise ArtifactError(f"rank {rank} has other logits than rank 0")
    return [logits[0][str(i)][: len(step.wanted)] for i, step in enumerate(steps)]


def rank_main(folder: Path) -> None:
    """One rank of the package: run the steps of the job in `folder`."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    from cann_runtime.loader import cpu_executor

    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    artifact = Artifact.open(job["artifact"])
    manifest = artifact.manifest
    rank, world = int(os.environ["RANK"]), manifest.world
    comm = None
    if world.size > 1:
        torch.set_num_threads(1)
        comm = _connect(rank, world, TCPStore, PrefixStore)
    graphs = [graph for graph in manifest.graphs if rank in graph.ranks]
    executor = cpu_executor(artifact, rank)
    plan, dtype = artifact.plan(), getattr(torch, manifest.dtype)
    seeded = job["checkpoint"] is None
    reader = SeededReader(plan, dtype) if seeded else RoundedReader(Path(job["checkpoint"]), dtype)
    executor.load_weights(iter(rank_weights(plan, reader, rank % world.tp, artifact.constants()).items()))
    executor.allocate_kv(job["blocks"])
    stored = load_file(folder / "steps.safetensors")
    out = {}
    for i in range(job["steps"]):
        inputs = StepInputs(*(stored[f"{i}.{k}"] for k in range(7)))
        out[str(i)] = executor.execute(graphs[0], inputs).clone()
    save_file(out, folder / f"logits{rank}.safetensors")
    if comm is not None:
        comm.close()


def _connect(rank: int, world: World, tcp: Any, prefix: Any) -> Comm:
    port = int(os.environ["MASTER_PORT"])
    store = tcp("127.0.0.1", port, world_size=world.size, is_master=rank == 0, wait_for_workers=False)
    return Comm(Launch(rank, world.size, rank, world.size, "127.0.0.1", port, managed=True), prefix("verify", store))


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
