"""The `cann-run` command: runs an artifact from a terminal.

It reads the arguments, brings up the ranks and the engine, and turns errors into one line and an exit code. What the
modes print is in `terminal.py`. Heavy modules are imported where they are needed, so that a wrong argument is cheap.

Exit codes: 0 done; 1 a rank died; 2 an error that the user can fix; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cann_runtime.arguments import Parser
from cann_runtime.errors import CannError, RequestError

if TYPE_CHECKING:
    from cann_runtime.artifact.store import Artifact
    from cann_runtime.parallel import Comm, Launch, LocalRanks
    from cann_runtime.request import SamplingParams

MODES = "--prompt TEXT, --prompts FILE, --chat or --score FILE"
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M or 4G")
    return int(float(match[1]) * _UNITS[match[2]])


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """All arguments of cann-run."""
    parser = Parser(prog="cann-run", description="Run an exported artifact.")
    parser.add_argument("artifact", type=Path, help="folder that cann-export wrote")

    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--prompt", metavar="TEXT", help="answer one prompt")
    mode.add_argument("--prompts", metavar="FILE", type=Path, help="prompts as one batch: one a line, or JSONL")
    mode.add_argument("--chat", action="store_true", help="talk in the terminal")
    mode.add_argument("--score", metavar="FILE", type=Path, help="loss of the model on a text file, in nats a token")
    mode.add_argument("--compile-only", action="store_true", help="fill the artifact's cache/ on a host with CANN")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=_positive, metavar="N", help="tokens to generate (default: 256 at most)")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default)")
    sampling.add_argument("--top-k", type=int, default=0, metavar="N", help="0 is off (default)")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="X", help="1 is off (default)")
    sampling.add_argument("--seed", type=int, metavar="N", help="same seed, same text")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")

    output = parser.add_argument_group("input and output")
    output.add_argument("--raw", action="store_true", help="plain text prompt: no chat template")
    output.add_argument("--stream", action="store_true", help="print text as it comes")
    output.add_argument("--json", action="store_true", help="one JSON object a result: text, tokens, timings")
    output.add_argument("--token-ids", action="store_true", help="print token ids in place of text")
    output.add_argument("--stats", action="store_true", help="print a line of timings on stderr at the end")

    where = parser.add_argument_group("weights, memory and ranks")
    where.add_argument("--checkpoint", type=Path, metavar="DIR", help="weights and tokenizer of this checkpoint")
    where.add_argument("--kv-memory", type=_bytes, metavar="SIZE", help="KV cache of one rank, such as 4G")
    where.add_argument(
        "--concurrency", type=_positive, metavar="N", help="most sequences at once (default: all that fit)"
    )
    where.add_argument("--threads", type=_positive, metavar="N", help="CPU threads of one rank")
    where.add_argument("--node-rank", type=int, metavar="N", help="this host's number, where there are several")
    where.add_argument("--master-addr", metavar="ADDR", help="address of host 0, where there are several")
    where.add_argument("--master-port", type=_positive, metavar="PORT", help="port of host 0, where there are several")
    proof = parser.add_argument_group("proof without a device")
    proof.add_argument("--executor", choices=("reference",), help="interpret Ascend graphs on this CPU, slowly")
    proof.add_argument(
        "--precision",
        choices=("exact", "exact64", "npu"),
        help="of the reference: float32 (default) or float64 throughout, or the device's dtypes and roundings",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(ranks_started=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run cann-run; returns the exit code."""
    args = build_parser().parse_args(argv)
    # What starts the other ranks of this host: the same command again.
    command = [sys.executable, *(sys.orig_argv[1:] if argv is None else ["-m", "cann_runtime.cli", *argv])]
    # torch_npu is imported by the NPU executor alone; a torch that loads it by itself fails on hosts without CANN.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    logging.basicConfig(level=logging.WARNING, format="cann-run: %(message)s", stream=sys.stderr)
    code = _guarded(args, command)
    if args.ranks_started:
        # Modules that were imported while the ranks ran may hold the process group (torch.distributed.nn.functional has
        # it as a default argument). Its threads would then abort the interpreter's teardown, so that is left out.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code


def _guarded(args: argparse.Namespace, command: list[str]) -> int:
    """The run's exit code; errors of the user's become a line."""
    rank = os.environ.get("RANK", "0")
    try:
        return _run(args, command)
    except CannError as error:
        if args.debug:
            raise
        print(f"cann-run: error: {f'rank {rank}: ' if rank != '0' else ''}{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(args: argparse.Namespace, command: list[str]) -> int:
    if not (args.compile_only or args.chat or args.score or args.prompts is not None or args.prompt is not None):
        raise RequestError(f"nothing to do: pass {MODES}")
    if args.precision is not None and args.executor is None:
        raise RequestError("--precision is of --executor reference: pass both, or neither")
    if args.compile_only and args.executor is not None:
        raise RequestError("--compile-only fills the cache of a device: it does not go with --executor reference")
    for flag, file in (("--prompts", args.prompts), ("--score", args.score)):
        if file is not None and not file.is_file():
            raise RequestError(f"{flag}: {file} is not a file")
    if args.checkpoint is not None and not args.checkpoint.is_dir():
        raise RequestError(f"--checkpoint: {args.checkpoint} is not a folder")

    from cann_runtime.artifact.store import Artifact
    from cann_runtime.request import SamplingParams

    params = SamplingParams(
        args.temperature, args.top_k, args.top_p, args.seed, args.max_tokens, ignore_eos=args.ignore_eos
    )
    artifact = Artifact.open(args.artifact)
    if args.compile_only and artifact.manifest.target.kind == "cpu":
        print("nothing to do: the graphs of a CPU artifact were compiled at export", file=sys.stderr)
        return 0

    import torch

    from cann_runtime.parallel import connect, plan_launch, threads_per_rank

    launch = plan_launch(
        artifact.manifest.world,
        os.environ,
        node_rank=args.node_rank,
        master_addr=args.master_addr,
        master_port=args.master_port,
    )
    if artifact.manifest.target.kind == "ascend" and args.executor is None:
        from cann_runtime.executor.ge.host import check_host, read_host

        check_host(artifact.manifest, read_host(launch.local_rank))
    threads = threads_per_rank(launch, args.threads)
    if threads is not None:
        torch.set_num_threads(threads)
    if launch.size == 1:
        _serve(args, artifact, params, launch, None)
        return 0
    if launch.rank != 0:
        # Ctrl-C in a terminal reaches every process; rank 0 decides what it means and stops the others.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    args.ranks_started = True
    comm, ranks = connect(launch, command, threads)
    try:
        _serve(args, artifact, params, launch, comm)
    except CannError:
        if launch.rank != 0:
            return 2  # rank 0 reports it
        raise
    except RuntimeError as error:
        lost = _lost_rank(error, ranks)
        if lost is None or args.debug:
            raise
        print(f"cann-run: {f'rank {launch.rank}: ' if launch.rank else ''}{lost}", file=sys.stderr, flush=True)
        if ranks is not None:
            ranks.close(patience=1.0)
        os._exit(1)  # tearing down groups whose peers are gone can wait for them
    finally:
        comm.close()
        if ranks is not None:
            ranks.close()
    return 0


def _lost_rank(error: RuntimeError, ranks: LocalRanks | None) -> str | None:
    """What to say where the error comes from another rank's end; None for any other error."""
    death = ranks.dead(patience=2.0) if ranks is not None else None
    if death is not None:
        return f"{death}; all ranks end"
    broken = ("gloo", "connection", "socket")
    return "lost the connection to another rank" if any(word in str(error).lower() for word in broken) else None


def _serve(
    args: argparse.Namespace, artifact: Artifact, params: SamplingParams, launch: Launch, comm: Comm | None
) -> None:
    """Load this rank and do its part: rank 0 runs the mode that was asked for, others follow it."""
    from cann_runtime.buckets import Buckets
    from cann_runtime.loader import kv_budget, load_rank, load_reference
    from cann_runtime.parallel import follow

    manifest = artifact.manifest
    if args.compile_only:
        from cann_runtime.executor.npu import compile_graphs

        blocks = kv_budget(artifact, launch.local_size, args.kv_memory)
        compile_graphs(artifact, rank=launch.rank, blocks=blocks if comm is None else comm.smallest(blocks))
        return
    failure: CannError | None = None
    reference = args.executor == "reference"
    try:
        if reference:
            executor = load_reference(artifact, args.checkpoint, launch.rank, args.precision or "exact")
        else:
            executor = load_rank(artifact, args.checkpoint, launch.rank)
        blocks = kv_budget(artifact, launch.local_size, args.kv_memory, reference)
    except CannError as error:
        failure = error
    if comm is not None:
        comm.agree(failure)
        blocks = comm.smallest(blocks)
    elif failure is not None:
        raise failure
    executor.allocate_kv(blocks)
    if comm is not None and launch.rank != 0:
        follow(manifest, Buckets(manifest, launch.rank).graphs, executor, comm)
        return

    from cann_runtime import terminal
    from cann_runtime.engine import Engine

    try:
        text = terminal.TextSide.open(artifact, args.checkpoint)
        engine = Engine(manifest, executor, blocks, comm, eos_token_ids=text.eos, concurrency=args.concurrency)
        terminal.run(args, engine, text, params)
    finally:
        if comm is not None:
            comm.stop()


if __name__ == "__main__":
    sys.exit(main())
