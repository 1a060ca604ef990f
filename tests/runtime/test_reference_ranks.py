"""Ranks of the reference executor: threads and processes over gloo do the same, and a broken meeting ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import RunProgram
from reference_op import run_op
from torch import Tensor

from cann_export.lower.ascend.toolchain import ensure_toolchain
from cann_runtime.artifact.manifest import World
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.reference.comm import Communicator, ThreadWorld
from tests.tiny_models import save_checkpoint, tiny_config, tiny_model

BF16 = torch.bfloat16


def mine(rank: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)).to(dtype)


def collectives(comm: Communicator, group: str) -> dict[str, Tensor]:
    """Every collective on one rank, of tensors that depend on the rank alone."""
    rank, size = comm.rank(group), comm.size(group)
    x = mine(rank)
    counts = [rank + 1 + other for other in range(size)]  # what this rank sends to each
    takes = [other + 1 + rank for other in range(size)]
    sends = torch.tensor(counts)
    results = {
        "sum": run_op("HcomAllReduce", {"x": x}, {"reduction": "sum", "group": group}, mode="npu", comm=comm),
        "max": run_op("HcomAllReduce", {"x": x}, {"reduction": "max", "group": group}, mode="npu", comm=comm),
        "gather": run_op("HcomAllGather", {"x": x}, {"rank_size": size, "group": group}, mode="npu", comm=comm),
        "scatter": run_op(
            "HcomReduceScatter",
            {"x": x},
            {"reduction": "sum", "rank_size": size, "group": group},
            mode="npu",
            comm=comm,
        ),
        "all to all": run_op("HcomAllToAll", {"x": x}, {"group": group}, mode="npu", comm=comm),
        "all to all of sizes": run_op(
            "HcomAllToAllV",
            {
                "send_data": torch.arange(sum(counts)) + 100 * rank,
                "send_counts": sends,
                "send_displacements": sends.cumsum(0) - sends,
                "recv_counts": torch.tensor(takes),
                "recv_displacements": torch.tensor(takes).cumsum(0) - torch.tensor(takes),
            },
            {"group": group},
            mode="npu",
            comm=comm,
        ),
        "broadcast": run_op("HcomBroadcast", {"x0": x}, {"root_rank": size - 1, "group": group}, mode="npu", comm=comm),
        "product": run_op(
            "MatmulAllReduce",
            {"x1": x, "x2": x.t().contiguous(), "bias": x[:, 0]},
            {"group": group},
            mode="npu",
            comm=comm,
        ),
    }
    return {name: result[0] for name, result in results.items()}


def check(results: list[dict[str, Tensor]]) -> None:
    """Hold the results of the ranks of one group against torch on all their tensors."""
    size = len(results)
    xs = [mine(rank) for rank in range(size)]
    total = torch.stack([x.float() for x in xs]).sum(0).to(BF16)
    product = torch.stack([(x.float() @ x.float().t() + x[:, 0].float()).to(BF16).float() for x in xs]).sum(0).to(BF16)
    for rank, got in enumerate(results):
        torch.testing.assert_close(got["sum"], total, rtol=2**-7, atol=0)
        assert torch.equal(got["sum"], results[0]["sum"]), "all ranks must have the same bits"
        assert torch.equal(got["max"], torch.stack(xs).amax(0))
        assert torch.equal(got["gather"], torch.cat(xs))
        assert torch.equal(got["scatter"], got["sum"].chunk(size)[rank])
        assert torch.equal(got["all to all"], torch.cat([x.chunk(size)[rank] for x in xs]))
        assert torch.equal(got["broadcast"], xs[-1])
        torch.testing.assert_close(got["product"], product, rtol=2**-7, atol=2**-8)
        pieces = []
        for other in range(size):
            counts = [other + 1 + to for to in range(size)]
            start = sum(counts[:rank])
            pieces.append(torch.arange(start, start + counts[rank]) + 100 * other)
        assert torch.equal(got["all to all of sizes"], torch.cat(pieces))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_threads_exchange_what_the_ops_say(size: int) -> None:
    world = ThreadWorld(World(size=size, tp=size))
    check(world.run(lambda rank: collectives(world.rank(rank), "tp")))


def test_groups_of_ranks_do_not_mix() -> None:
    world = ThreadWorld(World(size=4, tp=2, ep=4))
    results = world.run(lambda rank: collectives(world.rank(rank), "tp"))
    check(results[:2])
    check(results[2:])


def work_of_one_process() -> None:
    """What test_processes_over_gloo_do_the_same starts: all collectives over both groups, saved."""
    import torch.distributed as dist

    from cann_runtime.executor.reference.comm import GlooRank

    dist.init_process_group("gloo", init_method="env://")
    comm = GlooRank(World(size=4, tp=2, ep=4))
    results = {group: collectives(comm, group) for group in ("tp", "world")}
    torch.save(results, f"{sys.argv[1]}/{dist.get_rank()}.pt")
    dist.destroy_process_group()


def test_processes_over_gloo_do_the_same(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "4",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    processes = [
        subprocess.Popen([sys.executable, __file__, str(tmp_path)], env={**env, "RANK": str(rank)}) for rank in range(4)
    ]
    assert [process.wait(120) for process in processes] == [0] * 4
    loaded = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    check([results["world"] for results in loaded])
    threads = ThreadWorld(World(size=4, tp=2, ep=4))
    for group in ("tp", "world"):
        for over_gloo, in_threads in zip(
            (results[group] for results in loaded), threads.run(lambda r, g=group: collectives(threads.rank(r), g))
        ):
            assert all(torch.equal(over_gloo[name], in_threads[name]) for name in in_threads)


def test_a_failing_rank_ends_the_others() -> None:
    world = ThreadWorld(World(size=3, tp=3))

    def work(rank: int) -> None:
        if rank == 1:
            raise ArtifactError("rank 1 has no graphs")
        world.rank(rank).gather(mine(rank), "tp")

    with pytest.raises(ArtifactError, match="rank 1 has no graphs"):
        world.run(work)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda rank: mine(rank)[: 4 - rank], "different tensors to one collective"),
        (lambda rank: mine(rank, torch.float32 if rank else BF16), "different tensors to one collective"),
    ],
)
def test_ranks_that_bring_different_tensors_are_told(change: Callable[[int], Tensor], text: str) -> None:
    world = ThreadWorld(World(size=2, tp=2))
    attrs = {"reduction": "sum", "group": "tp"}
    with pytest.raises(ArtifactError, match=text):
        world.run(lambda rank: run_op("HcomAllReduce", {"x": change(rank)}, attrs, mode="npu", comm=world.rank(rank)))


def test_a_foreign_group_is_refused() -> None:
    world = ThreadWorld(World(size=2, tp=2))
    with pytest.raises(ArtifactError, match="over group 'pipeline', not one of tp, ep, world"):
        world.run(lambda rank: world.rank(rank).gather(mine(rank), "pipeline"))


def test_cann_run_prints_the_same_tokens_as_transformers(run_program: RunProgram, tmp_path: Path) -> None:
    """The whole program: export, ranks as processes, engine; two prompts in one batch."""
    ensure_toolchain(print)
    config = tiny_config("qwen2", head_dim=128, num_hidden_layers=3)
    model = tiny_model(config)
    for param in model.parameters():
        param.copy_(param.bfloat16())
    checkpoint = save_checkpoint(model, config, tmp_path / "checkpoint")
    artifact = tmp_path / "artifact"
    flags = ["--target", "ascend910b", "--tp", "2", "--dtype", "bfloat16", "--max-batch-size", "2"]
    exported = run_program("cann-export", checkpoint, *flags, "--max-seq-len", "128", "-o", artifact, "--quiet")
    assert exported.returncode == 0, exported.stderr
    prompts = [[5, 17, 300, 8, 42], [11, 3, 200]]
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"token_ids": {prompt}}}\n' for prompt in prompts))
    run = run_program(
        "cann-run",
        artifact,
        "--executor",
        "reference",
        "--checkpoint",
        checkpoint,
        "--prompts",
        tmp_path / "prompts.jsonl",
        "--max-tokens",
        "6",
        "--ignore-eos",
        "--json",
    )
    assert run.returncode == 0, run.stderr
    double = model.double()
    for line, prompt in zip(run.stdout.splitlines(), prompts, strict=True):
        got = json.loads(line)["tokens"]
        assert len(got) == 6
        logits = double(input_ids=torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
        assert got == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--prompt", "x", "--precision", "npu"], "--precision is of --executor reference"),
        (["--prompt", "x", "--executor", "reference", "--precision", "half"], "invalid choice: 'half'"),
        (["--compile-only", "--executor", "reference"], "does not go with --executor reference"),
    ],
)
def test_wrong_flags_are_one_line(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from cann_runtime.cli import main

    try:
        code = main(["nowhere", *flags])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    assert text in capsys.readouterr().err


if __name__ == "__main__":
    work_of_one_process()
