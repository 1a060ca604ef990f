"""`cann-export compile ARTIFACT`: compiles an artifact's GE graphs on a host with CANN, so that they ship with it.

Exporting needs no CANN and leaves `cache/` empty; this step fills it once for a CANN version, a chip and a KV size. The
work itself is the runtime's, which compiles the same way when it finds no cache.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cann_runtime.arguments import Parser
from cann_runtime.artifact.store import Artifact
from cann_runtime.errors import ArtifactError, CannError

if TYPE_CHECKING:  # torch takes a second to import, which the command line's help need not wait for
    from cann_runtime.executor.ge.load import CompileResult


def add_compile_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of `cann-export compile`."""
    parser.add_argument("artifact", type=Path, help="folder that cann-export wrote for an Ascend target")
    parser.add_argument(
        "--blocks", type=int, metavar="N", help="KV blocks to compile for (default: what cann-run takes here)"
    )
    parser.add_argument("--node-rank", type=int, metavar="N", help="this host's number, where there are several")
    parser.add_argument("--master-addr", metavar="ADDR", help="address of host 0, where there are several")
    parser.add_argument("--master-port", type=int, metavar="PORT", help="port of host 0, where there are several")


def compile_artifact(
    path: Path,
    *,
    blocks: int | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    log: Callable[[str], None] = print,
) -> list[CompileResult]:
    """Compile all graphs of the artifact at `path` on this host's NPUs, one process per rank.

    blocks: number of KV blocks, which is compiled into the graphs; by default what `cann-run` takes on this host.
    Returns what became of this process's graphs.

    Raises ArtifactError where the artifact is for another target, where the host has no CANN, or where they do not fit;
    all of this before other ranks are started.
    """
    artifact = Artifact.open(path)
    from cann_runtime.executor.ge.host import check_host, read_host
    from cann_runtime.executor.npu import compile_graphs
    from cann_runtime.parallel import connect, plan_launch

    if artifact.manifest.target.kind != "ascend":
        raise ArtifactError(f"{path} was exported for {artifact.manifest.target.kind}: it has no graphs to compile")
    launch = plan_launch(
        artifact.manifest.world, os.environ, node_rank=node_rank, master_addr=master_addr, master_port=master_port
    )
    check_host(artifact.manifest, read_host(launch.local_rank))
    count = planned_blocks(artifact, blocks, launch.local_size)
    log(f"{artifact.manifest.name}: compiling for {count} KV blocks")
    if launch.size == 1:
        return compile_graphs(artifact, rank=0, blocks=count, device=0, log=log)
    command = [sys.executable, "-m", "cann_export.compile", str(path), "--blocks", str(count)]
    comm, ranks = connect(launch, command, None)
    results: list[CompileResult] = []
    failure: CannError | None = None
    try:
        try:
            results = compile_graphs(artifact, rank=launch.rank, blocks=count, device=launch.local_rank, log=log)
        except CannError as error:
            failure = error
        comm.agree(failure)
        comm.close()
    finally:
        if ranks is not None:
            ranks.close(patience=60.0)
    return results


def planned_blocks(artifact: Artifact, asked: int | None, local_ranks: int) -> int:
    """KV blocks to compile for: what was asked for, else what `cann-run` takes on this host without --kv-memory.

    Raises ArtifactError where no block would be left beside the scratch blocks.
    """
    from cann_runtime.loader import kv_budget

    if asked is None:
        return kv_budget(artifact, local_ranks, None)
    scratch = artifact.manifest.kv_cache.scratch_blocks
    if asked <= scratch:
        taken = f"{scratch} of them {'is' if scratch == 1 else 'are'} taken by padding rows"
        raise ArtifactError(f"--blocks {asked}: {taken}; give at least {scratch + 1}")
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """Run as `python -m cann_export.compile`, as the ranks other than 0 are; returns the exit code."""
    parser = Parser(prog="cann-export compile")
    add_compile_flags(parser)
    args = parser.parse_args(argv)
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        compile_artifact(
            args.artifact,
            blocks=args.blocks,
            node_rank=args.node_rank,
            master_addr=args.master_addr,
            master_port=args.master_port,
        )
    except CannError as error:
        print(f"cann-export: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
