# SPDX-License-Identifier: Apache-2.0
"""Which stored KV goes first when room is needed: what is cheap to recompute per block and little used. No tensors.

Greedy-Dual-Size-Frequency: an entry's priority is the queue's clock plus uses x cost / size; the lowest goes, and the
clock rises to its priority, so that old entries age against new ones.

Source: Cherkasova 1998, HP Labs HPL-98-69R1.
"""

import heapq
import itertools
from collections.abc import Hashable

# Attention makes a token dearer the more it looks at; at this context length it costs twice its linear layers.
_CONTEXT_OF_DOUBLE_COST = 8192
# Priorities that were replaced stay in the heap until they come up; with more than this many it is built anew.
_MIN_COMPACTED = 64


def recompute_cost(num_tokens: int, context_len: int) -> float:
    """Cost of computing `num_tokens` after `context_len` tokens, in units of one token without context."""
    return num_tokens * (1.0 + (context_len + num_tokens / 2) / _CONTEXT_OF_DOUBLE_COST)


class EvictionQueue:
    """Entries that may be evicted now, lowest priority first.

    The owner adds an entry when its last user leaves and discards it when it is used again.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        # Tickets stand for entries, so that nothing that was discarded, and may have been deleted, is kept alive.
        self._heap: list[tuple[float, int]] = []  # (priority, ticket)
        self._entries: dict[int, Hashable] = {}  # by ticket, valid ones only
        self._current: dict[Hashable, tuple[float, int]] = {}  # entry -> (priority, ticket)
        self._tickets = itertools.count()
        self.num_blocks = 0
        self._sizes: dict[Hashable, int] = {}

    def add(self, entry: Hashable, *, num_uses: int, cost: float, num_blocks: int) -> None:
        """Make `entry` evictable. An entry already there gets a new priority."""
        self.discard(entry)
        priority = self._clock + num_uses * cost / max(1, num_blocks)
        ticket = next(self._tickets)
        self._current[entry] = (priority, ticket)
        self._entries[ticket] = entry
        self._sizes[entry] = num_blocks
        self.num_blocks += num_blocks
        heapq.heappush(self._heap, (priority, ticket))
        if len(self._heap) > 2 * len(self._current) + _MIN_COMPACTED:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)

    def discard(self, entry: Hashable) -> None:
        """Make `entry` not evictable; fine if it was not."""
        valid = self._current.pop(entry, None)
        if valid is not None:
            del self._entries[valid[1]]
            self.num_blocks -= self._sizes.pop(entry)

    def pop(self) -> Hashable | None:
        """Remove and return the entry to evict, or None when nothing may go."""
        while self._heap:
            priority, ticket = heapq.heappop(self._heap)
            if ticket in self._entries:
                entry = self._entries[ticket]
                self.discard(entry)
                self._clock = priority
                return entry
        return None

    def __contains__(self, entry: Hashable) -> bool:
        return entry in self._current

    def __len__(self) -> int:
        return len(self._current)
