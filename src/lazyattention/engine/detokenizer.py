# SPDX-License-Identifier: Apache-2.0
"""Token ids to text while they arrive: whole characters only, and never a piece of a stop string."""

import os
import weakref
from collections.abc import Sequence
from typing import Protocol

# Tokens of the prompt that come before the first output token in a decode, so that its leading space is right.
_NUM_PROMPT_TOKENS = 6
# A window this long without a settled end (a run of invalid bytes) is looked at for a place to cut.
_MAX_WINDOW_LEN = 32
_REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str | list[str]:
        """Return the text of `token_ids`; a list only for a list of lists."""


class Detokenizer:
    """The text of one sequence.

    What `push` and `finish` return, put together, is the decoded output, cut before (or after) the first stop string. Text
    that may yet change is held back: bytes of an unfinished character, and what may be the beginning of a stop string. The
    cost per token does not grow with the length of the text.

    A tokenizer that falls back to bytes decodes a whole run of byte tokens at once; if such a run is not valid UTF-8, what
    was sent of it before its first wrong byte stands.

    Attributes:
        stop_reason: The stop string found, or None. Once it is set, `push` returns "".
        num_tokens: Tokens taken in, up to the one that completed a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """Start a sequence.

        Args:
            tokenizer: Used from one thread at a time.
            prompt_token_ids: What the output continues; only its end is used. Empty: the output starts a text.
            stop: Stop strings, none empty.
            include_stop_str_in_output: Keep the stop string found.
            min_tokens: A stop string within the first `min_tokens - 1` tokens' text does not count.
            skip_special_tokens: Leave special tokens out of the text.
        """
        self._tokenizer = tokenizer
        self._special_ids = _special_token_ids(tokenizer) if skip_special_tokens else frozenset()
        self._skip_special_tokens = skip_special_tokens
        self._stops = StopScanner(stop, keep_match=include_stop_str_in_output)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        # The window: the last tokens whose text is final (`_settled` of them), then those whose text may yet change.
        tail = [
            token_id for token_id in prompt_token_ids[-2 * _NUM_PROMPT_TOKENS :] if token_id not in self._special_ids
        ]
        self._window = tail[-_NUM_PROMPT_TOKENS:]
        self._num_settled = len(self._window)
        self._prompt_text = self._decode(self._window) if self._window else ""
        # Characters of the window's text that were returned or belong to the prompt.
        self._num_chars = len(self._prompt_text)

    @property
    def stop_reason(self) -> str | None:
        """The stop string found, if any."""
        return self._stops.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """Take in new tokens; return the text that became certain. Tokens after a stop string are left out."""
        pieces = []
        for token_id in token_ids:
            if self._stops.matched is not None:
                break
            self.num_tokens += 1
            text = self._advance(token_id)
            pieces.append(self._stops.push(text) if self.num_tokens >= self._min_tokens else text)
        return "".join(pieces)

    def finish(self) -> str:
        """End the sequence; return what was held back. A second call returns ""."""
        if self._stops.matched is not None:
            return ""
        rest = self._decode(self._window)[self._num_chars :] if self._num_settled < len(self._window) else ""
        self._num_settled = len(self._window)
        self._num_chars += len(rest)
        return self._stops.push(rest) + self._stops.finish()

    def _advance(self, token_id: int) -> str:
        """Add one token to the window; return the new text that later tokens cannot change."""
        if token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._prompt_text):
            # The prompt ended within a character, which is whole now.
            self._num_chars = len(os.path.commonprefix([self._prompt_text, text]))
            self._prompt_text = ""
        # All of the run at the end: with byte fallback, one missing byte makes every byte of the run a replacement.
        certain = text.rstrip(_REPLACEMENT)
        new_text = certain[self._num_chars :]
        self._num_chars = max(self._num_chars, len(certain))
        if len(certain) == len(text):
            self._settle()
        elif len(self._window) % _MAX_WINDOW_LEN == 0:
            new_text += self._cut_unfinished_window(text)
        return new_text

    def _settle(self) -> None:
        """All text of the window is out: keep its newest tokens only, for the next token's leading space."""
        kept = self._window[self._num_settled :]
        text = self._decode(kept)
        # Tokens without text of their own would make the next one look like the first of all.
        if text:
            self._window, self._num_chars = kept, len(text)
        self._num_settled = len(self._window)
        self._prompt_text = ""

    def _cut_unfinished_window(self, text: str) -> str:
        """Shorten a window of invalid bytes where decoding the rest alone gives the same text; return what is cut off."""
        for start in range(len(self._window) - 1, len(self._window) - 5, -1):
            head, rest = self._decode(self._window[:start]), self._decode(self._window[start:])
            if head + rest == text:
                cut_off = head[self._num_chars :]
                self._window, self._num_settled, self._num_chars = self._window[start:], 0, 0
                self._prompt_text = ""
                return cut_off
        return ""

    def _decode(self, token_ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


class StopScanner:
    """Looks for stop strings in text that arrives in pieces; lets nothing through that may belong to one.

    Attributes:
        matched: The stop string found first (of those that end at the same character, the longest), or None.
    """

    def __init__(self, stop: Sequence[str], *, keep_match: bool = False) -> None:
        """`stop`: none empty. `keep_match`: let the stop string itself through."""
        self.matched: str | None = None
        self._stop = sorted(stop, key=len, reverse=True)
        self._fallbacks = [_fallback_table(text) for text in self._stop]
        self._keep_match = keep_match
        self._held = ""
        # Per stop string: how many of its characters the text so far ends with.
        self._progress = [0] * len(self._stop)

    def push(self, text: str) -> str:
        """Take in `text`; return what certainly stands before any stop string."""
        if not self._stop or self.matched is not None:
            return text if self.matched is None else ""
        pending = self._held + text
        for index in range(len(self._held), len(pending)):
            for which, stop in enumerate(self._stop):
                if self._step(which, pending[index]) == len(stop):
                    self.matched, self._held = stop, ""
                    return pending[: index + 1 - (0 if self._keep_match else len(stop))]
        num_held = max(self._progress)
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held]

    def finish(self) -> str:
        """No more text comes: return what was held back."""
        held, self._held = self._held, ""
        return held

    def _step(self, which: int, char: str) -> int:
        stop, fallback, progress = self._stop[which], self._fallbacks[which], self._progress[which]
        while progress and stop[progress] != char:
            progress = fallback[progress - 1]
        self._progress[which] = progress + (stop[progress] == char)
        return self._progress[which]


def _fallback_table(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is also its end (Knuth-Morris-Pratt)."""
    table, length = [0] * len(text), 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = table[length - 1]
        length += text[i] == text[length]
        table[i] = length
    return table


_special_ids_memo: "weakref.WeakKeyDictionary[Tokenizer, frozenset[int]]" = weakref.WeakKeyDictionary()


def _special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that decoding with `skip_special_tokens` leaves out. Finding them costs milliseconds, so once per tokenizer."""
    if tokenizer not in _special_ids_memo:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        ids = {token_id for token_id, token in added.items() if token.special}
        _special_ids_memo[tokenizer] = frozenset(ids | set(getattr(tokenizer, "all_special_ids", ())))
    return _special_ids_memo[tokenizer]
