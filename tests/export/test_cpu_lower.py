"""Lowering to the CPU and running what came out: a toy program through AOTInductor and the executor equals the same
module run eagerly, on one rank and on two; equal programs give equal bytes; what does not fit is refused in one line.

Shape letters: T tokens, S sequences, R logits rows, B blocks.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import cpu_toy
import pytest
import torch
from torch import Tensor

from cann_export.lower.cpu import CpuGraph, lower_cpu
from cann_export.lower.cpu_toolchain import resolve_isa
from cann_runtime.artifact.manifest import Bucket, Graph
from cann_runtime.errors import ArtifactError, RecipeError, UnsupportedModelError
from cann_runtime.executor.base import StepInputs
from cann_runtime.executor.cpu import CpuExecutor
from cann_runtime.ops import cpu

BLOCKS = 48
GRAPH = Graph(
    phase="mixed",
    bucket=Bucket(tokens=512, seqs=16, rows=512, max_blocks=16),
    dynamic=True,
    ranks=[0],
    format="aoti-so",
    object="toy",
    signature="",
)
# Prefill of several sequences, decodes, chunks beside decodes, one token alone.
STEPS = [{0: 5}, {0: 1, 1: 40, 2: 17}, {0: 1, 1: 1, 2: 1}, {1: 1, 2: 30, 3: 90}, {3: 1}]


@dataclass
class Toy:
    config: cpu_toy.Config
    lowered: CpuGraph

    def executor(self) -> CpuExecutor:
        graphs = {"toy": (self.lowered.library, self.lowered.signature)}
        return CpuExecutor([self.lowered.kernels], graphs, self.lowered.kv_cache, isa=self.lowered.isa)

    def loaded(self) -> CpuExecutor:
        executor = self.executor()
        executor.load_weights(iter(cpu_toy.parameters(self.config).items()))
        executor.allocate_kv(BLOCKS)
        return executor


def lower(config: cpu_toy.Config, folder: Path) -> Toy:
    return Toy(config, lower_cpu(cpu_toy.program(config), isa="native", out_dir=folder))


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """float32, qkv split from one linear, tied embedding."""
    return lower(cpu_toy.Config(), tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """bfloat16, norms on q and k between linear and rotary, no bias, head_dim 64."""
    config = cpu_toy.Config(dtype=torch.bfloat16, qk_norm=True, qkv_bias=False, head_dim=64, heads=4)
    return lower(config, tmp_path_factory.mktemp("other"))


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def run_steps(toy: Toy) -> list[float]:
    """Relative differences of the logits from the eager module, step by step."""
    executor, config = toy.loaded(), toy.config
    params, kv, batch = cpu_toy.parameters(config), cpu_toy.caches(config, BLOCKS), cpu_toy.Batch(config, BLOCKS)
    differences = []
    for rows in STEPS:
        step = batch.step(rows)
        differences.append(relative(executor.execute(GRAPH, step), cpu_toy.eager(config, params, step, kv)))
    return differences


def test_float32_logits_equal_the_eager_module_over_mixed_steps(toy: Toy) -> None:
    assert toy.lowered.report == {
        "linear": 9,
        "linear_unpacked": 0,
        "attention": 2,
        "attention_with_cat": 0,
        "collective": 0,
    }
    before = cpu.kernel_calls()
    assert max(run_steps(toy)) < 5e-6
    after = cpu.kernel_calls()
    assert after["linear_kernel"] - before["linear_kernel"] == 9 * len(STEPS)
    assert after["attention_kernel"] - before["attention_kernel"] == 2 * len(STEPS)
    assert (after["linear_plain"], after["attention_plain"]) == (before["linear_plain"], before["attention_plain"])


def test_bfloat16_with_normed_queries_is_as_near_to_float32_as_the_eager_module(other: Toy) -> None:
    assert other.lowered.report["attention_with_cat"] == 2
    config = other.config
    exact = replace(config, dtype=torch.float32)
    params = cpu_toy.parameters(config)
    wide = {name: value.float() for name, value in params.items()}
    executor, batch = other.loaded(), cpu_toy.Batch(config, BLOCKS)
    kv, kv_wide = cpu_toy.caches(config, BLOCKS), cpu_toy.caches(exact, BLOCKS)
    ours, eager = [], []
    for rows in STEPS:
        step = batch.step(rows)
        expected = cpu_toy.eager(exact, wide, step, kv_wide)
        ours.append(relative(executor.execute(GRAPH, step), expected))
        eager.append(relative(cpu_toy.eager(config, params, step, kv), expected))
    assert max(ours) < 1.2 * max(eager)


def test_only_the_asked_rows_have_logits(toy: Toy) -> None:
    executor, other = toy.loaded(), toy.loaded()
    step = cpu_toy.Batch(toy.config, BLOCKS).step({0: 9, 1: 4})
    full = executor.execute(GRAPH, step)
    picked = replace(step, logits_rows_R=torch.tensor([12, 3]))
    assert torch.equal(other.execute(GRAPH, picked), full[[12, 3]])


def test_a_sequence_gets_bitwise_the_same_logits_alone_and_in_a_batch(toy: Toy) -> None:
    prompt, extra = torch.randint(0, 131, (20,)), {1: 30, 2: 1}

    def logits(neighbours: dict[int, int]) -> Tensor:
        executor, batch = toy.loaded(), cpu_toy.Batch(toy.config, BLOCKS)
        rows = []
        for count in (20, 1, 1):
            step = batch.step({0: count, **neighbours})
            step.input_ids_T[:count] = prompt[:count]
            rows.append(executor.execute(GRAPH, step)[count - 1])
        return torch.stack(rows)

    assert torch.equal(logits({}), logits(extra))


def test_weights_are_outside_the_library_and_named_in_the_signature(toy: Toy) -> None:
    params = cpu_toy.parameters(toy.config)
    refs = [ref for ref in toy.lowered.signature.inputs if ref.kind == "param"]
    assert {ref.source for ref in refs} == set(params)
    assert [(r.name, r.packed) for r in refs if r.source == "embed"] == [("embed", False), ("embed.packed", True)]
    assert toy.executor().param_names() == [name for name in params]
    values = {name: value.numpy().tobytes()[-64:] for name, value in params.items()}
    library = toy.lowered.library.read_bytes()
    assert not any(value in library for value in values.values())


def test_export_never_touches_memory_of_the_size_of_the_weights(tmp_path: Path) -> None:
    """A layer of 1.6 GB: exporting it takes less than half of that."""
    code = (
        "import sys; from pathlib import Path; import cpu_toy\n"
        "from cann_export.lower.cpu import _Lowered, _export, _kv_spec; from cann_export.lower.cpu_toolchain import *\n"
        "from cann_runtime.ops import cpu; cpu.load_library(build_kernels(resolve_isa('native')))\n"
        "c = cpu_toy.Config(layers=1, hidden=8192, heads=16, head_dim=128, intermediate=16384, vocab=131)\n"
        "p = cpu_toy.program(c); l = _Lowered(p); _export(l, _kv_spec(p), p)\n"
        "total = sum(b.nbytes for b in l.buffers())\n"
        # Not ru_maxrss: across exec it keeps the size of the process that started this one.
        "print(total, 1024 * int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    total, peak = map(int, done.stdout.split()[-2:])
    assert total > 1_600_000_000
    assert peak < total / 2


def environment(**extra: str) -> dict[str, str]:
    paths = [str(Path(__file__).parents[1]), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), **extra}


def test_equal_programs_give_equal_bytes_in_another_folder_with_cold_caches(toy: Toy, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import cpu_toy; from cann_export.lower.cpu import lower_cpu\n"
        "g = lower_cpu(cpu_toy.program(cpu_toy.Config()), isa='native', out_dir=Path(sys.argv[1]))\n"
    )
    (tmp_path / "tmp").mkdir()
    env = environment(
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"),
        TMPDIR=str(tmp_path / "tmp"),
        PYTHONHASHSEED="7",
        OMP_NUM_THREADS="1",
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], cwd=tmp_path, env=env, check=True, capture_output=True
    )
    library = (tmp_path / "out" / "graph.so").read_bytes()
    assert library == toy.lowered.library.read_bytes()
    for place in (str(Path(torch.__file__).parents[1]), str(tmp_path), "/tmp/"):
        assert place.encode() not in library
        assert place.encode() not in toy.lowered.kernels.read_bytes()


def test_running_needs_neither_inductor_nor_a_compiler(toy: Toy, tmp_path: Path) -> None:
    code = (
        "import sys, cpu_run\n"
        "cpu_run.run(sys.argv[1])\n"
        "assert not [m for m in sys.modules if m.startswith(('torch._inductor.', 'torch._dynamo.', 'cann_export'))]\n"
    )
    write_job(toy, tmp_path)
    env = environment(PATH=str(tmp_path))
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "job.json")], env=env, check=True)
    step = cpu_toy.Batch(toy.config, BLOCKS).step(STEPS[0])
    assert torch.equal(torch.load(tmp_path / "logits.pt", weights_only=True), toy.loaded().execute(GRAPH, step))


def write_job(toy: Toy, folder: Path) -> None:
    step = cpu_toy.Batch(toy.config, BLOCKS).step(STEPS[0])
    torch.save(cpu_toy.parameters(toy.config), folder / "params.pt")
    torch.save(step.tensors(), folder / "step.pt")
    job = {
        "kernels": str(toy.lowered.kernels),
        "library": str(toy.lowered.library),
        "signature": toy.lowered.signature.model_dump(),
        "kv_cache": toy.lowered.kv_cache.model_dump(),
        "isa": toy.lowered.isa,
        "graph": GRAPH.model_dump(),
        "blocks": BLOCKS,
    }
    (folder / "job.json").write_text(json.dumps(job))


def test_a_running_graph_lets_other_python_threads_run(toy: Toy) -> None:
    """The interpreter lock is released: without it, ranks that wait for each other inside a graph can deadlock."""
    executor, batch = toy.loaded(), cpu_toy.Batch(toy.config, BLOCKS)
    step = batch.step({0: 200, 1: 200})
    inside = threading.Event()
    counted, stop = [0], threading.Event()

    def count() -> None:
        inside.wait()
        while not stop.is_set():
            counted[0] += 1
            time.sleep(1e-4)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    try:
        # No switch by time: the counter only advances where the main thread gives the lock away.
        sys.setswitchinterval(1000)
        inside.set()
        executor.execute(GRAPH, step)
        seen = counted[0]
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert seen > 0


def test_two_ranks_meet_inside_the_graph(tmp_path: Path) -> None:
    """Both ranks' logits equal the eager module's with torch's own collectives over the same group."""
    config = cpu_toy.Config(tp=2)
    toy = lower(config, tmp_path)
    assert toy.lowered.report["collective"] == 4
    write_job(toy, tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(Path(cpu_toy.__file__).with_name("cpu_run.py")),
                str(tmp_path / "job.json"),
                str(rank),
            ],
            env=environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1"),
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def test_wrong_inputs_are_refused_in_one_line(toy: Toy) -> None:
    executor, batch = toy.loaded(), cpu_toy.Batch(toy.config, BLOCKS)
    step = batch.step({0: 3, 1: 2})
    cases: list[tuple[StepInputs, str]] = [
        (replace(step, position_ids_T=step.position_ids_T[:4]), "step input position_ids: T is 4, and 5"),
        (replace(step, kv_lens_S=step.kv_lens_S.int()), "step input kv_lens: must be contiguous torch.int64"),
        (replace(step, logits_rows_R=step.logits_rows_R[:0]), "R = 0 is not in 1 .. 512"),
        (replace(step, block_table_SM=step.block_table_SM.repeat(1, 17)), "M = 17 is not in 1 .. 16"),
    ]
    for wrong, message in cases:
        with pytest.raises(ArtifactError, match=message) as error:
            executor.execute(GRAPH, wrong)
        assert "\n" not in str(error.value)


def test_weights_that_do_not_fit_are_refused_naming_the_parameter(toy: Toy) -> None:
    params = cpu_toy.parameters(toy.config)
    with pytest.raises(ArtifactError, match="parameter norm: no value was loaded"):
        toy.executor().load_weights((n, v) for n, v in params.items() if n != "norm")
    params["norm"] = params["norm"][:-1]
    with pytest.raises(ArtifactError, match=r"parameter norm: the graph takes float32 \[64\], got float32 \[63\]"):
        toy.executor().load_weights(iter(params.items()))


def test_a_host_without_the_isa_is_refused_before_anything_is_loaded(toy: Toy, tmp_path: Path) -> None:
    spec = toy.lowered.kv_cache
    with pytest.raises(ArtifactError, match="allowed: avx2, avx512, avx512_bf16"):
        CpuExecutor([tmp_path / "absent.so"], {}, spec, isa="neon")


def test_a_second_build_of_the_kernels_is_refused(toy: Toy, tmp_path: Path) -> None:
    damaged = tmp_path / "cann_cpu.so"
    damaged.write_bytes(toy.lowered.kernels.read_bytes() + b"\0")
    with pytest.raises(ArtifactError, match="already holds the CPU kernels of another build"):
        CpuExecutor([damaged], {}, toy.lowered.kv_cache, isa=toy.lowered.isa)


def test_unknown_isas_are_refused_at_export() -> None:
    with pytest.raises(RecipeError, match="allowed: native, avx2, avx512, avx512_bf16"):
        resolve_isa("sse4")


def test_an_attention_without_its_rotary_is_refused_at_export(toy: Toy, tmp_path: Path) -> None:
    program = cpu_toy.program(replace(toy.config, layers=1, rotary=False))
    with pytest.raises(UnsupportedModelError, match="attention must follow a rotary embedding"):
        lower_cpu(program, isa="native", out_dir=tmp_path)
