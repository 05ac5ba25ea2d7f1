# SPDX-License-Identifier: Apache-2.0
"""Log lines as JSON objects, one per line, each with the request's id where there is one."""

import json
import logging
import sys
import time
from typing import TextIO

_FIELDS = (
    "request_id",
    "unique_id",
    "scope",
    "status",
    "duration_s",
    "client",
    "user",
    "safety_identifier",
    "metadata",
    "documents",
)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in _FIELDS if getattr(record, name, None) is not None}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Handler(logging.StreamHandler[TextIO]):
    """A log that cannot be written (a full disk, a closed pipe) is no reason to fail a request or to print about it."""

    def handleError(self, record: logging.LogRecord) -> None:  # logging's name
        pass


def configure_server_logging(level: str, *, as_json: bool, stream: TextIO | None = None) -> None:
    """Send our log lines, and uvicorn's, to `stream` (standard error by default)."""
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    for name in ("lazyattention", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    # Our own access log says more.
    logging.getLogger("uvicorn.access").disabled = True


class TextFormatter(logging.Formatter):
    """Formats a record as one line, whatever its path or user's name holds; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%H:%M:%S", time.localtime(record.created))
        extra = " ".join(f"{name}={getattr(record, name)}" for name in _FIELDS if getattr(record, name, None))
        line = _printable(f"{seconds} {record.levelname:<7} {record.getMessage()} {extra}".rstrip())
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _printable(text: str) -> str:
    """What clients send must neither begin a line of its own nor move a terminal's cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
