"""The schema of a recipe file, and reading one: from a name, a YAML file or a checkpoint folder.

Every problem becomes one line that names the file, the key and what is allowed. What the values mean together (flags,
defaults, rules between keys) is in `recipe.py`; where recipe files are kept is the caller's business.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from cann_runtime.errors import RecipeError

DType = Literal["bfloat16", "float16", "float32"]
KVDType = Literal["auto", "bfloat16", "float16", "float32", "int8"]
Isa = Literal["native", "avx2", "avx512", "avx512_bf16"]
Positive = Annotated[StrictInt, Field(ge=1)]

TARGET_PATTERN = r"^(cpu|[Aa]scend\d{3}[\w-]*)$"
ALLOWED_TARGETS = "cpu, ascend910b, ascend910_93, ascend950, or a SoC name such as Ascend910B3"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Parallel(_Section):
    """Ranks. `ranks_per_node` is max(tp, ep) where it is not given; tp and ep divide nnodes x ranks_per_node."""

    tp: Positive = 1
    ep: Positive = 1
    nnodes: Positive = 1
    ranks_per_node: Positive | None = None


class Infer(_Section):
    """Sizes of the engine; a recipe may give max_seq_len and the KV dtype here or in `kv_cache`."""

    max_batch_size: Positive = 32
    max_seq_len: Positive | None = None
    kv_cache_dtype: KVDType | None = None


class KVCache(_Section):
    """The paged KV cache; `max_num_blocks` left out means: from the memory budget when the artifact is loaded."""

    dtype: KVDType | None = None
    block_size: Positive | None = None
    max_num_blocks: Positive | None = None
    max_seq_len: Positive | None = None


class Buckets(_Section):
    """Sizes of the static step graphs: sequences for decode, tokens for prefill."""

    decode: Annotated[list[Positive], Field(min_length=1)] | None = None
    prefill: Annotated[list[Positive], Field(min_length=1)] | None = None


class Cpu(_Section):
    """Options of the CPU target."""

    isa: Isa = "native"


class Recipe(_Section):
    """One recipe file. `model` is a Hugging Face config.json; `recipes/README.md` documents every key."""

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    model: dict[str, Any]
    dtype: DType = "bfloat16"
    target: Annotated[StrictStr, Field(pattern=TARGET_PATTERN)] = "ascend910b"
    cann: Annotated[StrictStr, Field(pattern=r"^\d+\.\d+(\.\w+)*$")] = "8.5.0"
    checkpoint: StrictStr | None = None
    pack_weights: StrictBool = False
    parallel: Parallel = Parallel()
    infer: Infer = Infer()
    kv_cache: KVCache = KVCache()
    buckets: Buckets = Buckets()
    cpu: Cpu = Cpu()


# --- reading a file ---------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-6 as a number, as YAML 1.2 and JSON do, and refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} stands twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def list_recipes(recipes_dir: Path) -> list[str]:
    """Names of the recipes in a folder, sorted; a recipe's file is called NAME.yaml."""
    return sorted(path.stem for path in recipes_dir.glob("*.yaml"))


def load_recipe(name_or_path: str | Path, recipes_dir: Path | None = None) -> Recipe:
    """The recipe of that name in `recipes_dir`, or of that YAML file, or of a Hugging Face checkpoint folder.

    A name wins over a folder called the same (write ./NAME for that).
    RecipeError where there is none, or where it holds an unknown key or a bad value.
    """
    path = Path(name_or_path).expanduser()
    names = list_recipes(recipes_dir) if recipes_dir is not None else []
    if recipes_dir is not None and str(name_or_path) in names:
        return _read(recipes_dir / f"{name_or_path}.yaml")
    if path.suffix in (".yaml", ".yml"):
        return _read(path)
    if path.is_dir():
        return _recipe_of_checkpoint(path)
    raise RecipeError(
        f"{name_or_path}: no recipe of that name{_nearest(str(name_or_path), names)}; "
        f"allowed: {', '.join(names) or 'none'}, a recipe's .yaml file, or a checkpoint folder"
    )


def with_model(recipe: Recipe, config: dict[str, Any], source: str) -> Recipe:
    """The recipe with another config.json (a checkpoint's own wins over the recipe's); `source` names it in errors."""
    return parse_recipe({**recipe.model_dump(), "model": config}, source)


def parse_recipe(data: Any, source: str, flags: dict[tuple[str, ...], str] | None = None) -> Recipe:
    """A recipe from plain data; `source` (a file) or `flags` (key path -> flag that set it) names the culprit."""
    if not isinstance(data, dict):
        raise RecipeError(f"{source}: a recipe is a mapping of keys, not {type(data).__name__}")
    try:
        recipe = Recipe.model_validate({key: value for key, value in data.items() if value is not None})
    except ValidationError as error:
        raise RecipeError(_one_line(error, source, flags or {})) from None
    for key, kind in (("model_type", str), ("architectures", list)):
        if not isinstance(recipe.model.get(key), kind):
            raise RecipeError(
                f"{source}: model.{key} is missing; model is the full config.json of a Hugging Face model"
            )
    return recipe


def _read(path: Path) -> Recipe:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return parse_recipe(data, str(path))


def _recipe_of_checkpoint(folder: Path) -> Recipe:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"{folder}: not a checkpoint folder, it has no config.json") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise RecipeError(f"{file}: a config.json is a mapping of keys, not {type(config).__name__}")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).lstrip("._-") or "model"
    data: dict[str, Any] = {"name": name, "model": config, "checkpoint": str(folder)}
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype in get_args(DType):
        data["dtype"] = dtype
    return parse_recipe(data, str(file))


# --- errors -----------------------------------------------------------------------------------------------------------


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f", did you mean {close[0]}?" if close else ""


def _sections(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """(path of a section, its keys) for the schema and every section in it."""
    yield prefix, list(model.model_fields)
    for key, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _sections(info.annotation, f"{prefix}{key}.")


def _unknown_key(path: tuple[str, ...]) -> str:
    sections = dict(_sections())
    parent, word = "".join(f"{part}." for part in path[:-1]), path[-1]
    homes = [f"{prefix}{key}" for prefix, keys in sections.items() for key in keys if key == word]
    near = f", did you mean {homes[0]}?" if homes else _nearest(word, sections[parent])
    return f"unknown key {'.'.join(path)}{near} (known: {', '.join(sections[parent])})"


def _one_line(error: ValidationError, source: str, flags: dict[tuple[str, ...], str]) -> str:
    """The first problem of a validation as one line, with the count of further ones."""
    problems = error.errors(include_url=False)
    first = problems[0]
    path = tuple(str(part) for part in first["loc"])
    culprit = flags.get(path, f"{source}: {'.'.join(path)}")
    value = repr(first.get("input"))
    value = value if len(value) <= 60 else value[:57] + "..."
    if first["type"] == "extra_forbidden":
        text = f"{source}: {_unknown_key(path)}"
    elif first["type"] == "missing":
        text = f"{culprit}: this key is missing"
    elif first["type"] == "literal_error":
        allowed = first["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        text = f"{culprit}: {value} is not allowed; allowed: {allowed}"
    elif path == ("target",):
        text = f"{culprit}: {value} is not allowed; allowed: {ALLOWED_TARGETS}"
    else:
        text = f"{culprit}: {value} is not allowed; {first['msg'][0].lower()}{first['msg'][1:]}"
    return text + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
