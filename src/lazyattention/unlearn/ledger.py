# SPDX-License-Identifier: Apache-2.0
"""The deletion ledger: one JSON line per request, append-only, each line bound to the one before it by a hash.

It holds hashes of the data, never the forgotten text. It shows tampering within the file; it cannot show that lines
were cut off its end, unless the last hash is kept elsewhere as well.
"""

import contextlib
import datetime
import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lazyattention.errors import RequestError

_FIRST = "0" * 64


def _hash(entry: Mapping[str, Any]) -> str:
    canonical = json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def append_entry(path: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Add one entry under a lock and return it as written.

    Args:
        path: JSON lines; created if missing.
        entry: JSON-able; "time_utc", "previous" and "hash" are added.

    Raises:
        RequestError: The existing ledger does not verify; nothing is added to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file, _locked(file):
        file.seek(0)
        entries = _verified(file.read(), path)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        previous = entries[-1]["hash"] if entries else _FIRST
        body: dict[str, Any] = json.loads(json.dumps({"time_utc": now, **entry, "previous": previous}))
        body["hash"] = _hash(body)
        file.seek(0, 2)
        file.write(json.dumps(body, ensure_ascii=True) + "\n")
        file.flush()
    return body


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Return all entries, oldest first, after checking every hash; an absent ledger is empty.

    Raises:
        RequestError: A line was changed, removed, inserted or cut.
    """
    return _verified(path.read_text(encoding="utf-8"), path) if path.exists() else []


def _verified(text: str, path: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    previous = _FIRST
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entry = json.loads(line)
            claimed = entry.pop("hash")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise RequestError(f"{path}, line {number}: not a ledger entry; restore the ledger from a copy") from error
        if entry.get("previous") != previous or _hash(entry) != claimed:
            raise RequestError(f"{path}, line {number}: the hash does not match; the ledger was changed after writing")
        previous = claimed
        entries.append({**entry, "hash": claimed})
    return entries


@contextlib.contextmanager
def _locked(file: Any) -> Iterator[None]:  # noqa: ANN401 - any open file
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
