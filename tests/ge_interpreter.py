"""Runs a GE graph on the CPU, all ranks in lockstep, to show that a lowered graph computes what its source does.

Only the operators of a dense decoder step, as their op documents define them (op-plugin and ops-transformer pages of
the same names); attention is torch's own scaled_dot_product_attention over the gathered blocks. Unknown operators fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

PROTO_DTYPES = {1: torch.float32, 2: torch.float16, 7: torch.int32, 8: torch.int64, 11: torch.bool, 27: torch.bfloat16}
GE_DTYPES = {0: torch.float32, 1: torch.float16, 3: torch.int32, 9: torch.int64, 12: torch.bool, 27: torch.bfloat16}

Inputs = dict[str, Tensor]


def run_graph(graph: Any, ranks: list[list[Tensor]]) -> list[Tensor]:
    """The graph's single output on each rank. ranks: inputs in Data index order; caches are written in place."""
    values: list[dict[str, tuple[Tensor, ...]]] = [{} for _ in ranks]
    for op in graph.op:
        inputs = [_inputs_of(op, known) for known in values]
        if op.type == "NetOutput":
            return [next(iter(i.values())) for i in inputs]
        if op.type == "Data":
            results = [(own[op.attr["index"].i],) for own in ranks]
        elif op.type == "HcomAllReduce":
            assert op.attr["reduction"].s == b"sum"
            results = [(torch.stack([i["x"] for i in inputs]).sum(0),)] * len(ranks)
        elif op.type == "HcomAllGather":
            assert op.attr["rank_size"].i == len(ranks)
            results = [(torch.cat([i["x"] for i in inputs]),)] * len(ranks)
        else:
            results = [OPS[op.type](op, i) for i in inputs]
        for known, result in zip(values, results, strict=True):
            known[op.name] = result
    raise AssertionError("the graph has no NetOutput")


def _inputs_of(op: Any, known: dict[str, tuple[Tensor, ...]]) -> Inputs:
    result = {}
    for edge, desc in zip(op.input, op.input_desc, strict=op.type != "Data"):
        if edge:
            name, port = edge.rsplit(":", 1)
            result[desc.name] = known[name][int(port)]
    return result


def _const(op: Any, _: Inputs) -> tuple[Tensor, ...]:
    value = op.attr["value"].t
    flat = torch.frombuffer(bytearray(value.data), dtype=PROTO_DTYPES[value.desc.dtype])
    return (flat.reshape(list(value.desc.shape.dim)),)


def _matmul(op: Any, i: Inputs) -> tuple[Tensor, ...]:
    assert not op.attr["transpose_x1"].b
    assert op.attr["transpose_x2"].b
    return (functional.linear(i["x1"], i["x2"], i.get("bias")),)


def _rms_norm(op: Any, i: Inputs) -> tuple[Tensor, ...]:
    return functional.rms_norm(i["x"], i["gamma"].shape, i["gamma"], op.attr["epsilon"].f), i["x"]


def _add_rms_norm(op: Any, i: Inputs) -> tuple[Tensor, ...]:
    total = i["x1"] + i["x2"]
    return functional.rms_norm(total, i["gamma"].shape, i["gamma"], op.attr["epsilon"].f), total, total


def _swiglu(op: Any, i: Inputs) -> tuple[Tensor, ...]:
    gate, up = i["x"].chunk(2, op.attr["dim"].i)
    return (functional.silu(gate) * up,)


def _rope(op: Any, i: Inputs) -> tuple[Tensor, ...]:
    assert op.attr["layout"].i == 4  # TND
    for x in (i["query"], i["key"]):  # in place, as the op is
        half = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)
        x.copy_(x * i["cos"] + half * i["sin"])
    return i["query"], i["key"]


def _scatter_cache(op: Any, i: Inputs) -> tuple[Tensor, ...]:
    assert "cache_mode" not in op.attr  # the prototype's default, "Norm"
    for rows, cache in (("key", "key_cache"), ("value", "value_cache")):
        for row, slot in zip(i[rows], i["slot_mapping"].tolist(), strict=True):
            i[cache][slot // i[cache].shape[1], slot % i[cache].shape[1]] = row
    return i["key_cache"], i["value_cache"]


def _attention(op: Any, i: Inputs) -> tuple[Tensor, ...]:
    """Paged attention in layouts TND and BSH, sparse modes 0 and 3 (bottom-right causal)."""
    heads, kv_heads = op.attr["num_heads"].i, op.attr["num_key_value_heads"].i
    causal, flat = op.attr["sparse_mode"].i == 3, op.attr["input_layout"].s == b"TND"
    query, table, kv_lens = i["query"], i["block_table"], i["actual_seq_lengths_kv"]
    assert (table.dtype, kv_lens.dtype) == (torch.int32, torch.int64)
    assert i["key0"].shape[1] == op.attr["block_size"].i
    if causal:
        assert torch.equal(i["atten_mask"], torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    if flat:
        ends = i["actual_seq_lengths"].tolist()
        assert ends[-1] == query.shape[0]
        rows = [query[a:b] for a, b in zip([0, *ends], ends)]
    else:
        lens = i["actual_seq_lengths"].tolist() if "actual_seq_lengths" in i else [query.shape[1]] * query.shape[0]
        rows = [q[:n].unflatten(-1, (heads, -1)) for q, n in zip(query, lens, strict=True)]
    out = torch.zeros_like(query if flat else query.unflatten(-1, (heads, -1)))
    start = 0
    for s, q in enumerate(rows):
        n, blocks = int(kv_lens[s]), table[s].long()
        k, v = (
            i[c][blocks].flatten(0, 1)[:n].unflatten(-1, (kv_heads, -1)).transpose(0, 1) for c in ("key0", "value0")
        )
        mask = torch.ones(q.shape[0], n, dtype=torch.bool).tril(n - q.shape[0]) if causal else None
        scale = op.attr["scale"].f
        o = functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, mask, scale=scale, enable_gqa=True)
        target = out[start : start + q.shape[0]] if flat else out[s, : q.shape[0]]
        target.copy_(o.transpose(0, 1))
        start += q.shape[0]
    return (out if flat else out.flatten(2), out.new_empty(0))


def _range(_: Any, i: Inputs) -> tuple[Tensor, ...]:
    return (torch.arange(*(i[k].item() for k in ("start", "limit", "delta")), dtype=i["start"].dtype),)


def _two(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Inputs], tuple[Tensor, ...]]:
    return lambda _, i: (function(i["x1"], i["x2"]),)


OPS: dict[str, Callable[[Any, Inputs], tuple[Tensor, ...]]] = {
    "Const": _const,
    "MatMul": _matmul,
    "RmsNorm": _rms_norm,
    "AddRmsNorm": _add_rms_norm,
    "SwiGlu": _swiglu,
    "ApplyRotaryPosEmb": _rope,
    "ScatterPaKvCache": _scatter_cache,
    "FusedInferAttentionScore": _attention,
    "Range": _range,
    "Reshape": lambda _, i: (i["x"].reshape(i["shape"].tolist()),),
    "Transpose": lambda _, i: (i["x"].permute(i["perm"].tolist()),),
    "SplitV": lambda _, i: tuple(
        t.clone() for t in i["x"].split(i["size_splits"].tolist(), int(i["split_dim"].reshape(-1)[0]))
    ),
    "GatherV2": lambda _, i: (torch.index_select(i["x"], int(i["axis"].reshape(-1)[0]), i["indices"]),),
    "Cast": lambda op, i: (i["x"].to(GE_DTYPES[op.attr["dst_type"].i]),),
    "ZerosLike": lambda _, i: (torch.zeros_like(i["x"]),),
    "SelectV2": lambda _, i: (torch.where(i["condition"], i["then"], i["else"]),),
    "Sub": _two(torch.sub),
    "Mul": _two(torch.mul),
    "Greater": _two(torch.gt),
    "GreaterEqual": _two(torch.ge),
    "Less": _two(torch.lt),
    "LogicalAnd": _two(torch.logical_and),
}
