# SPDX-License-Identifier: Apache-2.0
"""The text and bytes of single tokens, for log-probability reports."""

import functools
import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_VISIBLE_SPACE = "\u2581"


class TokenText:
    """Remembers each token's bytes; a token alone need not be a whole character."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401  # any transformers tokenizer
        self._tokenizer = tokenizer
        self._memo: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes a token adds to the text."""
        found = self._memo.get(token_id)
        if found is None:
            found = self._memo[token_id] = self._find_bytes(token_id)
        return found

    def text_of(self, token_id: int) -> str:
        """Its text; bytes of an unfinished character as U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def _find_bytes(self, token_id: int) -> bytes:
        token = str(self._tokenizer.convert_ids_to_tokens(token_id))
        match = _BYTE_TOKEN.fullmatch(token)
        if match:
            return bytes([int(match.group(1), 16)])
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if token.startswith(_VISIBLE_SPACE) and not text.startswith(" "):
            text = " " + text  # at a text's start the decoder takes it away
        if "\ufffd" in text and all(char in _byte_of_char() for char in token):
            return bytes(_byte_of_char()[char] for char in token)
        return text.encode("utf-8", "replace")


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """Byte-level tokenizers spell each byte as one printable character: itself, or one from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
