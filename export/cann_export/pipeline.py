"""The export pipeline: settings in, artifact out. The stages stand here in order; each is a function in its own module.

build (meta device) -> shard -> trace -> fuse -> lower -> package, once per phase and bucket; equal ranks share graphs.
"""

from __future__ import annotations

import contextlib
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cann_export.buckets import dynamic_bucket, scratch_blocks, static_buckets
from cann_export.expand import expand_plan, short_layers
from cann_export.fakeworld import fake_world
from cann_export.fingerprint import fingerprint, fingerprint_fields, versions
from cann_export.fuse import expectations, fuse
from cann_export.lint import Facts, check
from cann_export.model import DTYPES, BuiltModel, build_model, make_config
from cann_export.package import ArtifactWriter
from cann_export.program import Program
from cann_export.progress import Progress
from cann_export.shard import check_tp, kv_heads_per_rank, shard
from cann_export.trace import config_head_dim, head_dim, layer_kinds, trace
from cann_runtime.artifact.checkpoint_reader import CheckpointReader
from cann_runtime.artifact.manifest import Bucket, Graph, KVCacheSpec, Manifest, Phase, Target, World
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.artifact.weights import check_plan, pack_weights
from cann_runtime.recipe import Settings


@dataclass
class Report:
    """What an export made and what it took; printed at its end and kept in the manifest as far as it repeats.

    seconds: wall time by stage. peak_bytes: largest resident size of this process.
    """

    manifest: Manifest
    path: Path
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0


@dataclass
class _Lowered:
    """All graphs of an artifact and what the manifest says of them."""

    graphs: list[Graph]
    kv: KVCacheSpec
    plan: WeightPlan
    target: Target
    fusions: dict[str, int]
    traced_layers: int
    toolchain: dict[str, str]
    layout: dict[str, Any]
    libraries: list[Any] = field(default_factory=list)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def export(
    settings: Settings, output: Path, checkpoint: Path | None, progress: Progress, *, onnx: bool = False
) -> Report:
    """Export `settings` to the artifact folder `output`. Nothing is left of an export that fails.

    checkpoint: a resolved checkpoint folder; it gives the tokenizer, and with settings.pack_weights the weights.
    onnx: also write each graph as an ONNX model.
    Raises CannError subclasses, one line each, before anything is written where that can be known.
    """
    clock = _Clock()
    config = make_config(settings.config)
    check_tp(config, settings.tp)
    world = World(size=settings.world, tp=settings.tp, ep=settings.ep, nnodes=settings.nnodes)
    reader = CheckpointReader(checkpoint) if checkpoint is not None else None
    with ArtifactWriter(output, log=progress.log) as writer:
        lower = _lower_cpu if settings.is_cpu else _lower_ascend
        lowered = lower(settings, world, reader, writer, clock, progress, onnx)
        with clock("package"), progress.stage("package"):
            manifest = _manifest(settings, config, world, lowered, writer)
            manifest = _add_checkpoint(manifest, settings, lowered.plan, reader, writer, progress)
            manifest = writer.finish(manifest)
    return Report(manifest, output, clock.seconds, _peak_bytes())


def _peak_bytes() -> int:
    """Largest resident size of this process. Not ru_maxrss where it can be helped: that one outlives exec, and would
    be the size of a large process that started this one."""
    try:
        return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _build(settings: Settings, layers: int | None = None) -> BuiltModel:
    return build_model(settings.config, settings.dtype, settings.max_seq_len, layers)


def _sharded(settings: Settings, built: BuiltModel) -> tuple[WeightPlan, dict[str, int]]:
    expected = expectations(built)
    return shard(built, settings.tp), expected


def _kv_spec(settings: Settings, built: BuiltModel, layout: Any, scratch: int, layers: int) -> KVCacheSpec:
    return KVCacheSpec(
        layout=layout,
        layers=layers,
        kv_heads=kv_heads_per_rank(built, settings.tp),
        head_dim=head_dim(built),
        block_size=settings.block_size,
        dtype=settings.kv_dtype,
        scratch_blocks=scratch,
    )


def _add_constants(built: BuiltModel, writer: ArtifactWriter) -> Any:
    return writer.add_constants({f"{name}.inv_freq": rope.inv_freq for name, rope in built.ropes.items()})


def _add_onnx(program: Program, plan: WeightPlan, layers: int, writer: ArtifactWriter, clock: _Clock) -> str:
    from cann_export.lower.onnx import lower_onnx
    from cann_export.lower.onnx_repeat import repeat_layers

    with clock("onnx"):
        whole = repeat_layers(program, layers)
        return writer.add_object(lower_onnx(whole, expand_plan(plan, program.num_layers, layers)), "onnx")


def _lower_ascend(
    settings: Settings,
    world: World,
    reader: CheckpointReader | None,
    writer: ArtifactWriter,
    clock: _Clock,
    progress: Progress,
    onnx: bool,
) -> _Lowered:
    from cann_export.lower.ascend.convert import lower_ascend
    from cann_export.lower.ascend.soc import check_block_size, check_dtypes, layout, resolve_target
    from cann_export.lower.ascend.toolchain import ensure_toolchain

    target = resolve_target(settings.target, settings.cann)
    size = config_head_dim(make_config(settings.config))
    check_block_size(target, settings.block_size, size)
    check_dtypes(target, settings.dtype, settings.kv_dtype)
    flat = layout(size) == "flat"
    with clock("build"), progress.stage("build"):
        # All layers are looked at, to see what is unlike the others; then a few are traced where those stand for all.
        built = _build(settings)
        total = len(built.layers)
        if short := short_layers(layer_kinds(built)):
            built = _build(settings, short)
        first_plan, expected = _sharded(settings, built)
    if reader is not None:
        check_plan(expand_plan(first_plan, len(built.layers), total), reader)
    with clock("toolchain"), progress.stage("toolchain"):
        toolchain = ensure_toolchain(progress.log)
    buckets = static_buckets(settings, flat)
    scratch = scratch_blocks(buckets, settings.block_size, dynamic=False)
    kv = _kv_spec(settings, built, "per_layer", scratch, total)
    graphs: list[Graph] = []
    plan = first_plan
    fusions: dict[str, int] = {}
    with fake_world(settings.tp, settings.ep, settings.world), progress.graphs("graphs", len(buckets)) as done:
        for phase, bucket in buckets:
            plan = first_plan.model_copy(deep=True)
            with clock("trace"):
                program = trace(
                    built,
                    phase,
                    bucket,
                    tp=settings.tp,
                    block_size=settings.block_size,
                    kv_dtype=DTYPES[settings.kv_dtype],
                )
            with clock("fuse"):
                program = fuse(program, plan, expected)
            onnx_object = _add_onnx(program, plan, total, writer, clock) if onnx else None
            with clock("lower"):
                lowered = lower_ascend(program, target=target, layers_total=total)
            with clock("lint"):
                facts = Facts(str(target.family), phase, bucket, world, kv, settings.dtype, settings.config)
                check(lowered.model, lowered.signature, facts)
            fusions = program.report
            graphs.append(
                Graph(
                    phase=phase,
                    bucket=bucket,
                    ranks=list(range(world.size)),
                    format="ge-modeldef",
                    object=writer.add_object(lowered.model, "graph"),
                    signature=writer.add_json(lowered.signature, "signature"),
                    onnx=onnx_object,
                    report=lowered.report,
                )
            )
            done(f"{phase} {bucket.tokens}")
    described = {
        "layout": "flat" if flat else "rectangular",
        "mixed_phases": False,
        "query_lens": "cumulative" if flat else "per_sequence",
        "constants": _add_constants(built, writer),
    }
    return _Lowered(
        graphs,
        kv,
        expand_plan(plan, len(built.layers), total),
        target,
        fusions,
        len(built.layers),
        versions(toolchain.torch_npu),
        described,
    )


def _lower_cpu(
    settings: Settings,
    world: World,
    reader: CheckpointReader | None,
    writer: ArtifactWriter,
    clock: _Clock,
    progress: Progress,
    onnx: bool,
) -> _Lowered:
    from cann_export.lower.cpu import lower_cpu

    phase, bucket = dynamic_bucket(settings)
    with clock("build"), progress.stage("build"):
        built = _build(settings)
        plan, expected = _sharded(settings, built)
    if reader is not None:
        check_plan(plan, reader)
    with fake_world(settings.tp, settings.ep, settings.world), tempfile.TemporaryDirectory() as scratch_dir:
        with clock("trace"), progress.stage("trace"):
            program = trace(
                built,
                phase,
                bucket,
                tp=settings.tp,
                block_size=settings.block_size,
                kv_dtype=DTYPES[settings.kv_dtype],
                dynamic=True,
            )
        with clock("fuse"), progress.stage("fuse"):
            program = fuse(program, plan, expected)
        onnx_object = _add_onnx(program, plan, program.num_layers, writer, clock) if onnx else None
        with clock("lower"), progress.stage("compile"):
            lowered = lower_cpu(program, isa=settings.isa, out_dir=Path(scratch_dir))
            graph = Graph(
                phase=phase,
                bucket=bucket,
                dynamic=True,
                ranks=list(range(world.size)),
                format="aoti-so",
                object=writer.add_object(lowered.library, "graph"),
                signature=writer.add_json(lowered.signature, "signature"),
                onnx=onnx_object,
                report={"lowered": lowered.report, **_histogram(program)},
            )
        kernels = writer.add_file(lowered.kernels, "library")
    spec = lowered.kv_cache.model_copy(update={"scratch_blocks": scratch_blocks([(phase, bucket)], 1, dynamic=True)})
    layout = {
        "layout": "flat",
        "mixed_phases": True,
        "query_lens": "cumulative",
        "constants": _add_constants(built, writer),
    }
    target = Target(kind="cpu", isa=lowered.isa)
    return _Lowered([graph], spec, plan, target, program.report, program.num_layers, versions(), layout, [kernels])


def _histogram(program: Any) -> dict[str, Any]:
    """Ops of one middle layer of the fused graph, by name."""
    middle = min(1, program.num_layers - 1)
    ops: dict[str, int] = {}
    for node in program.gm.graph.nodes:
        if node.op == "call_function" and node.meta.get("layer") == middle and "getitem" not in str(node.target):
            name = str(node.target).removeprefix("aten.").removesuffix(".default")
            ops[name] = ops.get(name, 0) + 1
    return {
        "layers": {program.layer_kinds[middle]: {"nodes": sum(ops.values()), "histogram": dict(sorted(ops.items()))}}
    }


def _manifest(settings: Settings, config: Any, world: World, lowered: _Lowered, writer: ArtifactWriter) -> Manifest:
    buckets: list[tuple[Phase, Bucket]] = [(g.phase, g.bucket) for g in lowered.graphs]
    fields = fingerprint_fields(
        settings, config, lowered.target, world, buckets, lowered.plan, lowered.fusions, lowered.toolchain
    )
    eos = settings.config.get("eos_token_id")
    return Manifest(
        name=settings.name,
        fingerprint=fingerprint(fields),
        fingerprint_fields=fields,
        recipe=settings.as_dict() | {"checkpoint": None},
        architecture=settings.config,
        dtype=settings.dtype,
        toolchain=lowered.toolchain,
        target=lowered.target,
        world=world,
        vocab_size=int(config.vocab_size),
        max_seq_len=settings.max_seq_len,
        max_batch_size=settings.max_batch_size,
        max_num_blocks=settings.max_num_blocks,
        eos_token_ids=[] if eos is None else list(eos) if isinstance(eos, list) else [eos],
        graphs=lowered.graphs,
        kv_cache=lowered.kv,
        weight_plan=writer.add_weight_plan(lowered.plan),
        libraries=lowered.libraries,
        report={"fusions": lowered.fusions, "traced_layers": lowered.traced_layers},
        **lowered.layout,
    )


def _add_checkpoint(
    manifest: Manifest,
    settings: Settings,
    plan: WeightPlan,
    reader: CheckpointReader | None,
    writer: ArtifactWriter,
    progress: Progress,
) -> Manifest:
    """Tokenizer files, and the packed weights of every rank where asked, from the checkpoint."""
    if reader is None:
        return manifest
    from safetensors.torch import load

    from cann_export.checkpoint import tokenizer_files

    update: dict[str, Any] = {"tokenizer": writer.add_tokenizer(tokenizer_files(reader.path))}
    if settings.pack_weights:
        assert manifest.constants is not None
        constants = load(writer.object_bytes(manifest.constants.sha256))
        weights = {}
        with progress.graphs("weights", settings.tp) as done:
            for rank in range(settings.tp):
                weights[str(rank)] = pack_weights(plan, reader, rank, writer.weights_path(rank), constants)
                done(f"rank {rank}")
        update["weights"] = weights
    return manifest.model_copy(update=update)
