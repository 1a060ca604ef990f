"""The last rung of a CPU artifact: its compiled package, in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cann_export.verify.weights import rank_weights
from cann_runtime.artifact.store import Artifact

if TYPE_CHECKING:
    from cann_export.verify.ladder import Ladder


def cpu_rung(ladder: Ladder, artifact: Artifact) -> None:
    """Add the package's line. Ranks of a CPU package are processes, so only a package of one rank is run here."""
    from cann_runtime.executor.cpu import CpuExecutor

    manifest = artifact.manifest
    if manifest.world.size > 1:
        ladder.report.notes.append(f"CPU package not run: its {manifest.world.size} ranks are processes")
        return
    executor = CpuExecutor(
        [artifact.object_path(library.sha256) for library in manifest.libraries],
        {g.object: (artifact.object_path(g.object), artifact.signature(g.signature)) for g in manifest.graphs},
        manifest.kv_cache,
        isa=manifest.target.isa,
    )
    subject = ladder.subject
    executor.load_weights(iter(rank_weights(subject.plan, ladder.reader, 0, subject.constants).items()))
    executor.allocate_kv(ladder.script.blocks)

    def run() -> list[Tensor]:
        return [executor.execute(step.graph, step.inputs)[: len(step.wanted)] for step in ladder.script.steps]

    exact = torch.float32 == getattr(torch, manifest.dtype)
    ladder.rung("CPU package", run, lambda: "the compiled package itself: the fused graph passes", rounded=not exact)
