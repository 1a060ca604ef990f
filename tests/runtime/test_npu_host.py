"""Whether an artifact fits a host with an NPU, and what a user reads where it does not; communicators of a world."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from npu_fakes import FakeHost, fake_host
from npu_toy import BLOCK_SIZE, ToyGraph, write_artifact

from cann_export.compile import planned_blocks
from cann_export.lower.ascend.soc import FAMILIES
from cann_export.lower.ascend.toolchain import ensure_toolchain
from cann_runtime.artifact.manifest import Bucket, Signature, Target, World
from cann_runtime.artifact.store import Artifact
from cann_runtime.errors import ArtifactError, CannError
from cann_runtime.executor.ge.groups import bind_groups, group_ranks
from cann_runtime.executor.ge.host import Host, check_host, major_minor, read_host, soc_family
from cann_runtime.executor.npu import NpuExecutor, compile_graphs
from cann_runtime.loader import kv_budget

HOST = Host(soc="Ascend910B3", cann="8.5.0", torch_npu="2.13.0")
EMPTY = ToyGraph(
    bucket=Bucket(tokens=1, seqs=1, rows=1, max_blocks=1), model=b"graph", signature=Signature(inputs=[], outputs=[])
)


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return write_artifact(tmp_path / "toy", [EMPTY])


@pytest.fixture
def host() -> Iterator[FakeHost]:
    ensure_toolchain(print)
    with fake_host(FakeHost()) as pretended:
        yield pretended


def test_every_chip_that_the_exporter_knows_has_its_family() -> None:
    for family, socs in FAMILIES.items():
        assert {soc_family(soc) for soc in socs} == {family}
    assert soc_family("Ascend310P3") is None


@pytest.mark.parametrize("text", ["8.5.0", "8.5.RC1", "8.5.0.alpha001", "8.5"])
def test_versions_are_read_by_major_and_minor(text: str) -> None:
    assert major_minor(text) == (8, 5)
    assert major_minor("unknown") is None


@pytest.mark.parametrize(
    "host",
    [
        HOST,
        Host("Ascend910B1", "8.5.0", "2.13.0"),  # another chip of the family
        Host("Ascend910B3", "8.5.1", "2.13.0"),
        Host("Ascend910B3", "9.0.0", "2.13.0.post1"),
    ],
)
def test_hosts_that_fit(artifact: Artifact, host: Host) -> None:
    check_host(artifact.manifest, host)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (Host("Ascend910_9392", "8.5.0", "2.13.0"), r"this NPU is Ascend910_9392 \(ascend910_93\), .* for ascend910b"),
        (Host("Ascend310P3", "8.5.0", "2.13.0"), r"Ascend310P3 \(an unknown family\)"),
        (Host("Ascend910B3", "8.3.RC1", "2.13.0"), r"CANN 8\.3\.RC1 is installed, toy needs 8\.5 or newer"),
        (Host("Ascend910B3", "", "2.13.0"), r"CANN of unknown version is installed"),
        (Host("Ascend910B3", "8.5.0", "2.9.0"), r"torch_npu 2\.9\.0 is installed, toy was exported with 2\.13\.0"),
    ],
)
def test_hosts_that_do_not_fit_are_told_why_in_one_line(artifact: Artifact, host: Host, message: str) -> None:
    with pytest.raises(ArtifactError, match=message) as error:
        check_host(artifact.manifest, host)
    assert "\n" not in str(error.value)


def test_a_cpu_artifact_is_refused(artifact: Artifact) -> None:
    manifest = artifact.manifest.model_copy(update={"target": Target(kind="cpu", isa="avx2")})
    with pytest.raises(ArtifactError, match="exported for cpu"):
        check_host(manifest, HOST)


def test_the_host_is_asked_through_torch_npu(host: FakeHost) -> None:
    assert read_host(0) == Host(soc="Ascend910B3", cann="8.5.0", torch_npu="2.13.0")
    with pytest.raises(ArtifactError, match="NPU 8 is asked for, and torch_npu sees 8"):
        read_host(8)


def test_stub_libraries_are_not_taken_for_an_npu() -> None:
    ensure_toolchain(print)
    with pytest.raises(ArtifactError, match="torch_npu sees 0 on this host"):
        read_host(0)


def test_an_unfit_host_is_refused_before_a_weight_or_a_graph_is_read(host: FakeHost, artifact: Artifact) -> None:
    host.soc = "Ascend910_9392"

    def params() -> Iterator[tuple[str, object]]:
        raise AssertionError("weights are read")
        yield

    with pytest.raises(ArtifactError, match="this NPU is Ascend910_9392"):
        NpuExecutor(artifact, params(), rank=0, device=0)
    with pytest.raises(ArtifactError, match="this NPU is Ascend910_9392"):
        compile_graphs(artifact, rank=0, blocks=4, device=0)
    assert not host.engine_options
    assert not host.new_groups


def test_a_rank_without_graphs_is_refused(host: FakeHost, artifact: Artifact) -> None:
    with pytest.raises(ArtifactError, match="no graphs for rank 5 of 2"):
        compile_graphs(artifact, rank=5, blocks=4, device=0)


def test_every_rank_makes_every_group_in_the_same_order_with_names_that_last(host: FakeHost) -> None:
    world = World(size=8, tp=4, ep=8)
    assert group_ranks(world, "tp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    made = []
    for rank in range(8):
        host.new_groups.clear()
        binding = bind_groups(world, rank, {"ep", "tp"})
        made.append(list(host.new_groups))
        # tp and ep have communicators of their own: MoE dispatch shares its with nothing.
        assert binding.communicators == {"tp": f"cann_tp_{rank // 4 * 4}", "ep": "cann_ep_0"}
        assert binding.ep_rank == rank
    assert made == [[[0, 1, 2, 3], [4, 5, 6, 7], list(range(8))]] * 8


def test_a_cann_that_cannot_name_communicators_gives_its_own_names(host: FakeHost) -> None:
    host.stable_names = False
    assert bind_groups(World(size=2, tp=2), 0, {"tp"}).communicators == {"tp": "random_1"}


def test_ranks_that_are_not_connected_are_refused() -> None:
    assert bind_groups(World(), 0, set()).communicators == {}
    with pytest.raises(CannError, match="communicate over tp: start 2 ranks together"):
        bind_groups(World(size=2, tp=2), 0, {"tp"})


def test_kv_size_to_compile_for_is_what_cann_run_takes(host: FakeHost, artifact: Artifact, tmp_path: Path) -> None:
    full_batch = artifact.manifest.max_batch_size * artifact.manifest.max_seq_len // BLOCK_SIZE
    scratch = artifact.manifest.kv_cache.scratch_blocks
    assert planned_blocks(artifact, None, 2) == kv_budget(artifact, 2, None) == scratch + full_batch
    host.memory = 10 * artifact.manifest.kv_cache.bytes_per_block()
    assert planned_blocks(artifact, None, 2) == kv_budget(artifact, 2, None) == 4
    assert planned_blocks(artifact, 100, 2) == 100
    assert planned_blocks(write_artifact(tmp_path / "sized", [EMPTY], max_num_blocks=77), None, 2) == 77
    with pytest.raises(ArtifactError, match="--blocks 1: 1 of them is taken by padding rows; give at least 2"):
        planned_blocks(artifact, 1, 2)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)


def test_without_cann_compile_ends_with_one_line_and_code_2(artifact: Artifact) -> None:
    no_npu = "import sys; sys.modules['torch_npu'] = None; from cann_export.compile import main; sys.exit(main())"
    done = _run("-c", no_npu, str(artifact.path))
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "an Ascend artifact runs on a host with CANN and torch_npu, and this host has none" in lines[0]
    assert not (artifact.path / "cache").exists()


def test_ctrl_c_stays_what_it_was_when_torchair_is_imported() -> None:
    code = """
        import signal, sys
        from cann_export.lower.ascend import toolchain
        from cann_runtime.executor.ge import host
        kept = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        # The toolchain's stubs, without its import of TorchAir, which is what is under test.
        folder = toolchain.install(None, print)
        for library in sorted((folder / "stubs").iterdir()):
            toolchain.ctypes.CDLL(str(library), toolchain.ctypes.RTLD_GLOBAL)
        sys.path.insert(0, str(folder / "site"))
        try:
            host.read_host(0)
        except Exception as error:
            print(error)
        assert "torchair.core._backend" in sys.modules
        print((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == kept)
    """
    done = _run("-c", textwrap.dedent(code))
    assert done.stdout.splitlines()[-2:] == ["NPU 0 is asked for, and torch_npu sees 0 on this host", "True"], done


def test_the_executor_module_imports_neither_torch_npu_nor_the_exporter() -> None:
    code = "import sys, cann_runtime.executor.npu; print([n for n in ('torch_npu', 'cann_export') if n in sys.modules])"
    done = _run("-c", code)
    assert done.stdout.strip() == "[]", done.stderr
