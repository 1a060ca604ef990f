"""One artifact, several checkpoints, each with transformers' tokens; `inspect` and `why` on real artifacts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config, tiny_model

PROMPTS = [[5, 17, 300, 8, 42, 99, 7], [11], [3, 200, 60, 9, 9, 9, 410, 2, 33, 150, 77, 12, 500]]
NEW = 16


def greedy(seed: int) -> list[list[int]]:
    """transformers' greedy tokens for the checkpoint of that seed, in float64."""
    model = tiny_model(tiny_config("qwen2"), seed).double()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(NEW):
                ids = torch.cat((ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)), 1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, program: Any) -> Any:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"token_ids": prompt}) for prompt in PROMPTS))

    def ask(artifact: Path, *flags: str | Path) -> list[list[int]]:
        done = program(
            "cann-run", artifact, "--prompts", file, "--max-tokens", str(NEW), "--json", "--ignore-eos", *flags
        )
        assert (done.code, done.stderr) == (0, ""), done
        return [json.loads(line)["tokens"] for line in done.stdout.splitlines()]

    return ask


def test_packed_and_fine_tuned_weights_on_one_artifact(
    answers: Any, cpu_artifact: Path, tiny_checkpoint: Path, tuned_checkpoint: Path
) -> None:
    base, tuned = greedy(0), greedy(1)
    assert base != tuned
    assert answers(cpu_artifact) == base
    assert answers(cpu_artifact, "--checkpoint", tiny_checkpoint) == base
    assert answers(cpu_artifact, "--checkpoint", tuned_checkpoint) == tuned


def test_inspect_describes_every_file(program: Any, cpu_artifact: Path, ascend_artifact: Path) -> None:
    for artifact in (cpu_artifact, ascend_artifact):
        done = program("cann-export", "inspect", "--json", artifact)
        assert (done.code, done.stderr) == (0, "")
        found = json.loads(done.stdout)
        on_disk = {str(p.relative_to(artifact)): p.stat().st_size for p in artifact.rglob("*") if p.is_file()}
        assert {f["file"]: f["bytes"] for f in found["files"]} == {
            k: v for k, v in on_disk.items() if k != "manifest.sha256"
        }
        assert all(f["use"] for f in found["files"])
        assert found["world"] == {"size": 1, "tp": 1, "ep": 1, "nnodes": 1, "dp": 1}
        assert found["weights"]["source_elements"] == sum(
            p.numel() for p in tiny_model(tiny_config("qwen2")).parameters()
        )
        assert found["layers"]
    cpu, ascend = (program("cann-export", "inspect", path).stdout for path in (cpu_artifact, ascend_artifact))
    for text, words in (
        (cpu, ["mixed", "kernel library", "atb.linear 4", "packed weights"]),
        (ascend, ["decode", "MatMul 4"]),
    ):
        assert all(word in " ".join(text.split()) for word in words), text


def test_why_names_what_differs_and_only_that(
    program: Any, tmp_path: Path, cpu_artifact: Path, ascend_artifact: Path, tuned_checkpoint: Path
) -> None:
    flags = ("--target", "ascend910b", "--dtype", "bfloat16", "--decode-buckets", "1,2", "--prefill-buckets", "256")
    tuned = program("cann-export", tuned_checkpoint, *flags, "--max-num-blocks", "99", "-o", tmp_path / "tuned")
    assert tuned.code == 0, tuned.stderr
    done = program("cann-export", "why", ascend_artifact, tmp_path / "tuned")
    assert (done.code, done.stderr) == (0, "")
    assert "the graphs are the same" in done.stdout
    assert "max_num_blocks: null / 99" in done.stdout
    assert "not reproducible" not in done.stdout

    done = program("cann-export", "why", cpu_artifact, ascend_artifact)
    assert done.code == 1
    for word in ("target.kind", '"cpu" / "ascend"', "dtype", "kv_cache.block_size", "buckets"):
        assert word in done.stdout
    assert "architecture" not in done.stdout
    assert "weights" not in done.stdout
