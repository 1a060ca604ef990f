"""An export that is killed, at whatever moment, leaves the old artifact whole or the new one; the next export works.

The kills here are of the whole program, at moments that its own progress lines mark. That every single file operation
of the writer may be the last one is held by tests/export/test_package_writer.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from programs import SMALL_ASCEND, tree

OLD, NEW = [1, 2, 32], [1, 32]  # decode buckets; the largest batch is always one
MOMENTS = (("graphs 1/3", 0.0), ("package", 0.0), ("package", 0.02))


def kill_export(command: list[str], line: str, delay: float) -> None:
    """Start an export and kill it `delay` seconds after the progress line that begins so."""
    export = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert export.stderr is not None
    seen = next((text for text in export.stderr if text.startswith(line)), None)
    assert seen is not None, f"the export ended before {line!r}"
    time.sleep(delay)
    os.killpg(export.pid, signal.SIGKILL)
    export.stderr.close()
    export.wait()


def test_killed_at_several_moments(program: Any, tmp_path: Path, tiny_checkpoint: Path, ascend_artifact: Path) -> None:
    target = tmp_path / "parent" / "tiny"
    flags = ["1" if flag == "1,2" else flag for flag in SMALL_ASCEND]
    args = [str(tiny_checkpoint), *flags, "-o", str(target)]
    old = tree(ascend_artifact)
    for line, delay in MOMENTS:
        if not target.exists():
            shutil.copytree(ascend_artifact, target)
        kill_export([sys.executable, "-m", "cann_export.cli", *args], line, delay)
        done = program("cann-export", "inspect", "--json", target)
        assert done.code == 0, done.stderr
        decode = [g["bucket"]["tokens"] for g in json.loads(done.stdout)["graphs"] if g["phase"] == "decode"]
        if decode == OLD:
            assert tree(target) == old
        else:
            assert (decode, line) == (NEW, "package")
            shutil.rmtree(target)
    done = program("cann-export", *args)
    assert done.code == 0, done.stderr
    assert os.listdir(target.parent) == ["tiny"], "what the killed ones left is gone"
    assert program("cann-export", "why", ascend_artifact, target).stdout.count("buckets: ") == 1
