# SPDX-License-Identifier: Apache-2.0
"""A debug mode that proves that stored chunks are only read: their bits are compared after every step."""

from lazyattention.cache.chunk import Chunk
from lazyattention.cache.kv_pool import KVPool
from lazyattention.engine.batch import Batch
from lazyattention.engine.scheduler import Step


class ChecksumGuard:
    """Remembers a checksum of each chunk once it is complete and asserts it whenever the chunk was read."""

    def __init__(self, kv_pool: KVPool) -> None:
        """Watch the chunks in this pool."""
        self._kv_pool = kv_pool
        self._expected: dict[bytes, tuple[int, int]] = {}
        self.num_checks = 0

    def after_step(self, step: Step, batch: Batch) -> None:
        """Note chunks that were completed in this step and check those that were read.

        Raises:
            AssertionError: A stored chunk was written to.
        """
        for chunk in step.chunk_tokens:
            if chunk.is_ready and chunk.block_ids:  # else it was deleted and its last user ended in this very step
                self._expected[chunk.key.digest] = (id(chunk), self._checksum(chunk))
        for chunk in batch.read_chunks:
            known = self._expected.get(chunk.key.digest)
            if known is not None and known[0] == id(chunk) and chunk.block_ids:
                assert self._checksum(chunk) == known[1], f"the stored KV of chunk {chunk.key.hex} was written to"
                self.num_checks += 1

    def _checksum(self, chunk: Chunk) -> int:
        return self._kv_pool.checksum(chunk.block_ids, chunk.num_tokens)
