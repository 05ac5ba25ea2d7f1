# SPDX-License-Identifier: Apache-2.0
"""One logger per module under the name `lazyattention`; the level comes from LAZYATTENTION_LOG_LEVEL."""

import logging

from lazyattention import envs

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one module; `name` is its `__name__`."""
    return logging.getLogger(name)


def configure_logging(level: str | None = None) -> None:
    """Send our log lines to standard error. Called by programs (CLI, server), never by the library on import.

    Args:
        level: A name such as "INFO"; None reads LAZYATTENTION_LOG_LEVEL.
    """
    root = logging.getLogger("lazyattention")
    root.setLevel((level or envs.LOG_LEVEL).upper())
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        root.addHandler(handler)
        root.propagate = False
