# SPDX-License-Identifier: Apache-2.0
"""Blocks of text KV by their chain: what is found, what goes together."""

from lazyattention.cache.manager import CacheManager
from lazyattention.cache.prefix_store import PrefixNode, PrefixStore, block_key, boundary_key

ROOT = b"root"


def node_of(parent, *token_ids, tags=(), block_id=0):
    parent_key = ROOT if parent is None else parent.key
    return PrefixNode(block_key(parent_key, token_ids), parent, token_ids, block_id, 0, tags=frozenset(tags))


def test_equal_tokens_behind_different_chains_are_different_text():
    keys = {block_key(ROOT, [1, 2]), block_key(b"other", [1, 2]), block_key(boundary_key(ROOT, b"chunk"), [1, 2])}
    assert len(keys) == 3
    assert boundary_key(ROOT, b"a") != boundary_key(boundary_key(ROOT, b"a"), b"a")


def test_a_hash_alone_is_never_trusted():
    store = PrefixStore()
    node = node_of(None, 1, 2)
    assert store.insert(node)
    assert store.get(node.key, (1, 2)) is node
    assert store.get(node.key, (1, 3)) is None
    assert not store.insert(PrefixNode(node.key, None, (9, 9), 1, 0))


def test_a_tag_takes_its_text_and_all_that_continues_it():
    store = PrefixStore()
    before = node_of(None, 1)
    tagged = node_of(before, 2, tags=[b"document"])
    behind = node_of(tagged, 3)
    beside = node_of(before, 4)
    for node in (before, tagged, behind, beside):
        store.insert(node)
    assert set(store.remove_tagged(b"document")) == {tagged, behind}
    assert set(store) == {before, beside}
    assert before.children == {beside}
    assert store.remove_tagged(b"document") == []


def test_two_tagged_blocks_of_one_chain_are_removed_once():
    store = PrefixStore()
    first = node_of(None, 1, tags=[b"document"])
    second = node_of(first, 2, tags=[b"document"])
    for node in (first, second):
        store.insert(node)
    assert sorted(node.token_ids for node in store.remove_tagged(b"document")) == [(1,), (2,)]
    assert len(store) == 0


def test_text_behind_one_document_given_twice_can_be_evicted():
    """A tag that stood twice on a block was removed twice, and the KeyError stopped the engine."""
    from fixtures.tiny_engine import answer, make_engine, prompt

    engine = make_engine()
    answer(engine, prompt("p11 d9 d9 t30"))
    assert len(engine.cache.texts) > 0
    engine.cache.clear()
    assert len(engine.cache.texts) == 0
    engine.check_idle()


def test_text_held_by_a_request_outlives_its_deletion_and_is_found_by_nobody():
    cache = CacheManager(num_blocks=4, block_size=2)
    [block_id] = cache.allocate(1)
    key = block_key(ROOT, [1, 2])
    node = cache.insert_text(key, None, [1, 2], block_id, 0, frozenset([b"document"]))
    assert cache.delete_tagged(b"document") == 0
    assert cache.texts.get(key, [1, 2]) is None
    assert cache.pool.num_free == 3
    cache.release_blocks([block_id], [node])
    assert cache.pool.num_free == 4
    cache.check_idle()
