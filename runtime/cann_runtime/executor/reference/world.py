"""All ranks of a world in this process: what the verification of sharded graphs runs on.

It is an executor like any other, so that the engine can drive it; each rank is a ReferenceExecutor in a thread of its
own, and they meet at the collectives. One rank per process is `executor.py` with its default communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from cann_runtime.artifact.manifest import Graph
from cann_runtime.artifact.store import Artifact
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.base import StepInputs
from cann_runtime.executor.reference.comm import ThreadWorld
from cann_runtime.executor.reference.executor import Programs, ReferenceExecutor


class ReferenceWorld:
    """Every rank of an artifact that has one data-parallel group; `ranks` are their executors."""

    def __init__(
        self, artifact: Artifact, params: Callable[[int], Iterable[tuple[str, Tensor]]], *, precision: str = "exact"
    ) -> None:
        """params: rank -> that rank's parameters; precision as for ReferenceExecutor. Raises ArtifactError."""
        world = artifact.manifest.world
        if world.dp != 1:
            raise ArtifactError(
                f"{artifact.path} has {world.dp} groups that own different requests; only one can run here"
            )
        self.kv_spec = artifact.manifest.kv_cache
        self._threads = ThreadWorld(world)
        programs: Programs = {}
        self.ranks = [
            ReferenceExecutor(
                artifact,
                params(rank),
                rank=rank,
                precision=precision,
                comm=self._threads.rank(rank),
                programs=programs,
            )
            for rank in range(world.size)
        ]

    def allocate_kv(self, num_blocks: int) -> None:
        """Make every rank's KV caches."""
        for rank in self.ranks:
            rank.allocate_kv(num_blocks)

    def execute(self, graph: Graph, step: StepInputs) -> Tensor:
        """Run one step on all ranks; logits [R, V]. ArtifactError where ranks of a group have different logits."""
        logits = self._threads.run(lambda rank: self.ranks[rank].execute(graph, step))
        for rank, other in enumerate(logits):
            if not torch.equal(other.nan_to_num(), logits[0].nan_to_num()):
                raise ArtifactError(f"rank {rank} has other logits than rank 0")
        return logits[0]
