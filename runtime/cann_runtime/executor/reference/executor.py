"""Runs an artifact's GE graphs on the CPU as one rank's executor: to prove the graphs, not to be fast.

The same engine, KV manager and weight loader drive it as any executor; graphs are interpreted by `program.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

import torch
from torch import Tensor

from cann_runtime.artifact.manifest import Graph, Signature, TensorRef
from cann_runtime.artifact.store import Artifact
from cann_runtime.artifact.weights import rope_table
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.base import StepInputs
from cann_runtime.executor.reference.bind import bind_rank
from cann_runtime.executor.reference.comm import Alone, Communicator, GlooRank
from cann_runtime.executor.reference.graph import parse_model
from cann_runtime.executor.reference.precision import Precision
from cann_runtime.executor.reference.program import Observer, Program

_STEP_NAMES = tuple(field.name.rpartition("_")[0] for field in fields(StepInputs))
"""Names of the step inputs in signatures, in the order of StepInputs.tensors()."""

Programs = dict[tuple[str, str, int], Program]
"""Executable graphs by object, signature and ep rank."""


class ReferenceExecutor:
    """One rank's GE graphs, weights and KV caches on the CPU (executor/base.py says what an executor does).

    `observe`, where set, is called after every op of a step with the op and its outputs.
    """

    def __init__(
        self,
        artifact: Artifact,
        params: Iterable[tuple[str, Tensor]],
        *,
        rank: int = 0,
        precision: str = "exact",
        comm: Communicator | None = None,
        programs: Programs | None = None,
    ) -> None:
        """params: (name, tensor) of every parameter of this rank's graphs, in the plan's dtypes; others are ignored.

        precision: one of precision.MODES. comm: how this rank meets the others; by default alone or over gloo, as the
        world has it. programs: where to look for and keep executable graphs; ranks in one process may share it. Raises
        ArtifactError where the artifact has no GE graphs, or a parameter is missing or does not fit.
        """
        manifest = artifact.manifest
        if manifest.target.kind != "ascend":
            raise ArtifactError(
                f"{artifact.path} is for target {manifest.target.kind}: only Ascend graphs have a reference"
            )
        self.kv_spec = manifest.kv_cache
        self.precision = Precision.of(precision, manifest.target.family)
        self.observe: Observer | None = None
        self.kv: dict[str, Tensor] = {}
        self._artifact = artifact
        self._ep_rank = rank % manifest.world.ep
        self._comm = comm or (Alone() if manifest.world.size == 1 else GlooRank(manifest.world))
        mine = [graph for graph in manifest.graphs if rank in graph.ranks]
        if not mine:
            raise ArtifactError(f"{artifact.path} has no graphs for rank {rank} of {manifest.world.size}")
        self._signatures = {graph.signature: artifact.signature(graph.signature) for graph in mine}
        self._programs: Programs = {} if programs is None else programs
        self._params = self._load(params)

    def allocate_kv(self, num_blocks: int) -> None:
        """Make the KV caches, zeroed."""
        for signature in self._signatures.values():
            for ref in signature.inputs:
                if ref.kind == "kv" and ref.name not in self.kv:
                    shape = [num_blocks, *ref.shape[1:]]
                    self.kv[ref.name] = torch.zeros(shape, dtype=self.precision.held(_dtype(ref)))

    def execute(self, graph: Graph, step: StepInputs) -> Tensor:
        """Run one step: logits [R, V] in the model's dtype, in the compute format of a mode that replaces it."""
        signature = self._signatures.get(graph.signature)
        if signature is None:
            raise ArtifactError(f"the {graph.phase} graph of {graph.bucket} is not of this rank")
        program = self._program(graph, signature)
        given = dict(zip(_STEP_NAMES, step.tensors()))
        known = {"param": self._params, "kv": self.kv, "input": given}
        inputs = [known[ref.kind][ref.name] for ref in signature.inputs]
        with torch.inference_mode():
            outputs = program.run(inputs, self._comm, self.observe)
        return outputs[[ref.name for ref in signature.outputs].index("logits")]

    def _program(self, graph: Graph, signature: Signature) -> Program:
        """The graph's program, made when it is first used."""
        key = (graph.object, graph.signature, self._ep_rank)
        if key not in self._programs:
            if graph.format != "ge-modeldef":
                raise ArtifactError(f"graph {graph.object} has format {graph.format}, not ge-modeldef")
            parsed = parse_model(self._artifact.object_path(graph.object).read_bytes())
            program = Program(bind_rank(parsed, self._ep_rank), self.precision)
            _check_signature(program, signature, graph.object)
            self._programs[key] = program
        return self._programs[key]

    def _load(self, params: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        wanted: dict[str, TensorRef] = {}
        for signature in self._signatures.values():
            wanted |= {ref.name: ref for ref in signature.inputs if ref.kind == "param"}
        loaded: dict[str, Tensor] = {}
        exact = {} if self.precision.rounds else self._exact_tables()
        shared: dict[int, tuple[Tensor, Tensor]] = {}  # tied parameters are one tensor, before and after the cast
        for name, tensor in params:
            ref = wanted.get(name)
            if ref is None:
                continue
            if list(tensor.shape) != ref.shape or tensor.dtype != _dtype(ref):
                raise ArtifactError(
                    f"parameter {name} is {tensor.dtype} {list(tensor.shape)}, the graphs take {ref.dtype} {ref.shape}"
                )
            if name in exact:
                loaded[name] = exact[name]
                continue
            if id(tensor) not in shared:
                shared[id(tensor)] = (tensor, tensor.to(self.precision.held(tensor.dtype)))
            loaded[name] = shared[id(tensor)][1]
        missing = sorted(wanted.keys() - loaded.keys())
        if missing:
            raise ArtifactError(f"{len(missing)} parameters of the graphs were not given: {', '.join(missing[:5])}")
        return loaded

    def _exact_tables(self) -> dict[str, Tensor]:
        """The rotary tables without the rounding to the plan's dtype: it is the device's, not the model's."""
        constants, tables = self._artifact.constants(), {}
        for name, param in self._artifact.plan().params.items():
            if param.kind in ("rope_cos", "rope_sin") and param.constant in constants:
                table = rope_table(param.model_copy(update={"dtype": "float32"}), constants[param.constant])
                tables[name] = table.to(self.precision.compute)
        return tables


def _check_signature(program: Program, signature: Signature, name: str) -> None:
    """Hold a graph against its signature, as the device's loader does, and also what it writes."""
    if len(program.inputs) != len(signature.inputs):
        raise ArtifactError(f"{name}: {len(program.inputs)} inputs, but {len(signature.inputs)} in its signature")
    for index, ref in enumerate(signature.inputs):
        dtype, shape = program.inputs[index]
        if dtype != _dtype(ref) or list(shape) != ref.shape:
            raise ArtifactError(
                f"{name}: input {index} ({ref.name}) is {dtype} {list(shape)} in the graph, {ref.dtype} {ref.shape} "
                "in its signature"
            )
    if program.written != set(signature.in_place):
        odd = sorted(program.written ^ set(signature.in_place))
        names = ", ".join(signature.inputs[index].name for index in odd[:5])
        raise ArtifactError(f"{name}: the graph and its signature differ in what is written in place: {names}")


def _dtype(ref: TensorRef) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, ref.dtype)
    return dtype
