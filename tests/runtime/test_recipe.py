"""What a recipe file and its flags may say, what they become, and the one line that each mistake gets."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cann_runtime.errors import RecipeError
from cann_runtime.recipe import (
    Settings,
    add_recipe_flags,
    list_recipes,
    load_recipe,
    overrides_from,
    parse_recipe,
    resolve,
    with_model,
)

MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 2048}
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8}


def settings(data: dict[str, Any] | None = None, *flags: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_recipe_flags(parser)
    recipe = parse_recipe({"name": "tiny", "model": MODEL, **(data or {})}, "tiny.yaml")
    return resolve(recipe, overrides_from(parser.parse_args(list(flags))))


def problem(data: dict[str, Any] | None = None, *flags: str) -> str:
    with pytest.raises(RecipeError) as caught:
        settings(data, *flags)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_of_the_ascend_and_the_cpu_target() -> None:
    ascend = settings()
    assert (ascend.target, ascend.cann, ascend.dtype, ascend.kv_dtype) == (
        "ascend910b",
        "8.5.0",
        "bfloat16",
        "bfloat16",
    )
    assert (ascend.tp, ascend.ep, ascend.nnodes, ascend.world, ascend.block_size) == (1, 1, 1, 1, 128)
    assert (ascend.max_batch_size, ascend.max_seq_len, ascend.max_num_blocks) == (32, 2048, None)
    assert not ascend.pack_weights
    assert settings({"target": "cpu"}).block_size == 32


def test_default_buckets_reach_the_largest_batch_and_the_longest_sequence() -> None:
    assert settings().decode_buckets == (1, 2, 4, 8, 16, 24, 32)
    assert settings({"infer": {"max_batch_size": 20}}).decode_buckets == (1, 2, 4, 8, 16, 20)
    assert settings({"infer": {"max_batch_size": 1}}).decode_buckets == (1,)
    assert settings({"infer": {"max_batch_size": 300}}).decode_buckets[-2:] == (256, 300)
    assert settings({"model": {**MODEL, "max_position_embeddings": 32768}}).prefill_buckets == (256, 1024, 4096)
    assert settings({"infer": {"max_seq_len": 300}}).prefill_buckets == (256, 300)
    assert settings({"infer": {"max_seq_len": 64}}).prefill_buckets == (64,)


def test_buckets_of_the_recipe_are_sorted_and_end_at_the_largest_batch() -> None:
    asked = {"buckets": {"decode": [32, 1, 8], "prefill": [512, 128]}}
    assert settings(asked).decode_buckets == (1, 8, 32)
    assert settings(asked).prefill_buckets == (128, 512)
    assert settings(asked, "--max-batch-size", "16").decode_buckets == (1, 8, 16)
    assert settings(asked, "--decode-buckets", "4,2").decode_buckets == (2, 4, 32)


def test_flags_win_over_the_recipe() -> None:
    data = {"parallel": {"tp": 4}, "infer": {"max_seq_len": 512}, "kv_cache": {"max_seq_len": 512, "dtype": "auto"}}
    line = (
        "--tp 2 --max-seq-len 1024 --dtype float32 --kv-cache-dtype float32 --target Ascend910B3 --cann 8.3.RC1 "
        "--block-size 256 --max-num-blocks 99 --checkpoint org/name --pack-weights --isa avx2 "
        "--node-rank 0 --master-addr 10.0.0.1 --master-port 29500"
    )
    s = settings(data, *line.split())
    assert (s.tp, s.max_seq_len, s.dtype, s.kv_dtype, s.target) == (2, 1024, "float32", "float32", "Ascend910B3")
    assert (s.cann, s.block_size, s.max_num_blocks, s.checkpoint) == ("8.3.RC1", 256, 99, "org/name")
    assert s.pack_weights
    assert s.isa == "avx2"
    assert not settings({"pack_weights": True}, "--no-pack-weights").pack_weights


def test_world_is_nodes_times_ranks_per_node() -> None:
    moe = {"model": MOE}
    assert settings(moe, "--tp", "8", "--ep", "8").world == 8
    assert settings(moe, "--tp", "8", "--ep", "8", "--nnodes", "2").world == 16
    assert settings(moe, "--tp", "2", "--ep", "8").world == 8
    two_nodes = {**moe, "parallel": {"tp": 16, "ep": 16, "nnodes": 2, "ranks_per_node": 8}}
    assert settings(two_nodes).world == 16
    assert "parallel.tp 2 does not divide the world of 3 ranks" in problem(moe, "--tp", "2", "--ep", "3")
    assert problem({}, "--ep", "2") == "--ep: 2 is not allowed; this model has no experts, use 1"
    assert "--node-rank: 2 is not allowed; below --nnodes 2" in problem({}, "--nnodes", "2", "--node-rank", "2")


def test_two_keys_that_disagree_are_an_error() -> None:
    lengths = {"infer": {"max_seq_len": 512}, "kv_cache": {"max_seq_len": 256}}
    assert problem(lengths) == "tiny: infer.max_seq_len 512 and kv_cache.max_seq_len 256 disagree; give one of them"
    dtypes = {"infer": {"kv_cache_dtype": "auto"}, "kv_cache": {"dtype": "bfloat16"}}
    assert "infer.kv_cache_dtype auto and kv_cache.dtype bfloat16 disagree" in problem(dtypes)
    assert settings({"infer": {"max_seq_len": 512}, "kv_cache": {"max_seq_len": 512}}).max_seq_len == 512
    assert settings({"kv_cache": {"max_seq_len": 256}}).max_seq_len == 256


def test_kv_dtype_follows_the_model() -> None:
    message = problem({"kv_cache": {"dtype": "float16"}})
    assert message.startswith(
        "tiny: kv_cache.dtype: float16 KV does not fit a bfloat16 model; allowed: auto, bfloat16, int8"
    )
    assert (
        problem({}, "--kv-cache-dtype", "int8") == "--kv-cache-dtype: int8 is not supported yet; use auto or bfloat16"
    )
    assert settings({"dtype": "float16", "infer": {"kv_cache_dtype": "float16"}}).kv_dtype == "float16"


def test_sequences_longer_than_the_model_are_refused() -> None:
    assert "--max-seq-len: 2049 is not allowed; this model has 2048 positions" in problem({}, "--max-seq-len", "2049")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert settings({"model": {**MODEL, "rope_scaling": yarn}}, "--max-seq-len", "8192").max_seq_len == 8192


def test_block_sizes_that_a_target_forbids() -> None:
    message = problem({"kv_cache": {"block_size": 100}})
    assert "kv_cache.block_size: 100 is not allowed on ascend910b; allowed: 128, 256, 384, 512; use 128" in message
    assert settings({"kv_cache": {"block_size": 130}}, "--round-block-size").block_size == 256
    assert settings({"kv_cache": {"block_size": 4096}}, "--round-block-size").block_size == 512
    cpu = {"target": "cpu", "kv_cache": {"block_size": 40}}
    assert "allowed: a multiple of 16; use 48" in problem(cpu)
    assert settings(cpu, "--round-block-size").block_size == 48


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"paralel": {"tp": 2}}, "unknown key paralel, did you mean parallel?"),
        ({"infer": {"max_seqlen": 2}}, "unknown key infer.max_seqlen, did you mean max_seq_len?"),
        ({"tp": 2}, "unknown key tp, did you mean parallel.tp?"),
        (
            {"kv_cache": {"zzzz": 2}},
            "unknown key kv_cache.zzzz (known: dtype, block_size, max_num_blocks, max_seq_len)",
        ),
        ({"dtype": "bf16"}, "dtype: 'bf16' is not allowed; allowed: bfloat16, float16, float32"),
        ({"target": "gpu"}, "target: 'gpu' is not allowed; allowed: cpu, ascend910b"),
        ({"parallel": {"tp": 0}}, "parallel.tp: 0 is not allowed; input should be greater than or equal to 1"),
        ({"parallel": {"tp": "8"}}, "parallel.tp: '8' is not allowed; input should be a valid integer"),
        ({"parallel": {"tp": True}}, "parallel.tp: True is not allowed"),
        ({"buckets": {"decode": []}}, "buckets.decode: [] is not allowed"),
        ({"cpu": {"isa": "sse"}}, "cpu.isa: 'sse' is not allowed; allowed: native, avx2, avx512, avx512_bf16"),
        ({"cann": "new"}, "cann: 'new' is not allowed"),
        ({"model": None}, "model: this key is missing"),
        ({"model": {"architectures": ["X"]}}, "model.model_type is missing"),
    ],
)
def test_a_bad_key_or_value_names_the_file_the_key_and_what_is_allowed(data: dict[str, Any], words: str) -> None:
    message = problem(data)
    assert message.startswith("tiny.yaml: ")
    assert words in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", "many"], "--tp: 'many' is not allowed; a whole number"),
        (["--tp", "0"], "--tp: 0 is not allowed"),
        (["--dtype", "bf16"], "--dtype: 'bf16' is not allowed; allowed: bfloat16, float16, float32"),
        (["--decode-buckets", "1,,2"], "--decode-buckets: '' is not allowed; a whole number"),
        (["--master-port", "-1"], "--master-port: -1 is not allowed"),
    ],
)
def test_a_bad_flag_is_named(flags: list[str], words: str) -> None:
    assert problem({}, *flags).startswith(words)


def test_numbers_read_as_json_reads_them(tmp_path: Path) -> None:
    """YAML 1.1 makes 1e-6 a string, so a config.json pasted into a recipe would change its meaning."""
    config = '{"model_type": "llama", "architectures": ["L"], "eps": 1e-06, "theta": 1E6, "big": 10000, "x": -2.5e-3}'
    file = tmp_path / "pasted.yaml"
    file.write_text(f"name: pasted\nmodel: {config}\n")
    assert load_recipe(file).model == json.loads(config)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "twice.yaml").write_text("name: a\nname: b\n")
    (tmp_path / "broken.yaml").write_text("name: [a\n")
    (tmp_path / "list.yaml").write_text("- a\n")
    for name, words in (
        ("twice", "stands twice"),
        ("broken", "not valid YAML"),
        ("list", "a mapping of keys, not list"),
    ):
        with pytest.raises(RecipeError, match=f"{name}.yaml.*{words}") as caught:
            load_recipe(name, tmp_path)
        assert "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match="No such file"):
        load_recipe(tmp_path / "absent.yaml")
    with pytest.raises(RecipeError, match="twyce: no recipe of that name, did you mean twice"):
        load_recipe("twyce", tmp_path)


def test_a_checkpoint_folder_stands_in_for_a_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "My model"
    folder.mkdir()
    with pytest.raises(RecipeError, match="it has no config"):
        load_recipe(folder)
    (folder / "config.json").write_text(json.dumps({**MODEL, "torch_dtype": "float16"}))
    s = resolve(load_recipe(folder))
    assert (s.name, s.dtype, s.checkpoint) == ("My-model", "float16", str(folder))
    assert s.config == MODEL


def test_the_checkpoints_own_config_wins(tmp_path: Path) -> None:
    file = tmp_path / "base.yaml"
    file.write_text(yaml.safe_dump({"name": "base", "model": MODEL, "infer": {"max_seq_len": 1024}}))
    longer = with_model(load_recipe(file), {**MODEL, "max_position_embeddings": 512}, "ckpt/config.json")
    with pytest.raises(RecipeError, match="1024 is not allowed; this model has 512 positions"):
        resolve(longer)
    assert list_recipes(tmp_path) == ["base"]


def test_settings_are_plain_data() -> None:
    plain = settings().as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["config"] == MODEL


def test_reading_a_recipe_needs_no_torch() -> None:
    """The command line reads recipes before anything heavy, so that a mistake is told at once."""
    code = (
        "import sys, cann_runtime.recipe; assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
