"""Runs an artifact's GE graphs on an Ascend NPU, through TorchAir's own loader, and compiles them ahead of time.

One rank's weights and KV caches stay on its device; every bucket's graph reads the same ones. Binding and compiling is
in `ge/`, scheduling and padding in the engine. **None of this has run on an NPU**: it is tested against the Python of
torch_npu 2.13.0 with the device calls replaced, so GE's acceptance of the graphs and every number are still unproven.

Shape letters: T tokens, S sequences, R logits rows, M block-table columns, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from cann_runtime.artifact.manifest import Graph, TensorRef
from cann_runtime.artifact.store import Artifact
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.base import StepInputs
from cann_runtime.executor.ge import cache
from cann_runtime.executor.ge.bind import bound_shape
from cann_runtime.executor.ge.load import CompileResult, LoadedGraph, Log, RankGraphs
from cann_runtime.executor.ge.options import outputs_in_inputs

FRACTAL_NZ = 29  # aclFormat; torchair.ge._ge_graph.Format.FORMAT_FRACTAL_NZ

STEP_NAMES = ("input_ids", "position_ids", "slot_mapping", "block_table", "query_lens", "kv_lens", "logits_rows")
"""Names of the step inputs in signatures, in the order of StepInputs.tensors()."""


@dataclass(frozen=True)
class _StepArgument:
    """Where a step input goes: `position` in StepInputs.tensors() becomes `argument` of the graph."""

    argument: int
    position: int
    name: str
    shape: torch.Size
    dtype: torch.dtype
    on_host: bool


@dataclass
class _Runnable:
    """A compiled graph with its arguments: weights and caches are in place, step inputs are filled in at each step."""

    loaded: LoadedGraph
    arguments: list[Tensor]
    step: list[_StepArgument]
    written: list[Tensor | None]  # outputs that live in an input's memory; None: TorchAir allocates
    logits: int


class NpuExecutor:
    """One rank's graphs, weights and KV caches on one NPU (executor/base.py says what an executor does)."""

    def __init__(
        self,
        artifact: Artifact,
        params: Iterable[tuple[str, Tensor]],
        *,
        rank: int = 0,
        device: int | None = None,
        nz: bool = True,
        log: Log = print,
    ) -> None:
        """Check the host, then move the weights to the device as they stream in; other ranks are not waited for.

        params: (name, tensor on the CPU) of every parameter of this rank's graphs; others are ignored. device: index of
        the NPU, by default $LOCAL_RANK. nz: keep matrix weights as FRACTAL_NZ.

        Raises ArtifactError where host and artifact do not fit or a parameter is missing, before weights are read where
        it can be known.
        """
        self.manifest = artifact.manifest
        self.kv_spec = artifact.manifest.kv_cache
        index = local_device() if device is None else device
        self._device = torch.device("npu", index)
        self._graphs = RankGraphs.open(artifact, rank, index, nz=nz)
        self._log = log
        self._params = self._upload(params)
        self._kv: dict[str, Tensor] = {}
        self._runnable: dict[tuple[str, str], _Runnable] = {}

    def allocate_kv(self, num_blocks: int) -> None:
        """Make the KV caches, zeroed, then compile every graph for that many blocks, or take them from the cache.

        All ranks call it together: the communicators are made here.
        """
        if self._kv:
            raise ArtifactError("the KV caches are allocated already; their size is compiled into the graphs")
        self._graphs.connect()
        for loaded in self._graphs.graphs:
            for ref in loaded.signature.inputs:
                if ref.kind == "kv" and ref.name not in self._kv:
                    shape = bound_shape(ref, num_blocks)
                    self._kv[ref.name] = torch.zeros(shape, dtype=_dtype(ref), device=self._device)
        folder = self._graphs.cache_folder(num_blocks, self._log)
        for loaded in self._graphs.graphs:
            arguments = [self._argument(ref, host) for ref, host in zip(loaded.signature.inputs, loaded.on_host)]
            result = self._graphs.compile(loaded, arguments, num_blocks, folder)
            self._log(_line(result))
            self._runnable[(loaded.entry.object, loaded.entry.signature)] = _runnable(loaded, arguments)
        if folder is not None:
            cache.share(folder)

    def execute(self, graph: Graph, step: StepInputs) -> Tensor:
        """Run one step: logits [R, V] in the model's dtype, on the CPU."""
        try:
            runnable = self._runnable[(graph.object, graph.signature)]
        except KeyError:
            raise ArtifactError(f"the {graph.phase} graph of {graph.bucket} is not loaded on this rank") from None
        arguments = list(runnable.arguments)
        given = step.tensors()
        for want in runnable.step:
            tensor = given[want.position]
            if tensor.shape != want.shape or tensor.dtype != want.dtype:
                raise ArtifactError(
                    f"step input {want.name} is {tensor.dtype} {list(tensor.shape)}, "
                    f"the graph takes {want.dtype} {list(want.shape)}"
                )
            arguments[want.argument] = tensor if want.on_host else tensor.to(self._device, non_blocking=True)
        outputs = runnable.loaded.ge.run(arguments, runnable.written)
        logits: Tensor = outputs[runnable.logits].cpu()
        return logits

    def _upload(self, params: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        import torch_npu

        wanted: dict[str, TensorRef] = {}
        for loaded in self._graphs.graphs:
            wanted |= {ref.name: ref for ref in loaded.signature.inputs if ref.kind == "param"}
        if self._graphs.nz:
            # Without it torch_npu answers a cast to an internal format with the plain one.
            torch_npu.npu.config.allow_internal_format = True
        uploaded: dict[str, Tensor] = {}
        for name, tensor in params:
            ref = wanted.get(name)
            if ref is None:
                continue
            if list(tensor.shape) != ref.shape or tensor.dtype != _dtype(ref):
                raise ArtifactError(
                    f"parameter {name} is {tensor.dtype} {list(tensor.shape)}, the graphs take {ref.dtype} {ref.shape}"
                )
            uploaded[name] = _place(tensor, self._device, nz=name in self._graphs.nz)
        missing = sorted(wanted.keys() - uploaded.keys())
        if missing:
            raise ArtifactError(f"{len(missing)} parameters of the graphs were not given: {', '.join(missing[:5])}")
        return uploaded

    def _argument(self, ref: TensorRef, on_host: bool) -> Tensor:
        if ref.kind == "input":
            return torch.zeros(ref.shape, dtype=_dtype(ref), device="cpu" if on_host else self._device)
        return self._kv[ref.name] if ref.kind == "kv" else self._params[ref.name]


def compile_graphs(
    artifact: Artifact, *, rank: int, blocks: int, device: int | None = None, nz: bool = True, log: Log = print
) -> list[CompileResult]:
    """Fill the cache with this rank's graphs, compiled for `blocks` KV blocks; no weights are needed.

    GE is told of weights and caches by shape and memory format alone: one tensor of each kind stands for all of them.
    On more than one rank all ranks call it together, since GE asks HCCL about the communicators that it compiles in.

    Raises ArtifactError where host and artifact do not fit.
    """
    index = local_device() if device is None else device
    graphs = RankGraphs.open(artifact, rank, index, nz=nz)
    graphs.connect()
    folder = graphs.cache_folder(blocks, log)
    if folder is None:
        raise ArtifactError("nothing to keep: this CANN cannot use a compiled graph again, see the line above")
    if graphs.nz:
        import torch_npu

        torch_npu.npu.config.allow_internal_format = True
    place = torch.device("npu", index)
    stand_ins: dict[tuple[tuple[int, ...], str, bool, bool], Tensor] = {}
    results = []
    for loaded in graphs.graphs:
        inputs = []
        for ref, on_host in zip(loaded.signature.inputs, loaded.on_host):
            shape, in_nz = bound_shape(ref, blocks), ref.name in graphs.nz
            kind = (tuple(shape), ref.dtype, in_nz, on_host)
            if kind not in stand_ins:
                target = torch.device("cpu") if on_host else place
                stand_ins[kind] = _place(torch.empty(shape, dtype=_dtype(ref), device=target), target, nz=in_nz)
            inputs.append(stand_ins[kind])
        results.append(graphs.compile(loaded, inputs, blocks, folder))
        log(_line(results[-1]))
    cache.share(folder)
    return results


def local_device() -> int:
    """Index of this process's NPU: $LOCAL_RANK as launchers set it, else 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _place(tensor: Tensor, device: torch.device, *, nz: bool) -> Tensor:
    import torch_npu

    placed = tensor.to(device)
    if not nz:
        return placed
    cast: Tensor = torch_npu.npu_format_cast(placed, FRACTAL_NZ)
    return cast


def _runnable(loaded: LoadedGraph, arguments: list[Tensor]) -> _Runnable:
    signature = loaded.signature
    step = [
        _StepArgument(i, STEP_NAMES.index(ref.name), ref.name, torch.Size(ref.shape), _dtype(ref), loaded.on_host[i])
        for i, ref in enumerate(signature.inputs)
        if ref.kind == "input"
    ]
    written: list[Tensor | None] = [None] * len(loaded.ge.attr["_output_dtypes"].list.i)
    for output, source in outputs_in_inputs(signature.options).items():
        written[output] = arguments[source]
    logits = [ref.name for ref in signature.outputs].index("logits")
    return _Runnable(loaded, arguments, step, written, logits)


def _dtype(ref: TensorRef) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, ref.dtype)
    return dtype


def _line(result: CompileResult) -> str:
    how = "from the cache" if result.cached else "compiled"
    return f"{result.name}: {how} in {result.seconds:.1f} s"
