"""In which number formats the reference executor computes.

`exact` proves that a graph is the model: every float tensor is held in one wide format, whatever the graph says, so
that only the order of summation differs. `npu` predicts a device: tensors have the graph's own dtypes, and each op
rounds where its document says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

_REPLACED = (torch.float16, torch.bfloat16, torch.float32)

MODES = ("exact", "exact64", "npu")
"""Names that Precision.of takes."""


@dataclass(frozen=True)
class Precision:
    """mode and the format of computing; `family` is the target's SoC family, some ops round differently on each."""

    mode: Literal["exact", "npu"]
    compute: torch.dtype = torch.float32
    family: str = "ascend910b"

    @classmethod
    def of(cls, name: str, family: str | None = None) -> Precision:
        """exact: everything in float32. exact64: in float64. npu: the graph's dtypes, float32 inside ops."""
        compute = torch.float64 if name == "exact64" else torch.float32
        return cls("npu" if name == "npu" else "exact", compute, family or "ascend910b")

    @property
    def rounds(self) -> bool:
        """Do values inside an op get the roundings of the device?"""
        return self.mode == "npu"

    def held(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that a tensor has here where the graph says `dtype`."""
        if self.mode == "npu":
            return dtype
        if dtype == torch.complex64 and self.compute == torch.float64:
            return torch.complex128
        return self.compute if dtype in _REPLACED else dtype

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype to compute in with values of `dtype`; float64 stays."""
        return torch.promote_types(dtype, self.compute) if dtype == torch.float64 else self.compute
