"""What the programs print is theirs: no warnings, progress bars or log lines of the libraries they use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import MODULES, SMALL_ASCEND

GRAPHS = ("decode 1", "decode 2", "decode 32", "prefill 256")
NOISE = ("Warning", "%|", "it/s", "[transformers]", "Traceback", "kind0")


def test_an_export_prints_its_stages_and_its_report(program: Any, tmp_path: Path, tiny_checkpoint: Path) -> None:
    done = program("cann-export", tiny_checkpoint, *SMALL_ASCEND, "-o", tmp_path / "a")
    assert done.code == 0, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    table = next(i for i, line in enumerate(lines) if " -> " in line)
    stages = [line.removesuffix(" ...") for line in lines[:table]]
    assert stages[:2] == ["build", "toolchain"]
    assert stages[2:] == [f"graphs {i}/4: {name}" for i, name in enumerate(GRAPHS, 1)] + ["package"]
    report = " ".join(done.stderr.split())
    for word in ("ops per layer │ 18 (11 kernels): Reshape 7, MatMul 4", "4 graphs for 1 rank", "peak memory", "time"):
        assert word in report, report
    assert not [word for word in NOISE if word in done.stderr]


def test_help_names_every_command() -> None:
    done = subprocess.run([sys.executable, "-m", MODULES["cann-export"], "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for word in ("recipes", "inspect", "why", "compile", "toolchain install", "--tp", "--checkpoint"):
        assert word in done.stdout


@pytest.mark.slow
def test_converting_a_gguf_file_says_one_line(program: Any, tmp_path: Path) -> None:
    args = ["smollm2-135m", "--tp", "2", "-o", str(tmp_path / "a")]  # refused, after the conversion
    env = {"CANN_EXPORT_CACHE": str(tmp_path / "cache")}
    done = program("cann-export", *args, env=env)
    lines = done.stderr.splitlines()
    assert done.code == 2
    assert lines[0].startswith("converting ")
    assert "9 attention heads" in lines[1]
    assert len(lines) == 2
