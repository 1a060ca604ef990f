"""Writes a fused Program as an ONNX model: standard ops, fused ops as functions of our own, KV caches in and out.

Weights are external data: the model names the packed safetensors file of a rank (`WEIGHTS_FILE`, the layout of
cann_runtime.artifact.weights.pack_weights) and each parameter's place in it, so one model serves every checkpoint of
the architecture and every rank. `onnx_folder.py` lays models and weights out so that other tools can open them.
"""

from __future__ import annotations

import math
import operator
import re
from typing import Any

import onnx
import torch
from onnx import helper
from torch import fx

from cann_export.lower.onnx_functions import ATB, COLLECTIVES, FUNCTIONS, IR_VERSION, OPSET
from cann_export.lower.onnx_nodes import ELEMENT_TYPES, RULES, refusal
from cann_export.program import Program, Slot, tensor_meta
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.artifact.weights import packed_layout
from cann_runtime.errors import UnsupportedModelError

WEIGHTS_FILE = "weights.safetensors"
_DIMENSIONS = {
    "input_ids": "T",
    "position_ids": "T",
    "slot_mapping": "T",
    "block_table": "SM",
    "query_lens": "S",
    "kv_lens": "S",
    "logits_rows": "R",
}
"""Names of the dynamic dimensions of the step inputs: T tokens, S sequences, M block-table columns, R logits rows; a KV
cache has B blocks."""


def lower_onnx(program: Program, plan: WeightPlan) -> bytes:
    """The Program as a serialized ONNX ModelProto; the same Program and plan give the same bytes.

    plan: the plan of all parameters (its layout says where each lies in WEIGHTS_FILE). Inputs: the step inputs, then
    the KV caches [B, P, K, D]; outputs: logits [R, V], then the caches after the step, named `<cache>_out`. Raises
    UnsupportedModelError that lists every op without an ONNX form.
    """
    _refuse_unknown(program)
    writer = _Writer(program)
    for node in program.gm.graph.nodes:
        if node.op == "call_function":
            writer.add(node)
    model = helper.make_model(
        writer.graph(plan),
        functions=[FUNCTIONS[name]() for name in sorted(writer.functions)],
        opset_imports=[helper.make_opsetid(d, v) for d, v in (("", OPSET), (ATB, 1), (COLLECTIVES, 1))],
        ir_version=IR_VERSION,
        producer_name="cann-export",
    )
    return model.SerializeToString(deterministic=True)


def _refuse_unknown(program: Program) -> None:
    found: dict[str, dict[str, None]] = {}
    for node in program.gm.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem and (reason := refusal(node)):
            found.setdefault(reason, {}).setdefault(str(node.meta.get("source") or node.name))
    if found:
        pieces = [f"{reason} ({', '.join(list(places)[:3])})" for reason, places in sorted(found.items())]
        raise UnsupportedModelError(f"{len(found)} operators cannot be written as ONNX: {'; '.join(pieces)}")


class _Writer:
    """The graph under construction; see onnx_nodes.Emitter for what its methods promise."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.query_len = program.bucket.query_len
        self.functions: set[str] = set()
        self._nodes: list[onnx.NodeProto] = []
        self._values: dict[fx.Node, list[str]] = {}
        self._constants: dict[str, onnx.TensorProto] = {}
        self._shapes: dict[str, onnx.ValueInfoProto] = {}
        self._used: dict[str, int] = {}
        self._symbols: dict[str, str] = {}
        for node, slot in zip(program.placeholders(), program.slots, strict=True):
            self._values[node] = [slot.name]
            self._used[slot.name] = 1
            letters = _DIMENSIONS.get(slot.name, "B") if slot.kind != "param" else ""
            for size, letter in zip(tensor_meta(node).shape, letters, strict=False):
                if not isinstance(size, int):
                    self._symbols.setdefault(str(size), letter)

    def name(self, arg: Any) -> str:
        assert isinstance(arg, fx.Node), arg
        (value,) = self._values[arg]
        return value

    def constant(self, values: list[Any], shape: list[int], dtype: torch.dtype) -> str:
        name = f"{'x'.join(map(str, values))}:{str(dtype).removeprefix('torch.')}" + ("" if shape else ":scalar")
        if name not in self._constants:
            self._constants[name] = helper.make_tensor(name, ELEMENT_TYPES[dtype], shape, values)
        return name

    def op(self, node: fx.Node, kind: str, inputs: list[str], outputs: int = 1, **attributes: Any) -> list[str]:
        if attributes.get("domain") == ATB:
            self.functions.add(kind)
        name = self._unique(f"{node.meta.get('source') or 'step'}/{kind}")
        names = [name] if outputs == 1 else [f"{name}:{i}" for i in range(outputs)]
        self._nodes.append(helper.make_node(kind, inputs, names, name=name, **attributes))
        return names

    def replace(self, cache: fx.Node, value: str) -> None:
        self._values[cache] = [value]

    def add(self, node: fx.Node) -> None:
        """The ONNX nodes of one FX call."""
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            self._values[node] = [self._values[source][index]]
            return
        self._values[node] = RULES[node.target](self, node)
        val: Any = node.meta.get("val")
        outputs = list(val) if isinstance(val, (tuple, list)) else [val]
        for name, output in zip(self._values[node], outputs, strict=False):
            self._shapes[name] = self._info(name, output)

    def graph(self, plan: WeightPlan) -> onnx.GraphProto:
        """The finished graph; parameters are initializers whose data lies in WEIGHTS_FILE."""
        pairs = list(zip(self.program.placeholders(), self.program.slots, strict=True))
        inputs = [self._info(s.name, tensor_meta(n), s) for n, s in pairs if s.kind != "param"]
        outputs = []
        result = next(n for n in reversed(self.program.gm.graph.nodes) if n.op == "output").args[0][0]
        # Names of outputs are part of the interface, so they do not depend on what made them.
        made: list[tuple[str, str, torch.Tensor, Slot | None]] = [
            ("logits", self.name(result), tensor_meta(result), None)
        ]
        made += [(f"{s.name}_out", self.name(n), tensor_meta(n), s) for n, s in pairs if s.kind == "kv"]
        for name, value, val, slot in made:
            self._nodes.append(helper.make_node("Identity", [value], [name], name=name))
            outputs.append(self._info(name, val, slot))
        layout = packed_layout(plan)
        initializers = [self._constants[name] for name in sorted(self._constants)]
        for node, slot in sorted(pairs, key=lambda pair: pair[1].name):
            if slot.kind == "param":
                initializers.append(_external(slot.name, tensor_meta(node), layout.places[slot.name]))
        shapes = [info for name, info in self._shapes.items() if name not in {s.name for _, s in pairs}]
        title = f"{self.program.phase}_{'dynamic' if self.program.dynamic else self.program.bucket.tokens}"
        return helper.make_graph(self._nodes, title, inputs, outputs, initializers, value_info=shapes)

    def _unique(self, name: str) -> str:
        count = self._used[name] = self._used.get(name, 0) + 1
        return name if count == 1 else f"{name}_{count}"

    def _info(self, name: str, val: torch.Tensor, slot: Slot | None = None) -> onnx.ValueInfoProto:
        shape: list[str | int | None] = [s if isinstance(s, int) else self._dimension(str(s)) for s in val.shape]
        if slot is not None and slot.kind == "kv":
            shape[0] = "B"  # the number of blocks is bound at load, in static graphs too
        return helper.make_tensor_value_info(name, ELEMENT_TYPES[val.dtype], shape)

    def _dimension(self, symbol: str) -> str | int | None:
        if symbol.isdecimal():
            return int(symbol)
        known = re.sub(r"[a-z]\d+", lambda m: self._symbols.get(m[0], "?"), symbol)
        return None if "?" in known else known


def _external(name: str, val: torch.Tensor, place: tuple[int, int]) -> onnx.TensorProto:
    offset, length = place
    assert length == math.prod(val.shape) * val.dtype.itemsize, name
    tensor = onnx.TensorProto(
        name=name,
        data_type=ELEMENT_TYPES[val.dtype],
        dims=list(val.shape),
        data_location=onnx.TensorProto.EXTERNAL,
    )
    for key, value in (("location", WEIGHTS_FILE), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    return tensor
