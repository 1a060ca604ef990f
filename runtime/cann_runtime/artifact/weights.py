"""From a checkpoint's tensors to one rank's graph parameters, by the weight plan.

A rank reads only its own slices, one parameter at a time, straight from the mapped shard into the parameter: the peak
is the parameters themselves. The same stream can be written once as packed weights, one safetensors file per rank,
which are then mapped and never copied. Opening shards is in `checkpoint_reader.py`; placing parameters on a device is
the executor's work.

Shape letters: P positions, D rotary dimension, F frequencies (D / 2).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cann_runtime.artifact.checkpoint_reader import DTYPE_NAMES, CheckpointReader, SafetensorsFile
from cann_runtime.artifact.manifest import StoredFile
from cann_runtime.artifact.plan import Param, Part, WeightPlan
from cann_runtime.errors import ArtifactError, CheckpointError

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_ROPE_CHUNK = 4096  # positions computed at once: keeps the float32 intermediates of a long table small
_ALIGNMENT = 64  # bytes: a cache line, and the widest CPU vector

# How a checkpoint's names may differ from the plan's, (plan's prefix, checkpoint's prefix): a base model saved without
# its head, the text part of a multimodal model (old and new form), a wrapper that was saved along.
_PREFIXES = (
    ("", ""),
    ("model.", ""),
    ("model.", "model.language_model."),
    ("model.", "language_model."),
    ("", "language_model."),
    ("", "model."),
    ("", "_orig_mod."),
    ("", "module."),
)


def resolve_names(plan: WeightPlan, reader: CheckpointReader) -> dict[str, str]:
    """For each source that a plan names, the checkpoint's tensor: itself, with another prefix, or an alternative.

    One prefix rule holds for the whole checkpoint: the one that finds the most sources. Raises CheckpointError with the
    first missing names.
    """
    parts = {part.source: part for param in plan.params.values() for part in param.parts}
    found: dict[str, str] = {}
    for rule in _PREFIXES:
        names = {source: name for source, part in parts.items() if (name := _find(part, reader, rule))}
        if len(names) > len(found):
            found = names
        if len(found) == len(parts):
            return found
    raise CheckpointError(
        f"checkpoint {reader.path} lacks {_few([source for source in parts if source not in found])}, "
        "which this artifact's model needs"
    )


def check_plan(plan: WeightPlan, reader: CheckpointReader) -> None:
    """Check that a checkpoint fits a plan, from headers alone: names, shapes, and dtypes that can be cast.

    Raises CheckpointError, one line with up to five misfits.
    """
    problems: dict[str, str] = {}
    names = resolve_names(plan, reader)
    for param in plan.params.values():
        for part in param.parts:
            info = reader.info(names[part.source])
            if list(info.shape) != part.shape:
                problems[part.source] = f"{part.source} is {list(info.shape)} where the artifact expects {part.shape}"
            elif info.dtype not in _FLOATS:
                dtype = str(info.dtype).removeprefix("torch.")
                problems[part.source] = f"{part.source} is {dtype}, not float32, bfloat16 or float16"
    if problems:
        raise CheckpointError(f"checkpoint {reader.path} does not fit: {_few(list(problems.values()))}")


def stream_params(
    plan: WeightPlan, reader: CheckpointReader, tp_rank: int, constants: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The parameters of one rank, by name in the plan's order, each in the plan's dtype and local shape, contiguous.

    constants: the artifact's small tables (inverse frequencies). Parameters made of the same slices (tied embeddings)
    are read once and share one tensor. Call check_plan first; raises CheckpointError or ArtifactError.
    """
    yield from _stream(plan, list(plan.params), reader, tp_rank, constants)


def _stream(
    plan: WeightPlan, order: list[str], reader: CheckpointReader, tp_rank: int, constants: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    if not 0 <= tp_rank < plan.tp:
        raise ArtifactError(f"tensor-parallel rank {tp_rank} does not exist: the artifact has ranks 0 to {plan.tp - 1}")
    names = resolve_names(plan, reader)
    recipes = {name: _recipe(plan.params[name], names) for name in order}
    uses = Counter(recipe for recipe in recipes.values() if recipe is not None)
    kept: dict[str, Tensor] = {}  # tensors that a later parameter of the same recipe will take
    for name in order:
        param, recipe = plan.params[name], recipes[name]
        if recipe is None:
            yield name, _computed(param, tp_rank, constants)
            continue
        tensor = kept.pop(recipe) if recipe in kept else _weight(param, reader, names, tp_rank)
        uses[recipe] -= 1
        if uses[recipe]:
            kept[recipe] = tensor
        yield name, tensor
        del tensor  # before the next one is made


def _recipe(param: Param, names: dict[str, str]) -> str | None:
    """A key that is equal for parameters that hold the same values; None for computed ones."""
    if param.kind != "weight":
        return None
    parts = [(names[part.source], part.dim, part.ranges) for part in param.parts]
    return repr((parts, param.shape, param.dtype, param.cat_dim, param.transpose))


def _weight(param: Param, reader: CheckpointReader, names: dict[str, str], tp_rank: int) -> Tensor:
    out = torch.empty(param.shape, dtype=_dtype(param))
    # Written through a transposed view, so that no second copy of the parameter ever exists.
    target = out.transpose(-2, -1) if param.transpose else out
    row = 0
    for part in param.parts:
        shape = part.local_shape()
        size = shape[param.cat_dim] if shape else 1
        piece = target.narrow(param.cat_dim, row, size) if len(param.parts) > 1 else target
        if list(piece.shape) != shape:
            raise ArtifactError(f"weight plan: {param.name} is {param.shape}, but {part.source} gives {shape}")
        _copy_part(piece, part, names[part.source], reader, tp_rank)
        row += size
    if len(param.parts) > 1 and row != target.shape[param.cat_dim]:
        raise ArtifactError(
            f"weight plan: the parts of {param.name} give {row} rows, not {target.shape[param.cat_dim]}"
        )
    return out


def _copy_part(piece: Tensor, part: Part, name: str, reader: CheckpointReader, tp_rank: int) -> None:
    """Read one rank's slice into its place: cast (to nearest even) and padded with zeros on the way."""
    if part.dim is None or part.ranges is None:
        piece.copy_(reader.narrow(name))
    else:
        start, stop = part.ranges[tp_rank]
        full = part.shape[part.dim]
        have = max(0, min(stop, full) - start)
        if have:
            piece.narrow(part.dim, 0, have).copy_(reader.narrow(name, part.dim, start, start + have))
        piece.narrow(part.dim, have, piece.shape[part.dim] - have).zero_()
    reader.release(name)


def _computed(param: Param, tp_rank: int, constants: Mapping[str, Tensor]) -> Tensor:
    if param.kind == "rank_offset":
        return torch.full(param.shape, tp_rank * param.step, dtype=_dtype(param))
    if param.constant is None or param.constant not in constants:
        raise ArtifactError(f"weight plan: {param.name} needs the constant {param.constant}, which the artifact lacks")
    return rope_table(param, constants[param.constant])


def rope_table(param: Param, inv_freq_F: Tensor) -> Tensor:
    """cos or sin(position * inv_freq) * scaling for positions 0 .. P - 1: [P, D], both halves equal.

    In float32 and in the order of operations of transformers' rotary modules, then cast: equal to theirs bit by bit.
    """
    positions, dim = param.shape
    if dim != 2 * inv_freq_F.numel():
        raise ArtifactError(f"weight plan: {param.name} has {dim} columns for {inv_freq_F.numel()} frequencies")
    out_PD = torch.empty(positions, dim, dtype=_dtype(param))
    for start in range(0, positions, _ROPE_CHUNK):
        stop = min(start + _ROPE_CHUNK, positions)
        freqs_PF = torch.arange(start, stop, dtype=torch.float32)[:, None] * inv_freq_F.float()[None, :]
        emb_PD = torch.cat((freqs_PF, freqs_PF), dim=-1)
        out_PD[start:stop] = (emb_PD.cos() if param.kind == "rope_cos" else emb_PD.sin()) * param.scaling
    return out_PD


@dataclass(frozen=True)
class PackedLayout:
    """Where each parameter lies in a packed file, known from the plan alone, and equal on all ranks.

    head: the file's bytes before the first parameter. places: name -> (offset in the file, bytes), in file order.
    """

    head: bytes
    places: dict[str, tuple[int, int]]


def packed_layout(plan: WeightPlan) -> PackedLayout:
    """The layout of the file that pack_weights writes."""
    sizes = {name: math.prod(p.shape) * _dtype(p).itemsize for name, p in plan.params.items()}
    # The format allows no holes; sorting by item size keeps the others aligned to their items.
    order = sorted(sizes, key=lambda name: (sizes[name] % _ALIGNMENT != 0, -_dtype(plan.params[name]).itemsize, name))
    header: dict[str, object] = {}
    offset = 0
    for name in order:
        param = plan.params[name]
        span = [offset, offset + sizes[name]]
        header[name] = {"dtype": DTYPE_NAMES[_dtype(param)], "shape": param.shape, "data_offsets": span}
        offset += sizes[name]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    places = {}
    start = 8 + len(text)
    for name in order:
        places[name] = (start, sizes[name])
        start += sizes[name]
    return PackedLayout(len(text).to_bytes(8, "little") + text, places)


def pack_weights(
    plan: WeightPlan, reader: CheckpointReader, rank: int, path: Path, constants: Mapping[str, Tensor]
) -> StoredFile:
    """Write all parameters of one tensor-parallel rank as one safetensors file, tensor by tensor.

    Never more than one parameter in memory; the same checkpoint gives the same bytes. Tensors whose size is a multiple
    of 64 bytes come first, so that they lie at multiples of 64 in the file. Returns the file's hash and size.
    """
    layout = packed_layout(plan)
    digest = hashlib.sha256(layout.head)
    with path.open("wb") as file:
        file.write(layout.head)
        for name, tensor in _stream(plan, list(layout.places), reader, rank, constants):
            # numpy knows no bfloat16, so the bytes are taken; a scalar has no last dimension to view by.
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            if data.nbytes != layout.places[name][1]:
                raise ArtifactError(f"weight plan: {name} has {data.nbytes} bytes, not {layout.places[name][1]}")
            digest.update(data)
            file.write(data)
            del tensor, data
    return StoredFile(sha256=digest.hexdigest(), size=len(layout.head) + sum(n for _, n in layout.places.values()))


def stream_packed(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a packed file as views of the mapped file: no copy, pages are read when they are first used."""
    file = SafetensorsFile.open(path)
    for name in file.tensors:
        yield name, file.view(name)


def _dtype(param: Param) -> torch.dtype:
    if param.dtype not in _DTYPES:
        raise ArtifactError(f"weight plan: {param.name} has the unknown dtype {param.dtype}")
    return _DTYPES[param.dtype]


def _find(part: Part, reader: CheckpointReader, rule: tuple[str, str]) -> str | None:
    old, new = rule
    for name in (part.source, *part.alternatives):
        stored = new + name.removeprefix(old) if name.startswith(old) else name
        if stored in reader:
            return stored
    return None


def _few(items: list[str], limit: int = 5) -> str:
    rest = len(items) - limit
    return "; ".join(items[:limit]) + (f"; and {rest} more" if rest > 0 else "")
