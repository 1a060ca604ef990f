"""The two programs as a user starts them, in processes of their own, and what they leave in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MODULES = {"cann-export": "cann_export.cli", "cann-run": "cann_runtime.cli"}
SMALL_ASCEND = ("--target", "ascend910b", "--dtype", "bfloat16", "--decode-buckets", "1,2", "--prefill-buckets", "256")


@dataclass
class Done:
    """How a program ended."""

    code: int
    stdout: str
    stderr: str

    def refusal(self) -> str:
        """The one line of an error that is the user's: exit code 2, nothing on stdout, progress lines before it."""
        lines = self.stderr.splitlines()
        assert self.code == 2, self
        assert self.stdout == "", self
        assert lines, self
        assert lines[-1].startswith(("cann-export: error: ", "cann-run: error: ")), self
        assert all(line.endswith(" ...") or " graphs " in f" {line}" for line in lines[:-1]), self
        return lines[-1]


Program = Callable[..., Done]


def run(
    program: str,
    *args: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    prefix: Sequence[str] = (),
    umask: int = 0o022,
    python: str | Path = sys.executable,
) -> Done:
    """Run `cann-export` or `cann-run` in a process of its own; `prefix` is a command that runs it."""
    done = subprocess.run(
        [*prefix, str(python), "-m", MODULES[program], *map(str, args)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=600,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        umask=umask,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder with its content (None for a folder)."""
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in paths}
