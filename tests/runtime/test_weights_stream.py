"""From a checkpoint to one rank's parameters: the values of torch's own slicing, and no more memory than they take."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from artifact_samples import checkpoint_tensors, constants, sample_plan, save_checkpoint
from safetensors.torch import load_file
from torch import Tensor

from cann_runtime.artifact.checkpoint_reader import CheckpointReader
from cann_runtime.artifact.plan import Param, Part, WeightPlan
from cann_runtime.artifact.weights import check_plan, pack_weights, stream_packed, stream_params
from cann_runtime.errors import ArtifactError, CheckpointError


def one_param(param: Param, tp: int = 1) -> WeightPlan:
    return WeightPlan(tp=tp, params={param.name: param})


def load(plan: WeightPlan, reader: CheckpointReader, rank: int = 0) -> dict[str, Tensor]:
    check_plan(plan, reader)
    params = dict(stream_params(plan, reader, rank, constants()))
    for name, tensor in params.items():
        assert list(tensor.shape) == plan.params[name].shape
        assert str(tensor.dtype) == f"torch.{plan.params[name].dtype}"
        assert tensor.is_contiguous()
    return params


def misfit(plan: WeightPlan, reader: CheckpointReader) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_plan(plan, reader)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_slices_are_merged_as_torch_does(tmp_path: Path, shards: int, rank: int) -> None:
    plan = sample_plan(tp=2)
    source = checkpoint_tensors(plan)
    params = load(plan, CheckpointReader(save_checkpoint(tmp_path, source, shards)), rank)
    gate, up, down, norm = source.values()
    assert torch.equal(params["gate_up"], torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]))
    assert torch.equal(params["down"], down.chunk(2, dim=1)[rank])
    assert torch.equal(params["norm"], norm)
    assert params["rank_offset"].tolist() == [4 * rank]


def test_transposed_merged_and_padded(tmp_path: Path) -> None:
    weight, bias = torch.randn(10, 6), torch.randn(10)
    reader = CheckpointReader(save_checkpoint(tmp_path, {"w": weight, "b": bias}))
    part = Part(source="w", shape=[10, 6], dim=0, ranges=[(0, 4), (4, 8), (8, 12), (12, 16)])
    small = Part(source="b", shape=[10], dim=0, ranges=part.ranges)
    for rank in range(4):
        rows = torch.nn.functional.pad(weight, (0, 0, 0, 6))[4 * rank : 4 * rank + 4]
        for transpose in (False, True):
            shape = [6, 8] if transpose else [8, 6]
            param = Param(name="w", dtype="float32", shape=shape, parts=[part, part], transpose=transpose)
            expected = torch.cat([rows, rows])
            assert torch.equal(load(one_param(param, 4), reader, rank)["w"], expected.T if transpose else expected)
        param = Param(name="b", dtype="float32", shape=[4], parts=[small])
        assert torch.equal(
            load(one_param(param, 4), reader, rank)["b"], torch.nn.functional.pad(bias, (0, 6))[4 * rank : 4 * rank + 4]
        )


def test_stacked_along_another_dimension_and_uncut_parts(tmp_path: Path) -> None:
    a, b = torch.randn(3, 4), torch.randn(3, 2)
    reader = CheckpointReader(save_checkpoint(tmp_path, {"a": a, "b": b}))
    parts = [Part(source="a", shape=[3, 4], dim=1, ranges=[(1, 3)]), Part(source="b", shape=[3, 2])]
    param = Param(name="ab", dtype="float32", shape=[3, 4], parts=parts, cat_dim=1)
    assert torch.equal(load(one_param(param), reader)["ab"], torch.cat([a[:, 1:3], b], dim=1))


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_casts_round_as_torch_does(tmp_path: Path, stored: torch.dtype, wanted: str) -> None:
    # Ties and near-ties of float32 -> bfloat16, which truncation would get wrong, and random values.
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, -0x40808000], dtype=torch.int32)
    values = torch.cat([ties.view(torch.float32), torch.randn(1003)]).to(stored)
    reader = CheckpointReader(save_checkpoint(tmp_path, {"w": values}))
    param = Param(name="w", dtype=wanted, shape=[1008], parts=[Part(source="w", shape=[1008])])
    loaded = load(one_param(param), reader)["w"]
    assert torch.equal(loaded, values.to(getattr(torch, wanted)))
    if stored == torch.float32 and wanted == "bfloat16":
        assert loaded[:4].tolist() == [1.0, 1.015625, 1.0, 1.0078125]  # to nearest, ties to even


@pytest.mark.parametrize("positions", [7, 5000, 16384])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rope_tables_equal_transformers(positions: int, dtype: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}
    for rope in ({"rope_type": "default", "rope_theta": 1e5}, yarn):
        config = LlamaConfig(
            hidden_size=256, num_attention_heads=4, rope_parameters=rope, max_position_embeddings=16384
        )
        module = LlamaRotaryEmbedding(config)
        x = torch.empty(1, dtype=getattr(torch, dtype))
        cos, sin = module(x, torch.arange(positions)[None])
        scaling = float(module.attention_scaling)
        assert scaling == 1.0 if rope is not yarn else scaling > 1.0
        kinds = {"cos": "rope_cos", "sin": "rope_sin"}
        plan = WeightPlan.model_validate(
            {
                "tp": 1,
                "params": {
                    name: Param(
                        name=name, kind=kind, dtype=dtype, shape=[positions, 64], constant="inv", scaling=scaling
                    )
                    for name, kind in kinds.items()
                },
            }
        )
        tables = dict(stream_params(plan, EMPTY, 0, {"inv": module.inv_freq}))
        assert torch.equal(tables["cos"], cos[0])
        assert torch.equal(tables["sin"], sin[0])


class _Empty(CheckpointReader):
    """A checkpoint of no tensors, for plans that read none."""

    def __init__(self) -> None:
        self.path = Path("empty")
        self._files = {}


EMPTY = _Empty()


def tied_plan() -> WeightPlan:
    embed = Part(source="model.embed_tokens.weight", shape=[8, 4])
    norm = Part(source="model.norm.weight", shape=[4])
    head = Part(source="lm_head.weight", alternatives=["model.embed_tokens.weight"], shape=[8, 4])
    params = [
        Param(name="embed", dtype="bfloat16", shape=[8, 4], parts=[embed]),
        Param(name="norm", dtype="bfloat16", shape=[4], parts=[norm]),
        Param(name="head", dtype="bfloat16", shape=[8, 4], parts=[head]),
    ]
    return WeightPlan(tp=1, params={p.name: p for p in params})


@pytest.mark.parametrize(
    "rule",
    [
        lambda name: name,
        lambda name: name.removeprefix("model."),
        lambda name: "language_model." + name,
        lambda name: name.replace("model.", "model.language_model.", 1),
        lambda name: name.replace("model.", "language_model.", 1),
        lambda name: "_orig_mod." + name,
        lambda name: "module." + name,
        lambda name: "model." + name,
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_names_with_another_prefix_are_found(tmp_path: Path, rule: Callable[[str], str], tied: bool) -> None:
    source = checkpoint_tensors(tied_plan())
    if tied:
        del source["lm_head.weight"]
    extra = {"visual.patch_embed.weight": torch.zeros(2), "optimizer.step": torch.zeros(1, dtype=torch.int64)}
    reader = CheckpointReader(save_checkpoint(tmp_path, {rule(n): t for n, t in source.items()} | extra))
    params = load(tied_plan(), reader)
    assert torch.equal(params["embed"], source["model.embed_tokens.weight"].bfloat16())
    assert torch.equal(params["norm"], source["model.norm.weight"].bfloat16())
    head = source["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert torch.equal(params["head"], head.bfloat16())
    assert (params["head"].data_ptr() == params["embed"].data_ptr()) == tied, "tied embeddings are read once"


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    source = checkpoint_tensors(sample_plan())
    del source["model.layers.0.mlp.up_proj.weight"]
    message = misfit(sample_plan(), CheckpointReader(save_checkpoint(tmp_path / "a", source)))
    assert "model.layers.0.mlp.up_proj.weight" in message
    assert "gate_proj" not in message
    other = {f"transformer.h.{i}.attn.weight": torch.zeros(1) for i in range(3)}
    message = misfit(sample_plan(), CheckpointReader(save_checkpoint(tmp_path / "b", other)))
    assert "model.layers.0.mlp.gate_proj.weight" in message


def test_shapes_and_dtypes_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    source = checkpoint_tensors(sample_plan())
    source["model.norm.weight"] = torch.zeros(7)
    source["model.layers.0.mlp.down_proj.weight"] = torch.zeros(8, 6, dtype=torch.int8)
    message = misfit(sample_plan(), CheckpointReader(save_checkpoint(tmp_path, source)))
    assert "model.norm.weight is [7] where the artifact expects [6]" in message
    assert "down_proj.weight is int8" in message
    parts = [Part(source=f"w{i}", shape=[2]) for i in range(9)]
    plan = one_param(Param(name="w", dtype="float32", shape=[18], parts=parts))
    wrong = {f"w{i}": torch.zeros(3) for i in range(9)}
    message = misfit(plan, CheckpointReader(save_checkpoint(tmp_path / "many", wrong)))
    assert message.count("[3]") == 5
    assert message.endswith("and 4 more")


def test_inconsistent_plans_are_errors(tmp_path: Path) -> None:
    reader = CheckpointReader(save_checkpoint(tmp_path, {"w": torch.zeros(4, 2)}))
    part = Part(source="w", shape=[4, 2])
    half = Part(source="w", shape=[4, 2], dim=0, ranges=[(0, 2)])

    def run(plan: WeightPlan, rank: int = 0) -> None:
        dict(stream_params(plan, reader, rank, {}))

    with pytest.raises(ArtifactError, match=r"w is \[5, 2\]"):
        run(one_param(Param(name="w", dtype="float32", shape=[5, 2], parts=[part])))
    with pytest.raises(ArtifactError, match="give 4 rows, not 6"):
        run(one_param(Param(name="w", dtype="float32", shape=[6, 2], parts=[half, half])))
    with pytest.raises(ArtifactError, match="rank 1 does not exist"):
        run(one_param(Param(name="w", dtype="float32", shape=[4, 2], parts=[part])), 1)
    with pytest.raises(ArtifactError, match="constant inv"):
        run(one_param(Param(name="c", kind="rope_cos", dtype="float32", shape=[4, 2], constant="inv")))
    with pytest.raises(ArtifactError, match="unknown dtype float3"):
        run(one_param(Param(name="w", dtype="float3", shape=[4, 2], parts=[part])))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_are_the_streamed_ones(tmp_path: Path, dtype: str) -> None:
    plan = sample_plan(tp=2, rows=64, columns=10, dtype=dtype)
    reader = CheckpointReader(save_checkpoint(tmp_path / "c", checkpoint_tensors(plan), 2))
    for rank in range(2):
        path = tmp_path / f"rank{rank}.safetensors"
        stored = pack_weights(plan, reader, rank, path, constants())
        content = path.read_bytes()
        assert stored.size == len(content)
        assert stored.sha256 == hashlib.sha256(content).hexdigest()
        expected = load(plan, reader, rank)
        for read in (load_file(path), dict(stream_packed(path))):  # by safetensors itself, and by us
            assert read.keys() == expected.keys()
            assert all(torch.equal(read[name], expected[name]) for name in expected)
        for name, view in stream_packed(path):
            size = view.numel() * view.element_size()
            assert view.data_ptr() % (64 if size % 64 == 0 else view.element_size()) == 0, name
        again = pack_weights(plan, reader, rank, tmp_path / "again", constants())
        assert again == stored
        assert (tmp_path / "again").read_bytes() == content


class _Counting(CheckpointReader):
    """Counts the bytes of the views that are asked for."""

    asked = 0

    def narrow(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        view = super().narrow(name, dim, start, stop)
        self.asked += view.numel() * view.element_size()
        return view


def test_a_rank_asks_for_its_slices_only(tmp_path: Path) -> None:
    plan = sample_plan(tp=4, rows=64, columns=64)
    save_checkpoint(tmp_path, checkpoint_tensors(plan))
    for rank in range(4):
        reader = _Counting(tmp_path)
        params = dict(stream_params(plan, reader, rank, constants()))
        own = sum(params[name].numel() * 4 for name in ("gate_up", "down", "norm"))
        assert reader.asked == own


PEAK = """
import os, sys
import torch
from pathlib import Path
from cann_runtime.artifact.checkpoint_reader import CheckpointReader
from cann_runtime.artifact.plan import Param, Part, WeightPlan
from cann_runtime.artifact.weights import check_plan, pack_weights, stream_params

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith(key))

def part(name):
    return Part(source=name, shape=[1024, 4096], dim=0, ranges=[(256 * r, 256 * r + 256) for r in range(4)])

params = [
    Param(name=f"p{i}", dtype="bfloat16", shape=[4096, 512], parts=[part(f"w{2 * i}"), part(f"w{2 * i + 1}")],
          transpose=True)
    for i in range(8)
]
plan = WeightPlan(tp=4, params={p.name: p for p in params})
reader = CheckpointReader(sys.argv[1])
check_plan(plan, reader)
torch.ones(64, 64).bfloat16().t().contiguous().view(torch.uint8).numpy().data  # loads what is loaded once
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS:")
if sys.argv[2] == "stream":
    kept = dict(stream_params(plan, reader, 1, {}))
else:
    pack_weights(plan, reader, 1, Path(sys.argv[3]), {})
print(memory("VmHWM:") - before)
"""


def test_peak_memory_is_the_parameters(tmp_path: Path) -> None:
    """256 MiB of float32 on disk; a rank of four owns 32 MiB of bfloat16, of which one parameter is 4 MiB."""
    weight = torch.ones(1024, 4096)
    save_checkpoint(tmp_path, {f"w{i}": weight * i for i in range(16)}, 2)
    peaks = {}
    # Every block comes from the system and goes back to it: what malloc keeps of freed blocks (of up to 32 MiB; larger
    # ones always go back) is not what is measured.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    for mode in ("stream", "pack"):
        command = [sys.executable, "-c", PEAK, str(tmp_path), mode, str(tmp_path / "packed")]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
        peaks[mode] = int(done.stdout)
    extra = (4 << 20) + (6 << 20)  # one slice of the source, and small things
    assert peaks["stream"] < (32 << 20) + extra, peaks
    assert peaks["pack"] < (4 << 20) + extra, peaks
