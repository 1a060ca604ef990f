"""Tiny seeded Hugging Face checkpoints in the format users have: sharded safetensors with an index, config.json.

Every parameter is random, also those that Hugging Face's init leaves at 0 (biases) or 1 (norms): otherwise a dropped
bias or norm weight would change nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

BASE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 515,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def tiny_config(model_type: str = "qwen2", **changes: Any) -> dict[str, Any]:
    """A config.json for a tiny model."""
    config = {**BASE, "model_type": model_type, "architectures": [CLASSES[model_type]], **changes}
    if model_type == "mistral":
        config.setdefault("sliding_window", None)
    return config


def tiny_model(config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of that config with seeded random parameters."""
    from transformers import AutoModelForCausalLM

    from cann_export.model import make_config

    hf_config = make_config(config)
    hf_config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        if param.dim() == 1:
            param.copy_(0.5 * noise if name.endswith("bias") else 1 + 0.2 * noise)
        else:
            param.copy_(noise * 1.5 / param.shape[-1] ** 0.5)
    return model.to(dtype)


def save_checkpoint(model: Any, config: dict[str, Any], folder: Path, shard_size: str = "1MB") -> Path:
    """Save as a sharded checkpoint; config.json is the given one (as published), not transformers' rendering of it."""
    model.save_pretrained(folder, max_shard_size=shard_size)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}, indent=1))
    return folder
