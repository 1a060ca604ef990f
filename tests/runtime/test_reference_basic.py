"""Basic ops of the reference executor by themselves against torch.

Here are those that TorchAir's converters emit rarely or not at all, edge cases of attributes, and properties over many
shapes and dtypes; the others are in test_reference_torchair.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_op import run_op
from torch import Tensor
from torch.nn import functional as F

from cann_runtime.errors import ArtifactError

BF16 = torch.bfloat16


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


X, Y = randn(3, 4), randn(3, 4, seed=1)
CUBE = randn(2, 3, 4)
INTS, MORE = torch.tensor([7, -7, 9, -9]), torch.tensor([2, 2, -4, -4])

Case = tuple[str, dict[str, Tensor], dict[str, Any], Tensor | tuple[Tensor, ...]]

CASES: list[Case] = [
    ("AddV2", {"x1": X, "x2": Y}, {}, X + Y),
    ("Muls", {"x": X}, {"value": 2.5}, X * 2.5),
    ("Adds", {"x": X}, {"value": 2.5}, X + 2.5),
    ("Axpy", {"x1": X, "x2": Y}, {"alpha": 3.0}, X + 3 * Y),
    ("Square", {"x": X}, {}, X * X),
    ("Minimum", {"x1": X, "x2": Y}, {}, torch.minimum(X, Y)),
    ("Div", {"x1": X, "x2": Y}, {}, X / Y),
    ("Div", {"x1": INTS, "x2": MORE}, {}, torch.tensor([3, -3, -2, 2])),
    ("Mod", {"x1": INTS, "x2": MORE}, {}, torch.fmod(INTS, MORE)),
    ("FloorMod", {"x1": INTS, "x2": torch.tensor([2, 0, -4, 0])}, {}, torch.tensor([1, -1, -3, -1])),
    ("Exp", {"x": X}, {"base": 2.0, "scale": 3.0, "shift": 1.0}, torch.exp2(3 * X + 1)),
    ("Log", {"x": X.abs() + 1}, {"base": 10.0}, torch.log10(X.abs() + 1)),
    ("Softplus", {"x": 30 * X}, {}, F.softplus(30 * X, threshold=1e9)),
    ("FastGelu", {"x": X}, {}, X * torch.sigmoid(1.702 * X)),
    ("GeluV2", {"x": X}, {}, F.gelu(X)),
    ("GeluV2", {"x": X}, {"approximate": "tanh"}, F.gelu(X, approximate="tanh")),
    ("Swish", {"x": X}, {"scale": 1.5}, X * torch.sigmoid(1.5 * X)),
    ("Less", {"x1": X, "x2": Y}, {}, X < Y),
    ("GreaterEqual", {"x1": INTS, "x2": MORE.int()}, {}, INTS >= MORE),
    ("RightShift", {"x": INTS, "y": torch.tensor([1, 1, 1, 1])}, {}, INTS >> 1),
    ("Select", {"condition": torch.tensor([True, False, True]), "x1": X, "x2": Y}, {}, torch.stack((X[0], Y[1], X[2]))),
    ("OnesLike", {"x": X}, {}, torch.ones_like(X)),
    ("ExpandDims", {"x": X, "axis": torch.tensor(-1)}, {}, X[..., None]),
    ("FlattenV2", {"x": CUBE}, {}, CUBE.flatten(1)),
    ("Expand", {"x": X[:1], "shape": torch.tensor([3, -1])}, {}, X[:1].expand(3, 4)),
    ("ConcatD", {"x0": X, "x1": Y}, {"concat_dim": 1, "N": 2}, torch.cat((X, Y), 1)),
    ("Split", {"split_dim": torch.tensor(1), "x": X}, {"num_split": 2}, torch.split(X, 2, 1)),
    ("SplitD", {"x": X}, {"split_dim": 0, "num_split": 3}, torch.split(X, 1)),
    (
        "SplitV",
        {"x": X, "size_splits": torch.tensor([1, -1]), "split_dim": torch.tensor(1)},
        {"num_split": 2},
        torch.split(X, [1, 3], 1),
    ),
    ("Slice", {"x": X, "offsets": torch.tensor([1, 0]), "size": torch.tensor([-1, 3])}, {}, X[1:, :3]),
    ("SliceD", {"x": X}, {"offsets": (0, 2), "size": (2, -1)}, X[:2, 2:]),
    ("Gather", {"x": X, "indices": torch.tensor([2, 0])}, {}, X[[2, 0]]),
    ("GatherV2", {"x": X, "indices": torch.tensor(2), "axis": torch.tensor([1])}, {}, X[:, 2]),
    (
        "GatherV2",
        {"x": X, "indices": torch.tensor([-1]), "axis": torch.tensor(0)},
        {"negative_index_support": True},
        X[-1:],
    ),
    ("GatherNd", {"x": CUBE, "indices": torch.tensor([[1, 2], [0, 0]])}, {}, torch.stack((CUBE[1, 2], CUBE[0, 0]))),
    (
        "ScatterElements",
        {"data": X, "indices": torch.tensor([[0, 1]]), "updates": Y[:1, :2]},
        {"reduction": "mul"},
        X.scatter_reduce(0, torch.tensor([[0, 1]]), Y[:1, :2], "prod"),
    ),
    ("ReduceMax", {"x": CUBE, "axes": torch.tensor([0, 2])}, {}, CUBE.amax((0, 2))),
    ("ReduceMin", {"x": CUBE, "axes": torch.tensor([-1])}, {"keep_dims": True}, CUBE.amin(-1, keepdim=True)),
    ("ReduceProd", {"x": CUBE, "axes": torch.tensor([1])}, {}, CUBE.prod(1)),
    ("ReduceAll", {"x": CUBE > 0, "axes": torch.tensor([1])}, {}, (CUBE > 0).all(1)),
    ("ReduceSum", {"x": X, "axes": torch.tensor([], dtype=torch.int64)}, {}, X.sum()),
    ("ReduceMean", {"x": X, "axes": torch.tensor([], dtype=torch.int64)}, {}, X),
    ("ReduceMean", {"x": X, "axes": torch.tensor([], dtype=torch.int64)}, {"noop_with_empty_axes": False}, X.mean()),
    ("ArgMin", {"x": X, "dimension": torch.tensor(1)}, {"dtype": 3}, X.argmin(1).int()),
    ("ArgMinWithValue", {"x": X}, {"dimension": 1, "keep_dims": True}, (X.argmin(1, True).int(), X.amin(1, True))),
    ("Cumsum", {"x": INTS, "axis": torch.tensor(0)}, {"exclusive": True}, torch.tensor([0, 7, 0, 9])),
    ("Cumsum", {"x": INTS, "axis": torch.tensor(0)}, {"reverse": True}, torch.tensor([0, -7, 0, -9])),
    ("SoftmaxV2", {"x": CUBE}, {"axes": (0, 2)}, CUBE.exp() / CUBE.exp().sum((0, 2), keepdim=True)),
    ("BatchMatMulV2", {"x1": CUBE, "x2": CUBE, "bias": Y[0, :3]}, {"adj_x2": True}, CUBE @ CUBE.mT + Y[0, :3]),
    (
        "TransposeBatchMatMul",
        {"x1": CUBE, "x2": CUBE.mT.contiguous()},
        {"perm_y": (1, 0, 2)},
        (CUBE @ CUBE.mT).transpose(0, 1),
    ),
    (
        "LayerNormV3",
        {"x": CUBE, "gamma": X[0], "beta": Y[0]},
        {"begin_norm_axis": -1, "begin_params_axis": -1},
        F.layer_norm(CUBE, (4,), X[0], Y[0]),
    ),
    (
        "GroupNormV2",
        {"x": CUBE.transpose(1, 2), "gamma": X[0], "beta": Y[0]},
        {"num_groups": 2},
        F.group_norm(CUBE.transpose(1, 2), 2, X[0], Y[0]),
    ),
    (
        "RotaryPositionEmbedding",
        {"x": X, "cos": Y, "sin": Y},
        {"mode": 1},
        X * Y + torch.stack((-X[:, 1::2], X[:, 0::2]), -1).flatten(1) * Y,
    ),
    ("PadV3", {"x": X, "paddings": torch.tensor([0, 0, 2, 1])}, {"mode": "reflect"}, F.pad(X, (2, 1), mode="reflect")),
    ("PadV3", {"x": X, "paddings": torch.tensor([1, 0, 0, 2])}, {"paddings_contiguous": False}, F.pad(X, (0, 2, 1, 0))),
    (
        "Bitcast",
        {"x": torch.tensor([[1, 2, 3, 4]], dtype=torch.int8)},
        {"type": 3},
        torch.tensor([0x04030201], dtype=torch.int32),
    ),
    (
        "Bitcast",
        {"x": torch.tensor([0x04030201], dtype=torch.int32)},
        {"type": 2},
        torch.tensor([[1, 2, 3, 4]], dtype=torch.int8),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]} {i}" for i, case in enumerate(CASES)])
def test_an_op_equals_torch(case: Case) -> None:
    kind, inputs, attrs, want = case
    outputs = run_op(kind, inputs, attrs, mode="npu")
    wanted = want if isinstance(want, tuple) else (want,)
    for got, one in zip(outputs, wanted):
        torch.testing.assert_close(got, one, rtol=1e-5, atol=1e-6)


def test_add_rms_norm_cast_gives_the_norm_twice() -> None:
    inputs = {"x1": randn(5, 8, dtype=BF16), "x2": randn(5, 8, seed=1, dtype=BF16), "gamma": randn(8, dtype=BF16)}
    wide, rounded, _, total = run_op("AddRmsNormCast", inputs, mode="npu")
    norm, _, x = run_op("AddRmsNorm", inputs, mode="npu")
    assert wide.dtype == torch.float32
    assert torch.equal(rounded, norm)
    assert torch.equal(wide, norm.float())
    assert torch.equal(total, x)


def test_ops_that_write_in_place_return_the_very_tensor() -> None:
    for kind, inputs, attrs, want in (
        ("Assign", {"ref": X.clone(), "value": Y}, {}, Y),
        (
            "ScatterUpdate",
            {"var": X.clone(), "indices": torch.tensor([2, 0]), "updates": Y[:2]},
            {},
            torch.stack((Y[1], X[1], Y[0])),
        ),
        (
            "ScatterNdUpdate",
            {"var": X.clone(), "indices": torch.tensor([[1, 2]]), "updates": Y[0, :1]},
            {},
            X.index_put((torch.tensor([1]), torch.tensor([2])), Y[0, :1]),
        ),
    ):
        target = next(iter(inputs.values()))
        (got,) = run_op(kind, inputs, attrs, mode="npu")
        assert got is target
        assert torch.equal(got, want)
    var, updates = torch.zeros(2, 3, 5), randn(2, 3, 2)
    for indices in (torch.tensor([3, 0]), torch.tensor([[0, 3], [1, 0]])):
        (got,) = run_op(
            "Scatter",
            {"var": var.clone(), "indices": indices, "updates": updates},
            {"reduce": "update", "axis": -1},
            mode="npu",
        )
        assert torch.equal(got[0, :, 3:], updates[0])
        assert torch.equal(got[1, :, :2], updates[1])
        assert int((got == 0).sum()) == 30 - 12


def test_strided_slices_with_masks() -> None:
    def cut(kind: str, x: Tensor, begin: list[int], end: list[int], steps: list[int], **masks: int) -> Tensor:
        inputs = {"x": x, "begin": torch.tensor(begin), "end": torch.tensor(end), "strides": torch.tensor(steps)}
        return run_op(kind, inputs, masks)[0]

    wide = CUBE.double()
    close = torch.testing.assert_close
    close(cut("StridedSlice", wide, [0, 1], [9, 3], [1, 1], begin_mask=1), wide[:9, 1:3])
    close(
        cut("StridedSlice", wide, [1, 0, 0], [2, 0, 2], [1, 1, 1], shrink_axis_mask=1, new_axis_mask=2),
        wide[1, None, 0:2],
    )
    close(cut("StridedSliceV2", wide, [-2, 0], [2147483647, 2], [1, 1]), wide[-2:, :2])
    close(cut("StridedSliceV2", wide, [2], [-9], [-1]), wide.flip(0))
    with pytest.raises(ArtifactError, match="shrink_axis_mask are not supported"):
        cut("StridedSliceV2", wide, [0], [1], [1], shrink_axis_mask=1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["Add", "Sub", "Mul", "Maximum", "RealDiv"]),
    shapes=st.sampled_from([((3,), (3,)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((), (2, 3)), ((0, 3), (3,))]),
    dtype=st.sampled_from([torch.float32, torch.float16, BF16]),
    seed=st.integers(0, 99),
)
def test_arithmetic_rounds_once_from_float32(kind: str, shapes: Any, dtype: torch.dtype, seed: int) -> None:
    function = {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Maximum": torch.maximum, "RealDiv": torch.div}[
        kind
    ]
    x1, x2 = (randn(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes))
    (got,) = run_op(kind, {"x1": x1, "x2": x2}, mode="npu")
    want = function(x1.float(), x2.float()).to(dtype)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
    keep=st.booleans(),
    dtype=st.sampled_from([torch.float32, BF16]),
)
def test_reductions_over_any_axes(shape: list[int], data: st.DataObject, keep: bool, dtype: torch.dtype) -> None:
    axes = data.draw(st.lists(st.integers(-len(shape), len(shape) - 1), max_size=3))
    axes = list({axis % len(shape): axis for axis in axes}.values())
    x = randn(*shape, dtype=dtype)
    inputs = {"x": x, "axes": torch.tensor(axes, dtype=torch.int64)}
    for kind, function in (("ReduceSum", torch.sum), ("ReduceMax", torch.amax), ("ReduceMean", torch.mean)):
        (got,) = run_op(kind, inputs, {"keep_dims": keep}, mode="npu")
        if not axes and kind == "ReduceMean":
            want = x
        else:
            want = function(x.float(), axes or list(range(len(shape))), keepdim=keep).to(dtype)
        torch.testing.assert_close(got, want)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_shapes_move_elements_as_torch_does(shape: list[int], data: st.DataObject) -> None:
    x = randn(*shape)
    perm = data.draw(st.permutations(range(len(shape))))
    (turned,) = run_op("Transpose", {"x": x, "perm": torch.tensor(perm)}, mode="npu")
    assert torch.equal(turned, x.permute(perm))
    (flat,) = run_op("Reshape", {"x": turned, "shape": torch.tensor([-1])}, mode="npu")
    assert torch.equal(flat, x.permute(perm).reshape(-1))
    axis = data.draw(st.integers(0, len(shape) - 1))
    (index,) = torch.randint(0, shape[axis], (1, 2, 3), generator=torch.Generator().manual_seed(0))
    (rows,) = run_op("GatherV2", {"x": x, "indices": index, "axis": torch.tensor(axis)}, mode="npu")
    assert torch.equal(
        rows, torch.stack([x.select(axis, int(i)) for i in index.view(-1)], axis).unflatten(axis, (2, 3))
    )
    low, high = sorted(data.draw(st.lists(st.integers(0, shape[axis]), min_size=2, max_size=2)))
    inputs = {"begin": torch.tensor(low), "end": torch.tensor(high), "axes": torch.tensor(axis)}
    (cut,) = run_op("StridedSliceV2", {"x": x, **inputs}, mode="npu")
    assert torch.equal(cut, x.narrow(axis, low, high - low))


@pytest.mark.parametrize(
    ("kind", "inputs", "attrs", "text"),
    [
        ("RealDiv", {"x1": INTS, "x2": MORE}, {}, "only floats are supported"),
        ("Squeeze", {"x": X}, {"axis": (0,)}, "not all of size 1"),
        ("SplitD", {"x": X}, {"split_dim": 1, "num_split": 3}, "splits 4 into 3 parts"),
        ("GatherNd", {"x": X, "indices": torch.tensor([[-1]])}, {}, "negative indices"),
        ("Gather", {"x": X, "indices": torch.tensor([0])}, {"batch_dims": 1}, "batch_dims = 1 is not supported"),
        ("MatMul", {"x1": CUBE, "x2": X}, {}, "both must be matrices"),
        ("Cast", {"x": X}, {"dst_type": 36}, "ge::DataType 36 is not supported"),
        ("Conv2D", {"x": X, "filter": X}, {"strides": (1, 1, 1, 1), "pads": (0,) * 4}, "data_format is 'NHWC'"),
        (
            "ApplyRotaryPosEmb",
            {n: X for n in ("query", "key", "cos", "sin")},
            {"layout": 4},
            "layout 4 takes 3 dimensions",
        ),
        ("RotaryPositionEmbedding", {"x": X, "cos": Y, "sin": Y}, {"mode": 2}, "mode is 2; supported: 0, 1"),
    ],
)
def test_what_has_no_meaning_here_is_refused(kind: str, inputs: Any, attrs: dict[str, Any], text: str) -> None:
    with pytest.raises(ArtifactError, match=text):
        run_op(kind, inputs, attrs)
