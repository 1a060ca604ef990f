"""The NPU executor against the real Python of torch_npu and TorchAir, with only the device replaced (npu_fakes.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from npu_fakes import FakeHost, NpuTensor, fake_host
from npu_toy import ToyGraph, convert, eager, make_params, make_step, write_artifact

from cann_export.lower.ascend.toolchain import ensure_toolchain
from cann_runtime.artifact.store import Artifact
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.ge.bind import RankBinding, bind_rank, check_inputs, matmul_weights
from cann_runtime.executor.npu import FRACTAL_NZ, NpuExecutor, compile_graphs

BLOCKS = 5


@pytest.fixture(scope="module")
def graphs() -> list[ToyGraph]:
    ensure_toolchain(print)
    return [convert(2), convert(4)]


@pytest.fixture
def artifact(graphs: list[ToyGraph], tmp_path: Path) -> Artifact:
    return write_artifact(tmp_path / "toy", graphs)


@pytest.fixture
def host(graphs: list[ToyGraph]) -> Iterator[FakeHost]:
    with fake_host(FakeHost()) as pretended:
        yield pretended


def _parse(graph: ToyGraph):
    from torchair.ge._ge_graph import GeGraph

    return GeGraph(serialized_model_def=graph.model)


def _loaded_graph(host: FakeHost, index: int = 0):
    from torchair.ge._ge_graph import GeGraph

    return GeGraph(serialized_model_def=host.loaded[index]["graph"])


def _executor(artifact: Artifact, blocks: int = BLOCKS, rank: int = 0) -> NpuExecutor:
    executor = NpuExecutor(artifact, make_params().items(), rank=rank, device=rank, log=lambda line: None)
    executor.allocate_kv(blocks)
    return executor


def test_steps_give_what_torch_gives_and_write_the_caches_in_place(host: FakeHost, artifact: Artifact) -> None:
    executor = _executor(artifact)
    params = make_params()
    k_cache, v_cache = (torch.zeros(BLOCKS, 16, 1, 16, dtype=torch.bfloat16) for _ in range(2))
    for entry, slots in ((0, [70, 3]), (1, [17, 4, 79, 40]), (0, [70, 18])):
        graph = artifact.manifest.graphs[entry]
        step = make_step(len(slots), slots, seed=entry)
        logits = executor.execute(graph, step)
        assert type(logits) is torch.Tensor
        torch.testing.assert_close(logits, eager(params, step, k_cache, v_cache), rtol=2e-2, atol=2e-2)
    for name, expected in (("k_cache_0", k_cache), ("v_cache_0", v_cache)):
        held = executor._kv[name]
        assert isinstance(held, NpuTensor)
        torch.testing.assert_close(held.as_subclass(torch.Tensor), expected, rtol=2e-2, atol=2e-2)


def test_kv_block_count_is_bound_before_ge_sees_the_graph(host: FakeHost, artifact: Artifact) -> None:
    _executor(artifact, blocks=9)
    for index in (0, 1):
        graph = _loaded_graph(host, index)
        kv_ops = [op for op in graph.op if op.type == "Data" and op.name.endswith("_cache_1")]
        assert [list(op.output_desc[0].shape.dim) for op in kv_ops] == [[9, 16, 1, 16]] * 2
        assert [list(op.input_desc[0].shape.dim) for op in kv_ops] == [[9, 16, 1, 16]] * 2
        inputs, outputs = host.loaded[index]["hint"]
        assert all(size >= 0 for shape in inputs + outputs for size in shape), "GE would take the graph for dynamic"
        assert "[9, 16, 1, 16]" in host.loaded[index]["options"]["ge.inputHintShape"]
        assert "-1" not in host.loaded[index]["options"]["ge.inputHintShape"]


def test_logical_groups_become_hccl_communicators(host: FakeHost, artifact: Artifact) -> None:
    _executor(artifact)
    assert host.new_groups == [[0, 1]]
    groups = [op.attr["group"].s for op in _loaded_graph(host).op if "group" in op.attr]
    assert groups == [b"cann_tp_0"]


def test_moe_ranks_and_experts_are_bound(graphs: list[ToyGraph]) -> None:
    graph = _parse(graphs[0])
    op = graph.op.add()
    op.name, op.type = "dispatch", "MoeDistributeDispatchV2"
    op.attr["group_ep"].s, op.attr["group_tp"].s, op.attr["ep_rank_id"].i = b"ep", b"", 0
    routing = graph.op.add()
    routing.name = "routing"
    routing.attr["active_expert_range"].list.i.extend([0, 32])
    bind_rank(graph, RankBinding({"tp": "comm_tp", "ep": "comm_ep"}, ep_rank=3))
    assert (op.attr["group_ep"].s, op.attr["group_tp"].s, op.attr["ep_rank_id"].i) == (b"comm_ep", b"", 3)
    assert list(routing.attr["active_expert_range"].list.i) == [96, 128]


@pytest.mark.parametrize(
    ("group", "message"),
    [("tag=ptd:0;rank_list=0,1", "not one of tp, ep, world"), ("world", "which the launch lacks")],
)
def test_groups_that_cannot_be_bound_are_refused(graphs: list[ToyGraph], group: str, message: str) -> None:
    graph = _parse(graphs[0])
    next(op for op in graph.op if "group" in op.attr).attr["group"].s = group.encode()
    with pytest.raises(ArtifactError, match=message):
        bind_rank(graph, RankBinding({"tp": "comm_tp"}))


def test_matrix_weights_are_fractal_nz_and_ge_is_told(host: FakeHost, artifact: Artifact) -> None:
    _executor(artifact)
    # The embedding is also the output projection, and the norm's weight is no matrix.
    assert sorted(host.casts) == [([32, 32], FRACTAL_NZ), ([32, 256], FRACTAL_NZ)]
    data = {op.name: op.output_desc[0].attr for op in _loaded_graph(host).op if op.type == "Data"}
    assert {name: attr["format_for_int"].i for name, attr in data.items()} == {
        "embed_1": 2, "norm_1": 2, "kv_proj_1": 29, "o_proj_1": 29,
        "ids_1": 2, "slots_1": 2, "kv_lens_1": 2, "rows_1": 2, "k_cache_1": 2, "v_cache_1": 2,
    }  # fmt: skip
    assert data["kv_proj_1"]["origin_format_for_int"].i == 2
    assert list(data["kv_proj_1"]["origin_shape"].list.i) == [32, 32]


def test_nz_can_be_switched_off(host: FakeHost, artifact: Artifact) -> None:
    NpuExecutor(artifact, make_params().items(), rank=0, device=0, nz=False).allocate_kv(BLOCKS)
    assert host.casts == []
    assert {op.output_desc[0].attr["format_for_int"].i for op in _loaded_graph(host).op if op.type == "Data"} == {2}


def test_a_weight_that_something_else_reads_too_is_no_matrix_weight(graphs: list[ToyGraph]) -> None:
    assert matmul_weights(_parse(graphs[0]), graphs[0].signature) == {"kv_proj", "o_proj"}


def test_options_reach_the_engine_and_the_graph_as_torchair_splits_them(host: FakeHost, artifact: Artifact) -> None:
    from torchair.configs.compiler_config import CompilerConfig

    _executor(artifact)
    graph, engine = CompilerConfig().as_dict()
    for options in host.engine_options:
        assert engine.items() <= options.items()
        assert (options["ge.exec.staticMemoryPolicy"], options["ge.exec.deviceId"]) == ("2", "0")
    for loaded in host.loaded:
        assert graph.keys() <= loaded["options"].keys()
        assert loaded["options"]["ge.tiling_schedule_optimize"] == "1"
        assert loaded["options"]["frozenInput"] == "1,1,1,1,0,0,0,0,1,1"
        assert not engine.keys() & loaded["options"].keys()
        assert not [key for key in loaded["options"] if key.startswith("global:")]


def test_shape_hints_are_torchairs_own(host: FakeHost, artifact: Artifact, graphs: list[ToyGraph]) -> None:
    from torchair._ge_concrete_graph.utils import _append_real_input_shape

    _executor(artifact, blocks=6)
    shapes = [[6, *ref.shape[1:]] if ref.kind == "kv" else ref.shape for ref in graphs[0].signature.inputs]
    expected = _append_real_input_shape([SimpleNamespace(real_shape=shape) for shape in shapes])
    assert expected.items() <= host.loaded[0]["options"].items()


def test_a_cache_without_readers_comes_back_as_an_output_in_its_own_memory(
    host: FakeHost, artifact: Artifact, graphs: list[ToyGraph]
) -> None:
    from torchair.ge._ge_graph import GeGraph

    names = [ref.name for ref in graphs[0].signature.inputs]
    assert graphs[0].signature.options["ge.exec.outputReuseInputMemIndexes"] == f"{names.index('v_cache_0')},1"
    executor = _executor(artifact)
    seen = []
    real = GeGraph.run

    def run(self, inputs, assigned_outputs=[], stream=None):  # noqa: B006
        seen.append(assigned_outputs)
        return real(self, inputs, assigned_outputs, stream)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GeGraph, "run", run)
        executor.execute(artifact.manifest.graphs[0], make_step(2, [20, 21]))
    assert len(seen[0]) == 2
    assert seen[0][0] is None
    assert seen[0][1] is executor._kv["v_cache_0"]


def test_inputs_marked_for_host_memory_stay_there(host: FakeHost, graphs: list[ToyGraph], tmp_path: Path) -> None:
    model = _parse(graphs[0])
    names = [ref.name for ref in graphs[0].signature.inputs]
    model.attr["_input_placements"].list.i[names.index("logits_rows")] = 0
    changed = ToyGraph(graphs[0].bucket, model.model.SerializeToString(), graphs[0].signature)
    artifact = write_artifact(tmp_path / "host", [changed])
    # The fake `run` refuses inputs that are not in the memory that the graph asks for.
    logits = _executor(artifact).execute(artifact.manifest.graphs[0], make_step(2, [20, 21]))
    assert logits.shape == (2, 40)


def test_wrong_step_inputs_are_refused(host: FakeHost, artifact: Artifact) -> None:
    executor = _executor(artifact)
    graph = artifact.manifest.graphs[1]
    with pytest.raises(ArtifactError, match="step input input_ids"):
        executor.execute(graph, make_step(2, [20, 21]))
    step = make_step(4, [20, 21, 22, 23])
    step.slot_mapping_T = step.slot_mapping_T.long()
    with pytest.raises(ArtifactError, match=r"step input slot_mapping is torch\.int64"):
        executor.execute(graph, step)


def test_parameters_are_checked(host: FakeHost, artifact: Artifact) -> None:
    params = make_params()
    with pytest.raises(ArtifactError, match="2 parameters of the graphs were not given: embed, norm"):
        NpuExecutor(artifact, [item for item in params.items() if item[0] not in ("embed", "norm")], device=0)
    params["norm"] = params["norm"].float()
    with pytest.raises(ArtifactError, match=r"parameter norm is torch\.float32"):
        NpuExecutor(artifact, params.items(), device=0)


def test_a_signature_of_another_graph_is_refused(graphs: list[ToyGraph]) -> None:
    with pytest.raises(ArtifactError, match="input 4 \\(input_ids\\) is DT_INT64 \\[2\\] in the graph, int64 \\[4\\]"):
        check_inputs(_parse(graphs[0]), graphs[1].signature, "decode")
    shorter = graphs[0].signature.model_copy(update={"inputs": graphs[0].signature.inputs[:-1]})
    with pytest.raises(ArtifactError, match="the graph has 10 inputs, its signature 9"):
        check_inputs(_parse(graphs[0]), shorter, "decode")


def test_damaged_graph_bytes_are_refused(host: FakeHost, graphs: list[ToyGraph], tmp_path: Path) -> None:
    damaged = ToyGraph(graphs[0].bucket, b"\xff" * 64, graphs[0].signature)
    artifact = write_artifact(tmp_path / "damaged", [damaged])
    with pytest.raises(ArtifactError, match="holds no GE graph"):
        NpuExecutor(artifact, make_params().items(), device=0)


def test_compiling_without_weights_gives_the_graphs_that_the_executor_looks_for(
    host: FakeHost, artifact: Artifact
) -> None:
    results = compile_graphs(artifact, rank=0, blocks=BLOCKS, device=0, log=lambda line: None)
    assert [result.cached for result in results] == [False, False]
    assert host.compiled == 2
    compiled = [loaded["graph"] for loaded in host.loaded]
    lines: list[str] = []
    executor = NpuExecutor(artifact, make_params().items(), rank=0, device=0, log=lines.append)
    executor.allocate_kv(BLOCKS)
    assert host.compiled == 2, "the executor compiled again"
    assert [loaded["graph"] for loaded in host.loaded[2:]] == compiled
    assert all("from the cache" in line for line in lines)
