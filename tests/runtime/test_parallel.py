"""Ranks as real processes over gloo: the same tokens as one rank, clean ends, and no hang when a rank dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from toy_llama import hf_greedy, hf_model, prompts, write_toy

from cann_runtime.artifact.manifest import World
from cann_runtime.errors import ArtifactError
from cann_runtime.parallel import plan_launch, threads_per_rank

TOY_RUN = Path(__file__).parents[1] / "toy_run.py"


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_model()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy") / "artifact", tp=2)


@pytest.fixture(scope="module")
def environ(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("weights") / "toy.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    return {**os.environ, "TOY_WEIGHTS": str(path)}


def command(artifact: Path, *args: str) -> list[str]:
    return [str(TOY_RUN), str(artifact), "--threads", "1", *args]


def run(
    artifact: Path, environ: dict[str, str], *args: str, launcher: tuple[str, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *launcher, *command(artifact, *args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=environ | env, check=False)


def running(artifact: Path) -> list[int]:
    """Processes of this test's artifact that are still there."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                if str(artifact).encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def assert_all_gone(artifact: Path) -> None:
    deadline = time.monotonic() + 15
    while running(artifact):
        assert time.monotonic() < deadline, "a rank was left behind"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def asked(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A file of prompts, long ones too (their steps need more than one message), and their greedy tokens."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    given = prompts(9, seed=11, longest=90)
    file.write_text("\n".join(json.dumps({"token_ids": p}) for p in given))
    return file, [hf_greedy(model, p, 8, [2]) for p in given]


def test_two_ranks_give_the_tokens_of_transformers(
    artifact: Path, environ: dict[str, str], asked: tuple[Path, list[list[int]]]
) -> None:
    done = run(artifact, environ, "--prompts", str(asked[0]), "--max-tokens", "8", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert [json.loads(line)["tokens"] for line in done.stdout.splitlines()] == asked[1]
    assert_all_gone(artifact)


def test_torchrun_starts_the_same_ranks(
    artifact: Path, environ: dict[str, str], asked: tuple[Path, list[list[int]]]
) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(artifact, environ, "--prompts", str(asked[0]), "--max-tokens", "8", "--json", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["tokens"] for line in done.stdout.splitlines()] == asked[1]


@pytest.mark.parametrize("victim", ["1:0", "1:3"])
def test_a_dead_rank_ends_everything_with_a_message(artifact: Path, environ: dict[str, str], victim: str) -> None:
    done = run(artifact, environ, "--prompt", "Hi", "--max-tokens", "40", "--ignore-eos", TOY_DIE=victim)
    assert done.returncode == 1
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr
    assert_all_gone(artifact)


def test_the_others_end_when_rank_0_dies(artifact: Path, environ: dict[str, str]) -> None:
    done = run(artifact, environ, "--prompt", "Hi", "--max-tokens", "40", "--ignore-eos", TOY_DIE="0:3")
    assert done.returncode == -signal.SIGKILL
    assert "Traceback" not in done.stderr
    assert_all_gone(artifact)


def test_an_error_of_one_rank_is_reported_once(artifact: Path, environ: dict[str, str]) -> None:
    done = run(artifact, environ, "--prompt", "Hi", TOY_REFUSE="1")
    assert done.returncode == 2
    assert done.stderr == "cann-run: error: rank 1: the shard is truncated\n"
    done = run(artifact, environ, "--prompt", "Hi", TOY_REFUSE="0")
    assert done.returncode == 2
    assert done.stderr == "cann-run: error: the shard is truncated\n"
    assert_all_gone(artifact)


def test_an_error_of_the_prompt_ends_all_ranks(artifact: Path, environ: dict[str, str]) -> None:
    done = run(artifact, environ, "--prompt", "x" * 300)
    assert done.returncode == 2
    assert "max_seq_len" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert_all_gone(artifact)


def test_ctrl_c_ends_all_ranks_quietly(artifact: Path, environ: dict[str, str]) -> None:
    line = [sys.executable, *command(artifact, "--chat")]
    process = subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Hi\n")
    process.stdin.flush()
    process.stdout.readline()  # the answer is there: all ranks run
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == b""
    assert_all_gone(artifact)


def test_a_wrong_world_size_is_refused_before_weights_load(artifact: Path, environ: dict[str, str]) -> None:
    done = run(artifact, environ, "--prompt", "Hi", RANK="0", WORLD_SIZE="3", TOY_WEIGHTS="absent")
    assert done.returncode == 2
    assert "2 ranks" in done.stderr
    assert "3" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_ranks_listen_on_loopback_only(artifact: Path, environ: dict[str, str]) -> None:
    line = [sys.executable, *command(artifact, "--chat")]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Hi\n")
        process.stdin.flush()
        process.stdout.readline()
        addresses = [address for pid in running(artifact) for address in listening(pid)]
        process.stdin.write(b"/exit\n")
        process.stdin.flush()
        assert process.wait(60) == 0
    assert len(addresses) >= 2
    assert set(addresses) <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def listening(pid: int) -> list[str]:
    """Addresses, in the form of /proc/net/tcp, on which a process listens."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(entry))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1].split(":")[0])
    return found


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "5",
}


def test_places_of_ranks() -> None:
    alone = plan_launch(World(), {})
    assert (alone.rank, alone.size, alone.starts_ranks) == (0, 1, False)
    own = plan_launch(World(size=4, tp=4), {})
    assert (own.rank, own.local_size, own.address, own.starts_ranks) == (0, 4, "127.0.0.1", True)
    launched = plan_launch(World(size=4, tp=4, nnodes=2), TORCHRUN)
    assert (launched.rank, launched.local_rank, launched.local_size, launched.address, launched.port) == (
        3,
        1,
        2,
        "h",
        5,
    )
    assert not launched.starts_ranks
    node = plan_launch(World(size=4, tp=4, nnodes=2), {}, node_rank=1, master_addr="h", master_port=7)
    assert (node.rank, node.local_rank, node.starts_ranks) == (2, 0, True)


@pytest.mark.parametrize(
    ("world", "environ", "words"),
    [
        (World(size=4, tp=4), TORCHRUN | {"WORLD_SIZE": "8"}, "8"),
        (World(size=4, tp=2), {}, "tensor-parallel"),
        (World(size=4, tp=4, nnodes=2), {}, "--node-rank"),
    ],
)
def test_launches_that_do_not_fit_are_refused(world: World, environ: dict[str, str], words: str) -> None:
    with pytest.raises(ArtifactError, match=words):
        plan_launch(world, environ)


def test_cpus_are_shared_by_the_ranks_of_a_host() -> None:
    cpus = len(os.sched_getaffinity(0))
    assert threads_per_rank(plan_launch(World(), {}), None) is None
    assert threads_per_rank(plan_launch(World(size=2, tp=2), {}), None) == max(1, cpus // 2)
    assert threads_per_rank(plan_launch(World(size=64, tp=64), {}), None) == 1
    assert threads_per_rank(plan_launch(World(), {}), 3) == 3
