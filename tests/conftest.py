"""Settings that every test needs before torch is imported, and the few fixtures that several folders share.

Converted checkpoints and the unpacked Ascend toolchain are kept in the user's cache ($CANN_EXPORT_CACHE, by default
~/.cache/cann-export): they are the same for all tests, and making them anew takes a minute.
"""

from __future__ import annotations

import os

# Set before the first `import torch`: no device package is to load itself into a test.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
# No test may wait for a hub that is not there; the code under test gets the same answer as without a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RunProgram = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """The user's cache folder, shared by all tests of all runs."""
    folder = Path(os.environ.get("CANN_EXPORT_CACHE") or Path.home() / ".cache" / "cann-export")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def run_program() -> RunProgram:
    """Run `cann-export` or `cann-run` as a user does, in a process of its own; text output, exit code unchecked."""

    def run(program: str, *args: str | Path, timeout: float = 600, **env: str) -> subprocess.CompletedProcess[str]:
        module = {"cann-export": "cann_export.cli", "cann-run": "cann_runtime.cli"}[program]
        return subprocess.run(
            [sys.executable, "-m", module, *map(str, args)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **env},
            check=False,
        )

    return run
