"""The CPU executor: one rank's AOTInductor graphs with their weights and the KV cache of all layers.

It loads the artifact's kernel library and graphs (compiled code: their hashes are the store's business, done before),
binds the weights as the loader streams them, and runs steps. Nothing here imports inductor or needs a compiler.

Shape letters: T tokens, S sequences, R logits rows, M block-table columns, B blocks, P block_size, K kv heads,
D head_dim, L layers, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cann_runtime.artifact.manifest import Graph, KVCacheSpec, Signature, TensorRef
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.base import StepInputs
from cann_runtime.executor.isa import check_isa
from cann_runtime.ops import cpu as cpu_ops

_NAMES = ("input_ids", "position_ids", "slot_mapping", "block_table", "query_lens", "kv_lens", "logits_rows")
# The letters of each step input's dimensions, in graph order.
_LETTERS = ("T", "T", "T", "SM", "S", "S", "R")


@dataclass
class _Loaded:
    """A loaded graph: its runner (cann_cpu.GraphRunner) and its constants by name `p{index}`."""

    runner: Any
    params: dict[str, TensorRef]
    dtypes: list[torch.dtype]


class CpuExecutor:
    """Executor (see base.py) for target cpu.

    kernels: the artifact's kernel libraries; graphs: path and signature of each graph by the sha256 that the manifest's
    Graph names (`Graph.object`). Weights are bound by `load_weights` before the first step. Raises ArtifactError where
    the host's CPU lacks the ISA, or a library does not load or does not fit its signature.
    """

    def __init__(
        self,
        kernels: Sequence[Path],
        graphs: Mapping[str, tuple[Path, Signature]],
        kv_spec: KVCacheSpec,
        *,
        isa: str | None,
    ) -> None:
        check_isa(isa)
        if kv_spec.layout != "stacked":
            raise ArtifactError(
                f"manifest kv_cache.layout: {kv_spec.layout!r} is not allowed on target cpu, only 'stacked'"
            )
        self.kv_spec = kv_spec
        for path in kernels:
            cpu_ops.load_library(path)
        self._graphs = {sha: _load(path, signature) for sha, (path, signature) in graphs.items()}
        self._kv_cache: Tensor | None = None

    def param_names(self) -> list[str]:
        """The plan parameters that the graphs read, in graph order, each once."""
        sources = (_source(ref) for graph in self._graphs.values() for ref in graph.params.values())
        return list(dict.fromkeys(sources))

    def load_weights(self, params: Iterable[tuple[str, Tensor]]) -> None:
        """Bind every constant of every graph from (plan parameter, its tensor) pairs, in any order.

        A tensor is packed or copied as it arrives and not kept itself; all graphs share the results.
        Parameters that no graph reads are ignored. Raises ArtifactError where one is missing or has another shape.
        """
        wanted: dict[str, dict[bool, TensorRef]] = {}
        for graph in self._graphs.values():
            for ref in graph.params.values():
                wanted.setdefault(_source(ref), {})[ref.packed] = ref
        total = sum(_aligned(_nbytes(ref.shape, ref.dtype)) for forms in wanted.values() for ref in forms.values())
        memory, used = _huge_memory(total), 0
        values: dict[tuple[str, bool], Tensor] = {}
        for name, tensor in params:
            for packed, ref in wanted.get(name, {}).items():
                value = cpu_ops.pack_linear(tensor) if packed else tensor
                if list(value.shape) != ref.shape or _dtype_name(value) != ref.dtype:
                    got = f"{_dtype_name(value)} {list(value.shape)}"
                    raise ArtifactError(f"parameter {name}: the graph takes {ref.dtype} {ref.shape}, got {got}")
                size = _nbytes(ref.shape, ref.dtype)
                kept = memory[used : used + size].view(value.dtype).view(value.shape)
                values[name, packed] = kept.copy_(value)
                used += _aligned(size)
        missing = [name for name, forms in wanted.items() for packed in forms if (name, packed) not in values]
        if missing:
            raise ArtifactError(f"parameter {missing[0]}: no value was loaded ({len(missing)} missing)")
        for graph in self._graphs.values():
            bound = [values[_source(ref), ref.packed] for ref in graph.params.values()]
            graph.runner.bind(list(graph.params), bound)

    def allocate_kv(self, num_blocks: int) -> None:
        """Make the zeroed cache kv_cache [L, 2, B, K, P, D] with B = num_blocks."""
        s = self.kv_spec
        shape = (s.layers, 2, num_blocks, s.kv_heads, s.block_size, s.head_dim)
        memory = _huge_memory(_nbytes(shape, s.dtype))
        self._kv_cache = memory.view(getattr(torch, s.dtype)).view(shape)

    def execute(self, graph: Graph, step: StepInputs) -> Tensor:
        """Run one step: logits [R, V]. Raises ArtifactError where an input does not fit the graph."""
        loaded = self._graphs[graph.object]
        if self._kv_cache is None:
            raise ArtifactError("allocate_kv must be called before execute")
        inputs = step.tensors()
        _check(graph, loaded.dtypes, inputs)
        inputs.append(self._kv_cache)
        with torch.inference_mode():
            return loaded.runner.run(inputs)[0]  # type: ignore[no-any-return]


_HUGE_PAGE = 2 << 20


def _huge_memory(size: int) -> Tensor:
    """`size` zeroed bytes (uint8) on huge pages where the host grants them.

    Every decode step reads all weights; with small pages address translation alone costs about a fifth of its speed.
    """
    mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + size]


def _aligned(size: int) -> int:
    return (size + 63) // 64 * 64


def _nbytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * getattr(torch, dtype).itemsize  # type: ignore[no-any-return]


def _source(ref: TensorRef) -> str:
    return ref.source or ref.name


def _dtype_name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _load(path: Path, signature: Signature) -> _Loaded:
    """Load one graph and compare its constants with the signature's parameters."""
    params = {f"p{i}": ref for i, ref in enumerate(signature.inputs) if ref.kind == "param"}
    steps = [ref for ref in signature.inputs if ref.kind == "input"]
    if len(steps) != len(_LETTERS) or signature.inputs[-1].kind != "kv":
        raise ArtifactError(f"{path}: signature must end in {len(_LETTERS)} step inputs and the KV cache")
    try:
        runner = cpu_ops.graph_runner(path)
        names = set(runner.constants())
    except RuntimeError as e:
        raise ArtifactError(
            f"{path}: the graph does not load with torch {torch.__version__}: {str(e).splitlines()[0]}"
        ) from None
    if names != set(params):
        raise ArtifactError(f"{path}: the graph has {len(names)} constants, its signature {len(params)} parameters")
    return _Loaded(runner, params, [getattr(torch, ref.dtype) for ref in steps])


def _check(graph: Graph, dtypes: list[torch.dtype], inputs: list[Tensor]) -> None:
    """Compiled graphs trust their inputs: a wrong dtype or size would read foreign memory."""
    bucket = graph.bucket
    limits = {"T": bucket.tokens, "S": bucket.seqs, "R": bucket.rows, "M": bucket.max_blocks}
    sizes: dict[str, int] = {}
    for tensor, dtype, letters, name in zip(inputs, dtypes, _LETTERS, _NAMES):
        if tensor.dtype != dtype or tensor.dim() != len(letters) or not tensor.is_contiguous():
            raise ArtifactError(
                f"step input {name}: must be contiguous {dtype} [{', '.join(letters)}], "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
        for letter, size in zip(letters, tensor.shape):
            if sizes.setdefault(letter, size) != size:
                raise ArtifactError(
                    f"step input {name}: {letter} is {size}, and {sizes[letter]} in the inputs before it"
                )
    for letter, size in sizes.items():
        if not 1 <= size <= limits[letter]:
            raise ArtifactError(
                f"step input sizes: {letter} = {size} is not in 1 .. {limits[letter]} (the graph's bucket)"
            )
