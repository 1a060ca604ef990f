"""Loads the compiled CPU kernel library (ops of the namespace `cann_cpu`, class `cann_cpu.GraphRunner`) and calls it.

The library is compiled at export and travels in the artifact. What its ops mean is in `atb.py` and `plain.cpp`; running
whole graphs is in `executor/cpu.py`.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cann_runtime.errors import ArtifactError

# A library cannot be unloaded, nor its ops registered twice: this mirrors the state of the process, nothing more.
_loaded: dict[str, str] = {}


def load_library(path: Path) -> None:
    """Load the kernel library, once per process.

    Graphs call it as C functions, so its symbols are made visible to what is loaded later. Raises ArtifactError where
    the file does not load, or where the process already holds another build of the kernels.
    """
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as e:
        raise ArtifactError(f"{path}: cannot read the CPU kernel library ({e.strerror})") from None
    if digest in _loaded:
        return
    if is_loaded():
        raise ArtifactError(
            f"{path}: this process already holds the CPU kernels of another build "
            f"({next(iter(_loaded.values()), 'unknown')}); load this artifact in a new process"
        )
    try:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as e:
        raise ArtifactError(
            f"{path}: the CPU kernel library does not load with torch {torch.__version__}: {e}"
        ) from None
    _loaded[digest] = str(path)


def is_loaded() -> bool:
    """Whether the kernels' ops exist in this process."""
    return hasattr(torch.ops.cann_cpu, "rope_paged_attention")


def loaded_isa() -> str:
    """The ISA that the loaded library was compiled for."""
    return str(torch.ops.cann_cpu.isa())


def pack_linear(w_NK: Tensor) -> Tensor:
    """w [N, K] in the layout that `linear` reads: [ceil(N/32), ceil(K/p), 32, p], zero-padded, p = 2 for bfloat16 and 1
    for float32; other dtypes keep [N, K] (the plain path)."""
    packed: Tensor = torch.ops.cann_cpu.pack_linear(w_NK)
    return packed


def linear(x: Tensor, w_packed: Tensor, bias_N: Tensor | None, n: int) -> Tensor:
    """x [.., K] times the packed weight [N = n, K] transposed, plus bias: [.., N] in x's dtype. A row's result does not
    depend on the other rows, their number, or the number of threads."""
    out: Tensor = torch.ops.cann_cpu.linear(x, w_packed, bias_N, n)
    return out


def kernel_calls() -> dict[str, int]:
    """Calls since the library was loaded: linear and attention, by kernel and by the plain path."""
    names = ("linear_kernel", "linear_plain", "attention_kernel", "attention_plain")
    return dict(zip(names, torch.ops.cann_cpu.kernel_calls(), strict=True))


def graph_runner(path: Path) -> Any:
    """A `cann_cpu.GraphRunner` for a compiled graph: constants(), bind(names, tensors), run(inputs)."""
    return torch.classes.cann_cpu.GraphRunner(str(path))
