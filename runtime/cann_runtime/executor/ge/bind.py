"""Fills into a neutral GE graph what only a rank knows: communicators, its rank, the number of KV blocks.

Artifacts hold graphs that are equal on equal ranks, so they name process groups logically and leave the KV block count
open (-1). These functions edit the parsed graph in place, before TorchAir hands it to GE; they need nothing of the
device. `GraphDef` is the message of TorchAir's ge_ir.proto (package ge.proto).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cann_runtime.artifact.manifest import Signature, TensorRef
from cann_runtime.errors import ArtifactError

GROUP_ATTRS = ("group", "group_ep", "group_tp")
"""Attributes that name a communicator: collectives and fused matmul collectives use `group`, MoE dispatch and combine
the other two. TorchAir's own cache loader re-binds only the first."""

LOGICAL_GROUPS = ("tp", "ep", "world")

GE_DTYPES = {
    "float32": "DT_FLOAT",
    "float16": "DT_FLOAT16",
    "bfloat16": "DT_BF16",
    "int8": "DT_INT8",
    "uint8": "DT_UINT8",
    "int32": "DT_INT32",
    "int64": "DT_INT64",
    "bool": "DT_BOOL",
}
"""torch dtype name -> name in ge_ir.proto's enum DataType, for all that a step graph takes."""

WEIGHT_OPERANDS = {"MatMul": (1,), "MatMulV2": (1,), "MatMulV3": (1,)}
"""Ops whose weight may be stored as FRACTAL_NZ, with the input that is the weight."""

GraphDef = Any


@dataclass(frozen=True)
class RankBinding:
    """What one rank fills in: HCCL communicator names by logical group, and the rank's index in the ep group."""

    communicators: Mapping[str, str] = field(default_factory=dict)
    ep_rank: int = 0


def data_ops(graph: GraphDef) -> dict[int, Any]:
    """The graph's input ops by input index."""
    return {op.attr["index"].i: op for op in graph.op if op.type in ("Data", "RefData")}


def check_inputs(graph: GraphDef, signature: Signature, name: str) -> None:
    """Hold the graph's inputs against its signature: count, dtypes, shapes. Raises ArtifactError naming the input.

    A signature of another graph would bind weights to the wrong inputs without any other sign.
    """
    ops = data_ops(graph)
    if sorted(ops) != list(range(len(signature.inputs))):
        raise ArtifactError(f"{name}: the graph has {len(ops)} inputs, its signature {len(signature.inputs)}")
    for index, ref in enumerate(signature.inputs):
        desc = ops[index].output_desc[0]
        dtype = desc.DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_number[desc.dtype].name
        if dtype != GE_DTYPES.get(ref.dtype) or list(desc.shape.dim) != ref.shape:
            raise ArtifactError(
                f"{name}: input {index} ({ref.name}) is {dtype} {list(desc.shape.dim)} in the graph, "
                f"{ref.dtype} {ref.shape} in its signature"
            )


def bound_shape(ref: TensorRef, blocks: int) -> list[int]:
    """The input's shape with the KV block count filled in. Raises ArtifactError where another dimension is open."""
    shape = [blocks, *ref.shape[1:]] if ref.kind == "kv" and ref.shape[:1] == [-1] else list(ref.shape)
    if any(size < 0 for size in shape):
        raise ArtifactError(f"input {ref.name} has shape {ref.shape}: only a KV cache's first dimension may be open")
    return shape


def bind_kv_blocks(graph: GraphDef, signature: Signature, blocks: int) -> None:
    """Set the KV inputs' first dimension to `blocks`, also where a cache is among the outputs: a static graph now."""
    ops = data_ops(graph)
    for index, ref in enumerate(signature.inputs):
        for desc in (ops[index].input_desc[0], ops[index].output_desc[0]):
            desc.shape.dim[:] = bound_shape(ref, blocks)
    for op in graph.op:
        if op.type == "NetOutput":
            for desc in op.input_desc:
                if list(desc.shape.dim[:1]) == [-1]:
                    desc.shape.dim[0] = blocks


def bind_rank(graph: GraphDef, rank: RankBinding) -> None:
    """Put this rank's communicator names and rank numbers where the graph holds neutral ones.

    `ep_rank_id` is stored as 0 and becomes the rank in the ep group; `active_expert_range` is stored as [0, n] and
    moves to this rank's experts. Raises ArtifactError for a group that is not logical or that the launch does not have.
    """
    for op in graph.op:
        for key in GROUP_ATTRS:
            if key not in op.attr or not op.attr[key].s:
                continue
            logical = op.attr[key].s.decode()
            if logical not in LOGICAL_GROUPS:
                raise ArtifactError(f"op {op.name}: {key} is {logical!r}, not one of {', '.join(LOGICAL_GROUPS)}")
            if logical not in rank.communicators:
                raise ArtifactError(f"op {op.name} communicates over group {logical!r}, which the launch lacks")
            op.attr[key].s = rank.communicators[logical].encode()
        if "ep_rank_id" in op.attr:
            op.attr["ep_rank_id"].i = rank.ep_rank
        if "active_expert_range" in op.attr:
            experts = op.attr["active_expert_range"].list.i
            if len(experts) == 2 and experts[1] > experts[0]:
                if experts[0] != 0:
                    raise ArtifactError(f"op {op.name}: active_expert_range {list(experts)} is not stored from 0")
                count = experts[1]
                experts[:] = [rank.ep_rank * count, (rank.ep_rank + 1) * count]


def _consumers(graph: GraphDef) -> Iterator[tuple[str, str, int]]:
    """(producer's name, consumer's op type, input position) of every data edge."""
    for op in graph.op:
        for position, edge in enumerate(op.input):
            if edge and not edge.endswith(":-1"):
                yield edge.rsplit(":", 1)[0], op.type, position


def matmul_weights(graph: GraphDef, signature: Signature) -> set[str]:
    """Names of the 2-D parameters that nothing but the weight operand of matrix products reads.

    Those can be kept in the cube unit's own layout; an embedding table that is also the output projection cannot.
    """
    names = {op.name: signature.inputs[index] for index, op in data_ops(graph).items()}
    read: set[str] = set()
    elsewhere: set[str] = set()
    for producer, op_type, position in _consumers(graph):
        ref = names.get(producer)
        if ref is not None and ref.kind == "param" and len(ref.shape) == 2:
            (read if position in WEIGHT_OPERANDS.get(op_type, ()) else elsewhere).add(ref.name)
    return read - elsewhere
