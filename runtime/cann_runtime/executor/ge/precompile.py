"""Fills an artifact's cache/ on a host with CANN, on all of its ranks: the part that `cann-export compile` and
`cann-run --compile-only` share. What one rank does is `npu.compile_graphs`; how ranks start and meet is `parallel.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from cann_runtime.artifact.store import Artifact
from cann_runtime.errors import ArtifactError, CannError
from cann_runtime.executor.ge import host
from cann_runtime.executor.ge.load import CompileResult, Log
from cann_runtime.executor.npu import compile_graphs
from cann_runtime.loader import kv_blocks
from cann_runtime.parallel import Launch, connect


def planned_blocks(artifact: Artifact, asked: int | None) -> int:
    """KV blocks to compile for: what was asked for, else the recipe's max_num_blocks, else enough for a full batch of
    full length, which is also what `cann-run` takes where the device's memory allows. Raises ArtifactError where none
    would be left beside the scratch blocks.
    """
    if asked is None:
        return kv_blocks(artifact.manifest, 1 << 62)
    scratch = artifact.manifest.kv_cache.scratch_blocks
    if asked <= scratch:
        taken = f"{scratch} of them {'is' if scratch == 1 else 'are'} taken by padding rows"
        raise ArtifactError(f"--blocks {asked}: {taken}; give at least {scratch + 1}")
    return asked


def precompile(
    artifact: Artifact, blocks: int, launch: Launch, command: Sequence[str], log: Log = print
) -> list[CompileResult]:
    """Compile this rank's graphs for `blocks` KV blocks, starting the host's other ranks by `command` where it is ours.

    Raises CannError: without CANN, or on a host that the artifact does not fit, before any rank is started.
    """
    host.check_host(artifact.manifest, host.read_host(launch.local_rank))
    if launch.size == 1:
        return compile_graphs(artifact, rank=0, blocks=blocks, device=0, log=log)
    comm, ranks = connect(launch, command, None)
    results: list[CompileResult] = []
    failure: CannError | None = None
    try:
        try:
            results = compile_graphs(artifact, rank=launch.rank, blocks=blocks, device=launch.local_rank, log=log)
        except CannError as error:
            failure = error
        comm.agree(failure)
        comm.close()
    finally:
        if ranks is not None:
            ranks.close(patience=60.0)
    return results
