"""The weight plan: how each graph parameter of each rank is made from a checkpoint's tensors.

Pure data plus the two operations that export needs on it (concatenate, transpose). Reading checkpoints by this plan is
in `weights.py`. Shapes are local to a rank unless said otherwise.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A slice of one source tensor, the same recipe on every rank with other ranges.

    source: name in the checkpoint; `alternatives` are tried in order where it is absent (tied embeddings).
    shape: full shape of the source. dim: the cut dimension, None where the rank takes all of it.
    ranges: per rank [start, stop) along dim; stop may pass the end of the source: the missing rows are zeros (padding).
    """

    model_config = ConfigDict(extra="forbid")
    source: str
    alternatives: list[str] = []
    shape: list[int]
    dim: int | None = None
    ranges: list[tuple[int, int]] | None = None

    def local_shape(self) -> list[int]:
        """Shape of this part on every rank."""
        shape = list(self.shape)
        if self.dim is not None and self.ranges is not None:
            shape[self.dim] = self.ranges[0][1] - self.ranges[0][0]
        return shape


class Param(BaseModel):
    """One graph parameter.

    kind 'weight': the parts concatenated along `cat_dim` (then transposed where `transpose`), cast to `dtype`.
    kind 'rope_cos' / 'rope_sin': table [positions, dim] = f(position * inv_freq) * scaling, computed in float32 as
    transformers does, from the constant `constant` (inv_freq [dim/2] float32), then cast.
    kind 'rank_offset': int64 [1] = rank's tp index * `step`.
    """

    model_config = ConfigDict(extra="forbid")
    name: str
    kind: Literal["weight", "rope_cos", "rope_sin", "rank_offset"] = "weight"
    dtype: str
    shape: list[int]
    parts: list[Part] = []
    cat_dim: int = 0
    transpose: bool = False
    constant: str | None = None
    scaling: float = 1.0
    step: int = 0


class WeightPlan(BaseModel):
    """All parameters of all graphs of an artifact, by name, for every rank of the world."""

    model_config = ConfigDict(extra="forbid")
    tp: int
    params: dict[str, Param]
