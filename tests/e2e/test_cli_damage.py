"""What `cann-run` refuses before any compute: damaged or foreign artifacts, and checkpoints that do not fit.

Each case starts the program on a copy of a sound artifact and reads its one line.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hidden_packages import hide
from safetensors.torch import load_file, save_file
from tiny_models import save_checkpoint, tiny_config, tiny_model

Copy = Callable[[Path], Path]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """A copy of a folder, for a test to damage."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture
def refused(program: Any) -> Callable[..., str]:
    """The line that running an artifact is refused with."""

    def call(artifact: Path, *args: str | Path, env: dict[str, str] | None = None) -> str:
        line: str = program("cann-run", artifact, "--prompt", "Hi", *args, env=env).refusal()
        assert line.startswith("cann-run: error: ")
        return line

    return call


def flip(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def manifest_of(artifact: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((artifact / "manifest.json").read_text())
    return content


def write_manifest(artifact: Path, **changes: Any) -> None:
    """Edit the manifest as somebody who knows its format would: its recorded hash fits again."""
    text = json.dumps(manifest_of(artifact) | changes)
    (artifact / "manifest.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (artifact / "manifest.sha256").write_text(f"{digest}  manifest.json\n")


def test_the_sound_copy_runs(program: Any, copy: Copy, cpu_artifact: Path) -> None:
    done = program("cann-run", copy(cpu_artifact), "--prompt", "Hi", "--max-tokens", "2", "--token-ids", "--ignore-eos")
    assert done.code == 0, done.stderr
    assert len(done.stdout.split()) == 2
    assert done.stderr == ""


def test_a_flipped_bit_in_any_file_is_named(refused: Callable[..., str], copy: Copy, cpu_artifact: Path) -> None:
    artifact = copy(cpu_artifact)
    manifest = manifest_of(artifact)
    graph = manifest["graphs"][0]
    named = {
        "graph": f"objects/{graph['object']}",
        "signature": f"objects/{graph['signature']}",
        "kernels": f"objects/{manifest['libraries'][0]['sha256']}",
        "constants": f"objects/{manifest['constants']['sha256']}",
        "plan": "weight_plan.json",
        "weights": "weights/rank0.safetensors",
        "manifest": "manifest.json",
    }
    named |= {name: f"tokenizer/{name}" for name in manifest["tokenizer"]}
    files = {str(p.relative_to(artifact)) for p in artifact.rglob("*") if p.is_file()}
    assert files - {"manifest.sha256"} == set(named.values()), "a file of a kind that is not tested"
    for name in named.values():
        sound = (artifact / name).read_bytes()
        flip(artifact / name)
        line = refused(artifact)
        assert name in line
        assert "damaged" in line or name == "manifest.json", line
        (artifact / name).write_bytes(sound)


def test_missing_and_truncated_files(refused: Callable[..., str], copy: Copy, cpu_artifact: Path) -> None:
    artifact = copy(cpu_artifact)
    graph = artifact / "objects" / manifest_of(artifact)["graphs"][0]["object"]
    for file in (graph, artifact / "weights" / "rank0.safetensors", artifact / "tokenizer" / "tokenizer.json"):
        sound = file.read_bytes()
        file.write_bytes(sound[:-1])
        assert f"{file} is damaged: it has {len(sound) - 1} bytes" in refused(artifact)
        file.unlink()
        assert f"{file} is missing" in refused(artifact)
        file.write_bytes(sound)
    (artifact / "manifest.json").unlink()
    assert "manifest.json is missing" in refused(artifact)
    assert "is not a folder" in refused(graph) or "missing" in refused(graph)


def test_foreign_schema_versions(refused: Callable[..., str], copy: Copy, cpu_artifact: Path) -> None:
    artifact = copy(cpu_artifact)
    for version in (0, 2, "1", None):
        write_manifest(artifact, schema_version=version)
        line = refused(artifact)
        assert f"schema version {version}" in line
        assert "reads 1" in line


def test_an_edited_manifest_is_refused(refused: Callable[..., str], copy: Copy, cpu_artifact: Path) -> None:
    artifact = copy(cpu_artifact)
    write_manifest(artifact, surprise=1)
    assert "surprise" in refused(artifact)
    write_manifest(artifact, surprise=None, max_seq_len="long")
    assert "manifest.json" in refused(artifact)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["WORLD_SIZE is 2", "exported for 1 ranks"]),
        ({"RANK": "3", "WORLD_SIZE": "8"}, ["rank 3", "WORLD_SIZE is 8"]),
        ({"RANK": "1", "WORLD_SIZE": "1"}, ["RANK is 1"]),
        ({"RANK": "zero", "WORLD_SIZE": "1"}, ["RANK", "zero"]),
        ({"RANK": "0", "WORLD_SIZE": "many"}, ["WORLD_SIZE", "many"]),
    ],
    ids=str,
)
def test_a_wrong_world(refused: Callable[..., str], cpu_artifact: Path, env: dict[str, str], words: list[str]) -> None:
    line = refused(cpu_artifact, env=env)
    assert all(word in line for word in words), line


def test_a_host_without_the_instruction_set(refused: Callable[..., str], cpu_artifact: Path, tmp_path: Path) -> None:
    isa = manifest_of(cpu_artifact)["target"]["isa"]
    env = hide(tmp_path / "old", files={"/proc/cpuinfo": "processor : 0\nflags : fpu sse sse2 avx f16c bmi1 bmi2\n"})
    line = refused(cpu_artifact, env=env)
    assert isa in line
    assert "avx2" in line
    assert "lacks" in line


def test_an_unknown_instruction_set(refused: Callable[..., str], copy: Copy, cpu_artifact: Path) -> None:
    artifact = copy(cpu_artifact)
    write_manifest(artifact, target={"kind": "cpu", "isa": "avx9000", "family": None, "soc": None, "cann": None})
    line = refused(artifact)
    assert "avx9000" in line
    assert "avx2, avx512" in line


def test_another_torch(refused: Callable[..., str], copy: Copy, cpu_artifact: Path) -> None:
    artifact = copy(cpu_artifact)
    write_manifest(artifact, toolchain=manifest_of(artifact)["toolchain"] | {"torch": "2.9.1"})
    line = refused(artifact)
    assert "compiled against torch 2.9.1" in line
    assert torch.__version__ in line


def test_no_weights_anywhere(refused: Callable[..., str], copy: Copy, cpu_artifact: Path) -> None:
    artifact = copy(cpu_artifact)
    write_manifest(artifact, weights={})
    shutil.rmtree(artifact / "weights")
    line = refused(artifact)
    assert "--checkpoint" in line
    assert "--pack-weights" in line


def test_checkpoints_with_missing_or_truncated_shards(
    refused: Callable[..., str], copy: Copy, cpu_artifact: Path, tiny_checkpoint: Path
) -> None:
    checkpoint = copy(tiny_checkpoint)
    shard = sorted(checkpoint.glob("*.safetensors"))[1]
    sound = shard.read_bytes()
    shard.write_bytes(sound[:-100])
    line = refused(cpu_artifact, "--checkpoint", checkpoint)
    assert shard.name in line
    assert "truncated" in line
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in refused(cpu_artifact, "--checkpoint", checkpoint)
    shard.unlink()
    line = refused(cpu_artifact, "--checkpoint", checkpoint)
    assert f"lacks {shard.name}" in line


def test_a_checkpoint_that_does_not_fit(refused: Callable[..., str], cpu_artifact: Path, tmp_path: Path) -> None:
    config = tiny_config("qwen2", intermediate_size=512, vocab_size=600)
    wide = save_checkpoint(tiny_model(config), config, tmp_path / "wide")
    line = refused(cpu_artifact, "--checkpoint", wide)
    assert "gate_proj" in line
    assert "512" in line
    assert "384" in line

    config = tiny_config("qwen2", num_hidden_layers=2)
    short = save_checkpoint(tiny_model(config), config, tmp_path / "short")
    assert "layers.2." in refused(cpu_artifact, "--checkpoint", short)


def test_a_checkpoint_whose_dtype_cannot_be_cast(
    refused: Callable[..., str], copy: Copy, cpu_artifact: Path, tiny_checkpoint: Path
) -> None:
    checkpoint = copy(tiny_checkpoint)
    for shard in checkpoint.glob("*.safetensors"):
        tensors = {k: t.to(torch.int8) if "down_proj" in k else t for k, t in load_file(shard).items()}
        save_file(tensors, shard)
    line = refused(cpu_artifact, "--checkpoint", checkpoint)
    assert "down_proj" in line
    assert "int8" in line


def test_an_ascend_artifact_on_a_host_without_cann(program: Any, ascend_artifact: Path, tiny_checkpoint: Path) -> None:
    for flags in (["--compile-only"], ["--prompt", "Hi", "--checkpoint", tiny_checkpoint]):
        line = program("cann-run", ascend_artifact, *flags).refusal()
        assert "CANN and torch_npu" in line
    assert "CANN and torch_npu" in program("cann-export", "compile", ascend_artifact).refusal()


def test_inspect_and_why_check_what_they_read(program: Any, copy: Copy, ascend_artifact: Path) -> None:
    artifact = copy(ascend_artifact)
    file = artifact / "objects" / manifest_of(artifact)["graphs"][0]["object"]
    flip(file)
    for args in (["inspect", artifact], ["inspect", "--json", artifact], ["why", ascend_artifact, artifact]):
        line = program("cann-export", *args).refusal()
        assert f"{file} is damaged" in line
