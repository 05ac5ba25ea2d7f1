# SPDX-License-Identifier: Apache-2.0
"""Which KV blocks are free, and how many users each taken block has. No tensors here."""

from collections.abc import Iterable
from itertools import islice

from lazyattention.errors import CapacityError

# Runs of one size class that are looked at before a longer one is broken.
_MAX_LOOKED_AT = 64


class BlockPool:
    """Hands out block ids and counts references; prefers blocks that are consecutive in memory.

    A request takes the shortest run that is long enough, by powers of two, so that texts, which need few blocks, leave
    long runs to documents. No search looks at more than a fixed number of runs.

    Invariant: a block id is in exactly one free run exactly when its count is 0.
    """

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` blocks with ids 0 .. num_blocks - 1, all free."""
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._ref_counts = [0] * num_blocks
        # Free runs by first and by one-past-last block id, and first block ids by the bits of the length.
        self._run_lens: dict[int, int] = {}
        self._run_starts: dict[int, int] = {}
        self._classes: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length() + 1)]
        if num_blocks:
            self._add_run(0, num_blocks)

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
            start = self._find_run(wanted)
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

    def _find_run(self, wanted: int) -> int:
        """Return a run that is long enough, else one of the longest: few pieces, each consecutive."""
        own_class = wanted.bit_length()
        for start in islice(self._classes[own_class], _MAX_LOOKED_AT):
            if self._run_lens[start] >= wanted:
                return start
        for longer in self._classes[own_class + 1 :]:
            if longer:
                return next(iter(longer))
        longest_class = next(runs for runs in reversed(self._classes) if runs)
        return max(islice(longest_class, _MAX_LOOKED_AT), key=self._run_lens.__getitem__)

    def _take(self, start: int, num_blocks: int) -> list[int]:
        length = self._run_lens[start]
        self._remove_run(start)
        if length > num_blocks:
            self._add_run(start + num_blocks, length - num_blocks)
        return list(range(start, start + num_blocks))

    def _give(self, block_id: int) -> None:
        start, end = block_id, block_id + 1
        if start in self._run_starts:  # a free run ends right before this block
            start = self._run_starts[start]
            self._remove_run(start)
        if end in self._run_lens:  # one begins right after it
            length = self._run_lens[end]
            self._remove_run(end)
            end += length
        self._add_run(start, end - start)
        self.num_free += 1

    def _add_run(self, start: int, length: int) -> None:
        self._run_lens[start] = length
        self._run_starts[start + length] = start
        self._classes[length.bit_length()][start] = None

    def _remove_run(self, start: int) -> None:
        length = self._run_lens.pop(start)
        del self._run_starts[start + length]
        del self._classes[length.bit_length()][start]
