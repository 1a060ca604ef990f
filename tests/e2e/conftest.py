"""Tiny checkpoints and their artifacts, for all end-to-end tests.

One CPU artifact costs half a minute of compiling, so a session makes one, under a umask that lets nobody else read.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import SMALL_ASCEND, Program, run
from tiny_models import save_checkpoint, tiny_config, tiny_model
from toy_llama import write_tokenizer


@pytest.fixture(scope="session")
def program() -> Program:
    """The function `run`."""
    return run


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded Qwen2 checkpoint with a tokenizer."""
    return _checkpoint(tmp_path_factory.mktemp("base"), seed=0)


@pytest.fixture(scope="session")
def tuned_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights, in other shards."""
    return _checkpoint(tmp_path_factory.mktemp("tuned"), seed=1, shard_size="3MB")


def _checkpoint(folder: Path, seed: int, shard_size: str = "1MB") -> Path:
    config = tiny_config("qwen2")
    with torch.no_grad():
        save_checkpoint(tiny_model(config, seed), config, folder / "tiny", shard_size)
    write_tokenizer(folder / "tiny")
    return folder / "tiny"


@pytest.fixture(scope="session")
def cpu_artifact(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """A CPU artifact with packed weights; tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("cpu") / "tiny"
    done = run("cann-export", tiny_checkpoint, "--target", "cpu", "--pack-weights", "-o", folder, umask=0o077)
    assert done.code == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def ascend_artifact(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    """An Ascend artifact without weights."""
    folder = tmp_path_factory.mktemp("ascend") / "tiny"
    done = run("cann-export", tiny_checkpoint, *SMALL_ASCEND, "-o", folder)
    assert done.code == 0, done.stderr
    return folder
