"""Rungs before lowering: FX step graphs run by torch's own interpreter, all ranks as threads that meet at collectives.

The fused ops run by their plain definitions. Shape letters: R logits rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from cann_export.fakeworld import fake_world
from cann_export.fuse import expectations, fuse
from cann_export.model import build_model
from cann_export.program import Program
from cann_export.shard import kv_heads_per_rank, shard
from cann_export.trace import trace
from cann_export.verify.steps import PreparedStep
from cann_export.verify.weights import rank_weights
from cann_runtime.artifact.checkpoint_reader import CheckpointReader
from cann_runtime.artifact.manifest import Bucket, World
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.executor.reference.comm import Communicator, ThreadWorld

NodeWatch = Callable[[fx.Node, Any], None]
_C10D = torch.ops._c10d_functional


def make_program(
    config: dict[str, Any], max_seq_len: int, block_size: int, tp: int, *, fused: bool
) -> tuple[Program, WeightPlan, dict[str, Tensor], tuple[int, int]]:
    """(step graph in float32 with dynamic sizes, its plan, rope constants, (kv heads of a rank, head_dim))."""
    built = build_model(config, "float32", max_seq_len)
    expected = expectations(built)
    plan = shard(built, tp)
    bucket = Bucket(tokens=64, seqs=8, rows=64, max_blocks=8)
    with fake_world(tp):
        program = trace(built, "mixed", bucket, tp=tp, block_size=block_size, kv_dtype=torch.float32, dynamic=True)
    if fused:
        program = fuse(program, plan, expected)
    constants = {f"{name}.inv_freq": rope.inv_freq for name, rope in built.ropes.items()}
    return program, plan, constants, (kv_heads_per_rank(built, tp), program.head_dim)


class FxRanks:
    """All ranks of a step graph with their weights and caches."""

    def __init__(
        self,
        program: Program,
        plan: WeightPlan,
        reader: CheckpointReader,
        constants: Mapping[str, Tensor],
        cache_shape: list[int],
    ) -> None:
        """cache_shape: [blocks, block_size, kv heads of a rank, head_dim]."""
        self.program = program
        self.tp = plan.tp
        self._world = ThreadWorld(World(size=plan.tp, tp=plan.tp))
        self._params = [rank_weights(plan, reader, rank, constants) for rank in range(plan.tp)]
        layers = range(program.num_layers)
        names = [f"{kind}_cache_{i}" for i in layers for kind in ("k", "v")]
        self.kv = [{name: torch.zeros(cache_shape) for name in names} for _ in range(plan.tp)]

    def run(self, step: PreparedStep, watch: NodeWatch | None = None) -> Tensor:
        """Logits [R, V] of the step's wanted rows, from rank 0. watch: called with rank 0's nodes and values."""
        inputs = step.flat()

        def rank_logits(rank: int) -> Tensor:
            given = iter(inputs)
            values = [
                self._params[rank][slot.name]
                if slot.kind == "param"
                else next(given)
                if slot.kind == "input"
                else self.kv[rank][slot.name]
                for slot in self.program.slots
            ]
            with torch.no_grad():
                runner = _Rank(self.program.gm, self._world.rank(rank), watch if rank == 0 else None)
                out = runner.run(*values)
            logits: Tensor = out[0] if isinstance(out, tuple) else out
            return logits

        return self._world.run(rank_logits)[0]


class _Rank(fx.Interpreter):
    """One rank: collectives go to its communicator, in rank order, as the reference executor sums them."""

    def __init__(self, module: fx.GraphModule, comm: Communicator, watch: NodeWatch | None) -> None:
        super().__init__(module)
        self._comm = comm
        self._watch = watch

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if self._watch is not None:
            self._watch(n, result)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _C10D.all_reduce.default:
            total = torch.zeros_like(args[0])
            for part in self._comm.gather(args[0], args[2]):
                total = total + part
            return total
        if target is _C10D.all_gather_into_tensor.default:
            return torch.cat(self._comm.gather(args[0], args[2]))
        if target is _C10D.wait_tensor.default:
            return args[0]
        return super().call_function(target, args, kwargs)
