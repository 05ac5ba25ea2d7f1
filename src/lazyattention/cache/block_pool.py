# SPDX-License-Identifier: Apache-2.0
"""Which KV blocks are free, and how many users each taken block has. No tensors here."""

from collections.abc import Iterable

from lazyattention.errors import CapacityError


class BlockPool:
    """Hands out block ids and counts references; prefers blocks that are consecutive in memory.

    Invariant: a block id is in exactly one free run exactly when its count is 0.
    """

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` blocks with ids 0 .. num_blocks - 1, all free."""
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._ref_counts = [0] * num_blocks
        # Free runs by first and by one-past-last block id.
        self._run_lens: dict[int, int] = {0: num_blocks} if num_blocks else {}
        self._run_starts: dict[int, int] = {num_blocks: 0} if num_blocks else {}

    def ref_count(self, block_id: int) -> int:
        """Number of references to a block."""
        return self._ref_counts[block_id]

    def allocate(self, num_blocks: int, *, after: int | None = None) -> list[int]:
        """Take free blocks, each with one reference; all or nothing.

        Args:
            num_blocks: How many.
            after: If the blocks right after this one are free, take those.

        Raises:
            CapacityError: Fewer are free; nothing was taken.
        """
        if num_blocks > self.num_free:
            raise CapacityError(f"need {num_blocks} KV blocks, {self.num_free} are free")
        taken: list[int] = []
        if after is not None and after + 1 in self._run_lens:
            taken += self._take(after + 1, min(num_blocks, self._run_lens[after + 1]))
        while len(taken) < num_blocks:
            wanted = num_blocks - len(taken)
            # The first run that is long enough, else the longest: few pieces, each consecutive.
            start = next((s for s, length in self._run_lens.items() if length >= wanted), None)
            if start is None:
                start = max(self._run_lens, key=self._run_lens.__getitem__)
            taken += self._take(start, min(wanted, self._run_lens[start]))
        for block_id in taken:
            self._ref_counts[block_id] = 1
        self.num_free -= num_blocks
        return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each of these taken blocks."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, "a free block cannot be acquired"
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each block; blocks without references become free."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, "block released twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._give(block_id)

    def check(self) -> None:
        """Assert the invariant; for tests and for the idle engine."""
        free = [block_id for start, length in self._run_lens.items() for block_id in range(start, start + length)]
        assert len(free) == len(set(free)) == self.num_free
        assert {block_id for block_id, count in enumerate(self._ref_counts) if count == 0} == set(free)

    def _take(self, start: int, num_blocks: int) -> list[int]:
        length = self._run_lens.pop(start)
        if length > num_blocks:
            self._run_lens[start + num_blocks] = length - num_blocks
            self._run_starts[start + length] = start + num_blocks
        else:
            del self._run_starts[start + length]
        return list(range(start, start + num_blocks))

    def _give(self, block_id: int) -> None:
        start, end = block_id, block_id + 1
        if start in self._run_starts:  # a free run ends right before this block
            start = self._run_starts.pop(start)
            del self._run_lens[start]
        if end in self._run_lens:  # one begins right after it
            end = end + self._run_lens.pop(end)
        self._run_lens[start] = end - start
        self._run_starts[end] = start
        self.num_free += 1
