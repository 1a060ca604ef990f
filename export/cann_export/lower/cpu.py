"""Lowers a fused step program to one AOTInductor library for the CPU, with dynamic shapes and no weights inside.

The small fused ops become plain aten, which inductor fuses again; linears and attention become calls of the kernel
library, on packed weights and on one KV cache tensor for all layers. Compiling is in `cpu_compile.py`, the kernels'
compiler flags in `cpu_toolchain.py`; loading and running is `cann_runtime.executor.cpu`.

Shape letters: T tokens, S sequences, R logits rows, M block-table columns, N query heads, K kv heads, D head_dim,
B blocks, P block_size, L layers, H hidden.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from cann_export.lower.cpu_compile import compile_graph
from cann_export.lower.cpu_toolchain import build_kernels, resolve_isa
from cann_export.program import STEP_INPUTS, Program, tensor_meta
from cann_runtime.artifact.manifest import KVCacheSpec, Signature, TensorRef
from cann_runtime.errors import UnsupportedModelError
from cann_runtime.ops import atb as _atb  # noqa: F401  registers the ops that a Program holds
from cann_runtime.ops import cpu as cpu_ops

KV_CACHE = "kv_cache"

# The dynamic dimensions of the step inputs and of the cache, with example sizes that export must not specialize on
# (distinct, and neither 0 nor 1).
_EXAMPLE = {"T": 22, "S": 5, "M": 6, "R": 7, "B": 37}
_INPUT_DIMS = {
    "input_ids": ("T",),
    "position_ids": ("T",),
    "slot_mapping": ("T",),
    "block_table": ("S", "M"),
    "query_lens": ("S",),
    "kv_lens": ("S",),
    "logits_rows": ("R",),
}


@dataclass
class CpuGraph:
    """One compiled graph and what is needed to run it.

    library: the AOTInductor .so; kernels: the kernel library that it calls; isa: what both were compiled for.
    signature: constants first (constant i of the library is named `p{i}`), then the step inputs, then the cache.
    kv_cache: its layout, without scratch blocks. report: how many linears, attentions and collectives were lowered and
    how.
    """

    library: Path
    kernels: Path
    isa: str
    signature: Signature
    kv_cache: KVCacheSpec
    report: dict[str, int]


@dataclass(frozen=True)
class _Constant:
    """A parameter as the graph reads it: as it is, or packed for the linear kernel."""

    param: str
    packed: bool


@dataclass
class _Attention:
    """One layer's rotary -> cache write -> attention, found in the program; inputs as program nodes.

    q, k: rotary's inputs [T, N, D] and [T, K, D]; v [T, K, D]. qkv: the node [T, (N + 2 K) D] that q, k and v are the
    consecutive parts of, or None.
    """

    layer: int
    q: fx.Node
    k: fx.Node
    v: fx.Node
    cos: fx.Node
    sin: fx.Node
    qkv: fx.Node | None


def _called(node: fx.Node, name: str) -> bool:
    return node.op == "call_function" and str(node.target) == f"{name}.default"


def _element(node: fx.Node) -> tuple[fx.Node, int] | None:
    """(tuple node, index) where the node is an element of a multi-output node."""
    if node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        index = node.args[1]
        if isinstance(index, int):
            return node.args[0], index
    return None


def _node(arg: Any) -> fx.Node:
    assert isinstance(arg, fx.Node), arg
    return arg


_VIEWS = {"aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"}


def _through_views(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and str(node.target) in _VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _merged_qkv(q: fx.Node, k: fx.Node, v: fx.Node) -> fx.Node | None:
    """The node whose split in three gives q, k and v (up to views), or None."""
    parts = [_element(_through_views(n)) for n in (q, k, v)]
    if any(p is None for p in parts):
        return None
    (split, a), (split_k, b), (split_v, c) = [p for p in parts if p is not None]
    if split is not split_k or split is not split_v or (a, b, c) != (0, 1, 2):
        return None
    sizes = [tensor_meta(n).shape[1] * tensor_meta(n).shape[2] for n in (q, k, v)]
    if str(split.target) not in ("aten.split_with_sizes.default", "aten.split_with_sizes_copy.default"):
        return None
    source = split.args[0]
    if not isinstance(source, fx.Node) or list(split.args[1]) != sizes or tensor_meta(source).dim() != 2:  # type: ignore[arg-type]
        return None
    return source


def _find_attentions(program: Program) -> dict[fx.Node, _Attention]:
    """Every paged attention of the program with what it is made of, by its attention node.

    Raises UnsupportedModelError where an attention is not preceded by a rotary embedding and its layer's cache write.
    """
    layers = {program.node_of("kv", f"k_cache_{i}"): i for i in range(program.num_layers)}
    writes = {n.args[2]: n for n in program.gm.graph.nodes if _called(n, "atb.reshape_and_cache")}
    found: dict[fx.Node, _Attention] = {}
    for node in program.gm.graph.nodes:
        if not _called(node, "atb.paged_attention"):
            continue
        layer = layers.get(node.args[1])
        write = writes.get(node.args[1])
        q_out = _element(node.args[0])
        k_out = _element(write.args[0]) if write is not None else None
        if layer is None or write is None or q_out is None or k_out is None or q_out[0] is not k_out[0]:
            raise UnsupportedModelError(
                f"target cpu: {node.name}: attention must follow a rotary embedding and its own layer's cache write"
            )
        rotary = q_out[0]
        if not _called(rotary, "atb.rotary") or (q_out[1], k_out[1]) != (0, 1):
            raise UnsupportedModelError(
                f"target cpu: {node.name}: its queries and keys do not come from one atb.rotary"
            )
        q, k, cos, sin, v = (_node(a) for a in (*rotary.args, write.args[1]))
        found[node] = _Attention(layer, q, k, v, cos, sin, _merged_qkv(q, k, v))
    return found


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight, eps), total


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


class _Lowered(nn.Module):
    """The program as a module of CPU ops: forward(step inputs..., kv_cache) -> logits.

    It interprets the program's graph, op by op, so that exporting it records the lowered ops. Its buffers `p{i}` are
    the constants, in the order of `constants`; their memory is never touched.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.attentions = _find_attentions(program)
        self.head = _logits_linear(program)
        self.constants: list[_Constant] = []
        self._params = {
            node: slot.name
            for node, slot in zip(program.placeholders(), program.slots, strict=True)
            if slot.kind == "param"
        }
        self._skip = self._unused()
        for node in self._params:
            if self._needs_raw(node):
                self._add(node, packed=False)
            if self._packed_uses(node):
                self._add(node, packed=True)

    def _unused(self) -> set[fx.Node]:
        """The nodes that the fused attention replaces."""
        gone: set[fx.Node] = set()
        for node in self.program.gm.graph.nodes:
            if _called(node, "atb.reshape_and_cache"):
                gone.add(node)
        for node in self.attentions:
            rotary = _element(node.args[0])  # type: ignore[arg-type]
            assert rotary is not None
            gone.add(rotary[0])
            gone.update(rotary[0].users)
        return gone

    def _packed_uses(self, param: fx.Node) -> list[fx.Node]:
        return [u for u in param.users if _called(u, "atb.linear") and u.args[1] is param]

    def _needs_raw(self, param: fx.Node) -> bool:
        return any(
            not (_called(u, "atb.linear") and u.args[1] is param and u.args[0] is not param) for u in param.users
        )

    def _add(self, param: fx.Node, *, packed: bool) -> None:
        meta = tensor_meta(param)
        value = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        if packed:
            value = torch.ops.cann_cpu.pack_linear(value)
        # Real but untouched memory: inductor tells constants apart by their addresses, and never reads them.
        self.register_buffer(f"p{len(self.constants)}", torch.empty(value.shape, dtype=value.dtype))
        self.constants.append(_Constant(self._params[param], packed))

    def _constant(self, param: str, packed: bool) -> Tensor:
        index = self.constants.index(_Constant(param, packed))
        buffer: Tensor = getattr(self, f"p{index}")
        return buffer

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values: dict[fx.Node, Any] = {}
        step = dict(zip((*STEP_INPUTS, KV_CACHE), inputs, strict=True))
        for node, slot in zip(self.program.placeholders(), self.program.slots, strict=True):
            if slot.kind == "input":
                values[node] = step[slot.name]
            elif slot.kind == "param" and self._needs_raw(node):
                values[node] = self._constant(slot.name, packed=False)
        for node in self.program.gm.graph.nodes:
            if node.op == "placeholder" or node in self._skip:
                continue
            if node.op == "output":
                result = fx.map_arg(node.args[0], lambda n: values[n])
                return tuple(r for r in result if r is not None)
            values[node] = self._call(node, values, step)
        raise AssertionError("a graph ends with its output")

    def _call(self, node: fx.Node, values: dict[fx.Node, Any], step: dict[str, Tensor]) -> Any:
        """The value of one node, by the CPU ops that stand for it."""
        if node.op == "get_attr":
            value: Any = self.program.gm
            for part in str(node.target).split("."):
                value = getattr(value, part)
            return value
        if node in self.attentions:
            return self._attention(self.attentions[node], node, values, step)
        if _called(node, "atb.linear") and node.args[1] in self._params:
            x, bias = fx.map_arg((node.args[0], node.args[2] if len(node.args) > 2 else None), lambda n: values[n])
            weight = node.args[1]
            assert isinstance(weight, fx.Node)
            packed = self._constant(self._params[weight], packed=True)
            op = torch.ops.cann_cpu.linear_f32 if node is self.head else torch.ops.cann_cpu.linear
            return op(x, packed, bias, tensor_meta(weight).shape[0])
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        name = str(node.target)
        if name in _REPLACED:
            return _REPLACED[name](*args, **kwargs)
        assert callable(node.target), node
        return node.target(*args, **kwargs)

    def _attention(
        self, found: _Attention, node: fx.Node, values: dict[fx.Node, Any], step: dict[str, Tensor]
    ) -> Tensor:
        if found.qkv is not None:
            qkv = values[found.qkv]
        else:
            qkv = torch.cat([values[n].flatten(1) for n in (found.q, found.k, found.v)], dim=1)
        table, query_lens, kv_lens = (values[n] for n in node.args[3:6])  # type: ignore[index]
        out = torch.ops.cann_cpu.rope_paged_attention(
            qkv,
            values[found.cos],
            values[found.sin],
            step[KV_CACHE],
            found.layer,
            step["slot_mapping"],
            table,
            query_lens,
            kv_lens,
            node.args[6],
        )
        shape = tensor_meta(node).shape
        return out.view(-1, shape[1], shape[2])  # type: ignore[no-any-return]

    def count(self) -> dict[str, int]:
        """How the program's ops were lowered."""
        nodes = list(self.program.gm.graph.nodes)
        linears = [n for n in nodes if _called(n, "atb.linear")]
        packed = sum(n.args[1] in self._params for n in linears)
        merged = sum(a.qkv is not None for a in self.attentions.values())
        return {
            "linear": packed,
            "linear_unpacked": len(linears) - packed,
            "attention": merged,
            "attention_with_cat": len(self.attentions) - merged,
            "collective": sum(str(n.target).startswith("_c10d_functional.all_") for n in nodes),
        }


def _all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    if op != "sum":
        raise UnsupportedModelError(f"target cpu: all_reduce {op!r} is not supported, only 'sum'")
    out: Tensor = torch.ops.cann_cpu.all_reduce(x, group)
    return out


_REPLACED: dict[str, Callable[..., Any]] = {
    "atb.rms_norm.default": _rms_norm,
    "atb.add_rms_norm.default": _add_rms_norm,
    "atb.swiglu.default": _swiglu,
    "atb.linear.default": torch.nn.functional.linear,
    "_c10d_functional.all_reduce.default": _all_reduce,
    "_c10d_functional.all_gather_into_tensor.default": lambda x, size, group: torch.ops.cann_cpu.all_gather(
        x, size, group
    ),
    "_c10d_functional.wait_tensor.default": lambda x: x,
}


_TO_LOGITS = ("aten.view", "aten.reshape", "aten.permute", "_c10d_functional")


def _logits_linear(program: Program) -> fx.Node | None:
    """The linear that gives the logits: from the output back through views and gathers. Its result stays float32."""
    node: Any = next(n for n in program.gm.graph.nodes if n.op == "output").args[0]
    while isinstance(node, (tuple, list)):
        node = node[0]
    while isinstance(node, fx.Node) and str(node.target).startswith(_TO_LOGITS):
        node = node.args[0]
    return node if isinstance(node, fx.Node) and _called(node, "atb.linear") else None


def _kv_spec(program: Program) -> KVCacheSpec:
    """The stacked cache of all layers; every layer must have the same K, P, D and dtype."""
    shapes = {
        (tuple(tensor_meta(node).shape[1:]), tensor_meta(node).dtype)
        for node, slot in zip(program.placeholders(), program.slots, strict=True)
        if slot.kind == "kv"
    }
    if len(shapes) != 1:
        raise UnsupportedModelError(
            f"target cpu: all layers must have one KV cache shape, found {sorted(map(str, shapes))}"
        )
    ((block_size, kv_heads, head_dim), dtype) = next(iter(shapes))
    return KVCacheSpec(
        layout="stacked",
        layers=program.num_layers,
        kv_heads=int(kv_heads),
        head_dim=int(head_dim),
        block_size=int(block_size),
        dtype=str(dtype).removeprefix("torch."),
        scratch_blocks=0,
    )


def _signature(program: Program, lowered: _Lowered, spec: KVCacheSpec) -> Signature:
    inputs: list[TensorRef] = []
    for index, constant in enumerate(lowered.constants):
        buffer = getattr(lowered, f"p{index}")
        inputs.append(
            TensorRef(
                name=f"{constant.param}.packed" if constant.packed else constant.param,
                kind="param",
                dtype=str(buffer.dtype).removeprefix("torch."),
                shape=list(buffer.shape),
                source=constant.param,
                packed=constant.packed,
            )
        )
    for name in STEP_INPUTS:
        meta = tensor_meta(program.node_of("input", name))
        dims = [-1] * meta.dim()
        inputs.append(TensorRef(name=name, kind="input", dtype=str(meta.dtype).removeprefix("torch."), shape=dims))
    cache = [spec.layers, 2, -1, spec.kv_heads, spec.block_size, spec.head_dim]
    inputs.append(TensorRef(name=KV_CACHE, kind="kv", dtype=spec.dtype, shape=cache))
    result = next(n for n in program.gm.graph.nodes if n.op == "output").args[0]
    outputs: list[TensorRef] = []
    for name, node in zip(("logits", "hidden"), [n for n in result if n is not None]):
        meta = tensor_meta(node)
        shape = [-1, *map(int, meta.shape[1:])]
        dtype = torch.float32 if name == "logits" and lowered.head is not None else meta.dtype
        outputs.append(TensorRef(name=name, kind="output", dtype=str(dtype).removeprefix("torch."), shape=shape))
    return Signature(inputs=inputs, outputs=outputs, in_place=[len(inputs) - 1])


def _export(lowered: _Lowered, spec: KVCacheSpec, program: Program) -> torch.export.ExportedProgram:
    """The lowered module with dynamic T, S, M, R and B."""
    dims = {name: torch.export.Dim(name, min=1 if name != "B" else 2, max=2**31 - 1) for name in _EXAMPLE}
    args: list[Tensor] = []
    shapes: list[dict[int, Any]] = []
    for name in STEP_INPUTS:
        dtype = tensor_meta(program.node_of("input", name)).dtype
        args.append(torch.zeros([_EXAMPLE[d] for d in _INPUT_DIMS[name]], dtype=dtype))
        shapes.append({i: dims[d] for i, d in enumerate(_INPUT_DIMS[name])})
    size = [spec.layers, 2, _EXAMPLE["B"], spec.kv_heads, spec.block_size, spec.head_dim]
    args.append(torch.empty(size, dtype=getattr(torch, spec.dtype)))
    shapes.append({2: dims["B"]})
    with torch.no_grad():
        return torch.export.export(lowered, tuple(args), dynamic_shapes=(tuple(shapes),), strict=False)


def lower_cpu(program: Program, *, isa: str, out_dir: Path) -> CpuGraph:
    """Compile a fused program for the CPU: out_dir/graph.so.

    isa is `native` or one of cann_runtime.executor.isa.ISAS. Equal programs give equal bytes. Raises RecipeError for an
    unknown isa or a missing compiler, UnsupportedModelError for a structure that the CPU target has no op for.
    """
    isa = resolve_isa(isa)
    kernels = build_kernels(isa)
    if not cpu_ops.is_loaded():
        cpu_ops.load_library(kernels)
    lowered = _Lowered(program)
    spec = _kv_spec(program)
    exported = _export(lowered, spec, program)
    library = compile_graph(exported, isa=isa, out=out_dir / "graph.so")
    return CpuGraph(library, kernels, isa, _signature(program, lowered, spec), spec, lowered.count())
