"""The two enumerations of data types in a GE graph, as torch dtypes.

Descriptors and constants use the proto's enum DataType, attributes and `_output_dtypes` use ge::DataType; they agree on
bfloat16 and a few others only. Values: TorchAir's ge_ir.proto and its Python enum `DataType`.
"""

from __future__ import annotations

import torch

from cann_runtime.errors import ArtifactError

UNDEFINED_PROTO, UNDEFINED_GE = 0, 28

PROTO_DTYPES = {
    1: torch.float32,
    2: torch.float16,
    3: torch.int8,
    4: torch.uint8,
    5: torch.int16,
    6: torch.uint16,
    7: torch.int32,
    8: torch.int64,
    9: torch.uint32,
    10: torch.uint64,
    11: torch.bool,
    12: torch.float64,
    16: torch.complex64,
    27: torch.bfloat16,
}
"""Enum DataType of ge_ir.proto: TensorDescriptor.dtype, also of constants."""

GE_DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    7: torch.uint16,
    8: torch.uint32,
    9: torch.int64,
    10: torch.uint64,
    11: torch.float64,
    12: torch.bool,
    16: torch.complex64,
    27: torch.bfloat16,
}
"""Enum ge::DataType: attributes (Cast.dst_type ...) and the graph's `_output_dtypes`."""


def proto_dtype(code: int, where: str) -> torch.dtype:
    """The torch dtype of a descriptor's code. Raises ArtifactError for one that no torch tensor can hold."""
    if code not in PROTO_DTYPES:
        raise ArtifactError(f"{where}: data type {code} of ge_ir.proto is not supported")
    return PROTO_DTYPES[code]


def ge_dtype(code: int, where: str) -> torch.dtype:
    """The torch dtype of an attribute's code. Raises ArtifactError for one that no torch tensor can hold."""
    if code not in GE_DTYPES:
        raise ArtifactError(f"{where}: ge::DataType {code} is not supported")
    return GE_DTYPES[code]
