# SPDX-License-Identifier: Apache-2.0
"""Digests over typed, length-prefixed fields, so that no two different inputs can be spelled alike."""

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_SIZE = 16


def digest_fields(fields: Sequence[str | bytes], token_ids: Sequence[int] = ()) -> bytes:
    """Hash `fields` and `token_ids` into 16 bytes (BLAKE2b), the same in every process.

    Args:
        fields: Each is length-prefixed: ("ab", "c") differs from ("a", "bc").
        token_ids: Non-negative, below 2**32.
    """
    h = hashlib.blake2b(digest_size=DIGEST_SIZE)
    h.update(len(fields).to_bytes(4, "little"))
    for field in fields:
        raw = field.encode() if isinstance(field, str) else field
        h.update(len(raw).to_bytes(4, "little"))
        h.update(raw)
    h.update(array("I", token_ids).tobytes())
    return h.digest()
