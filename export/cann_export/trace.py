"""From a sharded model to a step graph: one `torch.export` trace of the Step module per phase and bucket.

The trace keeps aten ops whole (`aten.linear`) and in-place cache writes as they are; what fusion needs to know about a
node's place (decoder layer, module path) is put in its meta here. A static bucket is traced on the meta device, a
dynamic graph (CPU target) on fake CPU tensors with symbolic sizes.

Shape letters: T tokens, S sequences, R logits rows, M block-table columns, B blocks, P block_size, K kv heads, D
head_dim.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cann_export.model import BuiltModel, Step
from cann_export.program import STEP_INPUTS, Program, Slot
from cann_export.shard import kv_heads_per_rank
from cann_runtime.artifact.manifest import Bucket, Phase
from cann_runtime.errors import CannError, UnsupportedModelError

_LAYER = re.compile(r"\blayers\.(\d+)\b")
TRACE_BLOCKS = 16  # KV blocks in the example caches; the real number is bound at load


def layer_kinds(built: BuiltModel) -> list[str]:
    """A name for each decoder layer such that layers of equal names have equal graphs (all but parameter names).

    Compared are the layers' modules, parameters and plain settings (such as whether it has rotary embeddings).
    """
    kinds = []
    types = getattr(built.config, "layer_types", None)
    for i, layer in enumerate(built.layers):
        shapes = tuple((n, tuple(p.shape), p.dtype) for n, p in layer.named_parameters())
        body = tuple((type(m).__name__, _settings(m)) for m in layer.modules())
        kinds.append(repr((types[i] if types else "", shapes, body)))
    names = {kind: f"kind{n}" for n, kind in enumerate(dict.fromkeys(kinds))}
    return [names[k] for k in kinds]


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    plain = (bool, int, float, str, type(None))
    items = ((k, v) for k, v in vars(module).items() if isinstance(v, plain) and k != "layer_idx")
    return tuple(sorted(items, key=lambda item: item[0]))


def head_dim(built: BuiltModel) -> int:
    """Columns of one attention head."""
    return config_head_dim(built.config)


def config_head_dim(config: Any) -> int:
    """Columns of one attention head, from a transformers config."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _examples(
    built: BuiltModel, bucket: Bucket, tp: int, block_size: int, kv_dtype: torch.dtype, slot_dtype: torch.dtype
) -> tuple[Any, ...]:
    T, S, R, M = bucket.tokens, bucket.seqs, bucket.rows, bucket.max_blocks
    shape = (TRACE_BLOCKS, block_size, kv_heads_per_rank(built, tp), head_dim(built))
    kv = [torch.empty(shape, dtype=kv_dtype) for _ in range(2 * len(built.layers))]
    i64 = torch.int64
    return (
        torch.empty(T, dtype=i64),
        torch.empty(T, dtype=i64),
        torch.empty(T, dtype=slot_dtype),
        torch.empty(S, M, dtype=torch.int32),
        torch.empty(S, dtype=i64),
        torch.empty(S, dtype=i64),
        torch.empty(R, dtype=i64),
        kv,
    )


@contextlib.contextmanager
def _on_fake_cpu(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Inside, the meta parameters of the model are fake CPU tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, nn.Parameter] = {}
    saved: list[tuple[nn.Module, str, nn.Parameter]] = []
    with mode:
        for module in model.modules():
            for leaf, param in list(module.named_parameters(recurse=False)):
                saved.append((module, leaf, param))
                if id(param) not in memo:
                    fake = torch.empty(param.shape, dtype=param.dtype, device="cpu")
                    memo[id(param)] = nn.Parameter(fake, requires_grad=False)
                setattr(module, leaf, memo[id(param)])
        try:
            yield mode
        finally:
            for module, leaf, param in saved:
                setattr(module, leaf, param)


def trace(
    built: BuiltModel,
    phase: Phase,
    bucket: Bucket,
    *,
    tp: int,
    block_size: int,
    kv_dtype: torch.dtype,
    slot_dtype: torch.dtype = torch.int32,
    dynamic: bool = False,
) -> Program:
    """Trace the step graph of one rank. The caller holds `fakeworld.fake_world` open where tp > 1.

    Raises UnsupportedModelError where the model's forward cannot be traced, with the first line of torch's reason.
    """
    step = Step(built.model).eval()
    try:
        if dynamic:
            with _on_fake_cpu(built.model):
                example = Bucket(tokens=15, seqs=3, rows=5, max_blocks=7)
                args = _examples(built, example, tp, block_size, kv_dtype, slot_dtype)
                exported = _export(step, args, _dynamic_shapes(len(args[-1])))
        else:
            with torch.device("meta"):
                args = _examples(built, bucket, tp, block_size, kv_dtype, slot_dtype)
            exported = _export(step, args, None)
    except CannError:
        raise
    except Exception as error:  # whatever the model's own code, or tracing it, may raise
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UnsupportedModelError(f"{type(built.model).__name__}: cannot be traced: {first}") from error
    return _program(built, exported, phase, bucket, dynamic)


def _dynamic_shapes(kv_tensors: int) -> Any:
    # No upper bounds: the executor checks sizes against the manifest, and a bound would only add guards here.
    T, S, R, M = (torch.export.Dim(name, min=1) for name in "TSRM")
    B = torch.export.Dim("B", min=2)
    return ({0: T}, {0: T}, {0: T}, {0: S, 1: M}, {0: S}, {0: S}, {0: R}, [{0: B}] * kv_tensors)


def _export(step: nn.Module, args: tuple[Any, ...], dynamic_shapes: Any) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(step, args, dynamic_shapes=dynamic_shapes, strict=False)


def _program(
    built: BuiltModel, exported: torch.export.ExportedProgram, phase: Phase, bucket: Bucket, dynamic: bool
) -> Program:
    gm = exported.graph_module
    signature = exported.graph_signature
    inputs = iter(STEP_INPUTS)
    kv = iter(f"{kind}_cache_{i}" for i in range(len(built.layers)) for kind in ("k", "v"))
    slots: list[Slot] = []
    for node in list(gm.graph.nodes):
        if node.op != "placeholder":
            continue
        if node.name in signature.inputs_to_parameters:
            name = signature.inputs_to_parameters[node.name].removeprefix("model.")
            if not node.users:  # the other name of a tied parameter
                gm.graph.erase_node(node)
                continue
            slots.append(Slot("param", name))
        elif node.name in signature.user_inputs:
            step_input = next(inputs, None)
            slots.append(Slot("input", step_input) if step_input else Slot("kv", next(kv)))
        else:
            raise UnsupportedModelError(f"{type(built.model).__name__}: the graph holds a constant ({node.target})")
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        path = list(stack.values())[-1][0] if stack else ""
        node.meta["source"] = path.removeprefix("model.")
        match = _LAYER.search(path)
        if match and node.op == "call_function":
            node.meta["layer"] = int(match.group(1))
    _canonical_tied_names(built, slots)
    gm.graph.lint()
    gm.recompile()
    return Program(gm, slots, phase, bucket, len(built.layers), layer_kinds(built), dynamic, head_dim(built))


def _canonical_tied_names(built: BuiltModel, slots: list[Slot]) -> None:
    """Of several names of one parameter, the graph uses the first in module order: the plan's own name."""
    first: dict[int, str] = {}
    for name, param in built.model.named_parameters(remove_duplicate=False):
        first.setdefault(id(param), name)
    names = {n: first[id(p)] for n, p in built.model.named_parameters(remove_duplicate=False)}
    for slot in slots:
        if slot.kind == "param":
            slot.name = names.get(slot.name, slot.name)
