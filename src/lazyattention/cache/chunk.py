# SPDX-License-Identifier: Apache-2.0
"""A chunk: a piece of text encoded on its own, whose KV is stored once and used at any position. No tensors here."""

from dataclasses import dataclass, field

from lazyattention.utils.hashing import digest_fields

ISOLATED = "isolated"


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """Names everything a chunk's KV depends on: equal keys mean interchangeable KV.

    Attributes:
        digest: 16 bytes, the same in every process.
    """

    digest: bytes

    @classmethod
    def of(cls, tokens_digest: bytes, *, weights_id: str, encoding: str, kv_dtype: str, scope: str) -> "ChunkKey":
        """Hash the fields, each length-prefixed.

        Args:
            tokens_digest: Hash of the chunk's own tokens.
            weights_id: Fingerprint of weights, adapters and RoPE settings.
            encoding: What the chunk saw (`isolated`, or the key of the last chunk before it) and how its keys are stored.
            kv_dtype: Dtype of the stored KV.
            scope: The tenant.
        """
        return cls(digest_fields(("chunk", tokens_digest, weights_id, encoding, kv_dtype, scope)))

    @property
    def hex(self) -> str:
        """The digest as 32 hexadecimal digits."""
        return self.digest.hex()


@dataclass(slots=True, eq=False)
class Chunk:
    """One stored chunk and who uses it.

    Attributes:
        key: Its identity.
        token_ids: Its tokens; compared on every hit, since a hash alone is never trusted.
        scope: The tenant it belongs to.
        content_id: Hash of scope and tokens alone, to tell "other preamble" from "new".
        base: Position of its first token when it was encoded: the length of all it was encoded after.
        context: The chunks it is encoded after, in order; nothing once it is ready.
        keys_turned: False when its keys are stored without rotation.
        block_ids: Its KV blocks.
        document_ids: Documents it came from, with their titles.
        num_computed: Tokens whose KV exists; the chunk is ready when all do.
        num_users: Requests, encode jobs and dependent encodings that hold it; it cannot be evicted while positive.
        is_pinned: Pinned by the user.
        pinned_until_s: When the user's pin ends (monotonic seconds); None = until unpinned.
        is_deleted: Deleted while in use: not found any more, its blocks go when the last user ends.
        num_hits: Requests that found it.
        created_s: Monotonic seconds.
        last_used_s: Monotonic seconds.
        expires_at_s: Monotonic seconds; None = never.
    """

    key: ChunkKey
    token_ids: tuple[int, ...]
    scope: str
    content_id: bytes
    base: int
    context: "tuple[Chunk, ...]"
    keys_turned: bool
    block_ids: list[int]
    document_ids: dict[str, str | None] = field(default_factory=dict)
    num_computed: int = 0
    num_users: int = 0
    is_pinned: bool = False
    pinned_until_s: float | None = None
    is_deleted: bool = False
    num_hits: int = 0
    created_s: float = 0.0
    last_used_s: float = 0.0
    expires_at_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Real tokens; empty slots are not counted."""
        return len(self.token_ids)

    @property
    def is_ready(self) -> bool:
        """True once the KV of every token exists."""
        return self.num_computed == self.num_tokens
