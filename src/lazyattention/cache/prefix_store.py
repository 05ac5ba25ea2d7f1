# SPDX-License-Identifier: Apache-2.0
"""Blocks of text KV, keyed by the chain of everything before them, chunk boundaries included. No tensors here.

A node is one block. Its key hashes its parent's key and its own tokens, so equal keys mean equal prompts up to here. A
text span that ended before its last block was full has a last node with fewer tokens than a block holds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lazyattention.utils.hashing import digest_fields


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One stored block of text KV.

    Attributes:
        key: Hash of the chain up to and including this block.
        parent: The node before it, in whatever span; None at the chain's root.
        token_ids: Tokens in the block; compared on every hit.
        block_id: Where its KV lies. The store holds one reference on it.
        context_len: Tokens before it in its prompt.
        children: Nodes that continue it.
        tags: Digests of the documents and chunks that this block's own span is, or directly follows.
        num_hits: Requests that found it.
    """

    key: bytes
    parent: "PrefixNode | None"
    token_ids: tuple[int, ...]
    block_id: int
    context_len: int
    children: "set[PrefixNode]" = field(default_factory=set)
    tags: frozenset[bytes] = frozenset()
    num_hits: int = 0


def block_key(parent_key: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a text block after the chain `parent_key`."""
    return digest_fields((b"text", parent_key), token_ids)


def boundary_key(parent_key: bytes, chunk_digest: bytes, part: Sequence[int] = ()) -> bytes:
    """Key of the chain after a chunk, or after a part of it: its first token and its number of tokens."""
    return digest_fields((b"boundary", parent_key, chunk_digest), part)


class PrefixStore:
    """Index of text blocks. It owns no blocks: the cache manager counts references and decides what goes."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, PrefixNode] = {}
        self._by_tag: dict[bytes, set[PrefixNode]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._nodes.values())

    def get(self, key: bytes, token_ids: Sequence[int]) -> PrefixNode | None:
        """Return the node of this key if it is there and holds these very tokens."""
        node = self._nodes.get(key)
        return node if node is not None and node.token_ids == tuple(token_ids) else None

    def insert(self, node: PrefixNode) -> bool:
        """Add a node under its parent; return False (and change nothing) if its key is taken."""
        if node.key in self._nodes:
            return False
        self._nodes[node.key] = node
        if node.parent is not None:
            node.parent.children.add(node)
        for tag in node.tags:
            self._by_tag.setdefault(tag, set()).add(node)
        return True

    def remove(self, node: PrefixNode) -> None:
        """Take a node without children out of the index."""
        assert not node.children, "remove the continuations first"
        del self._nodes[node.key]
        if node.parent is not None:
            node.parent.children.discard(node)
        for tag in node.tags:
            tagged = self._by_tag[tag]
            tagged.discard(node)
            if not tagged:
                del self._by_tag[tag]

    def remove_tagged(self, tag: bytes) -> list[PrefixNode]:
        """Take out every node that carries `tag`, and all their continuations; return them."""
        removed: list[PrefixNode] = []
        for root in list(self._by_tag.get(tag, ())):
            if self._nodes.get(root.key) is not root:
                continue  # went with another root
            order = [root]
            for node in order:
                order.extend(node.children)
            for node in reversed(order):
                self.remove(node)
            removed.extend(order)
        return removed
