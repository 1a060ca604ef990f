"""`cann-export inspect`: what is in an artifact, as tables or as JSON, after the loader's own checks of every file.

Everything is read from the artifact; no graph is loaded and torch is not imported.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from cann_runtime.artifact.manifest import Graph, Manifest
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.artifact.store import MANIFEST, WEIGHT_PLAN, WEIGHTS, Artifact, weights_name

_ITEM_SIZES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


def inspect_artifact(path: Path, as_json: bool = False) -> None:
    """Print an artifact's description on stdout. Raises ArtifactError where it is damaged."""
    description = describe(path)
    if as_json:
        print(json.dumps(description, indent=2, sort_keys=True))
    else:
        _print(description)


def describe(path: Path) -> dict[str, Any]:
    """An artifact's description as plain JSON data; sizes in bytes."""
    artifact = Artifact.open(path, check_host=False)
    manifest = artifact.manifest
    files = _files(artifact)
    return {
        "path": str(path),
        "name": manifest.name,
        "schema_version": manifest.schema_version,
        "fingerprint": manifest.fingerprint,
        "model": manifest.architecture.get("architectures") or manifest.architecture.get("model_type", "unknown"),
        "dtype": manifest.dtype,
        "target": manifest.target.model_dump(),
        "toolchain": manifest.toolchain,
        "world": manifest.world.model_dump() | {"dp": manifest.world.dp},
        "limits": {"max_seq_len": manifest.max_seq_len, "max_batch_size": manifest.max_batch_size},
        "layout": manifest.layout,
        "kv_cache": manifest.kv_cache.model_dump() | {"bytes_per_block": manifest.kv_cache.bytes_per_block()},
        "graphs": [_graph(artifact, graph) for graph in manifest.graphs],
        "layers": _layers(manifest),
        "fusions": manifest.report.get("fusions", {}),
        "traced_layers": manifest.report.get("traced_layers"),
        "weights": _weights(manifest, artifact.plan()),
        "files": files,
        "bytes": sum(file["bytes"] for file in files),
    }


def _graph(artifact: Artifact, graph: Graph) -> dict[str, Any]:
    signature = artifact.signature(graph.signature)
    kinds = [ref.kind for ref in signature.inputs]
    return {
        "phase": graph.phase,
        "bucket": graph.bucket.model_dump(exclude_none=True),
        "dynamic": graph.dynamic,
        "ranks": graph.ranks,
        "format": graph.format,
        "object": graph.object,
        "bytes": artifact.manifest.objects[graph.object],
        "inputs": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "in_place": len(signature.in_place),
        "options": signature.options,
    }


def _layers(manifest: Manifest) -> dict[str, Any]:
    """Ops of one layer of each kind, by phase: the first graph of a phase stands for all its buckets."""
    layers: dict[str, Any] = {}
    for graph in manifest.graphs:
        if "layers" in graph.report:
            layers.setdefault(graph.phase, graph.report["layers"])
    return layers


def _weights(manifest: Manifest, plan: WeightPlan) -> dict[str, Any]:
    sources = {part.source: part.shape for param in plan.params.values() for part in param.parts}
    kinds = [param.kind for param in plan.params.values()]
    return {
        "parameters": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "bytes_per_rank": sum(math.prod(p.shape) * _ITEM_SIZES.get(p.dtype, 1) for p in plan.params.values()),
        "source_tensors": len(sources),
        "source_elements": sum(math.prod(shape) for shape in sources.values()),
        "packed": {rank: stored.size for rank, stored in manifest.weights.items()},
    }


def _files(artifact: Artifact) -> list[dict[str, Any]]:
    manifest = artifact.manifest
    uses: dict[str, list[str]] = {}
    for graph in manifest.graphs:
        uses.setdefault(graph.object, []).append(f"{graph.phase} graph, {graph.bucket.tokens} tokens")
        uses.setdefault(graph.signature, []).append(f"{graph.phase} signature")
    for library in manifest.libraries:
        uses.setdefault(library.sha256, []).append("kernel library")
    if manifest.constants is not None:
        uses.setdefault(manifest.constants.sha256, []).append("constants")
    sizes = {path: stored.size for path, stored in artifact.files().items()}
    sizes[artifact.path / MANIFEST] = (artifact.path / MANIFEST).stat().st_size
    for rank, stored in manifest.weights.items():
        sizes[artifact.path / WEIGHTS / weights_name(int(rank))] = stored.size
        uses[weights_name(int(rank))] = [f"packed weights of tp rank {rank}"]
    uses |= {MANIFEST: ["manifest"], WEIGHT_PLAN: ["weight plan"]} | {
        name: ["tokenizer"] for name in manifest.tokenizer
    }
    return [
        {
            "file": str(path.relative_to(artifact.path)),
            "bytes": size,
            "use": "; ".join(dict.fromkeys(uses.get(path.name, [])))
            or path.parent.name.replace(artifact.path.name, ""),
        }
        for path, size in sorted(sizes.items())
    ]


def _print(d: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    target, world, kv, weights = d["target"], d["world"], d["kv_cache"], d["weights"]
    facts = Table(title=f"{d['name']}  {d['path']}", show_header=False, title_justify="left")
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("fingerprint", d["fingerprint"])
    facts.add_row("model", f"{_words(d['model'])}, {d['dtype']}")
    facts.add_row("target", ", ".join(f"{key} {value}" for key, value in target.items() if value is not None))
    facts.add_row("toolchain", ", ".join(f"{name} {version}" for name, version in sorted(d["toolchain"].items())))
    facts.add_row("world", f"{world['size']} ranks: tp {world['tp']}, ep {world['ep']}, dp {world['dp']}")
    facts.add_row("limits", f"{d['limits']['max_seq_len']} tokens, {d['limits']['max_batch_size']} sequences")
    facts.add_row(
        "kv cache",
        f"{kv['layout']}, {kv['layers']} layers x {kv['kv_heads']} heads x {kv['head_dim']}, {kv['dtype']}; "
        f"block of {kv['block_size']} tokens: {_size(kv['bytes_per_block'])} a rank",
    )
    parameters = ", ".join(f"{count} {kind}" for kind, count in weights["parameters"].items())
    facts.add_row("parameters", f"{parameters}; {_size(weights['bytes_per_rank'])} a rank")
    facts.add_row(
        "checkpoint", f"{weights['source_tensors']} tensors, {weights['source_elements'] / 1e6:.1f} M elements"
    )
    packed = sum(weights["packed"].values())
    facts.add_row("packed weights", f"{len(weights['packed'])} ranks, {_size(packed)}" if packed else "none")
    inputs = {", ".join(f"{count} {kind}" for kind, count in g["inputs"].items()): None for g in d["graphs"]}
    facts.add_row("graph inputs", "; ".join(inputs))
    if d["fusions"]:
        fusions = ", ".join(f"{name} {count}" for name, count in d["fusions"].items())
        facts.add_row(f"fusions in {d['traced_layers']} traced layers", fusions)
    console.print(facts)

    graphs = Table("phase", "tokens", "seqs", "rows", "blocks", "ranks", "size", "object", title="graphs")
    for g in d["graphs"]:
        bucket = g["bucket"]
        most = "up to " if g["dynamic"] else ""
        row = [f"{most}{bucket[key]}" for key in ("tokens", "seqs", "rows", "max_blocks")]
        graphs.add_row(g["phase"], *row, _ranks(g["ranks"]), _size(g["bytes"]), g["object"][:12])
    console.print(graphs)

    for phase, kinds in d["layers"].items():
        ops = Table("layer", "ops", "which", title=f"ops per layer, {phase}")
        for kind, layer in kinds.items():
            histogram = layer.get("histogram", {})
            count = layer.get("nodes", sum(histogram.values()))
            ops.add_row(
                "each" if len(kinds) == 1 else kind,
                str(count),
                ", ".join(f"{name} {n}" for name, n in sorted(histogram.items())),
            )
        console.print(ops)

    files = Table("file", "size", "use", title=f"files, {_size(d['bytes'])}")
    for file in d["files"]:
        files.add_row(file["file"], _size(file["bytes"]), file["use"])
    console.print(files)


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _ranks(ranks: list[int]) -> str:
    whole = len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if whole else ", ".join(map(str, ranks))


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
