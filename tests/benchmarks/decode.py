"""Decode of smollm2-135m in bfloat16, one sequence, 128 new tokens: `cann-run` against llama.cpp's BF16, alternating.

Ours is the whole program's own figure (scheduler, sampler and detokenizer included), from its second token on; the
peer's is llama-bench's, its forward pass alone. The ratio is taken in each pair of runs; the median is quoted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import LlamaCpp

TOKENS, PAIRS = 128, 5
TARGET = 0.6


def ours(artifact: Path, threads: int) -> dict[str, Any]:
    """One run of cann-run: its JSON result."""
    command = [sys.executable, "-m", "cann_runtime.cli", str(artifact), "--prompt", "Tell me about the sea.", "--json"]
    flags = ["--max-tokens", str(TOKENS), "--ignore-eos", "--threads", str(threads), "--kv-memory", "512M"]
    done = subprocess.run([*command, *flags], check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def run(artifact: Path, gguf: Path) -> dict[str, Any]:
    """All pairs; prints a line for each and gives the record."""
    peer = LlamaCpp()
    model = peer.model(gguf, "BF16")
    threads = os.cpu_count() or 1
    ours(artifact, threads)
    peer.decode(model, 16, threads)
    pairs = []
    for i in range(PAIRS):
        a, b = ours(artifact, threads)["tokens_per_second"], peer.decode(model, TOKENS, threads)
        pairs.append({"ours": a, "llama.cpp": b, "ratio": a / b})
        print(f"  pair {i + 1}: cann-run {a:6.1f} tokens/s, llama.cpp {b:6.1f} tokens/s, ratio {a / b:.2f}")
    ratios = [p["ratio"] for p in pairs]
    print(
        f"decode, 1 sequence, bf16: ratio {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})"
    )
    return {
        "benchmark": "decode-1-bf16",
        "pairs": pairs,
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "target": TARGET,
        "threads": threads,
        "llama.cpp": peer.version,
        "model_file": model.name,
    }
