"""The architecture fingerprint: a hash of all that changes a graph, and of nothing else.

Weights enter by name, shape and dtype only, so any fine-tune of a model has the model's fingerprint. The hashed fields
are kept in the manifest: `cann-export why` compares them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from typing import Any

import torch

from cann_runtime.artifact.manifest import Bucket, Phase, Target, World
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.recipe import Settings

# Config keys that no forward pass reads: names, training and generation settings, and token ids.
NOT_GRAPH = {
    "_name_or_path", "_attn_implementation", "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype",
    "eos_token_id", "initializer_range", "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type",
    "task_specific_params",
    "chunk_size_feed_forward", "is_encoder_decoder", "tokenizer_class", "hidden_dropout", "resid_pdrop", "embd_pdrop",
}  # fmt: skip


def versions(torch_npu: str | None = None) -> dict[str, str]:
    """Versions of what makes graphs; local build tags are dropped."""
    found = {
        "cann-export": importlib.metadata.version("cann-export"),
        "torch": torch.__version__.partition("+")[0],
        "transformers": importlib.metadata.version("transformers"),
    }
    if torch_npu is not None:
        found["torch_npu"] = torch_npu.partition("+")[0]
    return found


def fingerprint_fields(
    settings: Settings,
    config: Any,
    target: Target,
    world: World,
    buckets: list[tuple[Phase, Bucket]],
    plan: WeightPlan,
    fusions: dict[str, int],
    toolchain: dict[str, str],
) -> dict[str, Any]:
    """Everything that is hashed, as plain JSON data. `config`: the transformers config object, all defaults filled."""
    sources = {part.source: part.shape for param in plan.params.values() for part in param.parts}
    values = {k: v for k, v in config.to_dict().items() if k not in NOT_GRAPH}
    fields = {
        "architecture": values,
        "dtype": settings.dtype,
        "kv_cache": {"dtype": settings.kv_dtype, "block_size": settings.block_size},
        "max_seq_len": settings.max_seq_len,
        "max_batch_size": settings.max_batch_size,
        "target": target.model_dump(),
        "world": world.model_dump(),
        "buckets": [[phase, bucket.model_dump()] for phase, bucket in buckets],
        "fusions": fusions,
        "weights": hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest(),
        "toolchain": toolchain,
    }
    plain: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return plain


def fingerprint(fields: dict[str, Any]) -> str:
    """sha256 of the fields in canonical JSON."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
