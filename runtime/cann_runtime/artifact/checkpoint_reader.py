"""Lazy reading of a Hugging Face checkpoint folder: safetensors shards, by tensor name.

Opening reads only headers and sizes, so that a missing, truncated or foreign shard is found before any weight is read.
What the tensors are for (slices, casts, names of the graph's parameters) is in `weights.py`; ids and downloads are the
exporter's work.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cann_runtime.errors import CheckpointError

# Names of the safetensors format (https://github.com/huggingface/safetensors#format).
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}

_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_MAP_NORESERVE = 0x4000  # Linux; named in the mmap module only from Python 3.12 on
_SHARD = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.safetensors")
# Weights that lie beside a model's own: LoRA adapters, and Mistral's second copy under other names.
_NOT_THE_MODEL = ("adapter_", "consolidated")


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor as its header describes it; `start` and `stop` are byte offsets in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass
class SafetensorsFile:
    """One safetensors file: its header, and views of its tensors in the memory-mapped file."""

    path: Path
    tensors: dict[str, TensorInfo]
    _map: mmap.mmap | None = field(default=None, repr=False)

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Read and check the header: sizes, offsets and the file's length. Raises CheckpointError."""
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                prefix = file.read(8)
                if prefix.startswith(b"version "):
                    raise CheckpointError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` there")
                length = int.from_bytes(prefix, "little")
                if len(prefix) < 8 or length > min(_MAX_HEADER, size - 8):
                    raise CheckpointError(f"{path} is truncated or not a safetensors file ({size} bytes)")
                header: Any = json.loads(file.read(length))
            end = 0
            tensors: dict[str, TensorInfo] = {}
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                if entry["dtype"] not in _DTYPES:
                    raise CheckpointError(f"{path}: tensor {name} has the unknown dtype {entry['dtype']}")
                start, stop = (int(offset) for offset in entry["data_offsets"])
                info = TensorInfo(_DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + start, 8 + length + stop)
                if start < 0 or stop - start != math.prod(info.shape) * info.dtype.itemsize:
                    raise CheckpointError(f"{path}: the header's size of tensor {name} does not fit its shape")
                tensors[name] = info
                end = max(end, info.stop)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
        except (ValueError, AttributeError, KeyError, TypeError):
            raise CheckpointError(f"{path} is not a safetensors file: its header is not readable") from None
        if size < end:
            raise CheckpointError(f"{path} is truncated: it has {size} bytes, its header describes {end}")
        return cls(path, tensors)

    def view(self, name: str) -> Tensor:
        """The whole tensor as a view of the file: nothing is read until it is used, nothing is copied."""
        info = self.tensors[name]
        if info.start == info.stop:
            return torch.empty(info.shape, dtype=info.dtype)
        # torch.frombuffer takes no float8, and bool only by way of bytes.
        count = (info.stop - info.start) // info.dtype.itemsize
        if info.dtype.itemsize == 1:
            raw = torch.frombuffer(self._mapped(), dtype=torch.uint8, count=count, offset=info.start)
            return raw.view(info.dtype).view(info.shape)
        flat = torch.frombuffer(self._mapped(), dtype=info.dtype, count=count, offset=info.start)
        return flat.view(info.shape)

    def will_need(self, start: int, stop: int) -> None:
        """Ask the system to read that byte range of the file ahead."""
        self._advise(mmap.MADV_WILLNEED, start, stop)

    def release(self, name: str) -> None:
        """Give back the pages that reading a tensor made resident; they can be read again."""
        info = self.tensors[name]
        self._advise(mmap.MADV_DONTNEED, info.start, info.stop)

    def _advise(self, option: int, start: int, stop: int) -> None:
        if stop > start:
            page = start - start % mmap.PAGESIZE
            self._mapped().madvise(option, page, stop - page)

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # Private and writable: a stray in-place write then changes neither the file nor crashes. No reserve:
                # files larger than the memory can be mapped.
                flags, prot = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
                self._map = mmap.mmap(fd, 0, flags=flags, prot=prot)
            finally:
                os.close(fd)
        return self._map


class CheckpointReader:
    """The tensors of a checkpoint folder by name; several readers may read one folder at once.

    Accepted, in the order in which transformers looks: `model.safetensors`; `model.safetensors.index.json` with its
    shards; shards `*-00001-of-0000n.safetensors` without an index; one safetensors file of another name.
    """

    def __init__(self, path: Path | str) -> None:
        """Open the folder and check every shard's header. Raises CheckpointError."""
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"checkpoint {self.path} is not a folder")
        self._files: dict[str, SafetensorsFile] = {}
        index = self.path / "model.safetensors.index.json"
        if (self.path / "model.safetensors").exists():
            self._add(SafetensorsFile.open(self.path / "model.safetensors"))
        elif index.exists():
            self._add_indexed(index)
        else:
            for name in _shards_without_index(self.path):
                self._add(SafetensorsFile.open(self.path / name))

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor, from the header. Raises CheckpointError where there is none of that name."""
        return self._file(name).tensors[name]

    def narrow(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start .. stop of a tensor along dim, as a view of the mapped file: only what is used is read."""
        file = self._file(name)
        whole = file.view(name)
        if whole.dim() == 0:
            return whole
        stop = whole.shape[dim] if stop is None else stop
        if dim == 0 and whole.numel():
            row = whole[0].numel() * whole.element_size()
            base = file.tensors[name].start
            file.will_need(base + start * row, base + stop * row)
        return whole.narrow(dim, start, stop - start)

    def release(self, name: str) -> None:
        """Drop a tensor's pages from this process, once its views have been copied."""
        self._file(name).release(name)

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            raise CheckpointError(f"checkpoint {self.path} has no tensor {name}")
        return self._files[name]

    def _add(self, file: SafetensorsFile) -> None:
        for name in file.tensors:
            if name in self._files:
                raise CheckpointError(f"tensor {name} is in both {self._files[name].path} and {file.path}")
            self._files[name] = file

    def _add_indexed(self, index: Path) -> None:
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            names = sorted({str(name) for name in weight_map.values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{index} is not readable as an index with a weight_map") from None
        # Plain names only, so that an index can never reach a file outside its folder.
        if strange := [name for name in names if Path(name).name != name]:
            raise CheckpointError(f"{index} names {strange[0]}, which is not a file of the folder")
        if missing := [name for name in names if not (self.path / name).exists()]:
            raise CheckpointError(f"checkpoint {self.path} lacks {_few(missing)}, which its index names")
        files = {name: SafetensorsFile.open(self.path / name) for name in names}
        for tensor, name in weight_map.items():
            if tensor not in files[name].tensors:
                raise CheckpointError(f"{self.path / name} lacks the tensor {tensor}, which the index places there")
            self._files[tensor] = files[name]


def _shards_without_index(path: Path) -> list[str]:
    names = sorted(p.name for p in path.glob("*.safetensors") if not p.name.startswith(_NOT_THE_MODEL))
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    if shards:
        stem, count = shards[0]["stem"], shards[0]["count"]
        expected = [f"{stem}-{i:05d}-of-{count}.safetensors" for i in range(1, int(count) + 1)]
        if missing := [name for name in expected if name not in names]:
            raise CheckpointError(f"checkpoint {path} lacks {_few(missing)}")
        return expected
    if len(names) == 1:
        return names
    if names:
        raise CheckpointError(f"checkpoint {path} has {_few(names)} and no index that says which belong together")
    other = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf") for p in path.glob(pattern))
    if other:
        raise CheckpointError(f"checkpoint {path} holds {_few(other)} but no safetensors, the only format that is read")
    raise CheckpointError(f"checkpoint {path} holds no *.safetensors file")


def _few(names: list[str], limit: int = 5) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
