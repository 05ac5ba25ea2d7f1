# SPDX-License-Identifier: Apache-2.0
"""A small client of our own document routes, for the command line. Standard library only."""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lazyattention.documents.document import Document
from lazyattention.errors import LazyAttentionError, NotFoundError, RequestError

_TIMEOUT_S = 600.0


class ServerUnreachableError(LazyAttentionError):
    """Nobody answers at the server's address."""


class DocumentClient:
    """Talks to one server."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """`url`: the server's address, without a path."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise RequestError(f"the server's address {url!r} must begin with http:// or https://")
        self._url = url.rstrip("/") + "/v1/documents"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def upload(
        self,
        documents: Sequence[Document],
        *,
        warm: bool,
        pin: bool,
        pin_ttl_s: float | None,
        system: str | None,
    ) -> Iterator[dict[str, Any]]:
        """Upload `documents`; yield the server's report on each as it is done."""
        body: dict[str, Any] = {
            "documents": [
                {"text": d.text, "id": d.id, "title": d.title, "metadata": d.metadata and dict(d.metadata)}
                for d in documents
            ],
            "warm": warm,
            "pin": pin,
            "pin_ttl_s": pin_ttl_s,
            "stream": True,
        }
        if system is not None:
            body["messages"] = [{"role": "system", "content": system}]
        with self._open("POST", "", body) as response:
            for line in response:
                if line == b"data: [DONE]\n":
                    return
                if line.startswith(b"data: "):
                    yield _report_of(line[len(b"data: ") :])
        raise LazyAttentionError(
            "the server's report ended early; see 'lazyattention documents list' for what is there"
        )

    def list(self) -> Iterator[dict[str, Any]]:
        """All documents."""
        query = ""
        while True:
            page = self._json("GET", query)
            yield from page["data"]
            if not page["has_more"]:
                return
            query = "?" + urllib.parse.urlencode({"after": page["data"][-1]["id"]})

    def show(self, document_id: str) -> dict[str, Any]:
        """One document with its text."""
        return self._json("GET", _path(document_id))

    def pin(self, document_id: str, ttl_s: float | None) -> dict[str, Any]:
        """Keep its KV."""
        return self._json("POST", _path(document_id) + "/pin", {"ttl_s": ttl_s})

    def unpin(self, document_id: str) -> dict[str, Any]:
        """Let it be evicted again."""
        return self._json("POST", _path(document_id) + "/unpin")

    def delete(self, document_id: str) -> dict[str, Any]:
        """Forget it."""
        return self._json("DELETE", _path(document_id))

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        with self._open(method, path, body) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def _open(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401  # urllib's response
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers, method=method)
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise _as_own_error(error) from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise ServerUnreachableError(
                f"no server at {self._url}: {reason}; start one with 'lazyattention serve'"
            ) from error


def _report_of(raw: bytes) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(raw)
        if "id" in report:
            return report
        message = report["error"]["message"]
    except (ValueError, KeyError, TypeError):
        raise LazyAttentionError(f"the server's report cannot be read: {raw[:80]!r}") from None
    raise LazyAttentionError(message)


def _path(document_id: str) -> str:
    return "/" + urllib.parse.quote(document_id)


def _as_own_error(error: urllib.error.HTTPError) -> LazyAttentionError:
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {error.code} {error.reason}"
    if error.code == 404:
        return NotFoundError(message)
    return RequestError(message) if 400 <= error.code < 500 else LazyAttentionError(message)
