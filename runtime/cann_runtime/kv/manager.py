"""Block tables: which physical blocks hold the keys and values of each running sequence.

A running sequence has a `row` in one table, so that a step reads the tables of its whole batch with one index. Which
sequence runs, and which one must give its blocks back, is the scheduler's decision.

Shape letters: M block-table columns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cann_runtime.kv.block_pool import BlockPool


class KVManager:
    """Block tables of at most `max_seqs` running sequences of at most `max_blocks` blocks each."""

    def __init__(
        self, *, num_blocks: int, scratch_blocks: int, block_size: int, max_seqs: int, max_blocks: int
    ) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.pool = BlockPool(num_blocks, scratch_blocks)
        # Unused entries are 0, a scratch block: reading one can never show another sequence's keys.
        self.table_NM: npt.NDArray[np.int32] = np.zeros((max_seqs, max_blocks), np.int32)
        self._owned: list[list[int]] = [[] for _ in range(max_seqs)]
        self._free_rows = list(range(max_seqs - 1, -1, -1))

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that fits when it is alone."""
        return min(self.pool.usable, self.max_blocks) * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold that many tokens."""
        return -(-tokens // self.block_size)

    def open(self, tokens: int) -> int | None:
        """A row with blocks for `tokens` tokens; None where no row is free or the blocks do not suffice."""
        if not self._free_rows or self.blocks_for(tokens) > self.pool.num_free:
            return None
        row = self._free_rows.pop()
        self.grow(row, tokens)
        return row

    def grow(self, row: int, tokens: int) -> bool:
        """Make the row hold `tokens` tokens in all; False (and nothing taken) where the pool is too empty."""
        owned = self._owned[row]
        missing = self.blocks_for(tokens) - len(owned)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        self.table_NM[row, len(owned) : len(owned) + missing] = blocks
        owned.extend(blocks)
        return True

    def tables(self, rows: list[int], columns: int) -> npt.NDArray[np.int32]:
        """A copy of the first columns of these rows' tables: [len(rows), min(columns, max_blocks)]."""
        return self.table_NM[np.array(rows), :columns]

    def close(self, row: int) -> None:
        """Give the row and its blocks back."""
        self.table_NM[row, : len(self._owned[row])] = 0
        self.pool.release(self._owned[row])
        self._owned[row] = []
        self._free_rows.append(row)
