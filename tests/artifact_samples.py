"""Small artifacts, plans and checkpoints for the tests of packaging and loading; nothing in them can be computed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cann_export.package import ArtifactWriter
from cann_runtime.artifact.canonical import canonical_json, sha256_file
from cann_runtime.artifact.manifest import (
    Bucket,
    Graph,
    KVCacheSpec,
    Manifest,
    Signature,
    StoredFile,
    Target,
    TensorRef,
    World,
)
from cann_runtime.artifact.plan import Param, Part, WeightPlan


def sample_plan(tp: int = 2, rows: int = 8, columns: int = 6, dtype: str = "float32") -> WeightPlan:
    """Two merged, cut matrices; a cut one by columns; a replicated vector; a rope table; a rank offset."""
    half = [(r * rows // tp, (r + 1) * rows // tp) for r in range(tp)]
    cut = [(r * columns // tp, (r + 1) * columns // tp) for r in range(tp)]
    parts = [
        Part(source=f"model.layers.0.mlp.{n}_proj.weight", shape=[rows, columns], dim=0, ranges=half)
        for n in ("gate", "up")
    ]
    down = Part(source="model.layers.0.mlp.down_proj.weight", shape=[rows, columns], dim=1, ranges=cut)
    norm = Part(source="model.norm.weight", shape=[columns])
    params = [
        Param(name="gate_up", dtype=dtype, shape=[2 * rows // tp, columns], parts=parts),
        Param(name="down", dtype=dtype, shape=[rows, columns // tp], parts=[down]),
        Param(name="norm", dtype=dtype, shape=[columns], parts=[norm]),
        Param(name="rope_cos", kind="rope_cos", dtype=dtype, shape=[16, 4], constant="inv_freq"),
        Param(name="rank_offset", kind="rank_offset", dtype="int64", shape=[1], step=4),
    ]
    return WeightPlan(tp=tp, params={p.name: p for p in params})


def constants() -> dict[str, Tensor]:
    """The tables that sample_plan names."""
    return {"inv_freq": torch.tensor([1.0, 0.01])}


def checkpoint_tensors(plan: WeightPlan, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors for every source of a plan."""
    generator = torch.Generator().manual_seed(seed)
    parts = {part.source: part.shape for param in plan.params.values() for part in param.parts}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in parts.items()}


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], shards: int = 1, index: bool = True) -> Path:
    """Write a checkpoint folder in one of the forms that the hub has."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        piece = {key: tensors[key] for key in list(tensors)[i::shards]}
        save_file(piece, folder / name)
        weight_map |= dict.fromkeys(piece, name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_artifact(folder: Path, text: str = "one", *, tp: int = 2, weights: bool = False, **changes: Any) -> Manifest:
    """Write an artifact whose objects hold `text`; `changes` go into the manifest."""
    fields = {"text": text, "config": {"hidden_size": 8, "layers": 2}}
    with ArtifactWriter(folder, log=lambda line: None) as writer:
        signature = Signature(
            inputs=[TensorRef(name="input_ids", kind="input", dtype="int64", shape=[-1])],
            outputs=[TensorRef(name="logits", kind="output", dtype="float32", shape=[-1, 8])],
        )
        sha, signature_sha = writer.add_object(text.encode() * 100, "graph"), writer.add_json(signature, "signature")
        graphs = [
            Graph(
                phase=phase,
                bucket=Bucket(tokens=tokens, seqs=4, rows=4, max_blocks=2),
                ranks=list(range(tp)),
                format="ge-modeldef",
                object=sha,
                signature=signature_sha,
                report={"layers": {"middle": {"nodes": 6, "histogram": {"MatMul": 4, "RmsNorm": 2}}}},
            )
            for phase, tokens in (("decode", 4), ("prefill", 64))
        ]
        stored = {str(r): _weights(writer.weights_path(r), text) for r in range(tp)} if weights else {}
        tokenizer = folder.parent / f"tokenizer-{text}.json"
        tokenizer.write_text(json.dumps({"text": text}))
        values: dict[str, Any] = {
            "name": "sample",
            "fingerprint": hashlib.sha256(canonical_json(fields)).hexdigest(),
            "fingerprint_fields": fields,
            "recipe": {"name": "sample"},
            "architecture": {"hidden_size": 8},
            "dtype": "float32",
            "toolchain": {"torch": torch.__version__},
            "target": Target(kind="ascend", family="ascend910b", soc="Ascend910B3", cann="8.5.0"),
            "world": World(size=tp, tp=tp),
            "layout": "flat",
            "mixed_phases": False,
            "query_lens": "cumulative",
            "vocab_size": 8,
            "max_seq_len": 64,
            "max_batch_size": 4,
            "graphs": graphs,
            "kv_cache": KVCacheSpec(
                layout="per_layer", layers=2, kv_heads=1, head_dim=4, block_size=16, dtype="float32", scratch_blocks=4
            ),
            "weight_plan": writer.add_weight_plan(sample_plan(tp)),
            "constants": writer.add_constants(constants()),
            "tokenizer": writer.add_tokenizer({"tokenizer.json": tokenizer}),
            "weights": stored,
        }
        return writer.finish(Manifest.model_validate(values | changes))


def _weights(path: Path, text: str) -> StoredFile:
    save_file({"text": torch.tensor(list(text.encode()), dtype=torch.uint8)}, path)
    return StoredFile(sha256=sha256_file(path), size=path.stat().st_size)
