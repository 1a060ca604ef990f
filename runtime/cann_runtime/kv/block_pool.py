"""The free list of physical KV blocks.

It only knows which blocks are free; which sequence owns a block, and in which order, is in `manager.py`.
"""

from __future__ import annotations


class BlockPool:
    """Blocks `scratch_blocks .. num_blocks - 1`; those before belong to padding rows and are never given out.

    ValueError where no block would be left for a sequence.
    """

    def __init__(self, num_blocks: int, scratch_blocks: int) -> None:
        if num_blocks <= scratch_blocks:
            raise ValueError(f"{num_blocks} KV blocks leave none for requests: {scratch_blocks} are scratch blocks")
        self.usable = num_blocks - scratch_blocks
        # A stack whose top is the lowest block, so that short runs stay in few pages of memory.
        self._free = list(range(num_blocks - 1, scratch_blocks - 1, -1))
        self._in_use = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` distinct blocks, or None (and nothing taken) where fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._in_use[block] = 1
        return taken

    def release(self, blocks: list[int]) -> None:
        """Give blocks back; ValueError for a block that is not in use (a double release would share it)."""
        for block in blocks:
            if not self._in_use[block]:
                raise ValueError(f"block {block} is not in use")
            self._in_use[block] = 0
        self._free.extend(reversed(blocks))
