# SPDX-License-Identifier: Apache-2.0
"""Blocks, chunks and text together: who holds what, what may go, and that nothing leaks."""

import pytest

from lazyattention.cache.chunk import ISOLATED, ChunkKey
from lazyattention.cache.chunk_store import content_id
from lazyattention.cache.manager import CacheManager
from lazyattention.cache.prefix_store import block_key
from lazyattention.errors import CapacityError
from lazyattention.reuse import Span

ROOT = b"root"


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


def key_of(token_ids, *, scope="default", encoding=ISOLATED, weights_id="w", kv_dtype="float32"):
    digest = Span(tuple(token_ids)).digest
    return ChunkKey.of(digest, weights_id=weights_id, encoding=encoding, kv_dtype=kv_dtype, scope=scope)


def insert(cache, token_ids, *, scope="default", document_id=None, ready=True, **more):
    chunk = cache.insert_chunk(key_of(token_ids, scope=scope), token_ids, scope=scope, **more)
    if document_id is not None:
        cache.chunks.label(chunk, document_id, None)
    if ready:
        chunk.num_computed = chunk.num_tokens
        cache.chunk_is_ready(chunk)
    return chunk


def chain(cache, *blocks):
    """Compute text blocks as a request would; return (block ids, nodes)."""
    block_ids, nodes, parent = [], [], None
    for token_ids in blocks:
        block_ids += cache.allocate(1)
        key = block_key(ROOT if parent is None else parent.key, token_ids)
        parent = cache.insert_text(key, parent, token_ids, block_ids[-1], 0, frozenset())
        nodes.append(parent)
    return block_ids, nodes


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cache(clock):
    return CacheManager(num_blocks=8, block_size=4, clock=clock)


def test_every_field_of_a_key_tells_chunks_apart():
    keys = {
        key_of([1, 2]),
        key_of([2, 1]),
        key_of([1, 2], scope="other"),
        key_of([1, 2], encoding="after:00"),
        key_of([1, 2], weights_id="v"),
        key_of([1, 2], kv_dtype="bfloat16"),
        # Fields are length-prefixed: moving a letter across a border makes another key.
        key_of([1, 2], weights_id="wi", encoding="solated"),
        key_of([1, 2], weights_id="w" + ISOLATED, encoding=""),
    }
    assert len(keys) == 8
    assert key_of([1, 2]) == key_of((1, 2))


def test_a_chunk_in_use_is_never_evicted_and_an_unused_one_is(cache):
    used, unused = insert(cache, range(12)), insert(cache, range(12, 24))
    cache.release_chunk(unused)
    assert cache.can_allocate(5)
    assert not cache.can_allocate(6)
    cache.allocate(5)
    assert used in cache.chunks
    assert cache.find_chunk(unused.key, unused.token_ids) is None
    assert cache.chunks.miss_reason(unused.key, "default", unused.token_ids) == "evicted"


def test_allocation_is_all_or_nothing(cache):
    insert(cache, range(28))
    with pytest.raises(CapacityError, match="need 2 KV blocks, 1 are free"):
        cache.allocate(2)
    assert cache.pool.num_free == 1


def test_half_a_chunk_is_dropped_with_its_last_user_and_lets_go_of_its_preamble(cache):
    preamble = insert(cache, [1, 2, 3])
    half = insert(cache, [7, 8, 9], context=[preamble], ready=False)
    cache.release_chunk(preamble)
    assert preamble.num_users == 1
    cache.release_chunk(half)
    assert half not in cache.chunks
    assert preamble.num_users == 0
    assert cache.chunks.miss_reason(half.key, "default", half.token_ids) == "new"
    cache.check_idle()


def test_a_ready_chunk_outlives_the_preamble_it_was_encoded_after(cache):
    preamble = insert(cache, [1, 2, 3])
    chunk = insert(cache, [7, 8, 9], context=[preamble])
    for held in (preamble, chunk):
        cache.release_chunk(held)
    cache.pin_chunk(chunk, None)
    cache.clear()
    assert list(cache.chunks) == [chunk]
    cache.check_idle()


def test_text_above_a_block_in_use_is_not_counted_as_room():
    """A request that computed its own copy of a stored block holds what follows it, not the block itself. The block was
    counted as free, the promised room did not exist, and the CapacityError stopped the engine.
    """
    cache = CacheManager(num_blocks=4, block_size=4)
    first_ids, first_nodes = chain(cache, [1, 1, 1, 1])
    own_copy = cache.allocate(1)
    below = cache.allocate(1)
    node = cache.insert_text(block_key(first_nodes[0].key, [2] * 4), first_nodes[0], [2] * 4, below[0], 4, frozenset())
    cache.release_blocks(first_ids, first_nodes)
    assert cache.can_allocate(1)
    assert not cache.can_allocate(2)
    cache.allocate(1)
    cache.release_blocks(own_copy + below, [node])
    assert cache.can_allocate(3)
    cache.allocate(3)


def test_text_goes_from_its_end_and_room_is_counted_through_the_whole_chain(cache):
    block_ids, nodes = chain(cache, [1] * 4, [2] * 4, [3] * 4)
    assert not cache.can_allocate(6)
    cache.release_blocks(block_ids, nodes)
    assert cache.can_allocate(8)
    cache.allocate(6)
    assert set(cache.texts) == set(nodes[:2])
    cache.allocate(2)
    assert len(cache.texts) == 0


def test_text_whose_parent_went_is_not_kept(cache):
    block_ids, nodes = chain(cache, [1] * 4)
    cache.release_blocks(block_ids, nodes)
    cache.clear()
    [block_id] = cache.allocate(1)
    key = block_key(nodes[0].key, [2] * 4)
    assert cache.insert_text(key, nodes[0], [2] * 4, block_id, 4, frozenset()) is None
    cache.release_blocks([block_id], [])
    cache.check_idle()


def test_eviction_weighs_use_and_cost_per_block(cache):
    """Of equal chunks the less used goes first; a short chunk in a block of its own goes before a full block."""
    often, seldom, short = insert(cache, range(8)), insert(cache, range(8, 16)), insert(cache, [1])
    often.num_hits = 5
    for chunk in (often, seldom, short):
        cache.release_chunk(chunk)
    gone = []
    while len(cache.chunks):
        before = set(cache.chunks)
        cache._evict_one()
        gone += before - set(cache.chunks)
    assert gone == [short, seldom, often]


def test_chunks_expire_after_their_last_use_and_say_so(clock):
    cache = CacheManager(num_blocks=8, block_size=4, chunk_ttl_s=60, clock=clock)
    chunk = insert(cache, [1, 2, 3])
    clock.now_s += 100
    assert cache.find_chunk(chunk.key, chunk.token_ids) is chunk, "in use"
    cache.release_chunk(chunk)
    clock.now_s += 59
    assert cache.find_chunk(chunk.key, chunk.token_ids) is chunk
    cache.hold_chunk(chunk)
    cache.release_chunk(chunk)
    clock.now_s += 60
    assert cache.find_chunk(chunk.key, chunk.token_ids) is None
    assert cache.chunks.miss_reason(chunk.key, "default", chunk.token_ids) == "expired"
    assert cache.stats.num_expired_chunks == 1
    cache.check_idle()


def test_a_pin_forbids_eviction_and_expiry_until_it_ends(clock):
    cache = CacheManager(num_blocks=8, block_size=4, chunk_ttl_s=10, clock=clock)
    chunk = insert(cache, range(8))
    cache.release_chunk(chunk)
    cache.pin_chunk(chunk, 30)
    cache.clear()
    clock.now_s += 29
    cache.expire()
    assert chunk in cache.chunks
    assert cache.num_pinned_blocks == 2
    assert not cache.can_allocate(7)
    clock.now_s += 1
    cache.expire()
    assert chunk not in cache.chunks, "unpinned, and its own time is over as well"
    cache.check_idle()


def test_unpinned_chunk_can_be_evicted_again(cache):
    chunk = insert(cache, range(8))
    cache.pin_chunk(chunk, None)
    cache.release_chunk(chunk)
    cache.unpin_chunk(chunk)
    cache.check_idle()
    cache.clear()
    assert len(cache.chunks) == 0


def test_deleted_chunk_is_found_by_nobody_and_stays_readable_for_its_users(cache):
    chunk = insert(cache, range(8), document_id="a")
    assert cache.delete_document("default", "a") == ([chunk], 0)
    assert cache.find_chunk(chunk.key, chunk.token_ids) is None
    assert cache.chunks.miss_reason(chunk.key, "default", chunk.token_ids) == "deleted"
    assert chunk.block_ids
    again = insert(cache, range(8), document_id="a")
    assert not set(again.block_ids) & set(chunk.block_ids)
    cache.release_chunk(chunk)
    cache.release_chunk(again)
    assert cache.pool.num_free == 6
    assert cache.delete_document("default", "a") == ([again], 2)
    cache.check_idle()


def test_deletion_stays_within_its_scope(cache):
    mine = insert(cache, range(8), scope="mine", document_id="a")
    yours = insert(cache, range(8), scope="yours", document_id="a")
    for chunk in (mine, yours):
        cache.release_chunk(chunk)
    cache.delete_document("mine", "a")
    assert list(cache.chunks) == [yours]


def test_no_reason_for_a_miss_crosses_scopes(cache):
    chunk = insert(cache, range(8), scope="mine")
    cache.release_chunk(chunk)
    for state in ("stored", "evicted"):
        reason = cache.chunks.miss_reason(key_of(range(8), scope="yours"), "yours", range(8))
        assert reason == "new", state
        cache.clear()
    assert content_id("mine", [1]) != content_id("yours", [1])


def test_hash_collision_is_not_a_hit(cache):
    chunk = insert(cache, [1, 2, 3])
    assert cache.find_chunk(chunk.key, [1, 2, 4]) is None


@pytest.mark.parametrize("leak", ["reference", "block", "hold"])
def test_integrity_check_notices_a_leak(cache, leak):
    chunk = insert(cache, [1, 2, 3])
    if leak == "reference":
        cache.release_chunk(chunk)
        cache.pool.acquire(chunk.block_ids)
    elif leak == "block":
        cache.release_chunk(chunk)
        cache.allocate(1)
    with pytest.raises(AssertionError):
        cache.check_idle()
