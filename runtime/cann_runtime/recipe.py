"""A recipe's flags and the settings that the export pipeline reads.

`resolve` merges a recipe with command-line flags, fills defaults and checks everything that can be known without
building the model. Whether tp divides the heads, or a SoC name exists, is checked by the stage that needs it. The
schema of the file is in `recipe_schema.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from cann_runtime.errors import RecipeError
from cann_runtime.recipe_schema import (
    ALLOWED_TARGETS,
    DType,
    Isa,
    KVDType,
    Recipe,
    list_recipes,
    load_recipe,
    parse_recipe,
    with_model,
)

__all__ = [
    "Overrides",
    "Recipe",
    "Settings",
    "add_recipe_flags",
    "list_recipes",
    "load_recipe",
    "overrides_from",
    "parse_recipe",
    "resolve",
    "with_model",
]

ASCEND_BLOCK_SIZES = (128, 256, 384, 512)
"""What the paged form of FusedInferAttentionScore takes in every phase and layout (op documents: query length > 1 asks
for a multiple of 128 up to 512)."""

Where = Callable[..., str]  # key path -> what set it (a flag, or recipe name and key), for error messages

_EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")


@dataclass(frozen=True)
class Settings:
    """A recipe with all defaults filled and all rules checked: what the export pipeline reads.

    config: Hugging Face config.json without its dtype. dtype and kv_dtype: torch names. target: as in the recipe.
    world = nnodes x ranks per node. Decode buckets count sequences, prefill buckets tokens, both ascending.
    max_num_blocks None: chosen from the memory budget at load. block_size in tokens.
    """

    name: str
    config: dict[str, Any]
    dtype: str
    target: str
    cann: str
    tp: int
    ep: int
    nnodes: int
    world: int
    max_batch_size: int
    max_seq_len: int
    kv_dtype: str
    block_size: int
    max_num_blocks: int | None
    decode_buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    checkpoint: str | None
    pack_weights: bool
    isa: str
    round_block_size: bool = False

    @property
    def is_cpu(self) -> bool:
        """Whether the target is the CPU (any other target is an Ascend family or SoC)."""
        return self.target == "cpu"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data, for the manifest."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain


# --- flags ------------------------------------------------------------------------------------------------------------

_FLAGS: dict[str, tuple[tuple[str, ...], str]] = {
    "--tp": (("parallel", "tp"), "ranks that share each attention layer"),
    "--ep": (("parallel", "ep"), "ranks that share the experts of each MoE layer"),
    "--nnodes": (("parallel", "nnodes"), "hosts"),
    "--max-batch-size": (("infer", "max_batch_size"), "largest number of sequences in one step"),
    "--max-seq-len": (("infer", "max_seq_len"), "largest prompt plus answer, in tokens"),
    "--dtype": (("dtype",), f"{', '.join(get_args(DType))}: of weights and activations"),
    "--target": (("target",), ALLOWED_TARGETS),
    "--cann": (("cann",), "CANN version of the inference hosts"),
    "--block-size": (("kv_cache", "block_size"), "tokens in one KV block"),
    "--kv-cache-dtype": (("infer", "kv_cache_dtype"), ", ".join(get_args(KVDType))),
    "--max-num-blocks": (("kv_cache", "max_num_blocks"), "KV blocks (default: from free memory at load)"),
    "--checkpoint": (("checkpoint",), "folder, hub id ORG/NAME, modelscope:ORG/NAME or package:NAME"),
    "--isa": (("cpu", "isa"), ", ".join(get_args(Isa))),
    "--decode-buckets": (("buckets", "decode"), "comma-separated numbers of sequences"),
    "--prefill-buckets": (("buckets", "prefill"), "comma-separated numbers of tokens"),
}
_TEXT_FLAGS = {"--dtype", "--target", "--cann", "--kv-cache-dtype", "--checkpoint", "--isa"}
_LIST_FLAGS = {"--decode-buckets", "--prefill-buckets"}


@dataclass(frozen=True)
class Overrides:
    """Values of flags: key path in the recipe -> (flag, value). The launch flags only have to agree with `nnodes`."""

    values: dict[tuple[str, ...], tuple[str, Any]] = field(default_factory=dict)
    round_block_size: bool = False
    node_rank: int = 0


def add_recipe_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that override a recipe; values stay text until `overrides_from`, whose errors are one line."""
    group = parser.add_argument_group("recipe", "these win over the recipe's own values")
    for flag, (_, text) in _FLAGS.items():
        group.add_argument(flag, help=text, metavar=flag.rsplit("-", 1)[-1].upper())
    group.add_argument(
        "--pack-weights", action=argparse.BooleanOptionalAction, help="put the weights into the artifact"
    )
    group.add_argument("--round-block-size", action="store_true", help="round a block size that the target forbids")
    launch = parser.add_argument_group(
        "launch", "accepted so that one command line serves every host; export ignores them"
    )
    for flag in ("--node-rank", "--master-addr", "--master-port"):
        launch.add_argument(flag, metavar=flag.rsplit("-", 1)[-1].upper())


def overrides_from(args: argparse.Namespace) -> Overrides:
    """The overrides that a parsed command line holds; RecipeError on a value that is no number where one is needed."""
    values: dict[tuple[str, ...], tuple[str, Any]] = {}
    for flag, (path, _) in _FLAGS.items():
        text = getattr(args, flag[2:].replace("-", "_"), None)
        if text is None:
            continue
        if flag in _TEXT_FLAGS:
            values[path] = (flag, text)
        elif flag in _LIST_FLAGS:
            values[path] = (flag, [_integer(flag, part) for part in text.split(",")])
        else:
            values[path] = (flag, _integer(flag, text))
    if getattr(args, "pack_weights", None) is not None:
        values["pack_weights",] = ("--pack-weights", args.pack_weights)
    for flag in ("node_rank", "master_port"):
        text = getattr(args, flag, None)
        if text is not None and _integer(f"--{flag.replace('_', '-')}", text) < 0:
            raise RecipeError(f"--{flag.replace('_', '-')}: {text} is not allowed; 0 or more")
    return Overrides(values, bool(getattr(args, "round_block_size", False)), int(getattr(args, "node_rank", None) or 0))


def _integer(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise RecipeError(f"{flag}: {text!r} is not allowed; a whole number") from None


# --- resolving --------------------------------------------------------------------------------------------------------


def resolve(recipe: Recipe, overrides: Overrides | None = None) -> Settings:
    """Merge flags into the recipe, fill the defaults, check the rules. RecipeError says which key or flag is wrong."""
    overrides = overrides or Overrides()
    flags = {path: flag for path, (flag, _) in overrides.values.items()}
    r = _merge(recipe, overrides, flags)

    def where(*path: str) -> str:
        return flags.get(path, f"{r.name}: {'.'.join(path)}")

    world = _world(r, where)
    max_seq_len = _max_seq_len(r, where)
    if overrides.node_rank >= r.parallel.nnodes:
        raise RecipeError(f"--node-rank: {overrides.node_rank} is not allowed; below --nnodes {r.parallel.nnodes}")
    return Settings(
        name=r.name,
        config={key: value for key, value in r.model.items() if key not in ("dtype", "torch_dtype")},
        dtype=r.dtype,
        target=r.target,
        cann=r.cann,
        tp=r.parallel.tp,
        ep=r.parallel.ep,
        nnodes=r.parallel.nnodes,
        world=world,
        max_batch_size=r.infer.max_batch_size,
        max_seq_len=max_seq_len,
        kv_dtype=_kv_dtype(r, where),
        block_size=_block_size(r, overrides.round_block_size, where),
        max_num_blocks=r.kv_cache.max_num_blocks,
        decode_buckets=_decode_buckets(r),
        prefill_buckets=_prefill_buckets(r, max_seq_len),
        checkpoint=r.checkpoint,
        pack_weights=r.pack_weights,
        isa=r.cpu.isa,
        round_block_size=overrides.round_block_size,
    )


def _merge(recipe: Recipe, overrides: Overrides, flags: dict[tuple[str, ...], str]) -> Recipe:
    data = recipe.model_dump()
    for path, (_, value) in overrides.values.items():
        section = data
        for key in path[:-1]:
            section = section[key]
        section[path[-1]] = value
    # The same thing under its second name gives way to a flag.
    if ("infer", "max_seq_len") in flags:
        data["kv_cache"]["max_seq_len"] = None
    if ("infer", "kv_cache_dtype") in flags:
        data["kv_cache"]["dtype"] = None
    return parse_recipe(data, recipe.name, flags)


def _world(r: Recipe, where: Where) -> int:
    p = r.parallel
    world = p.nnodes * (p.ranks_per_node or max(p.tp, p.ep))
    if p.ep > 1 and not any(isinstance(r.model.get(key), int) for key in _EXPERT_KEYS):
        raise RecipeError(f"{where('parallel', 'ep')}: {p.ep} is not allowed; this model has no experts, use 1")
    for key, value in (("tp", p.tp), ("ep", p.ep)):
        if world % value:
            raise RecipeError(
                f"{r.name}: parallel.{key} {value} does not divide the world of {world} ranks ({p.nnodes} nodes)"
            )
    return world


def _agreed(r: Recipe, infer_key: str, kv_key: str) -> tuple[tuple[str, str], Any]:
    """(key path that gave it, value) of a value that stands under `infer` or `kv_cache`; both must say the same."""
    first, second = getattr(r.infer, infer_key), getattr(r.kv_cache, kv_key)
    if first is not None and second is not None and first != second:
        raise RecipeError(
            f"{r.name}: infer.{infer_key} {first} and kv_cache.{kv_key} {second} disagree; give one of them"
        )
    return (("kv_cache", kv_key), second) if first is None and second is not None else (("infer", infer_key), first)


def _positions(config: dict[str, Any]) -> int | None:
    """Positions that the model can address: rope scaling may extend max_position_embeddings (yarn in Qwen2.5)."""
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int):
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    return max(limit, int(factor * original)) if factor and original else limit


def _max_seq_len(r: Recipe, where: Where) -> int:
    limit = _positions(r.model)
    path, asked = _agreed(r, "max_seq_len", "max_seq_len")
    if asked is None:
        return min(4096, limit or 4096)
    if limit is not None and asked > limit:
        raise RecipeError(
            f"{where(*path)}: {asked} is not allowed; this model has {limit} positions (max_position_embeddings)"
        )
    return int(asked)


def _kv_dtype(r: Recipe, where: Where) -> str:
    path, asked = _agreed(r, "kv_cache_dtype", "dtype")
    if asked in (None, "auto", r.dtype):
        return r.dtype
    if asked == "int8":
        raise RecipeError(f"{where(*path)}: int8 is not supported yet; use auto or {r.dtype}")
    raise RecipeError(
        f"{where(*path)}: {asked} KV does not fit a {r.dtype} model; allowed: auto, {r.dtype}, int8 "
        "(dtype sets the whole model)"
    )


def _block_size(r: Recipe, round_up: bool, where: Where) -> int:
    asked = r.kv_cache.block_size
    cpu = r.target == "cpu"
    if asked is None:
        return 32 if cpu else ASCEND_BLOCK_SIZES[0]
    if cpu:
        fitting, allowed = -(-asked // 16) * 16, "a multiple of 16"
    else:
        fitting = next((size for size in ASCEND_BLOCK_SIZES if size >= asked), ASCEND_BLOCK_SIZES[-1])
        allowed = ", ".join(map(str, ASCEND_BLOCK_SIZES))
    if asked == fitting or round_up:
        return fitting
    raise RecipeError(
        f"{where('kv_cache', 'block_size')}: {asked} is not allowed on {r.target}; allowed: {allowed}; "
        f"use {fitting}, or --round-block-size"
    )


def _decode_buckets(r: Recipe) -> tuple[int, ...]:
    """Ascending, none above max_batch_size, which is always one of them; by default denser where batches are small."""
    largest = r.infer.max_batch_size
    sizes = r.buckets.decode
    if sizes is None:
        sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, 256, 32), *range(256, largest, 64)]
    return tuple(sorted({size for size in sizes if size < largest} | {largest}))


def _prefill_buckets(r: Recipe, max_seq_len: int) -> tuple[int, ...]:
    """Ascending; a recipe's own are taken as they are, the default ones are cut at max_seq_len."""
    if r.buckets.prefill is not None:
        return tuple(sorted(set(r.buckets.prefill)))
    largest = min(4096, max_seq_len)
    return tuple(sorted({size for size in (256, 1024) if size < largest} | {largest}))
