"""The last rung of an Ascend artifact: its GE graphs in the reference executor, all ranks as threads.

It runs graphs that are already read, so that a cut or a changed graph can be run too.
Shape letters: R logits rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from cann_export.verify.steps import PreparedStep
from cann_export.verify.weights import rank_weights, widened
from cann_runtime.artifact.checkpoint_reader import CheckpointReader
from cann_runtime.artifact.manifest import Signature, World
from cann_runtime.artifact.plan import WeightPlan
from cann_runtime.errors import ArtifactError
from cann_runtime.executor.base import StepInputs
from cann_runtime.executor.reference.bind import bind_rank
from cann_runtime.executor.reference.comm import ThreadWorld
from cann_runtime.executor.reference.graph import Graph, Op
from cann_runtime.executor.reference.precision import Precision
from cann_runtime.executor.reference.program import Program

OpWatch = Callable[[Op, Sequence[Tensor]], None]
_STEP_NAMES = tuple(field.name.rpartition("_")[0] for field in fields(StepInputs))


@dataclass
class GeGraph:
    """A graph as the artifact stores it (neutral), read, with its signature."""

    graph: Graph
    signature: Signature


class GeRanks:
    """All ranks of an artifact's graphs with their weights and caches.

    graphs: by Graph.object of the manifest. precision: 'exact' (float32 throughout) or 'npu' (the device's roundings).
    """

    def __init__(
        self,
        graphs: Mapping[str, GeGraph],
        world: World,
        family: str | None,
        plan: WeightPlan,
        reader: CheckpointReader,
        constants: Mapping[str, Tensor],
        blocks: int,
        precision: str = "exact",
    ) -> None:
        self._precision = Precision.of(precision, family)
        self._graphs = graphs
        self._world = world
        self._threads = ThreadWorld(world)
        self._programs: dict[tuple[str, int], Program] = {}
        plan = plan if self._precision.rounds else widened(plan)
        self._params = [rank_weights(plan, reader, rank % world.tp, constants) for rank in range(world.size)]
        self.kv: list[dict[str, Tensor]] = []
        caches = {ref.name: ref for made in graphs.values() for ref in made.signature.inputs if ref.kind == "kv"}
        for _ in range(world.size):
            self.kv.append(
                {
                    name: torch.zeros([blocks, *ref.shape[1:]], dtype=self._precision.held(getattr(torch, ref.dtype)))
                    for name, ref in caches.items()
                }
            )

    def run(self, step: PreparedStep, watch: OpWatch | None = None) -> Tensor:
        """Logits [R, V] of the step's wanted rows, from rank 0. watch: called with rank 0's ops and outputs.

        Raises ArtifactError where a graph cannot run, naming the op, or where ranks have different logits.
        """
        made = self._graphs[step.graph.object]
        given = dict(zip(_STEP_NAMES, step.inputs.tensors()))
        programs = [self._program(step.graph.object, rank % self._world.ep) for rank in range(self._world.size)]

        def rank_logits(rank: int) -> Tensor:
            known = {"param": self._params[rank], "kv": self.kv[rank], "input": given}
            inputs = []
            for ref in made.signature.inputs:
                if ref.name not in known[ref.kind]:
                    raise ArtifactError(f"input {ref.name} of the {step.graph.phase} graph is in no plan")
                inputs.append(known[ref.kind][ref.name])
            with torch.inference_mode():
                outputs = programs[rank].run(inputs, self._threads.rank(rank), watch if rank == 0 else None)
            return outputs[[ref.name for ref in made.signature.outputs].index("logits")]

        logits = self._threads.run(rank_logits)
        for rank, other in enumerate(logits):
            if not torch.equal(other.nan_to_num(), logits[0].nan_to_num()):
                raise ArtifactError(f"rank {rank} has other logits than rank 0")
        return logits[0][: len(step.wanted)]

    def _program(self, key: str, ep_rank: int) -> Program:
        if (key, ep_rank) not in self._programs:
            self._programs[key, ep_rank] = Program(bind_rank(self._graphs[key].graph, ep_rank), self._precision)
        return self._programs[key, ep_rank]
