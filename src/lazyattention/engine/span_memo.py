# SPDX-License-Identifier: Apache-2.0
"""Remembers how the documents seen last were tokenised, within a bound on memory."""

import threading
from collections import OrderedDict
from collections.abc import Callable

from lazyattention.reuse import Span

_Key = tuple[str, str | None, str]  # text, title, id
_MAX_BYTES = 2**25
# A Python integer and the place that refers to it; a character of a text that is not ASCII; everything around.
_BYTES_PER_TOKEN, _BYTES_PER_CHAR, _BYTES_PER_DOCUMENT = 36, 2, 600


class SpanMemo:
    """Spans by document; those used longest ago go first. `clear` may come from another thread than the rest."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        """`max_bytes`: estimated memory of all that is remembered."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[_Key, tuple[tuple[Span, ...], int]] = OrderedDict()
        self._num_bytes = 0
        self._num_clears = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: _Key, make: Callable[[], tuple[Span, ...]]) -> tuple[Span, ...]:
        """Return the spans of a document; `make` computes those that are not remembered."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]
            num_clears = self._num_clears
        spans = make()
        num_tokens = sum(len(span.token_ids) for span in spans)
        size = num_tokens * _BYTES_PER_TOKEN + len(key[0]) * _BYTES_PER_CHAR + _BYTES_PER_DOCUMENT
        with self._lock:
            # What was made while others forgot may be what they forgot.
            if num_clears == self._num_clears and size <= self._max_bytes and key not in self._entries:
                self._entries[key] = (spans, size)
                self._num_bytes += size
                while self._num_bytes > self._max_bytes:
                    self._num_bytes -= self._entries.popitem(last=False)[1][1]
        return spans

    def clear(self) -> None:
        """Forget everything, what is being made at this moment included."""
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0
            self._num_clears += 1
