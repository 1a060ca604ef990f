"""Which Ascend chips the exporter knows, and what their attention ops ask of a recipe.

Names are those of torch_npu's own SoC table. Making a process behave like such a chip is in `pin.py`.
"""

from __future__ import annotations

from typing import Literal

from cann_runtime.artifact.manifest import Target
from cann_runtime.errors import RecipeError

DEFAULT_CANN = "8.5.0"
"""CANN version that graphs are made for where the recipe names none."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "ascend910b": ("Ascend910B3", "Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910B4", "Ascend910B4-1"),
    "ascend910_93": (
        "Ascend910_9392",
        "Ascend910_9362",
        "Ascend910_9363",
        "Ascend910_9372",
        "Ascend910_9381",
        "Ascend910_9382",
        "Ascend910_9391",
    ),
    "ascend950": ("Ascend950PR_9599", "Ascend950PR_9589", "Ascend950PR_9579", "Ascend950DT_9591", "Ascend950DT_9595"),
}
"""Family -> SoC names; the first is the family's default. Graphs differ between families, not within one."""

FLAT_HEAD_DIM = 128
"""The only head size that the attention op takes in the flat TND layout (without rope inputs)."""

BLOCK_STEP = 128
BLOCK_MAX = 512


def resolve_target(name: str, cann: str = DEFAULT_CANN) -> Target:
    """The manifest's target for a family or a full SoC name, in any case.

    Raises RecipeError listing the allowed names.
    """
    wanted = name.lower()
    for family, socs in FAMILIES.items():
        if wanted == family:
            return Target(kind="ascend", family=family, soc=socs[0], cann=cann)
        for soc in socs:
            if wanted == soc.lower():
                return Target(kind="ascend", family=family, soc=soc, cann=cann)
    socs_known = ", ".join(soc for socs in FAMILIES.values() for soc in socs)
    raise RecipeError(f"target: {name!r} is not known; allowed: cpu, {', '.join(FAMILIES)}, or one of {socs_known}")


def layout(head_dim: int) -> Literal["flat", "rectangular"]:
    """How the steps of a model with that head size are laid out (the manifest's `layout`)."""
    return "flat" if head_dim == FLAT_HEAD_DIM else "rectangular"


def check_block_size(target: Target, block_size: int, head_dim: int) -> None:
    """Refuse a KV block size that the attention op forbids on Ascend.

    FusedInferAttentionScore over a paged cache asks for a multiple of 128, at most 512, once a sequence has more than
    one query row, and older CANN releases ask the same of the flat layout (op-plugin and ops-transformer documents).

    Raises RecipeError naming the size to write, or the head sizes allowed.
    """
    if target.kind != "ascend":
        return
    if head_dim not in (64, 128):
        raise RecipeError(
            f"head_dim {head_dim} of the model: the rotary op of {target.soc} takes 64 or 128; use --target cpu"
        )
    if block_size % BLOCK_STEP or not 0 < block_size <= BLOCK_MAX:
        raise RecipeError(
            f"kv_cache.block_size: {block_size} is not allowed on {target.soc} (a multiple of {BLOCK_STEP}, at most "
            f"{BLOCK_MAX}); write block_size: {round_block_size(block_size)} or pass --round-block-size"
        )


def check_dtypes(target: Target, dtype: str, kv_dtype: str) -> None:
    """Refuse dtypes that the attention op does not take on Ascend: a model in float32, a cache in another dtype.

    Raises RecipeError naming the allowed ones.
    """
    if target.kind != "ascend":
        return
    if dtype not in ("bfloat16", "float16"):
        raise RecipeError(f"dtype: {dtype} is not allowed on {target.soc}; write bfloat16 or float16")
    if kv_dtype != dtype:
        raise RecipeError(f"kv_cache.dtype: {kv_dtype} is not allowed on {target.soc} beside dtype {dtype}; write auto")


def round_block_size(block_size: int) -> int:
    """The smallest allowed block size that is not smaller than the one asked for, or the largest allowed."""
    return min(max(BLOCK_STEP, -(-block_size // BLOCK_STEP) * BLOCK_STEP), BLOCK_MAX)
