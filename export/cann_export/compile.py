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

from cann_runtime.artifact.store import Artifact
from cann_runtime.errors import ArtifactError, CannError
from cann_runtime.executor.ge.load import CompileResult


def add_compile_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of `cann-export compile`."""
    parser.add_argument("artifact", type=Path, help="folder that cann-export wrote for an Ascend target")
    parser.add_argument(
        "--blocks", type=int, metavar="N", help="KV blocks to compile for (default: the recipe's, else a full batch's)"
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

    blocks: number of KV blocks, which is compiled into the graphs. Returns what became of this process's graphs.

    Raises ArtifactError where the artifact is for another target, where the host has no CANN, or where they do not fit.
    """
    artifact = Artifact.open(path)
    if artifact.manifest.target.kind != "ascend":
        raise ArtifactError(
            f"{path} was exported for {artifact.manifest.target.kind}: it has no graphs for CANN to compile"
        )
    from cann_runtime.executor.ge.precompile import planned_blocks, precompile
    from cann_runtime.parallel import plan_launch

    launch = plan_launch(
        artifact.manifest.world, os.environ, node_rank=node_rank, master_addr=master_addr, master_port=master_port
    )
    count = planned_blocks(artifact, blocks)
    command = [sys.executable, "-m", "cann_export.compile", str(path), "--blocks", str(count)]
    log(f"{artifact.manifest.name}: compiling for {count} KV blocks")
    return precompile(artifact, count, launch, command, log)


def main(argv: Sequence[str] | None = None) -> int:
    """Run as `python -m cann_export.compile`, as the ranks other than 0 are; returns the exit code."""
    parser = argparse.ArgumentParser(prog="cann-export compile")
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
