"""Small functions made into GE graphs by TorchAir's own converters, and graphs run by the reference executor.

For tests only: the toolchain must be loaded (`ensure_toolchain`). Caches are written in place where a function ends
with `aten.copy_` of the functional result into its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cann_export.lower.ascend.pin import pinned_target
from cann_runtime.executor.reference.comm import Alone, Communicator
from cann_runtime.executor.reference.graph import parse_model
from cann_runtime.executor.reference.precision import Precision
from cann_runtime.executor.reference.program import Program

SOCS = {"ascend910b": "Ascend910B3", "ascend910_93": "Ascend910_9392", "ascend950": "Ascend950PR_9599"}


@dataclass
class Converted:
    """A graph, which arguments of the function its inputs are, and which of its outputs the results are."""

    model: bytes
    arguments: list[int]
    results: list[int | None]  # None: a view of an input, which TorchAir leaves to its Python side

    def types(self) -> set[str]:
        """The op types in the graph."""
        return {op.type for op in parse_model(self.model).ops}

    def run(
        self,
        arguments: Sequence[Tensor],
        mode: str = "npu",
        family: str = "ascend910b",
        comm: Communicator | None = None,
    ) -> list[Tensor]:
        """The results on these arguments; where the graph writes an argument it is written."""
        precision = Precision.of(mode, family)
        program = Program(parse_model(self.model), precision)
        held = [argument.to(precision.held(argument.dtype)) for argument in arguments]
        outputs = program.run([held[index] for index in self.arguments], comm or Alone())
        assert None not in self.results, "a result is not in the graph"
        return [outputs[index] for index in self.results if index is not None]


def convert(
    function: Callable[..., Any], arguments: Sequence[Tensor], *, family: str = "ascend910b", decompose: bool = True
) -> Converted:
    """Lower `function` for tensors like `arguments`. decompose: with torch's decompositions for what TorchAir has no
    converter for, besides TorchAir's own table."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torchair._ge_concrete_graph.fx2ge_converter import _get_converter
    from torchair._utils import get_npu_default_decompositions
    from torchair.configs.compiler_config import CompilerConfig
    from torchair.npu_fx_compiler import _NpuFxCompiler

    from cann_export.lower.ascend.convert import _only_raises

    table: dict[Any, Any] = {}
    if decompose:
        for op, how in torch.export.default_decompositions().items():
            converter = _get_converter(op)
            if converter is None or _only_raises(converter):
                table[op] = how
    table |= get_npu_default_decompositions()
    mode = FakeTensorMode()
    with mode:
        metas = [torch.empty(a.shape, dtype=a.dtype, device="meta") for a in arguments]
        module = make_fx(function, tracing_mode="real", decomposition_table=table)(*metas)
    for node, meta in zip(module.graph.nodes, metas):
        node.meta["val"] = meta
    compiler = _NpuFxCompiler(CompilerConfig())
    compiler.arg_pos_to_source = None
    with pinned_target(SOCS[family], "8.5.0"), tracing(TracingContext(mode)):
        runner = compiler._get_compiled_gm(module, metas).runner
    indices = [info.func.fx_input_idx for info in runner._input_info_list]
    count = len(runner._fx_outputs)
    mapping = runner._fx_outputs_mapping or {}
    return Converted(runner.graph.model.SerializeToString(), indices, [mapping.get(i) for i in range(count)])
