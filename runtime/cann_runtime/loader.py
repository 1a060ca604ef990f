"""From an opened artifact to a rank that can run: its weights, its executor, and the size of its KV cache.

Which kind of executor is chosen here and nowhere else; how it places weights and runs graphs is its own business. The
executors are imported only when chosen: one needs torch_npu, the other a kernel library.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from cann_runtime.artifact.manifest import Manifest
from cann_runtime.artifact.store import Artifact
from cann_runtime.artifact.weights import check_plan, stream_packed, stream_params
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.base import Executor

if TYPE_CHECKING:
    from cann_runtime.executor.cpu import CpuExecutor

log = logging.getLogger(__name__)

MEMORY_FRACTION = 0.4
"""Part of the free memory that the KV cache may take where neither the recipe nor --kv-memory says a size."""


def rank_params(artifact: Artifact, checkpoint: Path | None, rank: int) -> Iterator[tuple[str, Tensor]]:
    """The graph parameters of one rank, by name: from a checkpoint, else from the artifact's packed weights.

    The checkpoint's names and shapes are checked before this returns. ArtifactError where there is no weight anywhere.
    """
    if checkpoint is not None:
        from cann_runtime.artifact.checkpoint_reader import CheckpointReader

        plan, reader = artifact.plan(), CheckpointReader(checkpoint)
        check_plan(plan, reader)
        return stream_params(plan, reader, rank % artifact.manifest.world.tp, artifact.constants())
    packed = artifact.weights_path(rank)
    if packed is None:
        raise ArtifactError(f"{artifact.path} holds no weights: pass --checkpoint DIR, or export with --pack-weights")
    return stream_packed(packed)


def kv_blocks(manifest: Manifest, free_bytes: int, kv_bytes: int | None = None) -> int:
    """Blocks of one rank's KV cache, scratch blocks included.

    The recipe's max_num_blocks, or as many as `kv_bytes` hold; otherwise enough for max_batch_size sequences of
    max_seq_len tokens, but no more than MEMORY_FRACTION of `free_bytes`. ArtifactError where not one block is left.
    """
    spec = manifest.kv_cache
    if kv_bytes is not None:
        blocks = kv_bytes // spec.bytes_per_block()
    elif manifest.max_num_blocks is not None:
        blocks = manifest.max_num_blocks
    else:
        wanted = spec.scratch_blocks + manifest.max_batch_size * -(-manifest.max_seq_len // spec.block_size)
        blocks = min(wanted, int(free_bytes * MEMORY_FRACTION) // spec.bytes_per_block())
    if blocks <= spec.scratch_blocks:
        raise ArtifactError(
            f"the KV cache has room for {blocks} blocks of {spec.bytes_per_block()} bytes, "
            f"{spec.scratch_blocks} of them for padding: raise --kv-memory (or kv_cache.max_num_blocks in the recipe)"
        )
    return blocks


def free_host_memory(local_ranks: int) -> int:
    """Bytes that one of this host's ranks may still use: available memory, or a container's limit, in equal shares."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    else:
        raise ArtifactError("/proc/meminfo does not say MemAvailable: pass --kv-memory")
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdecimal():
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available // local_ranks


def load_rank(artifact: Artifact, checkpoint: Path | None, rank: int) -> Executor:
    """The executor of one rank with its weights in place; its KV cache is not allocated yet.

    ArtifactError and CheckpointError as the files deserve; the host is checked before weights are read.
    """
    params = rank_params(artifact, checkpoint, rank)
    if artifact.manifest.target.kind == "ascend":
        from cann_runtime.executor.npu import NpuExecutor

        return NpuExecutor(artifact, params, rank=rank, log=log.info)
    cpu = cpu_executor(artifact, rank)
    cpu.load_weights(params)
    return cpu


def cpu_executor(artifact: Artifact, rank: int) -> CpuExecutor:
    """The executor of one rank of a CPU artifact, its libraries and graphs loaded and its weights not yet bound."""
    from cann_runtime.executor.cpu import CpuExecutor

    manifest = artifact.manifest
    mine = [graph for graph in manifest.graphs if rank in graph.ranks]
    return CpuExecutor(
        [artifact.object_path(library.sha256) for library in manifest.libraries],
        {graph.object: (artifact.object_path(graph.object), artifact.signature(graph.signature)) for graph in mine},
        manifest.kv_cache,
        isa=manifest.target.isa,
    )


def load_reference(artifact: Artifact, checkpoint: Path | None, rank: int, precision: str) -> Executor:
    """As load_rank, but interpreting an Ascend artifact on this CPU; precision: one of reference.precision.MODES."""
    from cann_runtime.executor.reference.executor import ReferenceExecutor

    return ReferenceExecutor(artifact, rank_params(artifact, checkpoint, rank), rank=rank, precision=precision)


def kv_budget(artifact: Artifact, local_ranks: int, kv_bytes: int | None, reference: bool = False) -> int:
    """kv_blocks for this host. On an NPU of its whole memory, not what is free: the count is compiled into the graphs,
    so it must be the same at every start. The reference executor may hold a cache in a format four times as wide."""
    if reference:
        return kv_blocks(artifact.manifest, free_host_memory(local_ranks) // 4, kv_bytes)
    if artifact.manifest.target.kind == "ascend":
        from cann_runtime.executor.ge.host import device_memory
        from cann_runtime.executor.npu import local_device

        return kv_blocks(artifact.manifest, device_memory(local_device()), kv_bytes)
    return kv_blocks(artifact.manifest, free_host_memory(local_ranks), kv_bytes)
