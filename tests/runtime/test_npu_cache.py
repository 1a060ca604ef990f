"""GE's compile cache: what it is keyed by, where it is kept, and that an entry for anything else is never used."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from npu_fakes import GE_KEY, FakeHost, fake_host
from npu_toy import ToyGraph, convert, write_artifact

from cann_export.compile import compile_artifact
from cann_export.lower.ascend.toolchain import ensure_toolchain
from cann_runtime.artifact.store import Artifact
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.ge.cache import cache_key, graph_key, open_cache, share, user_cache
from cann_runtime.executor.npu import CompileResult, compile_graphs

OTHER_USER = 65534


@pytest.fixture(scope="module")
def graph() -> ToyGraph:
    ensure_toolchain(print)
    return convert(2)


@pytest.fixture
def artifact(graph: ToyGraph, tmp_path: Path) -> Artifact:
    return write_artifact(tmp_path / "toy", [graph])


@pytest.fixture
def host(graph: ToyGraph) -> Iterator[FakeHost]:
    with fake_host(FakeHost()) as pretended:
        yield pretended


@pytest.fixture
def read_only() -> Iterator[Path]:
    """An artifact-like folder that this process, for the length of a test, may read but not write."""
    folder = Path(tempfile.mkdtemp())
    shipped = folder / "cache" / "key" / "rank0of2"
    shipped.mkdir(parents=True)
    (shipped / "g1.idx").write_text("index")
    (shipped / "g1.om").write_text("model")
    (shipped / "g1.lock").write_text("")
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    as_root = os.geteuid() == 0  # root may write everywhere
    if as_root:
        os.seteuid(OTHER_USER)
    try:
        yield folder
    finally:
        if as_root:
            os.seteuid(0)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)
        shutil.rmtree(folder)


def _compile(artifact: Artifact, blocks: int = 5, rank: int = 0) -> CompileResult:
    return compile_graphs(artifact, rank=rank, blocks=blocks, device=rank, log=lambda line: None)[0]


def test_compiling_fills_the_cache_of_the_artifact(host: FakeHost, artifact: Artifact) -> None:
    result = _compile(artifact)
    folder = artifact.path / "cache" / "cann8.5.0-Ascend910B3-kv5" / "rank0of2"
    assert sorted(path.suffix for path in folder.iterdir()) == [".idx", ".om"]
    assert host.loaded[0]["options"]["ge.graph_compiler_cache_dir"] == str(folder)
    assert host.loaded[0]["options"]["ge.graph_key"] == result.key
    assert GE_KEY.match(result.key)
    Artifact.open(artifact.path)  # a filled cache is no damage


def test_a_second_start_compiles_nothing(host: FakeHost, artifact: Artifact) -> None:
    assert not _compile(artifact).cached
    assert _compile(artifact).cached
    assert host.compiled == 1


def test_a_moved_artifact_keeps_its_cache(host: FakeHost, artifact: Artifact, tmp_path: Path) -> None:
    _compile(artifact)
    moved = shutil.move(artifact.path, tmp_path / "elsewhere")
    assert _compile(Artifact.open(moved)).cached


@pytest.mark.parametrize("change", ["cann", "soc", "blocks", "rank"])
def test_a_cache_for_something_else_is_never_used(host: FakeHost, artifact: Artifact, change: str) -> None:
    _compile(artifact)
    if change == "cann":
        host.cann = "8.5.1"
    if change == "soc":
        host.soc = "Ascend910B2"
    assert not _compile(artifact, blocks=6 if change == "blocks" else 5, rank=int(change == "rank")).cached
    assert host.compiled == 2


def test_a_graph_that_changed_under_the_same_name_is_compiled_again(
    host: FakeHost, artifact: Artifact, graph: ToyGraph, tmp_path: Path
) -> None:
    before = _compile(artifact)
    options = graph.signature.options | {"ge.topoSortingMode": "0"}
    changed = ToyGraph(graph.bucket, graph.model, graph.signature.model_copy(update={"options": options}))
    exported_again = write_artifact(artifact.path, [changed])  # an export keeps what is in cache/
    after = _compile(exported_again)
    assert (after.cached, after.name) == (False, before.name)
    assert after.key != before.key


def test_deterministic_mode_is_part_of_the_key(host: FakeHost, artifact: Artifact) -> None:
    import torch

    before = _compile(artifact)
    torch.use_deterministic_algorithms(True)
    try:
        assert _compile(artifact).key != before.key
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_kept_where_communicators_have_new_names_at_every_start(host: FakeHost, artifact: Artifact) -> None:
    host.stable_names = False
    lines: list[str] = []
    with pytest.raises(ArtifactError, match="cannot use a compiled graph again"):
        compile_graphs(artifact, rank=0, blocks=5, device=0, log=lines.append)
    assert lines == ["this CANN names communicators anew at every start: compiled graphs are not kept"]
    assert not (artifact.path / "cache").exists()


def test_entries_are_readable_for_other_users_whatever_the_umask(host: FakeHost, artifact: Artifact) -> None:
    before = os.umask(0o077)
    try:
        _compile(artifact)
    finally:
        os.umask(before)
    modes = {
        path.name.split(".")[-1]: oct(path.stat().st_mode & 0o777) for path in (artifact.path / "cache").rglob("*")
    }
    assert {modes["idx"], modes["om"]} == {"0o644"}
    assert {oct(p.stat().st_mode & 0o777) for p in (artifact.path / "cache").rglob("*") if p.is_dir()} == {"0o755"}


def test_a_read_only_artifact_falls_back_to_the_users_cache_with_what_it_shipped(
    read_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(tempfile.mkdtemp())
    monkeypatch.setenv("CANN_RUN_CACHE", str(own))
    assert user_cache() == own
    lines: list[str] = []
    folder = open_cache(read_only, "../fingerprint", "key", 0, 2, lines.append)
    assert own in folder.parents
    assert lines == [f"{read_only} is read-only: compiled graphs are kept in {folder}"]
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"g1.idx": "index", "g1.om": "model"}
    (folder / "g1.om").write_text("recompiled")
    assert open_cache(read_only, "../fingerprint", "key", 0, 2, lines.append) == folder
    assert (folder / "g1.om").read_text() == "recompiled", "the user's own entry wins"
    assert list(open_cache(read_only, "../fingerprint", "other", 0, 2, lines.append).iterdir()) == []
    share(folder)
    shutil.rmtree(own)


def test_keys_tell_hosts_and_graphs_apart() -> None:
    keys = [
        cache_key("8.5.0", "Ascend910B3", 5),
        cache_key("8.5.1", "Ascend910B3", 5),
        cache_key("8.5.0", "Ascend910B2", 5),
        cache_key("8.5.0", "Ascend910B3", 6),
    ]
    assert keys[0] == "cann8.5.0-Ascend910B3-kv5"
    assert len(set(keys)) == 4
    assert cache_key("../8.5", "", 1) == "cann.._8.5-unknown-kv1", "one path component, whatever CANN answers"
    graphs = [graph_key(b"a", {"x": "1"}), graph_key(b"b", {"x": "1"}), graph_key(b"a", {"x": "2"})]
    assert len(set(graphs)) == 3
    assert all(GE_KEY.match(key) for key in graphs)
    assert graph_key(b"a", {"x": "1", "y": "2"}) == graph_key(b"a", {"y": "2", "x": "1"})


def test_cann_export_compile_uses_the_runtimes_own_compilation(
    host: FakeHost, graph: ToyGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchair.ge._ge_graph import GeGraph

    single = GeGraph(serialized_model_def=graph.model)
    for op in single.op:
        op.attr.pop("group", None)
    alone = ToyGraph(graph.bucket, single.model.SerializeToString(deterministic=True), graph.signature)
    from cann_runtime.artifact.manifest import World

    artifact = write_artifact(tmp_path / "alone", [alone], world=World())
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    lines: list[str] = []
    results = compile_artifact(artifact.path, blocks=12, log=lines.append)
    assert [result.name for result in results] == ["decode_t2_s2_r2_m2"]
    assert lines[0] == "toy: compiling for 12 KV blocks"
    assert lines[1].startswith("decode_t2_s2_r2_m2: compiled in ")
    assert (artifact.path / "cache" / "cann8.5.0-Ascend910B3-kv12" / "rank0of1").is_dir()
    assert not host.new_groups


def test_ranks_compile_together_each_into_its_own_folder(artifact: Artifact) -> None:
    code = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from npu_fakes import FakeHost, fake_host
        from cann_export.compile import main
        from cann_export.lower.ascend.toolchain import ensure_toolchain
        ensure_toolchain(print)
        with fake_host(FakeHost()):
            sys.exit(main([{str(artifact.path)!r}, "--blocks", "5"]))
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        assert "decode_t2_s2_r2_m2: compiled in" in output
    folder = artifact.path / "cache" / "cann8.5.0-Ascend910B3-kv5"
    entries = {path.name: sorted(entry.name for entry in path.iterdir()) for path in folder.iterdir()}
    assert sorted(entries) == ["rank0of2", "rank1of2"]
    # Ranks of one tensor-parallel group run the same bound graph.
    assert entries["rank0of2"] == entries["rank1of2"]
