"""Where the ladder's weights come from: a checkpoint, or seeded numbers where there is none or it is too big.

Both look like a CheckpointReader, so that parameters are made by the runtime's own loader from the artifact's own plan.
Values are rounded to the artifact's dtype first: what is verified is the graph, not the rounding of a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from cann_runtime.artifact.checkpoint_reader import CheckpointReader, TensorInfo
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.artifact.weights import stream_params

_POOL = 4194301  # a prime, so that rows of no power-of-two width line up
_KEEP = 4 << 30  # bytes of tensors that are made once only
_FLOATS = ("bfloat16", "float16", "float32")


class RoundedReader(CheckpointReader):
    """A checkpoint whose values are rounded to `dtype` when they are read."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        super().__init__(path)
        self._dtype = dtype

    def narrow(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start .. stop along dim, rounded."""
        return super().narrow(name, dim, start, stop).to(self._dtype)


class SeededReader(CheckpointReader):
    """A checkpoint of seeded numbers that exists only where it is read: any slice costs only its own size.

    A matrix's rows are windows of one pool of normal numbers, at places that depend on its name, scaled so that
    activations keep their size. Biases are N(0, 0.5), norms 1 + N(0, 0.2): a dropped one shows.
    """

    def __init__(self, plan: WeightPlan, dtype: torch.dtype, seed: int = 0) -> None:
        self.path = Path("(seeded weights)")
        self._dtype = dtype
        self._shapes = {part.source: part.shape for param in plan.params.values() for part in param.parts}
        generator = torch.Generator().manual_seed(seed)
        pool = torch.randn(_POOL, generator=generator)
        widest = max((shape[-1] for shape in self._shapes.values() if shape), default=1)
        self._pool = torch.cat((pool, pool[: min(widest, _POOL)]))
        self._kept: dict[str, Tensor] = {}
        self._room = _KEEP

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype; there are no bytes."""
        return TensorInfo(self._dtype, tuple(self._shapes[name]), 0, 0)

    def release(self, name: str) -> None:
        """Nothing is kept."""

    def narrow(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start .. stop along dim."""
        shape = self._shapes[name]
        if name not in self._kept and self._room >= torch.Size(shape).numel() * self._dtype.itemsize:
            self._kept[name] = self._made(name, 0, 0, None)
            self._room -= self._kept[name].nbytes
        if name not in self._kept:
            return self._made(name, dim, start, stop)
        whole = self._kept[name]
        return whole if dim >= whole.dim() else whole.narrow(dim, start, (shape[dim] if stop is None else stop) - start)

    def _made(self, name: str, dim: int, start: int, stop: int | None) -> Tensor:
        shape = self._shapes[name]
        columns = shape[-1]
        rows = torch.Size(shape[:-1]).numel()
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
        first, width, taken = 0, columns, torch.arange(rows)
        if dim == len(shape) - 1:
            first, width = start, (columns if stop is None else stop) - start
        elif dim == 0:
            step = rows // shape[0]
            taken = taken[start * step : (shape[0] if stop is None else stop) * step]
        offsets = (place + taken * columns + first) % _POOL
        values = self._pool.unfold(0, width, 1)[offsets]
        if len(shape) == 1:
            values = values * 0.5 if name.endswith("bias") else 1 + 0.2 * values
        else:
            values *= 1.5 / columns**0.5
        out = list(shape)
        out[dim if shape else 0] = width if dim == len(shape) - 1 else len(taken) * shape[0] // max(rows, 1)
        return values.view(out).to(self._dtype)


def widened(plan: WeightPlan) -> WeightPlan:
    """The plan with every float parameter in float32: for runs in which only the order of summation differs."""
    params = {
        name: param.model_copy(update={"dtype": "float32"}) if param.dtype in _FLOATS else param
        for name, param in plan.params.items()
    }
    return WeightPlan(tp=plan.tp, params=params)


def rank_weights(
    plan: WeightPlan, reader: CheckpointReader, rank: int, constants: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """All parameters of one rank."""
    return dict(stream_params(plan, reader, rank, constants))
