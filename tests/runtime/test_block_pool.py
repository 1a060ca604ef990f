"""Blocks and block tables: nothing leaks, nothing is shared, scratch blocks are never given out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cann_runtime.kv.block_pool import BlockPool
from cann_runtime.kv.manager import KVManager

BLOCKS, SCRATCH, SIZE, SEQS, COLUMNS = 24, 3, 4, 5, 8


class Tables(RuleBasedStateMachine):
    """Opens, grows and closes rows at random, beside a model that only counts."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(
            num_blocks=BLOCKS, scratch_blocks=SCRATCH, block_size=SIZE, max_seqs=SEQS, max_blocks=COLUMNS
        )
        self.tokens: dict[int, int] = {}

    def used(self) -> int:
        return sum(-(-n // SIZE) for n in self.tokens.values())

    @rule(tokens=st.integers(1, COLUMNS * SIZE))
    def open(self, tokens: int) -> None:
        fits = self.used() + -(-tokens // SIZE) <= BLOCKS - SCRATCH and len(self.tokens) < SEQS
        row = self.kv.open(tokens)
        assert (row is not None) == fits
        if row is not None:
            assert row not in self.tokens
            self.tokens[row] = tokens

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens = data.draw(st.integers(1, COLUMNS * SIZE))
        wanted = max(tokens, self.tokens[row])
        before = self.kv.table_NM[row].copy()
        fits = self.used() - -(-self.tokens[row] // SIZE) + -(-wanted // SIZE) <= BLOCKS - SCRATCH
        assert self.kv.grow(row, tokens) == fits
        if fits:
            self.tokens[row] = wanted
        held = before != 0
        assert (self.kv.table_NM[row][held] == before[held]).all(), "blocks that hold keys stay in their place"

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.tokens)))
        self.kv.close(row)
        del self.tokens[row]

    @invariant()
    def blocks_are_owned_once(self) -> None:
        owned: list[int] = []
        for row in range(SEQS):
            count = -(-self.tokens.get(row, 0) // SIZE)
            table = self.kv.table_NM[row].tolist()
            owned += table[:count]
            assert table[count:] == [0] * (COLUMNS - count)
        assert len(set(owned)) == len(owned)
        assert all(SCRATCH <= block < BLOCKS for block in owned)
        assert self.kv.pool.num_free == BLOCKS - SCRATCH - len(owned)


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(1, 30), st.integers(0, 29))
def test_every_block_but_scratch_is_given_out_once(blocks: int, scratch: int) -> None:
    if blocks <= scratch:
        with pytest.raises(ValueError, match="scratch"):
            BlockPool(blocks, scratch)
        return
    pool = BlockPool(blocks, scratch)
    taken = [pool.allocate(1) for _ in range(blocks - scratch)]
    assert sorted(b for one in taken if one for b in one) == list(range(scratch, blocks))
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_block_cannot_be_released_twice() -> None:
    pool = BlockPool(8, 1)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(ValueError, match="not in use"):
        pool.release(blocks)
    with pytest.raises(ValueError, match="not in use"):
        pool.release([0])
