"""Products of groups of rows with one weight each (an expert's tokens with its matrix).

Letters: M rows, K inner, N columns, E groups. Rows beyond the groups' total are undefined.
Source: ops-transformer gmm/grouped_matmul (README); op-plugin npu_grouped_matmul, npu_grouped_matmul_finalize_routing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from cann_runtime.executor.reference.call import Call
from cann_runtime.executor.reference.ops.quant_matmul import dequantized_product, weight_values
from cann_runtime.executor.reference.ops.registry import OpFunction, implements

OPS: dict[str, OpFunction] = {}

_OUT = {0: torch.float16, 1: torch.bfloat16, 2: torch.int32, 3: torch.float32}
_ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    0: lambda x: x,
    1: torch.relu,
    2: lambda x: functional.gelu(x, approximate="tanh"),
    4: lambda x: x * torch.sigmoid(1.702 * x),
    5: lambda x: x * torch.sigmoid(x),
}


def group_rows(call: Call, groups: Tensor, kind: int, rows: int) -> list[tuple[int, int, int]]:
    """(group, first row, end) from a group list: 0 cumulative ends, 1 counts, 2 pairs (group, count)."""
    if groups.dtype != torch.int64:
        call.refuse(f"group_list is {groups.dtype}, needed: int64")
    if kind == 2:
        pairs = [(int(group), int(count)) for group, count in groups.tolist()]
    else:
        counts = torch.diff(groups, prepend=groups.new_zeros(1)) if kind == 0 else groups
        pairs = list(enumerate(int(count) for count in counts.tolist()))
    spans, row = [], 0
    for group, count in pairs:
        if count < 0 or row + count > rows:
            call.refuse(f"group_list {groups.tolist()} does not fit {rows} rows")
        spans.append((group, row, row + count))
        row += count
    return spans


def _present(call: Call, name: str) -> list[Tensor]:
    """A dynamic input; TorchAir feeds an empty tensor where a list is absent."""
    return [tensor for tensor in call.many(name) if tensor.numel()]


def _of(lists: dict[str, list[Tensor]], group: int, *, stacked: bool) -> dict[str, Tensor | None]:
    """A group's part of each list. stacked: a list of one tensor holds all groups in dimension 0."""
    return {
        name: None if not tensors else tensors[0][group] if stacked and len(tensors) == 1 else tensors[group]
        for name, tensors in lists.items()
    }


@implements(OPS, "GroupedMatmul")
def grouped_matmul(call: Call) -> tuple[Tensor, ...]:
    """Two forms. group_type 0: one x [M, K], whose rows group_list deals out; weights [E, K, N] or E of [K, N]; one
    output (split_item 2 or 3). group_type -1: as many x and weights, and outputs (split_item 0 or 1).

    Floats accumulate in float32, plus bias. int8: see dequantized_product, with scale[e] and per_token_scale. int8
    weights under float x: see weight_values. dtype -1: x's.
    """
    xs, weights = call.many("x"), call.many("weight")
    kind = call.choice("group_type", (-1, 0))
    if call.flag("transpose_x"):
        call.refuse("transpose_x is not supported")
    turned = call.flag("transpose_weight")
    lists = {name: _present(call, name) for name in ("bias", "scale", "offset", "antiquant_scale", "antiquant_offset")}
    if lists["offset"]:
        call.refuse("offsets are not supported")
    groups, pertoken = call.get("group_list"), call.get("per_token_scale")
    groups = None if groups is None or not groups.numel() else groups
    pertoken = None if pertoken is None or not pertoken.numel() else pertoken
    if kind == -1:
        call.choice("split_item", (0, 1))
        call.ignore("group_list_type")
        if groups is not None or len(xs) != len(weights) or pertoken is not None:
            call.refuse("group_type -1 takes as many x as weights, and no group_list")
        return tuple(
            _one(call, x, w.mT if turned else w, _of(lists, g, stacked=False), None)
            for g, (x, w) in enumerate(zip(xs, weights))
        )
    call.choice("split_item", (2, 3))
    if groups is None or len(xs) != 1:
        call.refuse("group_type 0 takes one x and a group_list")
    x = xs[0]
    pieces, end = [], 0
    for group, start, end in group_rows(call, groups, call.choice("group_list_type", (0, 1, 2)), x.shape[0]):
        weight = weights[0][group] if len(weights) == 1 else weights[group]
        token = None if pertoken is None else pertoken[start:end]
        parts = _of(lists, group, stacked=True)
        pieces.append(_one(call, x[start:end], weight.mT if turned else weight, parts, token))
    rest = call.undefined([x.shape[0] - end, pieces[0].shape[1]], pieces[0].dtype)
    return (torch.cat([*pieces, rest]),)


def _one(
    call: Call, x_MK: Tensor, weight_KN: Tensor, parts: dict[str, Tensor | None], pertoken: Tensor | None
) -> Tensor:
    code = call.choice("dtype", (-1, *_OUT))
    out = x_MK.dtype if code == -1 else call.precision.held(_OUT[code])
    activation = _ACTIVATIONS[call.choice("act_type", tuple(_ACTIVATIONS))]
    bias, scale, antiquant = parts["bias"], parts["scale"], parts["antiquant_scale"]
    if x_MK.dtype == torch.int8:
        wide = torch.int32 if out == torch.int32 else call.precision.compute
        y = dequantized_product(call, x_MK, weight_KN, scale=scale, pertoken_M=pertoken, bias=bias, out=wide)
        return y if out == torch.int32 else activation(y).to(out)
    if scale is not None or pertoken is not None:
        call.refuse("scales go with int8 x")
    if (weight_KN.dtype == torch.int8) != (antiquant is not None):
        call.refuse("int8 weights and antiquant_scale come together")
    values = call.wide(weight_KN)
    if antiquant is not None:
        values = weight_values(call, weight_KN, antiquant, parts["antiquant_offset"], x_MK.dtype)
    y = call.wide(x_MK) @ values
    return activation(y if bias is None else y + call.wide(bias)).to(out)


@implements(OPS, "GroupedMatmulFinalizeRouting")
def grouped_matmul_finalize_routing(call: Call) -> Tensor:
    """float32 [output_bs, N]: row r of the grouped int8 product, * pertoken_scale[r] * logit[r], added to row
    row_index[r]; shared_input * shared_input_weight is added from row shared_input_offset on."""
    x, weight, groups = call["x"], call["w"], call["group_list"]
    if x.dtype != torch.int8 or weight.dtype != torch.int8 or call.integer("dtype") != 0:
        call.refuse("only int8 x and w and a float32 result are supported")
    if call.flag("transpose_x"):
        call.refuse("transpose_x is not supported")
    weight = weight.mT if call.flag("transpose_w") else weight
    wide = call.precision.compute
    y = torch.zeros(call.integer("output_bs") or x.shape[0], weight.shape[-1], dtype=wide)
    shared, first = call.get("shared_input"), call.integer("shared_input_offset")
    weight_of_shared = call.number("shared_input_weight")
    if shared is not None:
        y[first : first + len(shared)] += call.wide(shared) * weight_of_shared
    scale, bias, pertoken, logit = (call.get(name) for name in ("scale", "bias", "pertoken_scale", "logit"))
    target = call["row_index"].long()
    for e, start, end in group_rows(call, groups, call.choice("group_list_type", (0, 1)), x.shape[0]):
        rows = dequantized_product(
            call,
            x[start:end],
            weight[e],
            scale=None if scale is None else scale[e],
            pertoken_M=None if pertoken is None else pertoken[start:end],
            bias=None if bias is None else bias[e],
            out=wide,
        )
        if logit is not None:
            rows = rows * call.wide(logit)[start:end, None]
        y.index_add_(0, target[start:end], rows)
    return y
