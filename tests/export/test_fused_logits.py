"""Logits of sharded and fused graphs against transformers in float64, over real ranks, and their cache behaviour."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import graph_runner
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_checkpoint, tiny_config, tiny_model

# Three sequences: whole prompts, chunks, then decodes of all three; then a chunk beside decodes.
SEQUENCES = [[5, 17, 300, 8, 42, 99, 7, 250, 31, 77, 123, 400], [11, 3, 200, 60, 19, 2, 1, 444, 18], [250] * 21]
CHUNKS = [[5, 0, 3], [4, 6, 16], [1, 1, 1], [2, 2, 1]]

CASES: dict[str, dict[str, Any]] = {
    "qwen2-untied": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-one-kv-head": {"model_type": "qwen2", "num_key_value_heads": 1, "vocab_size": 451},
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral"},
    "qwen3": {"model_type": "qwen3"},
}


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _reference(model: Any) -> list[torch.Tensor]:
    """float64 logits of transformers, rows in the order of the steps."""
    # The tables of cos and sin stay transformers' own float32 ones; the rest is float64.
    double = model.double()
    full = [double(input_ids=torch.tensor([s])).logits[0] for s in SEQUENCES]
    done = [0, 0, 0]
    rows = []
    for sizes in CHUNKS:
        step = []
        for s, size in enumerate(sizes):
            step.append(full[s][done[s] : done[s] + size])
            done[s] += size
        rows.append(torch.cat(step))
    return rows


def _logits(config: dict[str, Any], checkpoint: Path, tp: int, folder: Path) -> list[list[torch.Tensor]]:
    """Logits per rank and step."""
    if tp == 1:
        graph = graph_runner.rank_graph(config, checkpoint, 1, 0, "float32")
        with torch.no_grad():
            return [[graph.run(step) for step in graph_runner.steps_for(SEQUENCES, CHUNKS)]]
    job = folder / "job.json"
    out = folder / f"out{tp}"
    job.write_text(
        json.dumps(
            {
                "config": config,
                "checkpoint": str(checkpoint),
                "dtype": "float32",
                "sequences": SEQUENCES,
                "chunks": CHUNKS,
                "out": str(out),
            }
        )
    )
    env = {**os.environ, "WORLD_SIZE": str(tp), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    command = [sys.executable, graph_runner.__file__, str(job)]
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(r)}) for r in range(tp)]
    assert [r.wait(timeout=300) for r in ranks] == [0] * tp
    files = [load_file(f"{out}.{r}") for r in range(tp)]
    return [[f[str(i)] for i in range(len(CHUNKS))] for f in files]


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("qwen2-untied", 1),
        ("qwen2-untied", 2),
        ("qwen2-tied", 1),
        ("qwen2-tied", 4),
        ("qwen2-one-kv-head", 4),
        ("llama", 1),
        ("mistral", 1),
        ("qwen3", 1),
        ("qwen3", 2),
    ],
)
def test_logits_equal_transformers(name: str, tp: int, tmp_path: Path) -> None:
    config = tiny_config(**CASES[name])
    model = tiny_model(config)
    checkpoint = save_checkpoint(model, config, tmp_path / "checkpoint")
    reference = _reference(model)
    peak = max(float(r.abs().max()) for r in reference)
    assert peak >= 3, "the model must be sharp enough for an error to show"
    for rank in _logits(config, checkpoint, tp, tmp_path):
        for got, want in zip(rank, reference, strict=True):
            error = (got[:, : config["vocab_size"]].double() - want).abs().max()
            assert float(error) <= 2e-5 * peak
            assert torch.count_nonzero(got[:, config["vocab_size"] :]) == 0, "padding columns hold no logits"
