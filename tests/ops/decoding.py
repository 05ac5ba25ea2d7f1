"""A small engine's bookkeeping for op tests: requests over shared chunks that arrive, decode, grow and leave."""

import numpy as np

from lazyattention.ops import KVRange, RowGroup, make_plan
from lazyattention.ops.plan_builder import PlanBuilder, RequestRows


class Decoding:
    """Drives a PlanBuilder and says, for each step, what `make_plan` would make of it from scratch."""

    def __init__(self, seed, *, block_size, num_blocks, chunk_lens, device="cpu", table_entries=64, keys_turned=True,
                 contiguous=False):  # fmt: skip
        self.rng = np.random.default_rng(seed)
        self.block_size = block_size
        self.free = list(range(num_blocks)) if contiguous else self.rng.permutation(num_blocks).tolist()
        self.builder = PlanBuilder(block_size=block_size, device=device, table_entries=table_entries)
        self.chunks, self.requests = [], {}
        self.next_key = 0
        for num_tokens in chunk_lens:
            blocks = self._take(-(-num_tokens // block_size))
            range_id = self.builder.add_range(blocks, num_tokens, 3, keys_turned=keys_turned)
            self.chunks.append((range_id, KVRange(("chunk", range_id), blocks, num_tokens, 3, keys_turned)))

    def _take(self, count):
        taken, self.free[:count] = self.free[:count], []
        return taken

    def add(self, num_chunks, text_len, max_tokens=0):
        """A request over random chunks whose text of `text_len` tokens is stored."""
        chosen = self.rng.choice(len(self.chunks), num_chunks, replace=False)
        start, ids, deltas, kv_ranges = 3, [], [], []
        for index in chosen:
            range_id, kv_range = self.chunks[index]
            ids.append(range_id)
            deltas.append(start - 3)
            kv_ranges.append(kv_range)
            start += kv_range.num_tokens
        blocks = self._take(-(-text_len // self.block_size))
        text = self.builder.add_range(blocks, text_len, start, max_tokens=max_tokens)
        rows = RequestRows(np.array([*ids, text]), np.array([*deltas, 0]))
        key = self.next_key = self.next_key + 1
        self.requests[key] = [rows, kv_ranges, KVRange(("text", key), blocks, text_len, start)]
        return key

    def remove(self, key):
        rows, _, text = self.requests.pop(key)
        self.builder.drop_range(int(rows.range_ids[-1]))
        self.free += text.block_ids

    def step_ahead(self):
        """Let the builder assemble the next step early, as if each request took one token; blocks come later."""
        rows_of, positions = [], []
        for rows, _, text in self.requests.values():
            self.builder.grow_range(int(rows.range_ids[-1]), text.num_tokens + 1)
            rows_of.append(rows)
            positions.append(text.first_position + text.num_tokens)
        return self.builder.step_ahead(rows_of, np.array(positions))

    def step(self, query_lens=None):
        """Let each request take new tokens; return the builder's step and the plan made from scratch."""
        query_lens = np.ones(len(self.requests), np.int64) if query_lens is None else np.asarray(query_lens)
        positions, slots, ranges, groups, rows_of = [], [], [], [], []
        for (rows, chunk_ranges, text), count in zip(self.requests.values(), query_lens.tolist(), strict=True):
            num_tokens = text.num_tokens + count
            new = self._take(-(-num_tokens // self.block_size) - len(text.block_ids))
            text.block_ids = [*text.block_ids, *new]
            text.num_tokens = num_tokens
            self.builder.grow_range(int(rows.range_ids[-1]), num_tokens, new)
            for kv_range, delta in zip([*chunk_ranges, text], rows.deltas.tolist(), strict=True):
                groups.append(RowGroup(len(ranges), len(positions), count, delta))
                ranges.append(kv_range)
            for index in range(num_tokens - count, num_tokens):
                positions.append(text.first_position + index)
                slots.append(text.block_ids[index // self.block_size] * self.block_size + index % self.block_size)
            rows_of.append(rows)
        positions, slots = np.array(positions), np.array(slots)
        step = self.builder.step(rows_of, query_lens, positions, slots)
        scratch = make_plan(positions, slots, ranges, groups, block_size=self.block_size, for_kernels=False)
        return step, scratch
