"""The reference executor gives what eager torch gives, on graphs that TorchAir's own converters make of functions.

That holds both sides of an op: how the converter encodes it (names, attributes, enums, defaults) and what it computes.
Ops that have no torch function of their own are in test_reference_ops.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ge_convert import convert
from torch import Tensor
from torch.nn import functional as F

from cann_export.lower.ascend.toolchain import ensure_toolchain
from cann_runtime.errors import ArtifactError

BF16 = torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def _toolchain() -> None:
    ensure_toolchain(print)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def ints(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(high))


Case = tuple[Callable[..., Any], list[Tensor]]

ARITHMETIC: dict[str, Case] = {
    "add broadcast": (lambda x, y: x + y, [randn(3, 4), randn(4)]),
    "add bf16": (lambda x, y: x + y, [randn(3, 4, dtype=BF16), randn(4, dtype=BF16)]),
    "add bf16 and f32": (lambda x, y: x + y, [randn(3, 4, dtype=BF16), randn(4)]),
    "add a number": (lambda x: x + 2.5, [randn(3, dtype=BF16)]),
    "add with alpha": (lambda x, y: torch.add(x, y, alpha=3), [randn(3), randn(3) + 1]),
    "sub": (lambda x, y: x - y, [randn(3, 4), randn(4)]),
    "number minus tensor": (lambda x: 3 - x, [randn(5)]),
    "number minus bf16": (lambda x: 1 - x, [randn(5, dtype=BF16)]),
    "mul bf16": (lambda x, y: x * y, [randn(3, 4, dtype=BF16), randn(4, dtype=BF16)]),
    "mul int": (lambda x: x * 3, [ints(0, 9, 4)]),
    "mul bf16 and int": (lambda x, y: x * y, [randn(3, dtype=BF16), ints(0, 9, 3)]),
    "true division": (lambda x, y: x / y, [randn(3), randn(3) + 3]),
    "int by int": (lambda x: x / 3, [ints(-9, 9, 6)]),
    "floor division": (lambda x: x // 3, [ints(-9, 9, 6)]),
    "truncating division": (lambda x: torch.div(x, 3, rounding_mode="trunc"), [ints(-9, 9, 6)]),
    "remainder int": (lambda x: x % 3, [ints(-9, 9, 6)]),
    "remainder float": (lambda x: x % 0.7, [randn(5)]),
    "square": (lambda x: x**2, [randn(3, dtype=BF16)]),
    "power of a number": (lambda x: 2.0**x, [randn(3)]),
    "sqrt": (lambda x: x.abs().sqrt(), [randn(3)]),
    "rsqrt bf16": (lambda x: (x.abs() + 1).rsqrt(), [randn(3, dtype=BF16)]),
    "exp bf16": (lambda x: x.exp(), [randn(3, dtype=BF16)]),
    "log": (lambda x: (x.abs() + 1).log(), [randn(3)]),
    "log1p": (lambda x: (x.abs()).log1p(), [randn(3)]),
    "expm1": (lambda x: x.expm1(), [randn(3)]),
    "sin and cos": (lambda x: (x.sin(), x.cos()), [randn(5)]),
    "erf": (lambda x: x.erf(), [randn(3)]),
    "floor, ceil, round": (lambda x: (x.floor(), x.ceil(), x.round()), [randn(9) * 4]),
    "sign": (lambda x: x.sign(), [randn(5)]),
    "reciprocal": (lambda x: x.reciprocal(), [randn(5)]),
    "maximum": (torch.maximum, [randn(3), randn(3) + 0.1]),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), [randn(9)]),
    "clamp one side": (lambda x: x.clamp(min=0), [randn(9)]),
    "addcmul": (lambda x, y, z: torch.addcmul(x, y, z, value=2), [randn(3), randn(3) + 1, randn(3) + 2]),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), [randn(3), randn(3) + 1]),
    "sigmoid bf16": (lambda x: x.sigmoid(), [randn(5, dtype=BF16)]),
    "tanh": (lambda x: x.tanh(), [randn(5)]),
    "silu bf16": (F.silu, [randn(5, dtype=BF16)]),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), [randn(5)]),
    "relu": (F.relu, [randn(5)]),
    "softplus": (F.softplus, [randn(5)]),
}

LOGIC: dict[str, Case] = {
    "comparisons": (lambda x, y: (x > y) & (x <= 1.0) | ~(x != y), [randn(9), randn(9).roll(2)]),
    "where": (lambda x, y: torch.where(x > 0, x, y), [randn(3, 4), randn(4)]),
    "where with a number": (lambda x: torch.where(x > 0, x, 0.0), [randn(3, 4)]),
    "masked_fill": (lambda x: x.masked_fill(x > 0, float("-inf")), [randn(3, 4)]),
    "isinf": (lambda x: torch.isinf(x / 0), [randn(3)]),
    "bitwise": (lambda x, y: (x & y, x | y, ~x), [ints(0, 99, 5), ints(0, 50, 5)]),
}

REDUCTIONS: dict[str, Case] = {
    "sum bf16": (lambda x: x.sum(-1), [randn(3, 40, dtype=BF16)]),
    "sum of all": (lambda x: x.sum(), [randn(3, 4)]),
    "sum of bool": (lambda x: (x > 0).sum(0), [randn(3, 4)]),
    "mean bf16": (lambda x: x.mean(-1, keepdim=True), [randn(3, 40, dtype=BF16)]),
    "mean in float32": (lambda x: x.mean(-1, dtype=torch.float32), [randn(3, 4, dtype=BF16)]),
    "max with places": (lambda x: torch.max(x, 1), [randn(3, 9)]),
    "any and all": (lambda x: ((x > 0).any(), (x > 0).any(1), (x > 0).all(1)), [randn(3, 4)]),
    "argmax": (lambda x: x.argmax(-1), [randn(3, 9)]),
    "argmax of equal values": (lambda x: x.argmax(-1), [torch.tensor([[1.0, 5, 5, 2], [7, 7, 7, 7]])]),
    "argmax keeping the dimension": (lambda x: x.argmax(-1, keepdim=True), [randn(3, 9)]),
    "argmax of all": (lambda x: x.argmax(), [randn(3, 9)]),
    "topk": (lambda x: torch.topk(x, 3), [randn(3, 9)]),
    "topk smallest": (lambda x: torch.topk(x, 2, 0, largest=False), [randn(5, 4)]),
    "sort": (lambda x: torch.sort(x, -1, descending=True), [randn(3, 9)]),
    "argsort": (lambda x: torch.argsort(x, -1), [randn(3, 9)]),
    "cumsum int": (lambda x: x.cumsum(-1), [ints(0, 9, 3, 4)]),
    "cumsum of bool": (lambda x: (x > 0).cumsum(-1), [randn(3, 4)]),
    "softmax bf16": (lambda x: x.softmax(-1), [randn(3, 40, dtype=BF16)]),
    "softmax to float32": (lambda x: torch.softmax(x, -1, dtype=torch.float32), [randn(3, 4, dtype=BF16)]),
    "log_softmax": (lambda x: x.log_softmax(-1), [randn(3, 4)]),
}

SHAPES: dict[str, Case] = {  # negated, so that the result is no view, which TorchAir would leave out of the graph
    "slice": (lambda x: -x[:, 1:3], [randn(3, 4)]),
    "slice with a step": (lambda x: -x[..., 1::2], [randn(2, 3, 6)]),
    "slice from the end": (lambda x: -x[:, -2:], [randn(3, 6)]),
    "select": (lambda x: -x[:, 1], [randn(3, 4)]),
    "new axis": (lambda x: -x[:, None], [randn(3, 4)]),
    "flip": (lambda x: x.flip(1), [randn(3, 4)]),
    "cat": (lambda x, y: torch.cat((x, y), 1), [randn(3, 4), randn(3, 2)]),
    "stack": (lambda x, y: torch.stack((x, y), -1), [randn(3, 4), randn(3, 4)]),
    "split": (lambda x: tuple(-t for t in torch.split(x, [1, 3], 1)), [randn(3, 4)]),
    "uneven chunks": (lambda x: tuple(-t for t in torch.chunk(x, 3, 1)), [randn(3, 7)]),
    "unbind": (lambda x: tuple(-t for t in x.unbind(1)), [randn(3, 4)]),
    "view": (lambda x: -x.view(2, -1), [randn(4, 3)]),
    "permute": (lambda x: -x.permute(2, 0, 1), [randn(2, 3, 4)]),
    "transpose and reshape": (lambda x: x.transpose(0, 1).reshape(-1), [randn(3, 4)]),
    "expand": (lambda x: x.expand(3, 4) + 1, [randn(1, 4)]),
    "repeat": (lambda x: x.repeat(2, 3), [randn(2, 4)]),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), [randn(2, 4)]),
    "squeeze": (lambda x: x.squeeze(1) + 1, [randn(3, 1, 4)]),
    "flatten": (lambda x: -x.flatten(1), [randn(3, 2, 4)]),
    "full": (lambda x: x + torch.full((3, 4), 2.0, device=x.device), [randn(3, 4)]),
    "arange": (lambda x: x + torch.arange(1, 9, 2, device=x.device), [randn(3, 4)]),
    "triu and tril": (lambda x: (x.triu(1), x.tril()), [randn(4, 4)]),
    "zeros_like": (lambda x: torch.zeros_like(x) + x, [randn(3)]),
    "to int": (lambda x: x.to(torch.int32), [randn(9) * 5]),
    "to bool": (lambda x: x.to(torch.bool), [ints(0, 2, 9)]),
    "bytes of the same size": (lambda x: -x.view(torch.int32), [randn(2, 4)]),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 1), value=3.0), [randn(2, 3, 4)]),
    "pad that crops": (lambda x: F.pad(x, (-1, 1)), [randn(2, 3, 4)]),
    "replication pad": (lambda x: F.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate"), [randn(1, 2, 3, 4, 5)]),
}

INDEXING: dict[str, Case] = {
    "embedding": (lambda i, w: F.embedding(i, w), [ints(0, 9, 2, 3), randn(9, 4)]),
    "gather": (lambda x, i: x.gather(1, i), [randn(3, 4), ints(0, 4, 3, 2)]),
    "index_select": (lambda x, i: x.index_select(1, i), [randn(3, 4), ints(0, 4, 2)]),
    "rows": (lambda x, i: x[i], [randn(5, 4), ints(0, 5, 3)]),
    "columns": (lambda x, i: x[:, i], [randn(5, 4), ints(0, 4, 3)]),
    "pairs": (lambda x, i, j: x[i, j], [randn(5, 4), ints(0, 5, 3), ints(0, 4, 3)]),
    "split indices": (lambda x, i, j: x[i, :, j], [randn(5, 4, 6), ints(0, 5, 3), ints(0, 6, 3)]),
    "scatter": (lambda x, i, y: x.scatter(1, i, y), [randn(3, 4), torch.tensor([[0, 2], [1, 3], [2, 0]]), randn(3, 2)]),
    "scatter a number": (lambda x, i: x.scatter(1, i, 1.0), [randn(3, 4), torch.tensor([[0, 2], [1, 3], [2, 0]])]),
    "scatter_add": (lambda x, i, y: x.scatter_add(1, i, y), [randn(3, 4), ints(0, 4, 3, 2), randn(3, 2)]),
    "one_hot": (lambda i: F.one_hot(i, 5), [ints(0, 5, 3)]),
}

PRODUCTS: dict[str, Case] = {
    "mm": (lambda x, y: x @ y, [randn(3, 4), randn(4, 5)]),
    "mm bf16": (lambda x, y: x @ y, [randn(3, 64, dtype=BF16), randn(64, 5, dtype=BF16)]),
    "linear": (F.linear, [randn(2, 3, 4), randn(5, 4), randn(5)]),
    "linear bf16": (F.linear, [randn(2, 3, 64, dtype=BF16), randn(5, 64, dtype=BF16), randn(5, dtype=BF16)]),
    "bmm": (lambda x, y: torch.bmm(x, y.transpose(1, 2)), [randn(2, 3, 4), randn(2, 5, 4)]),
    "matmul of four dimensions": (lambda x, y: x @ y, [randn(2, 2, 3, 4), randn(2, 2, 4, 5)]),
    "matmul, one side batched": (lambda x, y: x @ y, [randn(2, 3, 4), randn(4, 5)]),
    "einsum": (lambda x, y: torch.einsum("bhd,hdk->bhk", x, y), [randn(2, 3, 4), randn(3, 4, 5)]),
    "addmm": (torch.addmm, [randn(5), randn(3, 4), randn(4, 5)]),
    "sdpa": (F.scaled_dot_product_attention, [randn(1, 2, 3, 8), randn(1, 2, 5, 8), randn(1, 2, 5, 8) + 1]),
    "sdpa with a mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        [randn(1, 2, 3, 8), randn(1, 2, 3, 8), randn(1, 2, 3, 8) + 1, torch.eye(3) > 0],
    ),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), [randn(1, 4, 8), randn(6, 4, 3)]),
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
        [randn(1, 4, 8, 8), randn(6, 4, 3, 3), randn(6)],
    ),
    "conv2d in groups": (lambda x, w: F.conv2d(x, w, groups=2), [randn(1, 4, 8, 8), randn(6, 2, 3, 3)]),
    "conv3d": (
        lambda x, w, b: F.conv3d(x, w, b, stride=(1, 2, 2), padding=(1, 1, 1)),
        [randn(1, 4, 3, 8, 8), randn(6, 4, 3, 3, 3), randn(6)],
    ),
    "layer_norm bf16": (
        lambda x, w, b: F.layer_norm(x, (8,), w, b),
        [randn(3, 8, dtype=BF16), randn(8, dtype=BF16), randn(8, dtype=BF16)],
    ),
    "layer_norm without weights": (lambda x: F.layer_norm(x, (8,), eps=1e-6), [randn(3, 8)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [randn(2, 4, 3, 3), randn(4), randn(4) + 1]),
}


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


@pytest.mark.parametrize("group", [ARITHMETIC, LOGIC, REDUCTIONS, SHAPES, INDEXING, PRODUCTS])
def test_graphs_of_torch_functions_give_eager_results(group: dict[str, Case]) -> None:
    for name, (function, arguments) in group.items():
        wanted = _tuple(function(*arguments))
        graph = convert(lambda *tensors, f=function: _tuple(f(*tensors)), arguments)
        for got, want in zip(graph.run(arguments), wanted, strict=True):
            tolerance = {"rtol": 1.6e-2, "atol": 1e-3} if want.dtype == BF16 else {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(got, want, msg=lambda m, name=name: f"{name}: {m}", **tolerance)


def test_exact_gelu_is_lowered_to_the_tanh_formula() -> None:
    x = randn(50) * 2
    (got,) = convert(lambda x: (F.gelu(x),), [x]).run([x])
    torch.testing.assert_close(got, F.gelu(x, approximate="tanh"))
    assert float((got - F.gelu(x)).abs().max()) > 1e-4


def test_exact_mode_does_not_round_to_the_graphs_dtype() -> None:
    x, y = randn(4, 64, dtype=BF16), randn(64, 64, dtype=BF16)
    graph = convert(lambda x, y: (torch.softmax(x @ y, -1) @ y,), [x, y])
    want = torch.softmax(x.double() @ y.double(), -1) @ y.double()
    modes = ("exact64", "exact", "npu")
    errors = {mode: float((graph.run([x, y], mode)[0].double() - want).abs().max()) for mode in modes}
    assert errors["exact64"] < 1e-12 < errors["exact"] < 1e-5 < errors["npu"] < 0.1


def test_an_unknown_op_is_refused_with_its_source() -> None:
    graph = convert(lambda x: (F.avg_pool2d(x, 2),), [randn(1, 2, 4, 4)])
    with pytest.raises(ArtifactError, match=r"AvgPoolV2.*avg_pool2d.*does not know"):
        graph.run([randn(1, 2, 4, 4)])
