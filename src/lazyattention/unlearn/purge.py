# SPDX-License-Identifier: Apache-2.0
"""Forgetting in the store as well: which documents' chunks have to go when a model forgets them.

New weights have a new `weights_id`, so old chunks cannot be hit by the unlearned model; but they still hold the text's
KV, and the original model still hits them. They are deleted by whoever owns the store: the engine's
`llm.documents.delete`, called at once if given, or later from the purge list.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lazyattention.errors import RequestError

# Deletes the stored chunks of the documents with these ids, in one scope, and returns how many chunks went.
DeleteDocuments = Callable[[Sequence[str]], Any]
_FORMAT = "lazyattention.unlearn.purge/1"


def request_purge(
    list_path: Path,
    request_id: str,
    document_ids: Sequence[str],
    *,
    scope: str = "default",
    delete: DeleteDocuments | None = None,
) -> dict[str, Any]:
    """Delete the documents' chunks now if `delete` is given, and write down what was or has to be done.

    Args:
        list_path: JSON lines beside the ledger, one per request; appended to.
        request_id: Of the deletion request.
        document_ids: As `Document.document_id`; not empty.
        scope: The tenant.
        delete: Usually `llm.documents.delete`.

    Returns:
        The line written: "status" is "done" or "pending".
    """
    if not document_ids:
        raise RequestError("there is no document id to purge; give at least one, or leave the store alone")
    if delete is not None:
        delete(list(document_ids))
    line = {
        "format": _FORMAT,
        "request_id": request_id,
        "scope": scope,
        "document_ids": list(document_ids),
        "status": "pending" if delete is None else "done",
    }
    list_path.parent.mkdir(parents=True, exist_ok=True)
    with list_path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return line


def pending_purges(list_path: Path) -> list[dict[str, Any]]:
    """Requests whose documents still have to be deleted, oldest first; a later "done" line settles a request."""
    if not list_path.exists():
        return []
    lines = [json.loads(line) for line in list_path.read_text(encoding="utf-8").splitlines()]
    done = {line["request_id"] for line in lines if line["status"] == "done"}
    return [line for line in lines if line["status"] == "pending" and line["request_id"] not in done]


def run_pending_purges(list_path: Path, delete: Callable[[Sequence[str], str], Any]) -> int:
    """Delete what is pending with `delete(document_ids, scope)` and mark it done. Returns the number of requests."""
    pending = pending_purges(list_path)
    for line in pending:
        delete(line["document_ids"], line["scope"])
        with list_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "status": "done"}) + "\n")
    return len(pending)
