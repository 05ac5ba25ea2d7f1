# SPDX-License-Identifier: Apache-2.0
"""What happens to every request before and after its route: id, key, rate, body, log line."""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lazyattention.errors import LazyAttentionError
from lazyattention.server.auth import Authenticator
from lazyattention.server.config import ScopeConfig
from lazyattention.server.errors import (
    EncodedBodyError,
    InvalidBodyError,
    SlowClientError,
    TooLargeError,
    error_body,
    error_headers,
)
from lazyattention.server.limits import RateLimiter
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)
access_logger = get_logger("lazyattention.server.access")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_ESCAPE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# What is needed to draw the page and to see that the server lives says nothing about anybody.
_PUBLIC_PATHS = ("/", "/health", "/docs", "/openapi.json", "/favicon.ico")
_PROBES = ("/health", "/metrics")
# Past this factor of the limit, a body is no longer read to its end for the sake of a readable answer.
_MAX_DRAINED = 16

# Called at a request's end with (scope name or "", route path, status).
OnEnd = Callable[[str, str, int], None]


class RequestGate:
    """Outermost ASGI layer. Puts `request_id`, `unique_id` and `tenant` (ScopeConfig) into the request's state."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticator: Authenticator,
        rate_limiter: RateLimiter,
        body_timeout_s: float,
        on_end: OnEnd,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._rate_limiter = rate_limiter
        self._body_timeout_s = body_timeout_s
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other ASGI events pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        state = scope.setdefault("state", {})
        # The client's own id is for its log and ours; what the engine sees is unique whatever clients send.
        state["unique_id"] = "req-" + uuid.uuid4().hex
        request_id = state["request_id"] = _plain_id(headers.get("x-request-id")) or state["unique_id"]
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            if is_public(scope["path"]) or scope["method"] == "OPTIONS":
                await self._app(scope, receive, send_with_id)
                return
            tenant = self._authenticator.scope_of(headers.get("authorization"))
            state["tenant"] = tenant
            self._rate_limiter.check(tenant)
            _check_encoding(headers.get("content-encoding"))
            body = await self._read_body(receive, headers.get("content-length"), tenant)
            _check_unicode(body)
            await self._app(scope, _replay(body, receive), send_with_id)
        except LazyAttentionError as error:
            await _send_error(error, send_with_id)
        except Exception:  # the HTTP border: a fault of ours ends this request and nothing else
            logger.exception("a request failed", extra={"request_id": request_id})
            if status:
                raise  # the answer has begun; uvicorn cuts the connection
            await _send_error(LazyAttentionError("internal error; see the server's log"), send_with_id)
        finally:
            self._end(scope, state, status, time.monotonic() - start)

    async def _read_body(self, receive: Receive, content_length: str | None, tenant: ScopeConfig) -> bytes:
        """Collect the body, within the scope's size and the time allowed."""
        limit = tenant.max_body_bytes
        declared = int(content_length) if content_length and content_length.isdigit() else 0
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_timeout_s):
                has_more = True
                while has_more and size <= limit * _MAX_DRAINED:
                    message = await receive()
                    chunk = message.get("body", b"")
                    has_more = message.get("more_body", False)
                    size += len(chunk)
                    if max(size, declared) <= limit:
                        chunks.append(chunk)
        except TimeoutError:
            raise SlowClientError(f"the body did not arrive within {self._body_timeout_s:g} s; send it again") from None
        if max(size, declared) > limit:
            raise TooLargeError(
                f"the body has {max(size, declared)} bytes, this scope may send {limit}; send fewer or shorter documents, "
                "or upload them in batches to /v1/documents"
            )
        return b"".join(chunks)

    def _end(self, scope: Scope, state: dict[str, Any], status: int, duration_s: float) -> None:
        tenant = state.get("tenant")
        name = tenant.name if isinstance(tenant, ScopeConfig) else ""
        route = getattr(scope.get("route"), "path", "other")
        self._on_end(name, route, status)
        client = scope.get("client")
        access_logger.log(
            # Probes come every few seconds and say nothing while all is well.
            logging.DEBUG if scope["path"] in _PROBES and status < 400 else logging.INFO,
            "%s %s %s",
            scope["method"],
            scope["path"].encode("utf-8", "backslashreplace").decode(),
            status or "aborted",
            extra={
                "request_id": state["request_id"],
                "unique_id": state["unique_id"] if state["unique_id"] != state["request_id"] else None,
                "scope": name,
                "status": status,
                "duration_s": round(duration_s, 4),
                "client": client[0] if client else None,
                **state.get("notes", {}),
            },
        )


def _check_encoding(content_encoding: str | None) -> None:
    if content_encoding and content_encoding.strip().lower() != "identity":
        raise EncodedBodyError(
            f"content-encoding {content_encoding!r:.80} is not read; send the body as it is, without compression"
        )


def is_public(path: str) -> bool:
    """True for what needs no key."""
    return path in _PUBLIC_PATHS or path.startswith("/static/")


def _check_unicode(body: bytes) -> None:
    """Refuse what is not UTF-8, and JSON in which an escape spells half a surrogate pair: it parses, but is no text that could be encoded."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidBodyError(f"the body is not valid UTF-8 at byte {error.start}; send JSON in UTF-8") from None
    if not _SURROGATE.search(body):
        return
    open_until = -1  # where the second half of a pair must begin
    for escape in _ESCAPE.finditer(body):
        code = int(escape.group(1), 16) if escape.group(1) else 0
        is_second = 0xDC00 <= code <= 0xDFFF
        if is_second != (open_until == escape.start()):
            break
        open_until = escape.end() if 0xD800 <= code <= 0xDBFF else -1
    else:
        if open_until < 0:
            return
    raise InvalidBodyError(
        "the body holds half of a surrogate pair (\\ud800 to \\udfff alone), which is not valid Unicode; remove it"
    )


def _plain_id(given: str | None) -> str | None:
    """The client's id, unless it has characters or a length that no id needs."""
    return given if given and _REQUEST_ID.fullmatch(given) else None


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that hands out the body at once and then waits for what the client does."""
    is_sent = False

    async def receive_again() -> Message:
        nonlocal is_sent
        if not is_sent:
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return receive_again


async def _send_error(error: LazyAttentionError, send: Send) -> None:
    headers = {"content-type": "application/json", **error_headers(error)}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.http_status, "headers": raw})
    await send({"type": "http.response.body", "body": json.dumps(error_body(error)).encode()})
