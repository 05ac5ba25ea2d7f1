# SPDX-License-Identifier: Apache-2.0
"""What goes first: little used, cheap to recompute, large; and old entries age."""

import random
import weakref

from hypothesis import given
from hypothesis import strategies as st

from lazyattention.cache.eviction import EvictionQueue, recompute_cost


def add(queue, entry, *, num_uses=1, cost=1.0, num_blocks=1):
    queue.add(entry, num_uses=num_uses, cost=cost, num_blocks=num_blocks)


def test_the_cheapest_per_block_and_least_used_goes_first():
    queue = EvictionQueue()
    add(queue, "dear", cost=9.0)
    add(queue, "large", cost=9.0, num_blocks=9)
    add(queue, "often", cost=1.5, num_uses=4)
    assert [queue.pop() for _ in range(4)] == ["large", "often", "dear", None]


def test_equal_entries_go_in_the_order_of_their_last_use():
    queue = EvictionQueue()
    for entry in "abc":
        add(queue, entry)
    add(queue, "a")
    assert [queue.pop() for _ in range(3)] == ["b", "c", "a"]


def test_an_entry_that_was_dear_once_does_not_stay_for_ever():
    queue = EvictionQueue()
    add(queue, "old", cost=10.0)
    evicted = []
    for number in range(20):
        add(queue, number)
        evicted.append(queue.pop())
    assert "old" in evicted


def test_discarded_entry_is_not_popped():
    queue = EvictionQueue()
    add(queue, "a", num_blocks=3)
    add(queue, "b")
    queue.discard("a")
    queue.discard("never there")
    assert ("a" in queue, "b" in queue, len(queue), queue.num_blocks) == (False, True, 1, 1)
    assert [queue.pop(), queue.pop()] == ["b", None]


def test_what_is_discarded_is_not_kept_alive():
    """A deleted document's tokens stayed with its chunk in the heap, below entries that were evicted later."""

    class Entry:
        pass

    queue, entry = EvictionQueue(), Entry()
    alive = weakref.ref(entry)
    add(queue, "first", cost=0.1)
    add(queue, entry)
    queue.discard(entry)
    del entry
    assert alive() is None
    assert [queue.pop(), queue.pop()] == ["first", None]


def test_memory_is_bounded_while_nothing_is_evicted():
    """Each use of a stored chunk left one more entry in the heap for as long as there was room enough."""
    queue = EvictionQueue()
    for number in range(5000):
        add(queue, number % 7)
    assert len(queue) == 7
    assert len(queue._heap) < 200
    assert sorted(queue.pop() for _ in range(7)) == list(range(7))


def test_attention_makes_late_tokens_dearer():
    assert recompute_cost(10, 0) < recompute_cost(10, 1000)
    assert recompute_cost(0, 1000) == 0


@given(st.integers(0, 2**32 - 1))
def test_any_mix_of_calls_agrees_with_a_plain_dictionary(seed):
    rng = random.Random(seed)
    queue, present = EvictionQueue(), {}
    for _ in range(200):
        entry = rng.randrange(6)
        match rng.randrange(4):
            case 0 | 1:
                present[entry] = rng.randrange(1, 5)
                add(queue, entry, cost=rng.random(), num_blocks=present[entry])
            case 2:
                present.pop(entry, None)
                queue.discard(entry)
            case 3:
                popped = queue.pop()
                assert (popped is None) == (not present)
                present.pop(popped, None)
        assert queue.num_blocks == sum(present.values())
        assert {entry for entry in range(6) if entry in queue} == set(present)
