# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, and what to do while a client may leave."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Send

from lazyattention.errors import LazyAttentionError
from lazyattention.server.errors import error_body
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientLeftError(Exception):
    """The client closed its connection; nobody reads the answer."""


def event(value: dict[str, Any]) -> bytes:
    """One event: a single data line in ASCII, since some clients take U+2028 for a line break."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class EventResponse(StreamingResponse):
    """An answer as server-sent events. Whatever ends it also ends where its values come from, at once."""

    def __init__(self, values: AsyncGenerator[dict[str, Any], None]) -> None:
        self._events = events(values)
        super().__init__(self._events, media_type="text/event-stream", headers=EVENT_HEADERS)

    async def stream_response(self, send: Send) -> None:
        """Send all events."""
        async with aclosing(self._events):
            await super().stream_response(send)


async def events(values: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    """Frame `values`; an error on the way becomes an event of its own, and `[DONE]` always ends the stream."""
    try:
        async with aclosing(values):
            async for value in values:
                yield event(value)
    except LazyAttentionError as error:
        yield event(error_body(error))
    except Exception:  # the HTTP border: the stream has begun, so a status cannot tell any more
        logger.exception("a stream failed")
        yield event(error_body(LazyAttentionError("internal error; see the server's log")))
    yield DONE


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, but cancel it when the client leaves.

    Raises:
        ClientLeftError: It did.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
