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
