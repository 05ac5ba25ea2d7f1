# SPDX-License-Identifier: Apache-2.0
"""Every exception raised on purpose, and the HTTP status the server answers with.

A message has three parts: what is wrong with which argument, what is allowed, what to do.
"""


class LazyAttentionError(Exception):
    """Base of every error raised on purpose."""

    http_status = 500


class RequestError(LazyAttentionError, ValueError):
    """The request itself is wrong; sending it again unchanged cannot help."""

    http_status = 400


class NotFoundError(LazyAttentionError, LookupError):
    """Something named by the caller (a document, a model, a request) is not there."""

    http_status = 404


class CapacityError(LazyAttentionError):
    """The request is valid but there is no room for it. Retrying later can help unless the message says never."""

    http_status = 503


class ConfigError(LazyAttentionError, ValueError):
    """An option given at start-up is wrong, or two options exclude each other."""


class UnsupportedError(LazyAttentionError):
    """A model, a device or an option that cannot be served exactly is refused instead of being approximated."""

    http_status = 501


class EngineDeadError(LazyAttentionError):
    """The engine stopped after an internal failure; the cause is attached. Start a new one."""
