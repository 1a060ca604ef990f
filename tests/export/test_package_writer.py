"""The artifact writer: atomic whatever happens, the same bytes for the same input, readable by everyone."""

from __future__ import annotations

import fcntl
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from artifact_samples import write_artifact

import cann_export.package as package
from cann_export.package import ArtifactWriter
from cann_runtime.artifact.store import Artifact
from cann_runtime.errors import ArtifactError


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def which(target: Path) -> str:
    """The text of the artifact at target, after every check; 'none' where there is nothing at all."""
    if not os.path.lexists(target):
        return "none"
    opened = Artifact.open(target, verify=True)
    for rank in range(2):
        opened.weights_path(rank)
    return str(opened.manifest.fingerprint_fields["text"])


def hidden(parent: Path) -> list[str]:
    return sorted(p.name for p in parent.iterdir() if p.name.startswith(".") and not p.name.endswith(".lock"))


# What changes the file system, by the name of its audit event; "open" stands before writes and fsyncs alike.
EVENTS = ("open", "os.rename", "os.mkdir", "os.chmod", "os.remove", "os.rmdir", "os.symlink", "ctypes.call_function")


def killed_export(target: Path, text: str, step: int) -> bool:
    """Export in a child that kills itself (SIGKILL) before its step-th file operation; False where it ended well."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event: str, args: object) -> None:
            nonlocal count
            if event in EVENTS:
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        try:
            sys.addaudithook(hook)
            write_artifact(target, text, weights=True)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@pytest.mark.parametrize("exchange", [True, False])
def test_killed_at_every_file_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:  # a file system that cannot exchange folders: the target is a link from the start
        monkeypatch.setattr(package, "_exchange", lambda a, b: False)
    target = tmp_path / "artifact"
    write_artifact(target, "old", weights=True)
    if not exchange:
        write_artifact(target, "old", weights=True)
        assert target.is_symlink()
    seen = []
    step = 0
    while True:
        step += 1
        if not killed_export(target, "new", step):
            break
        seen.append(which(target))
        if seen[-1] == "new":  # killed after the exchange: put the old one back, over what the killed export left
            write_artifact(target, "old", weights=True)
            assert hidden(tmp_path) == ([os.readlink(target)] if target.is_symlink() else [])
    assert which(target) == "new"
    assert len(seen) > 40
    assert set(seen) == {"old", "new"}
    assert seen == sorted(seen, reverse=True), "old until the exchange, new from then on"


def test_first_export_killed_at_every_file_operation(tmp_path: Path) -> None:
    target = tmp_path / "artifact"
    step = 0
    while True:
        step += 1
        killed = killed_export(target, "new", step)
        state = which(target)
        assert state in ("none", "new")
        if not killed:
            break
        if state == "new":
            package._remove(target)
    assert hidden(tmp_path) == []


def test_killed_at_random_moments(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from artifact_samples import write_artifact\n"
        "print('ready', flush=True)\n"
        "for i in range(10**9): write_artifact(Path(sys.argv[1]), ('old', 'new')[i % 2], weights=True)\n"
    )
    target = tmp_path / "artifact"
    write_artifact(target, "old", weights=True)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    chance = random.Random(0)
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", script, str(target)], env=env, stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            deadline = time.monotonic() + chance.uniform(0.05, 0.3)
            while time.monotonic() < deadline:  # a reader at work while the artifact is being exchanged
                assert Artifact.open(target).manifest.fingerprint_fields["text"] in ("old", "new")
        finally:
            child.kill()
            child.communicate()
        assert which(target) in ("old", "new")
    write_artifact(target, "new", weights=True)
    assert hidden(tmp_path) == []


def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "deep" / "b"
    second.parent.mkdir()
    write_artifact(first, weights=True)
    time.sleep(0.01)
    write_artifact(second, weights=True)
    assert content(first) == content(second)
    write_artifact(first, weights=True)
    assert content(first) == content(second)


def test_equal_objects_are_stored_once(tmp_path: Path) -> None:
    manifest = write_artifact(tmp_path / "a")
    assert len(manifest.graphs) == 2
    assert len({g.object for g in manifest.graphs}) == 1
    assert sorted(p.name for p in (tmp_path / "a" / "objects").iterdir()) == sorted(manifest.objects)


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        write_artifact(tmp_path / "a", weights=True)
    finally:
        os.umask(old)
    for path in [tmp_path / "a", *(tmp_path / "a").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_a_failed_export_leaves_the_old_artifact(tmp_path: Path) -> None:
    target = tmp_path / "a"
    write_artifact(target, "old", weights=True)

    def interrupted() -> None:
        with ArtifactWriter(target) as writer:
            writer.add_object(b"half an export")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert which(target) == "old"
    assert hidden(tmp_path) == []


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    target = tmp_path / "a"
    write_artifact(target, "old", weights=True)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))  # every file now ends at 64 KiB
    try:
        with pytest.raises(ArtifactError, match="cannot write") as caught, ArtifactWriter(target) as writer:
            writer.add_object(bytes(1 << 17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "\n" not in str(caught.value)
    assert which(target) == "old"
    assert hidden(tmp_path) == []


def test_a_second_export_waits_and_says_so(tmp_path: Path) -> None:
    target = tmp_path / "a"
    lines: list[str] = []
    fd = os.open(tmp_path / ".a.lock", os.O_RDONLY | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)

    def second() -> None:
        with ArtifactWriter(target, log=lines.append):
            lines.append("in")

    thread = threading.Thread(target=second)
    thread.start()
    deadline = time.monotonic() + 10
    while not lines and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lines == [f"another export is writing {target}: waiting for it to end"]
    os.close(fd)
    thread.join(10)
    assert lines[1:] == ["in"]


def test_only_artifacts_and_empty_folders_are_replaced(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    write_artifact(home)
    assert Artifact.open(home).manifest.fingerprint_fields["text"] == "one"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for target in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(ArtifactError, match="is no artifact"), ArtifactWriter(target):
            pass
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_link_of_the_user_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    write_artifact(tmp_path / "link", "one", weights=True)
    write_artifact(tmp_path / "link", "two", weights=True)
    assert os.readlink(tmp_path / "link") == str(tmp_path / "disk")
    assert which(tmp_path / "disk") == "two"


def test_a_read_only_artifact_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "a"
    write_artifact(target, "old", weights=True)
    for path in [*target.rglob("*"), target]:
        path.chmod(path.stat().st_mode & ~0o222)
    write_artifact(target, "new", weights=True)
    assert which(target) == "new"
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("exchange", [True, False])
def test_compiled_graphs_stay_only_with_the_same_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(package, "_exchange", lambda a, b: False)
    target = tmp_path / "a"
    write_artifact(target, "one")
    for text, stays in (("one", True), ("one", True), ("two", False), ("two", False)):
        (target / "cache").mkdir(exist_ok=stays) if text == "one" else None
        write_artifact(target, text)
        assert (target / "cache").exists() == stays


def test_a_reference_that_was_not_added_is_refused(tmp_path: Path) -> None:
    manifest = write_artifact(tmp_path / "a")
    with pytest.raises(ArtifactError, match="was not added"), ArtifactWriter(tmp_path / "b") as writer:
        writer.finish(manifest)
    assert not (tmp_path / "b").exists()
