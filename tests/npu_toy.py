"""A tiny step graph in the form of the Ascend artifacts, made by the real TorchAir converter, and what it computes.

One norm, a merged projection, an in-place write of paged K and V, a read of whole K blocks (kv_lens names the block), a
collective over the logical group `tp` and an output projection tied to the embedding.

Shape letters: T tokens, R logits rows, H hidden 32, D head_dim 16, B blocks, P block_size 16, V vocabulary 40.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cann_export.lower.ascend.pin import pinned_target
from cann_export.package import ArtifactWriter
from cann_runtime.artifact.manifest import Bucket, Graph, KVCacheSpec, Manifest, Signature, Target, TensorRef, World
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.artifact.store import Artifact
from cann_runtime.executor.base import StepInputs

PARAMS = {"embed": [40, 32], "norm": [32], "kv_proj": [32, 32], "o_proj": [32, 256]}
BLOCK_SIZE = 16
EPS = 1e-6
TWO_RANKS = World(size=2, tp=2)


@dataclass
class ToyGraph:
    """ModelDef bytes with neutral groups and an open KV block count, and their signature."""

    bucket: Bucket
    model: bytes
    signature: Signature


def bucket(tokens: int) -> Bucket:
    return Bucket(tokens=tokens, seqs=tokens, rows=2, max_blocks=2)


def convert(tokens: int) -> ToyGraph:
    """Lower the toy step for T = `tokens` with TorchAir; the toolchain must be loaded."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torchair.configs.compiler_config import CompilerConfig
    from torchair.npu_fx_compiler import _NpuFxCompiler

    npu, aten = torch.ops.npu, torch.ops.aten

    def step(embed, norm, kv_proj, o_proj, ids, pos, slots, table, q_lens, kv_lens, rows, k_cache, v_cache):
        h_TH = aten.embedding(embed, ids)
        kv_T = npu.npu_linear(npu.npu_rms_norm(h_TH, norm, EPS)[0], kv_proj)
        k_TD, v_TD = kv_T.split(16, -1)
        k_new, v_new = npu.npu_scatter_pa_kv_cache_functional(
            k_TD.view(-1, 1, 16), v_TD.view(-1, 1, 16), k_cache, v_cache, slots, cache_mode="Norm"
        )
        read_T = aten.index_select(k_new, 0, kv_lens).view(-1, BLOCK_SIZE * 16)
        out_TH = torch.ops._c10d_functional.all_reduce(npu.npu_linear(read_T, o_proj), "sum", "tp")
        h_TH = h_TH + torch.ops._c10d_functional.wait_tensor(out_TH)
        logits_RV = npu.npu_linear(aten.index_select(h_TH, 0, rows), embed)
        aten.copy_(k_cache, k_new)
        aten.copy_(v_cache, v_new)
        return (logits_RV,)

    sizes = bucket(tokens)
    kv = [-1, BLOCK_SIZE, 1, 16]
    refs = [TensorRef(name=name, kind="param", dtype="bfloat16", shape=shape) for name, shape in PARAMS.items()]
    for name, dtype, shape in (
        ("input_ids", "int64", [tokens]),
        ("position_ids", "int64", [tokens]),
        ("slot_mapping", "int32", [tokens]),
        ("block_table", "int32", [sizes.seqs, sizes.max_blocks]),
        ("query_lens", "int64", [sizes.seqs]),
        ("kv_lens", "int64", [sizes.seqs]),
        ("logits_rows", "int64", [sizes.rows]),
    ):
        refs.append(TensorRef(name=name, kind="input", dtype=dtype, shape=shape))
    refs += [TensorRef(name=name, kind="kv", dtype="bfloat16", shape=kv) for name in ("k_cache_0", "v_cache_0")]
    mode = FakeTensorMode()
    with mode:
        fakes = [
            torch.empty([7 if d < 0 else d for d in ref.shape], dtype=getattr(torch, ref.dtype), device="meta")
            for ref in refs
        ]
        graph_module = make_fx(step, tracing_mode="real")(*fakes)
    for node, fake, ref in zip(graph_module.graph.nodes, fakes, refs):
        node.meta["val"] = fake
        if ref.kind == "param":
            fake._torchair_is_parameter = True
        if ref.kind == "kv":
            fake._dynamo_static_input_type = "guarded"
    config = CompilerConfig()
    config.experimental_config.frozen_parameter = True
    config.experimental_config.tiling_schedule_optimize = True
    config.experimental_config.topology_sorting_strategy = "StableRDFS"
    compiler = _NpuFxCompiler(config)
    compiler.arg_pos_to_source = None
    with pinned_target("Ascend910B3", "8.5.0"), tracing(TracingContext(mode)):
        runner = compiler._get_compiled_gm(graph_module, fakes).runner
        local, engine = runner._normalize_ge_option()
    del local["ge.inputHintShape"]  # made at load
    inputs = [refs[info.func.fx_input_idx] for info in runner._input_info_list]
    for op in runner.graph.op:
        for desc in [*op.input_desc, *op.output_desc] if op.type == "Data" else op.input_desc:
            if op.type in ("Data", "NetOutput") and list(desc.shape.dim) == [7, *kv[1:]]:
                desc.shape.dim[0] = -1
    signature = Signature(
        inputs=inputs,
        outputs=[TensorRef(name="logits", kind="output", dtype="bfloat16", shape=[sizes.rows, 40])],
        in_place=[index for index, ref in enumerate(inputs) if ref.kind == "kv"],
        options=local | {f"global:{key}": value for key, value in engine.items()},
    )
    return ToyGraph(sizes, runner.graph.model.SerializeToString(deterministic=True), signature)


def write_artifact(path: Path, graphs: list[ToyGraph], world: World = TWO_RANKS, **changes: object) -> Artifact:
    """Pack graphs that all ranks share; `changes` replace fields of the manifest."""
    with ArtifactWriter(path, log=lambda line: None) as writer:
        entries = [
            Graph(
                phase="decode",
                bucket=graph.bucket,
                ranks=list(range(world.size)),
                format="ge-modeldef",
                object=writer.add_object(graph.model, "graphs"),
                signature=writer.add_json(graph.signature),
            )
            for graph in graphs
        ]
        manifest = Manifest(
            name="toy",
            fingerprint="f" * 64,
            fingerprint_fields={},
            recipe={},
            architecture={},
            dtype="bfloat16",
            toolchain={"torch": "2.13.0", "torch_npu": "2.13.0"},
            target=Target(kind="ascend", family="ascend910b", soc="Ascend910B3", cann="8.5.0"),
            world=world,
            layout="flat",
            mixed_phases=False,
            query_lens="cumulative",
            vocab_size=40,
            max_seq_len=32,
            max_batch_size=4,
            graphs=entries,
            kv_cache=KVCacheSpec(
                layout="per_layer",
                layers=1,
                kv_heads=1,
                head_dim=16,
                block_size=BLOCK_SIZE,
                dtype="bfloat16",
                scratch_blocks=1,
            ),
            weight_plan=writer.add_weight_plan(WeightPlan(tp=world.tp, params={})),
            objects=writer.objects,
        )
        writer.finish(manifest.model_copy(update=changes))
    return Artifact.open(path)


def make_params(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).bfloat16() for name, shape in PARAMS.items()
    }


def make_step(tokens: int, slots: list[int], seed: int = 1) -> StepInputs:
    generator = torch.Generator().manual_seed(seed)
    return StepInputs(
        input_ids_T=torch.randint(0, 40, (tokens,), generator=generator),
        position_ids_T=torch.arange(tokens),
        slot_mapping_T=torch.tensor(slots, dtype=torch.int32),
        block_table_SM=torch.zeros(tokens, 2, dtype=torch.int32),
        query_lens_S=torch.arange(tokens) + 1,
        kv_lens_S=torch.tensor(slots) // BLOCK_SIZE,
        logits_rows_R=torch.tensor([tokens - 1, 0]),
    )


def eager(params: dict[str, Tensor], step: StepInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """The toy step in plain torch on 2 equal ranks: logits [R, V]; the caches [B, P, 1, D] are written in place."""
    h_TH = torch.nn.functional.embedding(step.input_ids_T, params["embed"])
    normed_TH = torch.nn.functional.rms_norm(h_TH.float(), (32,), params["norm"].float(), EPS).bfloat16()
    kv_T = torch.nn.functional.linear(normed_TH, params["kv_proj"])
    slots = step.slot_mapping_T.long()
    k_cache.view(-1, 1, 16)[slots] = kv_T[:, None, :16]
    v_cache.view(-1, 1, 16)[slots] = kv_T[:, None, 16:]
    out_TH = torch.nn.functional.linear(k_cache[step.kv_lens_S].flatten(1), params["o_proj"])
    h_TH = h_TH + 2 * out_TH
    return torch.nn.functional.linear(h_TH[step.logits_rows_R], params["embed"])
