"""Same input, same bytes, wherever and however often; and what the flagship export must give and may cost.

Both exports of a pair differ in all that must not matter: folders, TMPDIR, umask, hash seed, compiler cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from programs import tree

LAYERS, RANKS = 80, 8
KERNELS = {"MatMul": 4, "AddRmsNorm": 2, "HcomAllReduce": 2, "ApplyRotaryPosEmb": 1, "FusedInferAttentionScore": 1}
KERNELS |= {"ScatterPaKvCache": 1, "SwiGlu": 1, "SplitV": 1}
VIEWS = {"Reshape": 6}


def other_world(folder: Path, seed: str) -> dict[str, str]:
    """An environment with nothing in common with another one's."""
    for name in ("tmp", "inductor"):
        (folder / name).mkdir(parents=True)
    return {
        "TMPDIR": str(folder / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PYTHONHASHSEED": seed,
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def test_a_cpu_artifact_has_the_same_bytes_anywhere(
    program: Any, tmp_path: Path, cpu_artifact: Path, tiny_checkpoint: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    second = tmp_path / "a" / "deep" / "folder"
    args = [tiny_checkpoint, "--target", "cpu", "--pack-weights", "-o", second]
    done = program("cann-export", *args, env=other_world(tmp_path / "w", "1234"), cwd=tmp_path / "elsewhere")
    assert done.code == 0, done.stderr
    assert not [word for word in ("Warning", "%|", "kind0") if word in done.stderr], done.stderr
    first = tree(cpu_artifact)
    assert sorted(first) == sorted(tree(second))
    assert first == tree(second)
    modes = [{str(p.relative_to(a)): p.stat().st_mode for p in a.rglob("*")} for a in (cpu_artifact, second)]
    assert modes[0] == modes[1]
    assert list((tmp_path / "elsewhere").iterdir()) == []
    left = [path.name for path in (tmp_path / "w" / "tmp").iterdir() if not path.name.startswith("torchinductor_")]
    assert left == [], "temporary files are removed, but for torch's own cache"
    text = b"".join(content or b"" for content in first.values())
    for word in (str(tmp_path), str(cpu_artifact), str(Path.home()), "torchinductor"):
        assert word.encode() not in text


@pytest.mark.slow
def test_a_cpu_artifact_has_the_same_bytes_with_kernels_compiled_anew(
    program: Any, tmp_path: Path, cpu_artifact: Path, tiny_checkpoint: Path
) -> None:
    env = other_world(tmp_path / "w", "99") | {"CANN_EXPORT_CACHE": str(tmp_path / "cache")}
    args = [tiny_checkpoint, "--target", "cpu", "--pack-weights", "-o", tmp_path / "a"]
    done = program("cann-export", *args, env=env)
    assert done.code == 0, done.stderr
    assert tree(cpu_artifact) == tree(tmp_path / "a")


@dataclass
class Flagship:
    """One full-size export: where it is and what it took."""

    folder: Path
    cpu_seconds: float
    peak_bytes: int


@pytest.fixture(scope="module")
def flagship(tmp_path_factory: pytest.TempPathFactory) -> Flagship:
    """qwen2.5-72b on 8 ranks, with no checkpoint, measured by the system."""
    folder = tmp_path_factory.mktemp("flagship") / "qwen2.5-72b"
    command = [sys.executable, "-m", "cann_export.cli", "qwen2.5-72b", "--tp", str(RANKS), "-o", str(folder), "--quiet"]
    said = folder.with_name("said.txt")
    with said.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert (process.returncode, said.read_text()) == (0, ""), "--quiet is quiet"
    return Flagship(folder, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


@pytest.fixture(scope="module")
def manifest(flagship: Flagship) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((flagship.folder / "manifest.json").read_text())
    return content


def test_the_flagship_fits_a_small_machine(flagship: Flagship) -> None:
    print(f"qwen2.5-72b, tp 8: {flagship.cpu_seconds:.1f} s of CPU, {flagship.peak_bytes / 1e9:.2f} GB")
    assert flagship.cpu_seconds <= 60
    assert flagship.peak_bytes <= 1.5e9


def test_equal_ranks_share_their_graphs(flagship: Flagship, manifest: dict[str, Any]) -> None:
    graphs = manifest["graphs"]
    phases = [graph["phase"] for graph in graphs]
    assert phases.count("decode") >= 8
    assert phases.count("prefill") >= 3
    assert all(graph["ranks"] == list(range(RANKS)) for graph in graphs)
    assert len({graph["object"] for graph in graphs}) == len(graphs)
    used = {graph[key] for graph in graphs for key in ("object", "signature")} | {manifest["constants"]["sha256"]}
    assert {p.name for p in (flagship.folder / "objects").iterdir()} == used
    assert sum(p.stat().st_size for p in flagship.folder.rglob("*") if p.is_file()) < 50e6


def test_a_middle_layer_has_nineteen_nodes(manifest: dict[str, Any]) -> None:
    for graph in manifest["graphs"]:
        ((_, layer),) = graph["report"]["layers"].items()
        assert layer["histogram"] == KERNELS | VIEWS
        assert (layer["nodes"], layer["kernels"]) == (19, 13)


def test_the_stored_graph_says_the_same(flagship: Flagship, manifest: dict[str, Any]) -> None:
    """Counted on the file itself by TorchAir's own classes, in a process of its own (it patches torch)."""
    decode = next(g for g in manifest["graphs"] if g["phase"] == "decode")
    code = (
        "import collections, json, sys\n"
        "from pathlib import Path\n"
        "from cann_export.lower.ascend.toolchain import ensure_toolchain\n"
        "ensure_toolchain(lambda text: None)\n"
        "from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef\n"
        "model = ModelDef.FromString(Path(sys.argv[1]).read_bytes())\n"
        "print(json.dumps(collections.Counter(op.type for op in model.graph[0].op)))\n"
    )
    file = flagship.folder / "objects" / decode["object"]
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    # The first layer's norm has no addition before it, the last addition belongs to the final norm.
    assert counts["FusedInferAttentionScore"] == counts["ScatterPaKvCache"] == counts["SwiGlu"] == LAYERS
    assert counts["MatMul"] == 4 * LAYERS + 1
    assert counts["HcomAllReduce"] == 2 * LAYERS + 1
    assert counts["AddRmsNorm"] == 2 * LAYERS
    assert not {"TensorMove", "Transpose", "TransposeD", "Assign", "Identity"} & set(counts), counts
    kv = ["k_cache", "v_cache"]
    signature = json.loads((flagship.folder / "objects" / decode["signature"]).read_text())
    names = [ref["name"] for ref in signature["inputs"]]
    written = {names[index] for index in signature["in_place"]}
    assert written == {f"{kind}_{layer}" for kind in kv for layer in range(LAYERS)}
    shapes = {tuple(ref["shape"]) for ref in signature["inputs"] if ref["kind"] == "kv"}
    assert shapes == {(-1, 128, 1, 128)}


def test_a_second_flagship_is_the_same_to_the_byte(program: Any, flagship: Flagship, tmp_path: Path) -> None:
    second = tmp_path / "x" / "copy"
    args = ["qwen2.5-72b", "--tp", str(RANKS), "-o", second]
    done = program("cann-export", *args, env=other_world(tmp_path / "w", "7"), umask=0o077)
    assert done.code == 0, done.stderr
    assert tree(flagship.folder) == tree(second)
    assert "19 (13 kernels)" in " ".join(done.stderr.split()), "the report prints the histogram"
    assert "FutureWarning" not in done.stderr
