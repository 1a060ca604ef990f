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

NOT_GRAPH = {
    "_name_or_path": "where the config came from",
    "architectures": "a name; the class follows from model_type",
    "auto_map": "remote code, which is never run",
    "tokenizer_class": "text side",
    "transformers_version": "of whoever saved the config; ours is in `toolchain`",
    "dtype": "the recipe's dtype is what the graph has",
    "torch_dtype": "the same by its old name",
    "_attn_implementation": "always our own",
    "is_encoder_decoder": "follows from the class",
    "use_cache": "the step graph always has its cache",
    "output_attentions": "the step graph has one output",
    "output_hidden_states": "the step graph has one output",
    "return_dict": "the step graph has one output",
    "chunk_size_feed_forward": "memory saving of encoders, which computes the same",
    "bos_token_id": "token ids enter at run time",
    "eos_token_id": "token ids enter at run time",
    "pad_token_id": "token ids enter at run time; an embedding's padding row only has no gradient",
    "attention_dropout": "training",
    "hidden_dropout": "training",
    "resid_pdrop": "training",
    "embd_pdrop": "training",
    "initializer_range": "training",
    "id2label": "heads of classifiers",
    "label2id": "heads of classifiers",
    "problem_type": "heads of classifiers",
    "task_specific_params": "settings of generation",
}
"""Config keys that cannot change a step graph, and why."""


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
