"""Runs one step of a lowered toy in a process of its own, as the runtime would: from files, without the exporter.

`run(job)` writes logits.pt beside the job. As a program `cpu_run.py JOB RANK` it is one of two ranks over gloo, and
compares its logits with the eager module's under torch's own collectives.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from cann_runtime.artifact.manifest import Graph, KVCacheSpec, Signature
from cann_runtime.executor.base import StepInputs
from cann_runtime.executor.cpu import CpuExecutor


def execute(job_file: Path, change: float = 1.0) -> tuple[Tensor, dict[str, Tensor], StepInputs]:
    """Logits, parameters (each times `change`, which sets ranks apart) and inputs of the job's step."""
    job = json.loads(job_file.read_text())
    graph, spec = Graph(**job["graph"]), KVCacheSpec(**job["kv_cache"])
    graphs = {graph.object: (Path(job["library"]), Signature(**job["signature"]))}
    executor = CpuExecutor([Path(job["kernels"])], graphs, spec, isa=job["isa"])
    params = torch.load(job_file.with_name("params.pt"), weights_only=True)
    for name in params:
        if name.endswith((".o", ".down")):
            params[name] = params[name] * change
    executor.load_weights(iter(params.items()))
    executor.allocate_kv(job["blocks"])
    step = StepInputs(*torch.load(job_file.with_name("step.pt"), weights_only=True))
    return executor.execute(graph, step), params, step


def run(job: str) -> None:
    logits, _, _ = execute(Path(job))
    torch.save(logits, Path(job).with_name("logits.pt"))


def rank_main(job: str, rank: int) -> None:
    import cpu_toy
    import torch.distributed as dist
    from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

    dist.init_process_group("gloo", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    _register_process_group("tp", group)
    logits, params, step = execute(Path(job), change=1.0 + rank)
    config = cpu_toy.Config(tp=2)
    expected = cpu_toy.eager(config, params, step, cpu_toy.caches(config, 48))
    difference = float((logits - expected).abs().max() / expected.abs().max())
    both = [torch.empty_like(logits) for _ in range(2)]
    dist.all_gather(both, logits)
    _unregister_process_group("tp")
    dist.destroy_process_group()
    assert difference < 5e-6, difference
    assert torch.equal(both[0], both[1])


if __name__ == "__main__":
    rank_main(sys.argv[1], int(sys.argv[2]))
    # As cann-run does: a module imported meanwhile may hold the group, whose threads abort the interpreter's teardown.
    os._exit(0)
