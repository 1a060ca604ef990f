"""GGUF files to Hugging Face checkpoint folders, once, through transformers' own GGUF reader.

The result holds the dequantized weights in float32 (every quantized value is exact there), so that a float32 run equals
transformers'. Finding the file is in `checkpoint.py`.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cann_export.cache import cached_folder
from cann_runtime.artifact.canonical import sha256_file
from cann_runtime.errors import CheckpointError

_FORMAT = 1  # raised when the conversion changes, so that old results are not used


def convert_gguf(path: Path, log: Callable[[str], None]) -> Path:
    """The checkpoint folder of a GGUF file, from the user's cache or converted now (20 s for 135M parameters)."""

    def build(folder: Path) -> None:
        log(f"converting {path.name} to a checkpoint folder, once (about 20 s for a small model)")
        try:
            _convert(path, folder)
        except (ValueError, KeyError, ImportError, NotImplementedError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"{path} cannot be converted: {reason}") from error

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file")
    return cached_folder(f"gguf/{path.stem}-{sha256_file(path)[:16]}-v{_FORMAT}", build)


def _convert(path: Path, folder: Path) -> None:
    import torch
    import transformers

    # The readers' progress bars, of which some cannot be switched off.
    with contextlib.redirect_stderr(io.StringIO()):
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        # Without dequantize the weights would stay in GGUF blocks, which save_pretrained refuses.
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=transformers.GgufConfig(dequantize=True), dtype=torch.float32
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    config_path = folder / "config.json"
    config = _shortest_floats(json.loads(config_path.read_text()))
    config.pop("_name_or_path", None)
    config.pop("_model_name_or_path", None)
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)


def _shortest_floats(value: Any) -> Any:
    """GGUF keeps floats in 32 bits (1e-05 reads as 9.99999974e-06): the shortest number with the same 32 bits."""
    if isinstance(value, dict):
        return {key: _shortest_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortest_floats(item) for item in value]
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value
