"""The fused ops as ONNX functions: each body says in standard ONNX ops what the `atb::` op of the same name means.

A runtime that knows the domain may put its own kernels in their place; any other inlines the bodies. Written against
the definitions in cann_runtime.ops.atb; which functions a graph needs is `onnx_nodes.py`'s business.

Shape letters: T tokens, S sequences, Q rows and n keys of one sequence, N query heads, K kv heads, G = N / K,
D head_dim, B blocks, P block_size, M block-table columns, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
from onnx import TensorProto, helper

OPSET = 28
"""The standard opset of all graphs and functions: the newest that onnx 1.23 and onnxruntime 1.32 both know."""
IR_VERSION = 14
ATB = "ai.cann_export.atb"
COLLECTIVES = "ai.cann_export.c10d"

MASKED = float.fromhex("-0x1.fffffep+127")  # lowest float32: unlike -inf, a wholly masked row gives no NaN


class _Body:
    """Nodes of one function (or of the body of a loop in it); values are named by what made them."""

    def __init__(self, prefix: str = "") -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.prefix = prefix

    def add(self, op: str, *inputs: str, outputs: list[str] | None = None, **attributes: Any) -> str:
        """One node; gives the name of its first output."""
        outputs = outputs or [f"{self.prefix}{op}_{len(self.nodes)}"]
        self.nodes.append(helper.make_node(op, list(inputs), outputs, name=outputs[0], **attributes))
        return outputs[0]

    def attribute(self, name: str, kind: onnx.AttributeProto.AttributeType, field: str) -> str:
        """The function's attribute `name` as a scalar tensor."""
        out = self.add("Constant")
        self.nodes[-1].attribute.append(onnx.AttributeProto(name=field, type=kind, ref_attr_name=name))
        return out

    def ints(self, *values: int) -> str:
        return self.add("Constant", value_ints=list(values))

    def int(self, value: int) -> str:
        return self.add("Constant", value_int=value)

    def float(self, value: float) -> str:
        return self.add("Constant", value_float=value)


def _function(
    name: str, inputs: list[str], outputs: list[str], body: _Body, attributes: list[str] | None = None
) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_function(ATB, name, inputs, outputs, body.nodes, opsets, attributes or [])


def _linear(name: str, has_bias: bool) -> onnx.FunctionProto:
    body = _Body()
    turned = body.add("Transpose", "weight", perm=[1, 0])
    if has_bias:
        product = body.add("MatMul", "x", turned)
        body.add("Add", product, "bias", outputs=["y"])
        return _function(name, ["x", "weight", "bias"], ["y"], body)
    body.add("MatMul", "x", turned, outputs=["y"])
    return _function(name, ["x", "weight"], ["y"], body)


def _add_norm(body: _Body, x: str, y: str) -> None:
    """Float32 inside, rounded to x's dtype before the weight."""
    x32 = body.add("Cast", x, to=TensorProto.FLOAT)
    square = body.add("Mul", x32, x32)
    mean = body.add("ReduceMean", square, body.ints(-1), keepdims=1)
    eps = body.attribute("eps", onnx.AttributeProto.FLOAT, "value_float")
    root = body.add("Sqrt", body.add("Add", mean, eps))
    normed = body.add("CastLike", body.add("Mul", x32, body.add("Reciprocal", root)), x)
    body.add("Mul", "weight", normed, outputs=[y])


def rms_norm() -> onnx.FunctionProto:
    """x [.., H], weight [H] -> [.., H]."""
    body = _Body()
    _add_norm(body, "x", "y")
    return _function("rms_norm", ["x", "weight"], ["y"], body, ["eps"])


def add_rms_norm() -> onnx.FunctionProto:
    """x, residual [.., H], weight [H] -> (norm of the sum, the sum)."""
    body = _Body()
    body.add("Add", "x", "residual", outputs=["total"])
    _add_norm(body, "total", "y")
    return _function("add_rms_norm", ["x", "residual", "weight"], ["y", "total"], body, ["eps"])


def rotary() -> onnx.FunctionProto:
    """q [T, N, D], k [T, K, D], cos and sin [T, D] -> rotated q and k, half (GPT-NeoX) mode."""
    body = _Body()
    axis = body.ints(1)
    cos, sin = body.add("Unsqueeze", "cos", axis), body.add("Unsqueeze", "sin", axis)
    for x in ("q", "k"):
        body.add("Split", x, outputs=[f"{x}_low", f"{x}_high"], axis=-1, num_outputs=2)
        turned = body.add("Concat", body.add("Neg", f"{x}_high"), f"{x}_low", axis=-1)
        body.add("Add", body.add("Mul", x, cos), body.add("Mul", turned, sin), outputs=[f"{x}_out"])
    return _function("rotary", ["q", "k", "cos", "sin"], ["q_out", "k_out"], body)


def swiglu() -> onnx.FunctionProto:
    """[.., 2 I] -> [.., I]: silu(first half) * second half."""
    body = _Body()
    body.add("Split", "x", outputs=["gate", "up"], axis=-1, num_outputs=2)
    silu = body.add("Mul", "gate", body.add("Sigmoid", "gate"))
    body.add("Mul", silu, "up", outputs=["y"])
    return _function("swiglu", ["x"], ["y"], body)


def reshape_and_cache() -> onnx.FunctionProto:
    """k, v [T, K, D], caches [B, P, K, D], slots [T] -> the caches with row t at slot block * P + offset.

    The `atb::` op writes in place; ONNX values never change, so the caches after the write are outputs.
    """
    body = _Body()
    slots = body.add("Unsqueeze", body.add("Cast", "slot_mapping", to=TensorProto.INT64), body.ints(1))
    for x in ("k", "v"):
        cache = f"{x}_cache"
        shape = body.add("Shape", cache)
        per_slot = body.add("Concat", body.ints(-1), body.add("Shape", cache, start=2), axis=0)
        flat = body.add("Reshape", cache, per_slot)
        written = body.add("ScatterND", flat, slots, body.add("CastLike", x, cache))
        body.add("Reshape", written, shape, outputs=[f"{cache}_out"])
    inputs = ["k", "v", "k_cache", "v_cache", "slot_mapping"]
    return _function("reshape_and_cache", inputs, ["k_cache_out", "v_cache_out"], body)


def _attention_loop(rectangular: bool) -> onnx.GraphProto:
    """One sequence: its rows of q against its own keys; the rows of earlier sequences are carried in `done`.

    Reads the function's q32 [T, K, G, D], caches, block_table, query_lens, kv_lens, scale. A sequence at a time:
    prefill chunks and decodes in one step differ in length, and memory is then that of the longest sequence only.
    """
    body = _Body("seq_")
    zero, one = body.ints(0), body.ints(1)
    at = body.add("Unsqueeze", "index", zero)
    length = body.add("Gather", "query_lens", at, axis=0)  # [1]
    keys = body.add("Gather", "kv_lens", at, axis=0)
    start = body.add("Shape", "done", start=0, end=1)
    if rectangular:
        rows = body.add("Unsqueeze", "rows_each", zero)
        end = body.add("Add", start, rows)
        first = body.add("Sub", keys, length)  # the position of row 0; padding rows follow the last live one
    else:
        end = length
        rows = body.add("Sub", end, start)
        first = body.add("Sub", keys, rows)
    q_QKGD = body.add("Slice", "q32", start, end, zero)
    q_KGQD = body.add("Transpose", q_QKGD, perm=[1, 2, 0, 3])

    blocks = body.add("Squeeze", body.add("Gather", "table", at, axis=0), zero)
    stop = body.add("Max", keys, one)

    def history(cache: str) -> str:
        pages = body.add("Gather", cache, blocks, axis=0)  # [M, P, K, D]
        shape = body.add("Concat", body.ints(-1), body.add("Shape", cache, start=2), axis=0)
        rows_nKD = body.add("Slice", body.add("Reshape", pages, shape), zero, stop, zero)
        x32 = body.add("Cast", rows_nKD, to=TensorProto.FLOAT)
        return body.add("Unsqueeze", body.add("Transpose", x32, perm=[1, 0, 2]), one)  # [K, 1, n, D]

    k_K1nD, v_K1nD = history("k_cache"), history("v_cache")
    product = body.add("MatMul", q_KGQD, body.add("Transpose", k_K1nD, perm=[0, 1, 3, 2]))
    scores_KGQn = body.add("Mul", product, "scale_value")
    row = body.add("Range", body.int(0), body.add("Squeeze", rows), body.int(1))
    last_Q1 = body.add("Unsqueeze", body.add("Add", row, first), one)
    key_n = body.add("Range", body.int(0), body.add("Squeeze", stop), body.int(1))
    seen = body.add("And", body.add("LessOrEqual", key_n, last_Q1), body.add("Less", key_n, keys))
    masked = body.add("Where", seen, scores_KGQn, body.float(MASKED))
    # A row that sees no key at all (padding) gives zeros.
    probs = body.add("Where", seen, body.add("Softmax", masked, axis=-1), body.float(0.0))
    out_QKGD = body.add("Transpose", body.add("MatMul", probs, v_K1nD), perm=[2, 0, 1, 3])
    body.add("Concat", "done", out_QKGD, outputs=["done_next"], axis=0)
    body.add("Identity", "going", outputs=["going_next"])
    make = helper.make_tensor_value_info
    carried: list[str | int | None] = [None, None, None, None]
    return helper.make_graph(
        body.nodes,
        "one_sequence",
        [
            make("index", TensorProto.INT64, []),
            make("going", TensorProto.BOOL, []),
            make("done", TensorProto.FLOAT, carried),
        ],
        [make("going_next", TensorProto.BOOL, []), make("done_next", TensorProto.FLOAT, carried)],
    )


def _paged_attention(name: str, rectangular: bool) -> onnx.FunctionProto:
    body = _Body()
    shape_TND = body.add("Shape", "q")
    shape_D = body.add("Shape", "q", start=2)
    kv_heads = body.add("Shape", "k_cache", start=2, end=3)
    split = body.add("Concat", body.ints(0), kv_heads, body.ints(-1), shape_D, axis=0)
    q_TKGD = body.add("Reshape", "q", split)
    body.add("Cast", q_TKGD, outputs=["q32"], to=TensorProto.FLOAT)
    body.add("Cast", "block_table", outputs=["table"], to=TensorProto.INT64)
    scale = body.attribute("scale", onnx.AttributeProto.FLOAT, "value_float")
    body.add("Identity", scale, outputs=["scale_value"])
    if rectangular:
        each = body.attribute("query_len", onnx.AttributeProto.INT, "value_int")
        body.add("Identity", each, outputs=["rows_each"])
    none = body.add("Slice", "q32", body.ints(0), body.ints(0), body.ints(0))
    count = body.add("Squeeze", body.add("Shape", "query_lens"))
    going = body.add("Cast", body.int(1), to=TensorProto.BOOL)
    out_TKGD = body.add("Loop", count, going, none, body=_attention_loop(rectangular))
    body.add("CastLike", body.add("Reshape", out_TKGD, shape_TND), "q", outputs=["y"])
    inputs = ["q", "k_cache", "v_cache", "block_table", "query_lens", "kv_lens"]
    attributes = ["scale", "query_len"] if rectangular else ["scale"]
    return _function(name, inputs, ["y"], body, attributes)


FUNCTIONS: dict[str, Callable[[], onnx.FunctionProto]] = {
    "linear": lambda: _linear("linear", has_bias=False),
    "linear_bias": lambda: _linear("linear_bias", has_bias=True),
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "rotary": rotary,
    "swiglu": swiglu,
    "reshape_and_cache": reshape_and_cache,
    # query_lens cumulative, rows of all sequences packed.
    "paged_attention": lambda: _paged_attention("paged_attention", rectangular=False),
    # query_lens per sequence, `query_len` rows for each, its live rows first.
    "paged_attention_rectangular": lambda: _paged_attention("paged_attention_rectangular", rectangular=True),
}
"""Name of each function in the domain ATB -> what makes it."""
