"""Lowers a Program to a GE graph with TorchAir's own converters and makes it fit to store and share.

The FX side is prepared in `ops.py`, protobuf passes are in `proto.py`, layers beyond those traced come from `stamp.py`.
The result depends on the Program and the target alone: not on this host, rank, process or call count.
"""

from __future__ import annotations

import dis
import operator
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cann_export.lower.ascend import proto
from cann_export.lower.ascend.ops import is_rewritten, to_npu
from cann_export.lower.ascend.pin import pinned_target
from cann_export.lower.ascend.stamp import Layered, layer_of_name, stamp
from cann_export.program import Program, Slot, tensor_meta
from cann_runtime.artifact.manifest import Signature, Target, TensorRef
from cann_runtime.errors import UnsupportedModelError
from cann_runtime.executor.ge.options import ENGINE_PREFIX

_SIZE_OPTIONS = ("frozenInput", "ge.inputHintShape")
"""Options that list every input. The first is made here from the signature, so that it holds for stamped graphs; the
second holds shapes, which are known at load (`cann_runtime.executor.ge.options`)."""

_INPUT_DTYPES = {
    "input_ids": torch.int64,
    "position_ids": torch.int64,
    "slot_mapping": torch.int32,
    "block_table": torch.int32,
    "query_lens": torch.int64,
    "kv_lens": torch.int64,
    "logits_rows": torch.int64,
}


@dataclass
class GeGraph:
    """One lowered graph.

    model: a serialized GE ModelDef, in the neutral form (logical group names, KV blocks -1).
    signature: Data in index order and the logits; `in_place` are the KV caches; `options` are GE's (ENGINE_PREFIX).
    report: 'nodes' and 'kernels' of the whole graph, 'histogram', and 'layers': kind -> the same for one middle layer.
    """

    model: bytes
    signature: Signature
    report: dict[str, Any] = field(default_factory=dict)


def lower_ascend(
    program: Program, *, target: Target, layers_total: int | None = None, layer_kinds: list[str] | None = None
) -> GeGraph:
    """Lower a fused Program for an Ascend target.

    Where `layers_total` is larger than the Program's layers, the Program must hold a first, a last and at least one
    middle layer of each kind; the middle ones are repeated after `layer_kinds` (default: all layers of the kind of the
    Program's middle layer). `ensure_toolchain` must have run. Raises UnsupportedModelError with every op that has no
    converter.
    """
    assert target.soc, "the target comes from resolve_target"
    assert target.cann, "the target comes from resolve_target"
    check_inputs(program)
    refuse_unsupported(program.gm)
    gm = to_npu(program)
    with pinned_target(target.soc, target.cann), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchAir repeats what its frozen_parameter option means
        layered = _convert(program, gm)
    total = layers_total or program.num_layers
    if total != program.num_layers:
        kinds = layer_kinds or [program.layer_kinds[min(i, 1)] for i in range(total - 1)] + [program.layer_kinds[-1]]
        layered = stamp(layered, program.layer_kinds, kinds)
    else:
        kinds = program.layer_kinds
    return _finish(layered, kinds)


def check_inputs(program: Program) -> None:
    """Hold the step inputs against what the ops read: TorchAir converts any dtype, and only the device would refuse it.

    The attention op takes its lengths as int64 (they steer its tiling) and its block table as int32.
    """
    for slot, node in zip(program.slots, program.placeholders(), strict=True):
        if slot.kind == "input" and (dtype := tensor_meta(node).dtype) != _INPUT_DTYPES[slot.name]:
            raise TypeError(f"step input {slot.name} is {dtype}, needed: {_INPUT_DTYPES[slot.name]}")


def refuse_unsupported(gm: fx.GraphModule) -> None:
    """Raise UnsupportedModelError that lists every operator that cannot be lowered, each with where it comes from.

    Those are operators without a converter, and results whose shape depends on data: a graph's shapes are static.
    """
    from torchair._ge_concrete_graph.fx2ge_converter import _get_converter

    found: dict[str, dict[str, None]] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        name = str(node.target)
        if not _is_static(node.meta.get("val")):
            found.setdefault(f"{name} with a data-dependent shape", {}).setdefault(_origin(node))
        elif not is_rewritten(name):
            converter = _get_converter(node.target)
            if converter is None or _only_raises(converter):
                found.setdefault(name, {}).setdefault(_origin(node))
    if found:
        pieces = [f"{name} ({', '.join(list(places)[:3])})" for name, places in sorted(found.items())]
        raise UnsupportedModelError(f"{len(found)} operators cannot be lowered for Ascend: {'; '.join(pieces)}")


def _is_static(val: Any) -> bool:
    if isinstance(val, torch.Tensor):
        return all(isinstance(d, int) or d.node.is_constant() for d in val.shape)
    return all(_is_static(v) for v in val) if isinstance(val, (list, tuple)) else True


def _only_raises(converter: Any) -> bool:
    """TorchAir registers converters that do nothing but raise NotImplementedError; they are as good as none."""
    code = getattr(converter, "__wrapped__", converter).__code__
    steps = (i for i in dis.get_instructions(code) if i.opname not in ("RESUME", "NOP", "COPY_FREE_VARS", "CACHE"))
    first = next(steps)
    return first.opname == "LOAD_GLOBAL" and first.argval in ("NotImplementedError", "RuntimeError")


def _origin(node: fx.Node) -> str:
    place = str(node.meta.get("source") or node.name)
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    files = [line for line in lines if line.startswith("File ")]
    if not files:
        return place
    match = re.match(r'File "(.*)", line (\d+)', files[-1])
    return f"{place}, {'/'.join(match[1].split('/')[-2:])}:{match[2]}" if match else place


def data_name(slot: Slot) -> str:
    """Name of a slot's Data node."""
    return re.sub(r"\W", "_", slot.name)


def _convert(program: Program, gm: fx.GraphModule) -> Layered:
    """TorchAir's conversion of every node, reusing the example values instead of running each op again."""
    from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph
    from torchair._utils.graph_transform_observer import GraphTransformObserver
    from torchair.configs.compiler_config import CompilerConfig

    config = CompilerConfig()
    config.experimental_config.frozen_parameter = True
    config.experimental_config.tiling_schedule_optimize = True
    config.experimental_config.topology_sorting_strategy = "StableRDFS"
    config.experimental_config.enable_view_optimize = False  # it would bake the KV block count into Reshapes
    graph = GeConcreteGraph(config, name="step")
    layers: dict[str, int | None] = {}
    slots = iter(program.slots)
    slot_of: dict[str, Slot] = {}
    values_of: dict[str, torch.Tensor] = {}
    values: dict[fx.Node, Any] = {}
    with graph.context():
        for node in gm.graph.nodes:
            before = len(graph.graph.op)
            with graph.converter_context(node=node):
                if node.op == "placeholder":
                    slot = next(slots)
                    name, val = data_name(slot), _marked(slot, tensor_meta(node))
                    slot_of[name], values_of[name] = slot, val
                    values[node] = graph.parse_input(name, (), {}, val)
                elif node.op == "output":
                    graph.parse_output("output", ([values[n] for n in node.args[0]],), {}, None)
                elif node.target is operator.getitem:
                    values[node] = values[node.args[0]][node.args[1]]
                else:
                    args, kwargs = _plain(node.args, values), _plain(node.kwargs, values)
                    try:
                        values[node] = graph.parse_node(node.target, args, kwargs, node.meta["val"])
                    except (NotImplementedError, RuntimeError, TypeError, AssertionError) as error:
                        first = next(iter(str(error).splitlines()), type(error).__name__)
                        raise UnsupportedModelError(
                            f"{node.target} ({_origin(node)}) cannot be lowered for Ascend: {first}"
                        ) from error
            for op in graph.graph.op[before:]:
                layers[op.name] = layer_of_name(op.name) if op.type == "Data" else node.meta.get("layer")
    assert len(slot_of) == len(program.slots), "two inputs of the graph have the same Data name"

    graph.optimize_graph_without_runtime(observer=GraphTransformObserver(gm, (), config))
    assert not graph._graph_output_ref_input, "a KV cache is written but never read"
    local, start = graph._normalize_ge_option()
    options = {k: str(v) for k, v in local.items() if k not in _SIZE_OPTIONS}
    options |= {ENGINE_PREFIX + k: str(v) for k, v in start.items()}

    model = graph.graph._model
    ge = model.graph[0]
    proto.drop_identities(ge)
    proto.drop_tensor_moves(ge)
    proto.merge_constants(ge)
    proto.drop_unread(ge)
    proto.drop_bookkeeping(ge)
    live = [op.name for op in sorted((o for o in ge.op if o.type == "Data"), key=lambda o: o.attr["index"].i)]
    caches = {name for name in live if slot_of[name].kind == "kv"}
    proto.free_first_dim(ge, caches)
    # Constants are shared by all layers after merging, whichever layer's conversion made them.
    layers |= {op.name: None for op in ge.op if op.type == "Const"}
    proto.canonical_order(ge, layers)
    layers = proto.rename_ops(ge, layers)
    written = {live[index] for index in graph._ref_data_idx}
    assert written == caches, f"not written in place: {sorted(caches - written)}"
    inputs = [_tensor_ref(slot_of[name], values_of[name]) for name in live]
    result = next(n for n in reversed(gm.graph.nodes) if n.op == "output").args[0][0]
    return Layered(model, layers, inputs, _tensor_ref(None, tensor_meta(result)), options)


def _marked(slot: Slot, val: torch.Tensor) -> torch.Tensor:
    """Weights and caches keep their addresses between steps; GE then need not check or copy them (frozenInput)."""
    if slot.kind == "param":
        val._torchair_is_parameter = True  # type: ignore[attr-defined]
    elif slot.kind == "kv":
        val._dynamo_static_input_type = "guarded"  # type: ignore[attr-defined]
    return val


def _plain(value: Any, values: dict[fx.Node, Any]) -> Any:
    if isinstance(value, fx.Node):
        return values[value]
    if isinstance(value, (list, tuple)):
        return [_plain(v, values) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v, values) for k, v in value.items()}
    return value


def _tensor_ref(slot: Slot | None, val: torch.Tensor) -> TensorRef:
    dtype = str(val.dtype).removeprefix("torch.")
    shape = list(val.shape)
    if slot is None:
        return TensorRef(name="logits", kind="output", dtype=dtype, shape=shape)
    if slot.kind == "kv":
        shape[0] = -1
    return TensorRef(name=slot.name, kind=slot.kind, dtype=dtype, shape=shape)


def _finish(layered: Layered, kinds: list[str]) -> GeGraph:
    ge = layered.model.graph[0]
    inputs = layered.inputs
    options = dict(layered.options)
    options["frozenInput"] = ",".join("1" if ref.kind in ("param", "kv") else "0" for ref in inputs)
    signature = Signature(
        inputs=inputs,
        outputs=[layered.output],
        in_place=[i for i, ref in enumerate(inputs) if ref.kind == "kv"],
        options=dict(sorted(options.items())),
    )
    ops_of: dict[int, list[Any]] = {}
    for op in ge.op:
        layer = layered.layers.get(op.name)
        if layer is not None:
            ops_of.setdefault(layer, []).append(op)
    whole = proto.histogram(list(ge.op))
    report: dict[str, Any] = _counted(whole)
    # A middle layer of each kind where there is one: first and last may hold a piece of what surrounds the layers.
    shown = {kinds[-1]: len(kinds) - 1} | {kinds[0]: 0} | {kind: i for i, kind in enumerate(kinds[1:-1], start=1)}
    report["layers"] = {kind: _counted(proto.histogram(ops_of.get(i, []))) for kind, i in shown.items()}
    return GeGraph(layered.model.SerializeToString(deterministic=True), signature, report)


def _counted(histogram: dict[str, int]) -> dict[str, Any]:
    return {"nodes": sum(histogram.values()), "kernels": proto.kernels(histogram), "histogram": histogram}
