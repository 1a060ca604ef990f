"""Takes one rank's GE graphs from an artifact to graphs that GE has compiled, the way TorchAir's own cache loader does.

The order of calls (bind, put memory formats on the inputs, initialize the engine, load, compile) is that of the module
which TorchAir's `GeConcreteGraph.codegen` writes; memory and execution are in `npu.py`. TorchAir is imported inside
functions only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cann_runtime.artifact.manifest import Graph, Signature
from cann_runtime.artifact.store import Artifact
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.ge import bind, cache, groups, host
from cann_runtime.executor.ge.options import engine_options, graph_options

NPU_EXECUTOR = 1  # fx2ge_converter.ExecutorType.NPU
NZ_DTYPES = ("bfloat16", "float16")

Log = Callable[[str], None]


@dataclass
class LoadedGraph:
    """One graph parsed into TorchAir's GeGraph. `on_host[i]`: does the graph want input i in host memory?"""

    entry: Graph
    name: str
    signature: Signature
    ge: Any
    on_host: list[bool]


@dataclass(frozen=True)
class CompileResult:
    """What became of one graph: GE's key, whether GE had it in its cache, and how long it took in seconds."""

    name: str
    key: str
    cached: bool
    seconds: float


class RankGraphs:
    """All graphs of one rank, parsed and checked, with what is needed to bind them.

    Nothing is on the device yet: a host or an artifact that does not fit is refused by `open`.
    """

    def __init__(self, artifact: Artifact, rank: int, npu: host.Host, graphs: list[LoadedGraph], nz: bool) -> None:
        self.artifact, self.rank, self.npu, self.graphs = artifact, rank, npu, graphs
        self.names = groups.used_groups(loaded.ge for loaded in graphs)
        self.nz = _cube_weights(graphs) if nz else set()
        self.binding: bind.RankBinding | None = None

    @classmethod
    def open(cls, artifact: Artifact, rank: int, device: int, *, nz: bool) -> RankGraphs:
        """Check the host against the artifact, then parse this rank's graphs. Raises ArtifactError."""
        npu = host.read_host(device)
        host.check_host(artifact.manifest, npu)
        entries = [graph for graph in artifact.manifest.graphs if rank in graph.ranks]
        if not entries:
            raise ArtifactError(f"{artifact.path} has no graphs for rank {rank} of {artifact.manifest.world.size}")
        return cls(artifact, rank, npu, [_parse(artifact, entry) for entry in entries], nz)

    def connect(self) -> None:
        """Create the communicators that the graphs name; all ranks call it alike."""
        self.binding = groups.bind_groups(self.artifact.manifest.world, self.rank, self.names)

    def cache_folder(self, blocks: int, log: Log) -> Path | None:
        """Where GE keeps this rank's compiled graphs, or None where it could not find them again."""
        if self.names and not groups.names_are_stable():
            log("this CANN names communicators anew at every start: compiled graphs are not kept")
            return None
        key = cache.cache_key(self.npu.cann, self.npu.soc, blocks)
        manifest = self.artifact.manifest
        return cache.open_cache(self.artifact.path, manifest.fingerprint, key, self.rank, manifest.world.size, log)

    def compile(self, loaded: LoadedGraph, inputs: Sequence[Tensor], blocks: int, folder: Path | None) -> CompileResult:
        """Bind one graph to this rank, load it into GE and compile it; once per graph.

        inputs: one tensor per graph input, of the final shape, memory format and place. Their values are not read.
        """
        from torchair._ge_concrete_graph.fx2ge_converter import _update_internal_format_from_inputs
        from torchair.core import _backend

        if self.binding is None:
            raise AssertionError("connect() comes before compile()")
        started = time.perf_counter()
        bind.bind_kv_blocks(loaded.ge, loaded.signature, blocks)
        bind.bind_rank(loaded.ge, self.binding)
        _update_internal_format_from_inputs(loaded.ge, inputs)
        local, engine = graph_options(loaded.signature, blocks), engine_options(loaded.signature)
        bound: bytes = loaded.ge.model.SerializeToString(deterministic=True)
        key = cache.graph_key(bound, {**local, **engine, **_backend._get_global_op_compile_config()})
        cached = False
        if folder is not None:
            cached = cache.is_cached(folder, key)
            local |= {"ge.graph_compiler_cache_dir": str(folder.resolve()), "ge.graph_key": key}
        _backend.initialize_graph_engine(engine)
        loaded.ge.load(local, create_pg=False)
        loaded.ge.compile()
        return CompileResult(loaded.name, key, cached, time.perf_counter() - started)


def _parse(artifact: Artifact, entry: Graph) -> LoadedGraph:
    from google.protobuf.message import DecodeError
    from torchair.ge._ge_graph import GeGraph

    bucket = entry.bucket
    name = f"{entry.phase}_t{bucket.tokens}_s{bucket.seqs}_r{bucket.rows}_m{bucket.max_blocks}"
    if entry.format != "ge-modeldef":
        raise ArtifactError(f"graph {name} has format {entry.format}; an NPU runs ge-modeldef")
    path = artifact.object_path(entry.object)
    try:
        ge = GeGraph(serialized_model_def=path.read_bytes(), name=name)
    except (DecodeError, IndexError) as error:
        raise ArtifactError(f"{path} holds no GE graph ({error})") from error
    signature = artifact.signature(entry.signature)
    bind.check_inputs(ge, signature, name)
    places = list(ge.attr["_input_placements"].list.i)
    executor = ge.attr["_executor_type"].i
    if len(places) != len(signature.inputs) or executor != NPU_EXECUTOR:
        raise ArtifactError(f"{path}: converted for a CPU (executor type {executor}), not for an NPU")
    return LoadedGraph(entry, name, signature, ge, [place == 0 for place in places])  # utils.Placement.HOST is 0


def _cube_weights(graphs: Sequence[LoadedGraph]) -> set[str]:
    """Parameters that every graph which takes them reads as a matrix product's weight only.

    They are stored as FRACTAL_NZ, the cube unit's own layout, which spares a transformation at every step.
    """
    allowed: set[str] = set()
    refused: set[str] = set()
    for loaded in graphs:
        params = {ref.name for ref in loaded.signature.inputs if ref.kind == "param"}
        typed = {ref.name for ref in loaded.signature.inputs if ref.dtype in NZ_DTYPES}
        here = bind.matmul_weights(loaded.ge, loaded.signature) & typed
        allowed |= here
        refused |= params - here
    return allowed - refused
