"""Makes a GE graph executable and runs it, op by op, on CPU tensors.

All that can be refused is refused when the Program is made: unknown ops, attributes and data types, inputs that an op
lacks, and reads that race with a write in place. What each op computes is in `ops/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cann_runtime.errors import ArtifactError
from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.comm import Communicator
from cann_runtime.executor.reference.dtypes import ge_dtype, proto_dtype
from cann_runtime.executor.reference.graph import ConstTensor, Edge, Graph, Op, Value
from cann_runtime.executor.reference.hazards import in_order, written_values
from cann_runtime.executor.reference.ops import OPS, OpFunction
from cann_runtime.executor.reference.precision import Precision
from cann_runtime.executor.reference.prototype import prototypes

Observer = Callable[[Op, Sequence[Tensor]], None]
"""Called after each op with its outputs."""

_INPUTS = ("Data", "RefData")


@dataclass
class _Step:
    """One op, ready to run.

    own: outputs that a later op writes in place, so they need memory of their own. kept: outputs that something reads.
    freed: values that nothing reads after this step.
    """

    op: Op
    function: OpFunction
    inputs: list[tuple[str, Edge | None]]
    attrs: dict[str, Value]
    given: frozenset[str]
    source: str
    own: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    freed: list[Edge] = field(default_factory=list)

    @property
    def communicates(self) -> bool:
        """Does the op wait for other ranks?"""
        return "group" in self.attrs or "group_ep" in self.attrs


class Program:
    """An executable graph.

    inputs: the graph's dtype and shape of each input by Data index; a dimension of -1 is open. written: indices of the
    inputs that are written in place. Raises ArtifactError naming the op.
    """

    def __init__(self, graph: Graph, precision: Precision) -> None:
        self.graph = graph
        self.precision = precision
        self.inputs: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.written: set[int] = set()
        self._data: list[tuple[Edge, int, Op]] = []
        self._constants: dict[Edge, Tensor] = {}
        self._steps: list[_Step] = []
        self._outputs: list[tuple[Edge, torch.dtype, tuple[int, ...]]] = []
        ordered = in_order(graph.ops)
        output = None
        for op in ordered:
            if op.type in _INPUTS:
                self._add_input(op)
            elif op.type == "Const":
                self._constants[Edge(op.name, 0)] = _constant(op, precision)
            elif op.type == "NetOutput":
                output = op
            else:
                self._steps.append(_step(op))
        if output is None:
            raise ArtifactError("the GE graph has no NetOutput")
        if sorted(self.inputs) != list(range(len(self.inputs))):
            raise ArtifactError(f"the GE graph's inputs are numbered {sorted(self.inputs)}")
        self._add_outputs(output)
        self._plan_memory(ordered)

    def run(self, inputs: Sequence[Tensor], comm: Communicator, observe: Observer | None = None) -> list[Tensor]:
        """The graph's outputs. Inputs that the graph writes are written into the tensors given.

        inputs: by Data index, of the shapes in `self.inputs`, of the dtypes that the precision holds those in. Raises
        ArtifactError where they do not fit, or an op cannot take what it gets.
        """
        self._check(inputs)
        values: dict[Edge, Tensor] = {edge: inputs[index] for edge, index, _ in self._data}
        values |= self._constants
        if observe is not None:
            for edge, _, op in self._data:
                observe(op, (values[edge],))
        for step in self._steps:
            outputs = self._run_step(step, values, comm, observe)
            for port in step.kept:
                values[Edge(step.op.name, port)] = outputs[port]
            for edge in step.freed:
                del values[edge]
        return [self._output(values[edge], dtype, shape) for edge, dtype, shape in self._outputs]

    def _run_step(
        self, step: _Step, values: dict[Edge, Tensor], comm: Communicator, observe: Observer | None
    ) -> Sequence[Tensor]:
        inputs = {name: values[edge] if edge is not None else None for name, edge in step.inputs}
        call = Call(step.source, inputs, step.attrs, step.given, self.precision, comm)
        try:
            result = step.function(call)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            if step.communicates:  # the fault may be another rank's; the caller tells it from the error
                raise
            first = next(iter(str(error).splitlines()), type(error).__name__)
            shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in inputs.items() if x is not None)
            raise ArtifactError(f"{step.source} cannot take its inputs ({shapes}): {first}") from error
        call.check_used()
        outputs = list(result) if isinstance(result, tuple) else [result]
        if step.kept and max(step.kept) >= len(outputs):
            raise ArtifactError(f"{step.source} has {len(outputs)} outputs, but output {max(step.kept)} is read")
        for port in step.own:
            outputs[port] = outputs[port].clone(memory_format=torch.contiguous_format)
        if observe is not None:
            observe(step.op, outputs)
        return outputs

    def _add_input(self, op: Op) -> None:
        index = op.attrs["index"].value if "index" in op.attrs else None
        if not isinstance(index, int) or not op.output_descs:
            raise ArtifactError(f"{op.source} is an input without an index or a descriptor")
        if index in self.inputs:
            raise ArtifactError(f"{op.source}: another input has the index {index} too")
        desc = op.output_descs[0]
        self.inputs[index] = (proto_dtype(desc.dtype, op.source), desc.shape)
        self._data.append((Edge(op.name, 0), index, op))

    def _add_outputs(self, op: Op) -> None:
        codes = self.graph.attrs.get("_output_dtypes")
        dtypes = codes.value if codes is not None else ()
        if not isinstance(dtypes, tuple) or len(dtypes) != len(op.inputs):
            raise ArtifactError(f"{op.source} has {len(op.inputs)} outputs, the graph's _output_dtypes says otherwise")
        for (_, edge), desc, code in zip(op.inputs, op.input_descs, dtypes):
            dtype = ge_dtype(code, "_output_dtypes")
            if edge is None or proto_dtype(desc.dtype, op.source) != dtype:
                raise ArtifactError(f"{op.source}: output {desc.name} has two data types, or no producer")
            self._outputs.append((edge, self.precision.held(dtype), desc.shape))

    def _plan_memory(self, ordered: Sequence[Op]) -> None:
        """Which inputs are written, which values need memory of their own, and when each value is read last."""
        steps = {step.op.name: step for step in self._steps}
        index_of = {edge.producer: index for edge, index, _ in self._data}
        for edge in written_values(ordered):
            if edge.producer in index_of:
                self.written.add(index_of[edge.producer])
            elif edge in self._constants:
                raise ArtifactError(f"op {edge.producer} is a constant that another op writes in place")
            else:
                steps[edge.producer].own.append(edge.port)
        last: dict[Edge, _Step] = {}
        wanted = {edge for edge, _, _ in self._outputs}
        for step in self._steps:
            for _, source in step.inputs:
                if source is not None and source not in self._constants:
                    last[source] = step
        for value, step in last.items():
            if value not in wanted:
                step.freed.append(value)
        for value in wanted | last.keys():
            if value.producer in steps:
                steps[value.producer].kept.append(value.port)

    def _check(self, inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(self.inputs):
            raise ArtifactError(f"{len(inputs)} inputs for a GE graph that takes {len(self.inputs)}")
        for edge, index, _ in self._data:
            dtype, shape = self.precision.held(self.inputs[index][0]), self.inputs[index][1]
            if inputs[index].dtype != dtype or not _fits(inputs[index].shape, shape):
                raise ArtifactError(
                    f"input {index} of the GE graph ({edge.producer}) takes {dtype} {list(shape)}, "
                    f"got {inputs[index].dtype} {list(inputs[index].shape)}"
                )

    def _output(self, value: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        if value.dtype != dtype or not _fits(value.shape, shape):
            raise ArtifactError(
                f"an output of the GE graph is {value.dtype} {list(value.shape)}, NetOutput says {dtype} {list(shape)}"
            )
        return value


def _step(op: Op) -> _Step:
    function, prototype = OPS.get(op.type), prototypes().get(op.type)
    if function is None or prototype is None:
        raise ArtifactError(f"{op.source} is of a type that the reference executor does not know")
    prototype.check_inputs(op)
    attrs = prototype.attributes(op)
    given = frozenset(name for name, value in attrs.items() if value != prototype.attrs[name].default)
    return _Step(op, function, list(op.inputs), attrs, given, op.source)


def _constant(op: Op, precision: Precision) -> Tensor:
    value = op.attrs["value"].value if "value" in op.attrs else None
    if not isinstance(value, ConstTensor):
        raise ArtifactError(f"{op.source} has no value")
    dtype = proto_dtype(value.dtype, op.source)
    count = torch.Size(value.shape).numel()
    # TorchAir writes the whole storage of a view; such bytes are not the elements.
    if len(value.data) != count * dtype.itemsize:
        raise ArtifactError(f"{op.source} has {len(value.data)} bytes for {dtype} {list(value.shape)}")
    if not count:
        return torch.empty(value.shape, dtype=precision.held(dtype))
    return torch.frombuffer(bytearray(value.data), dtype=dtype).reshape(value.shape).to(precision.held(dtype))


def _fits(shape: torch.Size, wanted: tuple[int, ...]) -> bool:
    """-1 in `wanted` is any size, [-2] any shape (GE's unknown rank)."""
    if wanted == (-2,):
        return True
    return len(shape) == len(wanted) and all(w in (-1, s) for s, w in zip(shape, wanted))
