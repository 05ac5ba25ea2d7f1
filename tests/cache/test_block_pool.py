# SPDX-License-Identifier: Apache-2.0
"""Free blocks and reference counts: nothing is handed out twice, nothing is lost, neighbours stay together."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyattention.cache.block_pool import BlockPool
from lazyattention.errors import CapacityError


def test_blocks_come_consecutively_when_they_can():
    pool = BlockPool(10)
    assert pool.allocate(4) == [0, 1, 2, 3]
    taken = pool.allocate(3)
    pool.release([1, 2])
    assert pool.allocate(3) == [7, 8, 9], "one run that is long enough before two short ones"
    assert pool.allocate(2, after=0) == [1, 2]
    pool.release(taken)
    pool.check()


def test_growth_prefers_the_block_right_behind():
    pool = BlockPool(8)
    first = pool.allocate(2)
    assert pool.allocate(1, after=first[-1]) == [2]
    second = pool.allocate(1)
    assert second == [3]
    assert pool.allocate(1, after=2) != [3]


def test_few_blocks_leave_long_runs_whole():
    pool = BlockPool(40)
    hole, kept = pool.allocate(4), pool.allocate(2)
    pool.release(hole)
    assert pool.allocate(1) == [0]
    assert pool.allocate(34) == list(range(6, 40))
    pool.release(kept)
    pool.check()


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=30), st.integers(1, 12))
def test_a_run_that_is_long_enough_is_found(requests, wanted):
    pool = BlockPool(64)
    held = []
    for num_blocks, is_kept in requests:
        if num_blocks <= pool.num_free:
            held.append((pool.allocate(num_blocks), is_kept))
    for block_ids, is_kept in held:
        if not is_kept:
            pool.release(block_ids)
    free = [pool.ref_count(block_id) == 0 for block_id in range(64)]
    has_run = any(all(free[start : start + wanted]) for start in range(64 - wanted + 1))
    if wanted <= pool.num_free:
        taken = pool.allocate(wanted)
        assert (taken == list(range(taken[0], taken[0] + wanted))) == has_run
    pool.check()


def test_a_scattered_pool_is_not_searched_through():
    """Every second block is free: looking for a long run must not look at all of them."""
    pool = BlockPool(20_000)
    pool.allocate(20_000)
    pool.release(range(0, 20_000, 2))
    num_looked_at = 0

    class Counted(dict):
        def __getitem__(self, start):
            nonlocal num_looked_at
            num_looked_at += 1
            return super().__getitem__(start)

    pool._run_lens = Counted(pool._run_lens)
    assert len(set(pool.allocate(10))) == 10
    assert num_looked_at < 10 * 100
    pool.check()


def test_documents_lie_in_one_piece_after_long_use():
    """Documents of some sizes and growing texts come and go in a pool that is mostly full."""
    rng = random.Random(0)
    pool, documents, texts = BlockPool(2000), [], []
    num_pieces = num_documents = 0
    for _ in range(4000):
        while pool.num_free < 100:
            pool.release(documents.pop(rng.randrange(len(documents))))
        if rng.random() < 0.3:
            blocks = pool.allocate(rng.choice((8, 32, 40)))
            documents.append(blocks)
            num_documents += 1
            num_pieces += 1 + sum(b != a + 1 for a, b in zip(blocks, blocks[1:], strict=False))
        texts.append(pool.allocate(rng.randrange(1, 5)))
        if len(texts) > 20:
            pool.release(texts.pop(rng.randrange(len(texts))))
        growing = rng.choice(texts)
        growing += pool.allocate(1, after=growing[-1])
    assert num_pieces < 1.5 * num_documents
    pool.check()


def test_too_many_changes_nothing():
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(CapacityError, match="need 2 KV blocks, 1 are free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check()


def test_a_block_is_free_when_its_last_reference_goes():
    pool = BlockPool(2)
    [block_id] = pool.allocate(1)
    pool.acquire([block_id])
    pool.release([block_id])
    assert pool.num_free == 1
    pool.release([block_id])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block_id])
    with pytest.raises(AssertionError, match="free block"):
        pool.acquire([block_id])


def test_an_empty_pool_is_consistent():
    pool = BlockPool(0)
    assert pool.allocate(0) == []
    pool.check()


@given(st.integers(0, 2**32 - 1))
def test_any_mix_of_calls_agrees_with_plain_counting(seed):
    rng = random.Random(seed)
    pool, counts = BlockPool(16), [0] * 16
    for _ in range(150):
        held = [block_id for block_id, count in enumerate(counts) if count]
        match rng.randrange(4):
            case 0 | 1:
                wanted = rng.randrange(6)
                if wanted > counts.count(0):
                    with pytest.raises(CapacityError):
                        pool.allocate(wanted)
                    continue
                taken = pool.allocate(wanted, after=rng.choice(held) if held else None)
                assert len(set(taken)) == wanted
                assert all(counts[block_id] == 0 for block_id in taken)
                for block_id in taken:
                    counts[block_id] = 1
            case 2 if held:
                block_id = rng.choice(held)
                pool.acquire([block_id])
                counts[block_id] += 1
            case 3 if held:
                block_id = rng.choice(held)
                pool.release([block_id])
                counts[block_id] -= 1
        pool.check()
        assert [pool.ref_count(block_id) for block_id in range(16)] == counts
