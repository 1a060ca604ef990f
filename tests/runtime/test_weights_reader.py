"""Checkpoint folders in every form that the hub has, and every way in which they can be broken."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from artifact_samples import save_checkpoint
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cann_runtime.artifact.checkpoint_reader import CheckpointReader
from cann_runtime.errors import CheckpointError


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"layers.{i}.weight": torch.randn(4 + i, 6, generator=generator) for i in range(5)}


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("shards", "index"), [(1, False), (3, True), (3, False)])
def test_all_forms_give_the_same_tensors(tmp_path: Path, shards: int, index: bool) -> None:
    expected = tensors()
    reader = CheckpointReader(save_checkpoint(tmp_path, expected, shards, index))
    assert set(reader) == set(expected)
    assert len(reader) == len(expected)
    for name, tensor in expected.items():
        assert name in reader
        assert reader.info(name).shape == tuple(tensor.shape)
        assert reader.info(name).dtype == tensor.dtype
        assert torch.equal(reader.narrow(name), tensor)
        assert torch.equal(reader.narrow(name, 1, 2, 5), tensor[:, 2:5])
        reader.release(name)
        assert torch.equal(reader.narrow(name, 0, 1, 3), tensor[1:3])


def test_one_file_of_another_name(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "weights.safetensors")
    save_file({"lora": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    assert set(CheckpointReader(tmp_path)) == set(tensors())


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
)
def test_slices_equal_those_of_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    odd = {"a": torch.ones(3, dtype=torch.uint8), "empty": torch.empty(0, 4), "scalar": torch.tensor(2.5)}
    values = torch.randn(7, 5, 3, generator=generator).to(dtype)
    reader = CheckpointReader(save_checkpoint(tmp_path, odd | {"t": values}))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        slices = file.get_slice("t")
        for mine, theirs in (
            (reader.narrow("t", 0, 2, 6), slices[2:6]),
            (reader.narrow("t", 1, 1, 4), slices[:, 1:4]),
            (reader.narrow("t", 2, 0, 2), slices[:, :, 0:2]),
            (reader.narrow("t"), file.get_tensor("t")),
            (reader.narrow("scalar"), file.get_tensor("scalar")),
            (reader.narrow("empty"), file.get_tensor("empty")),
        ):
            assert mine.dtype == theirs.dtype
            assert mine.shape == theirs.shape
            as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (mine, theirs)]
            assert torch.equal(*as_bytes)


def test_a_view_that_is_written_to_leaves_the_file_alone(tmp_path: Path) -> None:
    reader = CheckpointReader(save_checkpoint(tmp_path, tensors()))
    reader.narrow("layers.0.weight").zero_()
    assert torch.equal(CheckpointReader(tmp_path).narrow("layers.0.weight"), tensors()["layers.0.weight"])


def test_files_of_more_than_4_gib(tmp_path: Path) -> None:
    rows, columns = 3 << 20, 1024  # 6 GiB of bfloat16, of which only a few pages exist
    size = rows * columns * 2
    header = {"big": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, size]}}
    head = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.seek(size - 2 * columns, 1)
        file.write(torch.full((columns,), 3.0, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    reader = CheckpointReader(tmp_path)
    assert torch.equal(reader.narrow("big", 0, rows - 2, rows)[:, :2].float(), torch.tensor([[0.0, 0], [3, 3]]))
    assert reader.narrow("big", 1, columns - 1, columns)[-1].item() == 3.0
    reader.release("big")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, tensors(), 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("cut", [1, 50, 10**6])
def test_a_truncated_shard_is_named(tmp_path: Path, cut: int) -> None:
    save_checkpoint(tmp_path, tensors(), 3)
    shard = tmp_path / "model-00003-of-00003.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[: max(0, len(content) - cut)])
    message = refusal(tmp_path)
    assert "truncated" in message
    assert shard.name in message


def test_every_truncation_is_found(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {"w": torch.ones(4)})
    content = (tmp_path / "model.safetensors").read_bytes()
    for length in range(len(content)):
        (tmp_path / "model.safetensors").write_bytes(content[:length])
        assert "model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git LFS pointer"),
        (b"PK\x03\x04" + b"\0" * 100, "not a safetensors file"),
        (struct.pack("<Q", 3) + b"[1]", "not a safetensors file"),
        (struct.pack("<Q", 9) + b'{"a": 17}', "not a safetensors file"),
        (struct.pack("<Q", 51) + b'{"a":{"dtype":"Q9","shape":[1],"data_offsets":[0,4]}}'[:51], "safetensors"),
        (struct.pack("<Q", 54) + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}' + b"\0" * 4, "does not fit"),
        (struct.pack("<Q", 53) + b'{"a":{"dtype":"Q9","shape":[1],"data_offsets":[0,4]}}' + b"\0" * 4, "dtype Q9"),
    ],
)
def test_what_is_no_safetensors_file_is_said(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    message = refusal(tmp_path)
    assert words in message
    assert str(tmp_path / "model.safetensors") in message


def test_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    assert "no *.safetensors" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    message = refusal(tmp_path)
    assert "pytorch_model.bin" in message
    assert "safetensors" in message
    assert "not a folder" in refusal(tmp_path / "nowhere")


def test_ambiguous_folders_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "y.safetensors")
    assert "no index" in refusal(tmp_path)
    for i in (1, 2):
        save_file({"a": torch.ones(1)}, tmp_path / f"model-0000{i}-of-00002.safetensors")
    assert "in both" in refusal(tmp_path)


def test_broken_indexes_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, tensors(), 2)
    index = tmp_path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    moved = document["weight_map"] | {"layers.0.weight": "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": moved}))
    assert "lacks the tensor layers.0.weight" in refusal(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    assert "not a file of the folder" in refusal(tmp_path)
    for broken in ("", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'):
        index.write_text(broken)
        assert "index" in refusal(tmp_path)
