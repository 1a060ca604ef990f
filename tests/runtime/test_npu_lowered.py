"""The NPU executor takes what the Ascend exporter makes: a lowered, stamped decoder, on the pretend host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ascend_toy import Size, toy_program
from npu_fakes import FakeHost, fake_host
from npu_toy import ToyGraph, write_artifact
from torch import Tensor

from cann_export.fakeworld import fake_world
from cann_export.lower.ascend.convert import GeGraph, lower_ascend
from cann_export.lower.ascend.soc import resolve_target
from cann_export.lower.ascend.toolchain import ensure_toolchain
from cann_runtime.artifact.manifest import Bucket, World
from cann_runtime.artifact.store import Artifact
from cann_runtime.executor.npu import NpuExecutor, compile_graphs

LAYERS = 4
TP = 8


def _lower(bucket: Bucket) -> GeGraph:
    size = Size(layers=3, tp=TP)
    target = resolve_target("ascend910b")
    with fake_world(TP):
        return lower_ascend(toy_program(size, bucket, "decode"), target=target, layers_total=LAYERS)


@pytest.fixture(scope="module")
def lowered() -> list[ToyGraph]:
    ensure_toolchain(print)
    buckets = [Bucket(tokens=n, seqs=n, rows=n, max_blocks=4) for n in (2, 4)]
    return [ToyGraph(bucket, graph.model, graph.signature) for bucket in buckets for graph in [_lower(bucket)]]


@pytest.fixture
def artifact(lowered: list[ToyGraph], tmp_path: Path) -> Artifact:
    return write_artifact(tmp_path / "decoder", lowered, world=World(size=TP, tp=TP))


def _params(graph: ToyGraph) -> Iterator[tuple[str, Tensor]]:
    for ref in graph.signature.inputs:
        if ref.kind == "param":
            yield ref.name, torch.zeros(ref.shape, dtype=getattr(torch, ref.dtype))


def test_exported_graphs_are_bound_compiled_and_found_again(lowered: list[ToyGraph], artifact: Artifact) -> None:
    from torchair.ge._ge_graph import GeGraph as TorchAirGraph

    with fake_host(FakeHost()) as host:
        assert [r.cached for r in compile_graphs(artifact, rank=0, blocks=9, device=0)] == [False, False]
        executor = NpuExecutor(artifact, _params(lowered[0]), rank=0, device=0)
        executor.allocate_kv(9)
        assert host.compiled == 2, "the executor looked for other graphs than were compiled"
    graph = TorchAirGraph(serialized_model_def=host.loaded[2]["graph"])
    refs = lowered[0].signature.inputs
    data = {op.attr["index"].i: op for op in graph.op if op.type == "Data"}
    in_nz = {refs[index].name for index, op in data.items() if op.output_desc[0].attr["format_for_int"].i == 29}
    matrices = [f"model.layers.{i}.{name}" for i in range(LAYERS) for name in ("qkv", "o", "gate_up", "down")]
    assert in_nz == {*matrices, "lm_head"}
    inputs, outputs = host.loaded[2]["hint"]
    assert all(size >= 0 for shape in outputs for size in shape)
    caches = [shape for shape, ref in zip(inputs, refs) if ref.kind == "kv"]
    assert caches == [[9, 128, 1, 128]] * (2 * LAYERS)
    collectives = [op.attr["group"].s for op in graph.op if op.type.startswith("Hcom")]
    assert len(collectives) == 2 * LAYERS + 2  # two a layer, the embedding, the logits
    assert set(collectives) == {b"cann_tp_0"}
    options = host.loaded[2]["options"]
    frozen = options["frozenInput"].split(",")
    assert [flag == "1" for flag in frozen] == [ref.kind != "input" for ref in refs]


def test_all_ranks_load_the_same_bytes(artifact: Artifact) -> None:
    loaded = []
    for rank in (0, TP - 1):
        with fake_host(FakeHost()) as host:
            compile_graphs(artifact, rank=rank, blocks=9, device=rank)
        loaded.append([graph["graph"] for graph in host.loaded])
    assert loaded[0] == loaded[1]
