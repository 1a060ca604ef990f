"""What an executor is: it holds one rank's graphs, weights and KV caches, and runs one step at a time.

One file per implementation stands beside this one: `cpu.py` (AOTInductor), `npu.py` (GE graphs through TorchAir).
Choosing buckets and padding is the engine's work (`step.py`); an executor runs exactly what it is given.

Shape letters: T tokens, S sequences, R logits rows, M block-table columns, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cann_runtime.artifact.manifest import Graph, KVCacheSpec


@dataclass
class StepInputs:
    """The step inputs of one rank, as CPU tensors in the order in which every graph takes them.

    input_ids_T, position_ids_T int64; slot_mapping_T int32 or int64 (manifest.slot_dtype); block_table_SM int32;
    query_lens_S int64 (cumulative or per sequence: manifest.query_lens); kv_lens_S int64; logits_rows_R int64.
    """

    input_ids_T: Tensor
    position_ids_T: Tensor
    slot_mapping_T: Tensor
    block_table_SM: Tensor
    query_lens_S: Tensor
    kv_lens_S: Tensor
    logits_rows_R: Tensor

    def tensors(self) -> list[Tensor]:
        """The inputs in graph order."""
        return [
            self.input_ids_T,
            self.position_ids_T,
            self.slot_mapping_T,
            self.block_table_SM,
            self.query_lens_S,
            self.kv_lens_S,
            self.logits_rows_R,
        ]


class Executor(Protocol):
    """One rank's compiled graphs with their weights and KV caches."""

    kv_spec: KVCacheSpec

    def allocate_kv(self, num_blocks: int) -> None:
        """Make the KV caches with that many blocks (scratch blocks included), zeroed. Called once, before execute."""
        ...

    def execute(self, graph: Graph, step: StepInputs) -> Tensor:
        """Run one step: logits [R, V_padded] in the model's dtype or float32; KV caches are written in place."""
        ...
