# SPDX-License-Identifier: Apache-2.0
"""Outputs of one request on their way to a reader that may be slower than the engine: merged instead of piling up."""

import asyncio
from collections import deque
from dataclasses import replace

from lazyattention.engine.outputs import RequestOutput


class OutputMailbox:
    """Holds at most one unread output, however late its reader is; an exception comes after it. One event loop only.

    An output holds everything up to now, so of two unread ones the newer suffices, with both deltas.
    """

    def __init__(self) -> None:
        self._items: deque[RequestOutput | BaseException] = deque()
        self._has_items = asyncio.Event()

    def put(self, item: RequestOutput | BaseException) -> None:
        """Leave an output, or an exception that ends the request."""
        last = self._items[-1] if self._items else None
        if isinstance(item, RequestOutput) and isinstance(last, RequestOutput):
            self._items[-1] = _merged(last, item)
        else:
            self._items.append(item)
        self._has_items.set()

    async def get(self) -> RequestOutput | BaseException:
        """Wait for something and take it."""
        await self._has_items.wait()
        item = self._items.popleft()
        if not self._items:
            self._has_items.clear()
        return item


def _merged(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    outputs = [
        replace(
            new,
            delta_text=old.delta_text + new.delta_text,
            delta_token_ids=old.delta_token_ids + new.delta_token_ids,
        )
        for old, new in zip(older.outputs, newer.outputs, strict=True)
    ]
    return replace(newer, outputs=outputs)
