"""cann-run as a user meets it: its modes on the toy model, compared with transformers, and its one-line errors."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_llama import ToyExecutor, hf_greedy, hf_model, prompts, write_toy

from cann_runtime import loader
from cann_runtime.artifact.store import Artifact
from cann_runtime.cli import main
from cann_runtime.terminal import read_prompts
from cann_runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_model()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy") / "artifact")


@pytest.fixture(scope="module")
def tokenizer(artifact: Path) -> Tokenizer:
    return Tokenizer(artifact / "tokenizer")


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """cann-run in this process, with the toy's executor in place of a compiled graph."""

    def load_rank(artifact: Artifact, checkpoint: Path | None, rank: int) -> ToyExecutor:
        return ToyExecutor(artifact.manifest, model.state_dict())

    def call(artifact: Path, *args: str, stdin: str = "") -> Done:
        monkeypatch.setattr(loader, "load_rank", load_rank)
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main([str(artifact), "--threads", "1", *args])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    threads = torch.get_num_threads()
    yield call
    torch.set_num_threads(threads)


def test_a_prompt_goes_through_the_chat_template(run: Run, model: Any, artifact: Path, tokenizer: Tokenizer) -> None:
    done = run(artifact, "--prompt", "What is it?", "--max-tokens", "12", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is it?"}])
    expected = hf_greedy(model, ids, 12, [2])
    assert result["tokens"] == expected
    assert result["text"] == tokenizer.decode(expected)
    assert result["prompt"] == "What is it?"
    assert result["prompt_tokens"] == len(ids)
    assert result["finish_reason"] == ("stop" if expected[-1] == 2 else "length")
    assert 0 < result["ttft"] <= result["seconds"]
    assert result["tokens_per_second"] > 0


def test_raw_streamed_text_equals_the_whole(run: Run, model: Any, artifact: Path, tokenizer: Tokenizer) -> None:
    done = run(artifact, "--prompt", "The capital", "--max-tokens", "30", "--stream", "--raw", "--ignore-eos")
    expected = tokenizer.decode(hf_greedy(model, tokenizer.encode("The capital"), 30, []))
    assert (done.stdout, done.stderr, done.returncode) == (expected + "\n", "", 0)


def test_prompts_of_a_file_run_as_one_batch_and_print_in_order(
    run: Run, model: Any, artifact: Path, tmp_path: Path
) -> None:
    asked = prompts(6, seed=5, longest=30)
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"token_ids": p}) for p in asked) + "\n\n")
    done = run(artifact, "--prompts", str(file), "--max-tokens", "9", "--json", "--stats")
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["index"] for r in results] == list(range(6))
    assert [r["tokens"] for r in results] == [hf_greedy(model, p, 9, [2]) for p in asked]
    assert done.stderr.startswith("6 requests, ")
    steps = int(done.stderr.split(" steps")[0].split()[-1])
    assert steps < 6 * 9, "the prompts shared their steps"


def test_a_chat_remembers_the_conversation(run: Run, model: Any, artifact: Path, tokenizer: Tokenizer) -> None:
    lines = ["Hi", "more", "/clear", "Hi", "x" * 200, "/exit", "unread"]
    done = run(artifact, "--chat", "--max-tokens", "8", stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    messages: list[dict[str, str]] = []
    expected = ""
    for line in ("Hi", "more"):
        messages.append({"role": "user", "content": line})
        answer = tokenizer.decode(hf_greedy(model, tokenizer.encode_chat(messages), 8, [2]))
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    assert done.stdout == expected + messages[1]["content"] + "\n"
    assert "max_seq_len" in done.stderr, "a message that is too long is refused, and the chat goes on"
    assert "Traceback" not in done.stderr


def test_a_checkpoint_brings_its_own_tokenizer_and_end_tokens(
    run: Run, model: Any, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    bare = write_toy(tmp_path / "bare", tokenizer=False)
    done = run(bare, "--prompt", "Hi")
    assert done.returncode == 2
    assert "tokenizer.json" in done.stderr
    assert "--checkpoint" in done.stderr
    assert len(done.stderr.splitlines()) == 1

    tuned = tmp_path / "tuned"
    write_toy(tmp_path / "other")
    (tmp_path / "other-tokenizer").rename(tuned)
    ids = tokenizer.encode("Hi")
    greedy = hf_greedy(model, ids, 8, [])
    (tuned / "generation_config.json").write_text(json.dumps({"eos_token_id": [greedy[3], 2]}))
    done = run(bare, "--prompt", "Hi", "--raw", "--checkpoint", str(tuned), "--token-ids")
    assert done.stdout.split() == list(map(str, greedy[: greedy.index(greedy[3]) + 1]))


def test_a_seed_repeats_a_sampled_text(run: Run, artifact: Path) -> None:
    args = ["--prompt", "Hi", "--temperature", "1", "--top-k", "50", "--top-p", "0.9", "--max-tokens", "16", "--seed"]
    first, again, other = (run(artifact, *args, seed).stdout for seed in ("1", "1", "2"))
    assert first == again != other


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1, captured.err
    return captured.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["--prompt", "--prompts", "--chat"]),
        (["--prompts", "absent.txt"], ["--prompts", "absent.txt"]),
        (["--prompt", "x", "--checkpoint", "absent"], ["--checkpoint", "absent"]),
        (["--prompt", "x", "--temperature", "-1"], ["temperature"]),
        (["--prompt", "x", "--top-p", "2"], ["top_p"]),
        (["--prompt", "x"], ["holds no weights", "--checkpoint"]),
        (["--prompt", "x", "--checkpoint", "."], ["safetensors"]),
    ],
    ids=lambda value: " ".join(value[:4]),
)
def test_errors_are_one_line_with_exit_code_2(
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(artifact), *args]) == 2
    line = one_line(capsys)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--prompt", "x", "--chat"], ["not allowed with"]),
        (["--prompt", "x", "--max-tokens", "0"], ["--max-tokens", "above 0"]),
        (["--prompt", "x", "--kv-memory", "lots"], ["--kv-memory", "4G"]),
        (["--promt", "x"], ["--promt"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_wrong_arguments_are_one_line_with_exit_code_2(
    artifact: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(artifact), *args])
    assert caught.value.code == 2
    line = one_line(capsys)
    for word in words:
        assert word in line


def test_a_folder_that_is_no_artifact_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--prompt", "x"]) == 2
    assert "manifest.json" in one_line(capsys)


def test_compiling_a_cpu_artifact_has_nothing_to_do(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(artifact), "--compile-only"]) == 0
    assert "nothing to do" in one_line(capsys)


def test_debug_shows_the_traceback(artifact: Path) -> None:
    command = [sys.executable, "-m", "cann_runtime.cli", str(artifact), "--prompt", "x", "--debug"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" in done.stderr
    assert "holds no weights" in done.stderr


def test_errors_in_arguments_do_not_wait_for_torch(artifact: Path) -> None:
    code = (
        "import sys; from cann_runtime.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules, 'imported'; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, str(artifact / "absent"), "--chat", "--checkpoint", "absent"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr


PROBE = """
import sys, torch
from pathlib import Path
from cann_runtime import cli, loader

class Constant:
    def allocate_kv(self, num_blocks): pass
    def execute(self, graph, step): return torch.ones(len(step.logits_rows_R), 304)

loader.load_rank = lambda artifact, checkpoint, rank: Constant()
code = cli.main([sys.argv[1], "--prompt", "Hi", "--max-tokens", "3", "--temperature", "1", "--top-p", "0.9"])
heavy = [m for m in ("transformers", "cann_export", "torch._inductor", "torch._dynamo") if m in sys.modules]
sys.exit(f"imported {heavy}" if heavy else code)
"""


def test_running_imports_nothing_heavy(artifact: Path) -> None:
    command = [sys.executable, "-c", PROBE, str(artifact)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("content", "line", "word"),
    [
        ('{"prompt": "a"}\n{"prompt": 5}', 2, "prompt"),
        ('{"prompt": "a"}\nhello', 2, "JSON"),
        ('{"text": "a"}', 1, "messages"),
        ('{"token_ids": [1, "a"]}', 1, "token_ids"),
        ('{"prompt": "a", "token_ids": [1]}', 1, "prompt"),
    ],
)
def test_a_bad_line_of_a_prompts_file_is_named(tmp_path: Path, content: str, line: int, word: str) -> None:
    from cann_runtime.errors import RequestError

    path = tmp_path / "p.txt"
    path.write_text(content)
    with pytest.raises(RequestError, match=rf"p\.txt:{line}.*{word}"):
        read_prompts(path)


def test_text_files_hold_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("first\n\n  second {with} spaces  \r\nthird")
    assert read_prompts(path) == ["first", "  second {with} spaces  ", "third"]


def test_kv_blocks_follow_the_recipe_the_flag_and_the_memory(artifact: Path) -> None:
    from cann_runtime.errors import ArtifactError
    from cann_runtime.loader import MEMORY_FRACTION, kv_blocks

    made = Artifact.open(artifact).manifest
    block = made.kv_cache.bytes_per_block()
    assert block == torch.empty(2, 2, 2, 16, 4).nbytes  # layers, k and v, kv heads, head_dim, block size
    assert kv_blocks(made, 1 << 40) == 8 + 8 * 128 // 4
    assert kv_blocks(made, 100 * block) == int(100 * MEMORY_FRACTION)
    assert kv_blocks(made, 1 << 40, 50 * block) == 50
    assert kv_blocks(made.model_copy(update={"max_num_blocks": 99}), 1 << 40) == 99
    with pytest.raises(ArtifactError, match="--kv-memory"):
        kv_blocks(made, 1 << 40, 8 * block)
