# SPDX-License-Identifier: Apache-2.0
"""Cut a text that is too long for one chunk at its natural borders, without losing a character."""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence

from lazyattention.documents.document import Document
from lazyattention.errors import ConfigError

# A border stands after the match. Strongest first: paragraph, line, sentence (Latin and CJK), word.
_BORDERS: tuple[re.Pattern[str], ...] = (
    re.compile(r"\n[^\S\n]*\n\s*"),
    re.compile(r"\n"),
    re.compile(r"""[.!?…]["'”’)\]]*\s+|[。！？]["'”’）」』]*"""),
    re.compile(r"\s+"),
)


def split_text(text: str, count_tokens: Callable[[str], int], max_chunk_len: int) -> list[str]:
    """Cut `text` into pieces of at most `max_chunk_len` tokens; their concatenation is `text` exactly.

    A piece ends at the strongest border in the second half of what fits: after a paragraph, a line, a sentence or a word;
    so pieces are neither tiny nor cut for the sake of a few more tokens. Only a single very long word is cut inside.

    Args:
        text: Any text; "" gives no piece.
        count_tokens: Length of a text in tokens, as the engine counts it. May be called often; called with pieces of
            at most a few times `max_chunk_len` tokens.
        max_chunk_len: Tokens.

    Raises:
        ConfigError: `max_chunk_len` is not positive, or not even one character fits into it.
    """
    if max_chunk_len < 1:
        raise ConfigError(f"max_chunk_len must be at least 1 token, got {max_chunk_len}")
    borders = [[match.end() for match in pattern.finditer(text)] for pattern in _BORDERS]
    pieces: list[str] = []
    start = 0
    chars_guess = 4 * max_chunk_len
    while start < len(text):
        longest = _longest_fit(text, start, count_tokens, max_chunk_len, chars_guess)
        chars_guess = max(longest, 1)
        end = start + longest
        if end < len(text):
            end = _best_border(borders, start, end)
        # Token counts are not quite monotone in length: a shorter piece can have more tokens.
        while end - start > 1 and count_tokens(text[start:end]) > max_chunk_len:
            end -= max(1, (end - start) // 16)
        pieces.append(text[start:end])
        start = end
    return pieces


def split_document(document: Document, count_tokens: Callable[[str], int], max_chunk_len: int) -> list[str]:
    """Cut a document's text as `split_text` does."""
    return split_text(document.text, count_tokens, max_chunk_len)


def _longest_fit(text: str, start: int, count_tokens: Callable[[str], int], limit: int, chars_guess: int) -> int:
    """Return how many characters from `start` fit into `limit` tokens: found by doubling, then by bisection."""
    remaining = len(text) - start
    fits, too_long = 0, min(chars_guess, remaining)
    while count_tokens(text[start : start + too_long]) <= limit:
        fits = too_long
        if fits == remaining:
            return fits
        too_long = min(2 * too_long, remaining)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if count_tokens(text[start : start + middle]) <= limit:
            fits = middle
        else:
            too_long = middle
    if fits == 0:
        raise ConfigError(
            f"max_chunk_len = {limit} tokens is too small: the character {text[start]!r} alone needs more"
        )
    return fits


def _best_border(borders: Sequence[Sequence[int]], start: int, end: int) -> int:
    """Return the strongest kind's last border in the second half of `start..end`, else the last border of any kind."""
    last = [kind[index - 1] if (index := bisect_right(kind, end)) else start for kind in borders]
    half = start + (end - start + 1) // 2
    in_second_half = [border for border in last if border >= half]
    return in_second_half[0] if in_second_half else max(last) if max(last) > start else end
