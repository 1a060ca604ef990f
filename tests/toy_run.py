"""`cann-run` with the toy executor in place of a compiled graph; everything else is the real program.

TOY_WEIGHTS names the safetensors file of the toy's weights. TOY_DIE=RANK:STEP lets a rank kill itself before a step,
TOY_REFUSE=RANK lets its loading fail with a user's error.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from toy_llama import ToyExecutor

from cann_runtime import cli, loader
from cann_runtime.artifact.manifest import Graph
from cann_runtime.artifact.store import Artifact
from cann_runtime.errors import CheckpointError
from cann_runtime.executor.base import StepInputs


class Mortal(ToyExecutor):
    """The toy, with a step at which it dies."""

    def execute(self, graph: Graph, step: StepInputs) -> Tensor:
        if os.environ.get("TOY_DIE") == f"{self.rank}:{len(self.steps)}":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(graph, step)


def load_rank(artifact: Artifact, checkpoint: Path | None, rank: int) -> ToyExecutor:
    """In place of loader.load_rank."""
    if os.environ.get("TOY_REFUSE") == str(rank):
        raise CheckpointError("the shard is truncated")
    return Mortal(artifact.manifest, load_file(os.environ["TOY_WEIGHTS"]), rank=rank)


if __name__ == "__main__":
    loader.load_rank = load_rank
    sys.exit(cli.main())
