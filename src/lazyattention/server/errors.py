# SPDX-License-Identifier: Apache-2.0
"""Errors as HTTP answers: what only a server can refuse, and how every error looks on the wire (OpenAI's shape)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lazyattention.errors import CapacityError, LazyAttentionError, NotFoundError


class AuthenticationError(LazyAttentionError):
    """No API key, or one that is not known."""

    http_status = 401


class ForbiddenError(LazyAttentionError):
    """The API key is known but may not do this."""

    http_status = 403


class TooLargeError(LazyAttentionError):
    """The body is larger than this scope may send."""

    http_status = 413


class EncodedBodyError(LazyAttentionError):
    """The body is compressed, which this server does not read."""

    http_status = 415


class SlowClientError(LazyAttentionError):
    """The body did not arrive in time."""

    http_status = 408


class OverloadedError(LazyAttentionError):
    """Too many requests, of this scope or altogether. `retry_after_s`: seconds after which trying again makes sense."""

    http_status = 429

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDownError(CapacityError):
    """The server ends; another one, or this one after its restart, can help."""


class DeadlineError(LazyAttentionError):
    """The request's own deadline passed before it was done."""

    http_status = 504


class InvalidBodyError(LazyAttentionError):
    """The body does not fit the route's model; `param` names the first field that is wrong."""

    http_status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnknownModelError(NotFoundError):
    """The request names a model that is not served."""

    code = "model_not_found"


# Fields are OpenAI's; clients choose their exception by the status and show `message`.
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_CODES: Mapping[int, str] = {401: "invalid_api_key", 413: "request_too_large", 429: "rate_limit_exceeded"}


# A body with many unknown fields has its first ones named.
_MAX_NAMED = 10
# Characters of a place; schemas may be nested deeply.
_MAX_PLACE = 300
# str, list[...], a discriminator or a model's class: how pydantic calls the member of a union that it tried.
_UNION_MEMBER = re.compile(
    r"str|int|constrained-\w+|(?:list|function|literal|tagged|nullable|json|chain)\b.+|[A-Z]\w*", re.DOTALL
)


def error_body(error: LazyAttentionError, status: int | None = None) -> dict[str, Any]:
    """The JSON body of an error."""
    status = status or error.http_status
    default_type = "server_error" if status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": str(error),
            "type": _TYPES.get(status, default_type),
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None) or _CODES.get(status),
        }
    }


def error_headers(error: LazyAttentionError) -> dict[str, str]:
    """HTTP headers that belong to an error."""
    if isinstance(error, AuthenticationError):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, OverloadedError):
        return {"Retry-After": str(max(1, round(error.retry_after_s)))}
    if isinstance(error, CapacityError):
        return {"Retry-After": "1"}
    return {}


def body_error(problems: Sequence[Mapping[str, Any]]) -> InvalidBodyError:
    """Turn pydantic's list of problems into one error that names each field.

    Args:
        problems: As in `ValidationError.errors()`; their `input` is not shown, it may be huge or not encodable.
    """
    kind = problems[0]["type"]
    if kind == "json_invalid":
        place, reason = problems[0]["loc"][-1], problems[0].get("ctx", {}).get("error", "malformed")
        reason = reason.removesuffix(" at")  # Python's own message goes on with the place
        return InvalidBodyError(f"the body is not valid JSON: {reason} at character {place}; correct it")
    if kind in ("model_attributes_type", "missing") and tuple(problems[0]["loc"]) == ("body",):
        return InvalidBodyError(
            "the body must be a JSON object, sent with the header 'Content-Type: application/json'; see /docs"
        )
    places = [_place(problem) for problem in problems]
    unknown = [place for place, problem in zip(places, problems, strict=True) if problem["type"] == "extra_forbidden"]
    if unknown:
        named = list(dict.fromkeys(unknown))
        more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
        return InvalidBodyError(
            f"unknown or unsupported field(s): {', '.join(named[:_MAX_NAMED])}{more}; remove them, see /docs for what is allowed",
            param=unknown[0],
            code="unknown_field",
        )
    lines = dict.fromkeys(
        f"{place}: {problem['msg'].removeprefix('Value error, ')}"
        for place, problem in zip(places, problems, strict=True)
    )
    shown = [line[:300] for line in list(lines)[:5]]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more")
    return InvalidBodyError("; ".join(shown), param=places[0])


def _place(problem: Mapping[str, Any]) -> str:
    # The names of union members and validators that pydantic puts between the field names say nothing to a caller.
    where = problem["loc"][problem["loc"][:1] in (("body",), ("query",), ("path",)) :]
    own = where[-1:] if problem["type"] == "extra_forbidden" else ()  # a name of the caller's choice
    inner = where[: len(where) - len(own)]
    parts = [*(str(part) for part in inner if not _UNION_MEMBER.fullmatch(str(part))), *map(str, own)]
    return ".".join(part.encode("utf-8", "replace").decode()[:100] for part in parts)[:_MAX_PLACE] or "body"
