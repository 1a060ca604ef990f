"""Runs fused step graphs with torch's own interpreter: what the model's numbers are before any lowering.

A rank takes its parameters from the checkpoint by the weight plan, as the runtime does; collectives go over real gloo.
Run as a program it is one rank: it reads a job (JSON) and writes the logits of each step.

Shape letters: T tokens, S sequences, R logits rows, M block-table columns, V vocabulary.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cann_export.fakeworld import fake_world
from cann_export.fuse import expectations, fuse
from cann_export.model import DTYPES, build_model
from cann_export.program import Program
from cann_export.shard import shard
from cann_export.trace import trace
from cann_runtime.artifact.checkpoint_reader import CheckpointReader
from cann_runtime.artifact.manifest import Bucket
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.artifact.weights import check_plan, stream_params

BLOCK, BLOCKS, COLUMNS = 16, 32, 12


@dataclass
class RankGraph:
    """One rank's fused graph with its parameters and caches."""

    program: Program
    params: dict[str, Tensor]
    kv: list[Tensor]

    def run(self, inputs: list[Tensor]) -> Tensor:
        """Logits [R, V_padded] of one step; caches are written in place."""
        step, kv, values = iter(inputs), iter(self.kv), []
        for slot in self.program.slots:
            values.append(
                self.params[slot.name] if slot.kind == "param" else next(step if slot.kind == "input" else kv)
            )
        out = torch.fx.Interpreter(self.program.gm).run(*values)
        logits: Tensor = out[0] if isinstance(out, tuple) else out
        return logits


def fused(
    config: dict[str, Any], tp: int, dtype: str, bucket: Bucket, block: int = BLOCK
) -> tuple[Program, WeightPlan, Any]:
    """Build, shard, trace and fuse with dynamic sizes."""
    built = build_model(config, dtype, max_seq_len=config["max_position_embeddings"])
    expected = expectations(built)
    plan = shard(built, tp)
    with fake_world(tp):
        program = trace(built, "mixed", bucket, tp=tp, block_size=block, kv_dtype=DTYPES[dtype], dynamic=True)
    return fuse(program, plan, expected), plan, built


def rank_graph(config: dict[str, Any], checkpoint: Path, tp: int, rank: int, dtype: str) -> RankGraph:
    """The graph of one rank of `tp`, with its weights."""
    program, plan, built = fused(config, tp, dtype, Bucket(tokens=64, seqs=8, rows=64, max_blocks=COLUMNS))
    reader = CheckpointReader(checkpoint)
    check_plan(plan, reader)
    constants = {f"{n}.inv_freq": r.inv_freq for n, r in built.ropes.items()}
    params = dict(stream_params(plan, reader, rank, constants))
    shape = [BLOCKS, BLOCK, max(1, built.config.num_key_value_heads // tp), program.head_dim]
    kv = [torch.zeros(shape, dtype=DTYPES[dtype]) for _ in range(2 * program.num_layers)]
    return RankGraph(program, params, kv)


def steps_for(sequences: list[list[int]], chunks: list[list[int]]) -> list[list[Tensor]]:
    """Step inputs that feed the sequences in the given chunk sizes; step i gives chunks[i][s] tokens of sequence s.

    Block tables are scattered over the cache; logits are asked for every row.
    """
    order = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(3)) + 1
    tables = order[: len(sequences) * (len(order) // len(sequences))].view(len(sequences), -1).int()
    tables = torch.nn.functional.pad(tables, (0, COLUMNS - tables.shape[1])).contiguous()
    done = [0] * len(sequences)
    steps = []
    for sizes in chunks:
        ids, pos, slots, rows, lens, table = [], [], [], 0, [], []
        ends = []
        for s, size in enumerate(sizes):
            if size == 0:
                continue
            where = range(done[s], done[s] + size)
            ids += sequences[s][done[s] : done[s] + size]
            pos += where
            slots += [int(tables[s, p // BLOCK]) * BLOCK + p % BLOCK for p in where]
            rows += size
            done[s] += size
            ends.append(rows)
            lens.append(done[s])
            table.append(tables[s])
        i64 = torch.int64
        steps.append(
            [
                torch.tensor(ids, dtype=i64),
                torch.tensor(pos, dtype=i64),
                torch.tensor(slots, dtype=torch.int32),
                torch.stack(table),
                torch.tensor(ends, dtype=i64),
                torch.tensor(lens, dtype=i64),
                torch.arange(rows, dtype=i64),
            ]
        )
    return steps


def main(job_file: str) -> None:
    """One rank over gloo; the job gives config, checkpoint, dtype, sequences, chunks, and where to put the logits."""
    import torch.distributed as dist
    from safetensors.torch import save_file

    job = json.loads(Path(job_file).read_text())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    graph = rank_graph(job["config"], Path(job["checkpoint"]), size, rank, job["dtype"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    dist.distributed_c10d._register_process_group("tp", dist.group.WORLD)
    with torch.no_grad():
        out = {str(i): graph.run(step) for i, step in enumerate(steps_for(job["sequences"], job["chunks"]))}
    save_file({k: v.contiguous() for k, v in out.items()}, f"{job['out']}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    # As cann-run does: the registered group's threads can abort the interpreter's teardown.
    os._exit(0)
