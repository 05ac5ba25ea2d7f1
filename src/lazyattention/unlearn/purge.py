# SPDX-License-Identifier: Apache-2.0
"""Forgetting in the store as well: which documents have to leave it when a model forgets them.

New weights have a new `weights_id`, so old chunks cannot be hit by the unlearned model; but they still hold the text's
KV, and the original model still hits them. The store lives in the memory of a server or an `LLM`, which deletes them
when told to: at once if it can be reached, else later, from the purge list.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lazyattention.errors import LazyAttentionError, NotFoundError, RequestError

# Deletes the text and the chunks of one document; NotFoundError = nothing is known of it.
DeleteDocument = Callable[[str], Any]
_FORMAT = "lazyattention.unlearn.purge/2"


def request_purge(
    list_path: Path, request_id: str, document_ids: Sequence[str], *, delete: DeleteDocument | None = None
) -> dict[str, Any]:
    """Delete the documents now if `delete` is given, and write down what was done or has to be.

    Args:
        list_path: JSON lines beside the ledger, appended to.
        request_id: Of the deletion request.
        document_ids: As `Document.document_id`; not empty.
        delete: `DocumentClient(url).delete` for a running server, `llm.documents.delete` in the same process. When it
            fails, the purge is pending: the model is unlearned already.

    Returns:
        The line written: "status" is "done" or "pending"; "documents" has one entry each, with "status" "deleted" or
        "not stored" and what the server said; "reason" says why it is pending.
    """
    if not document_ids:
        raise RequestError("there is no document id to purge; give at least one, or leave the store alone")
    line: dict[str, Any] = {"format": _FORMAT, "request_id": request_id, "document_ids": list(document_ids)}
    if delete is None:
        outcome: dict[str, Any] = {"status": "pending", "reason": "no store was given"}
    else:
        try:
            outcome = {"status": "done", "documents": list(_deleted(document_ids, delete))}
        except LazyAttentionError as error:
            outcome = {"status": "pending", "reason": str(error)}
    _append(list_path, line | outcome)
    return line | outcome


def pending_purges(list_path: Path) -> list[dict[str, Any]]:
    """Requests whose documents still have to be deleted, oldest first; a "done" line of the same request settles them."""
    try:
        text = list_path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot read the purge list {list_path}: {error.strerror}") from error
    lines = []
    for number, row in enumerate(text.splitlines(), 1):
        try:
            lines.append(json.loads(row))
            lines[-1]["request_id"], lines[-1]["status"], lines[-1]["document_ids"]
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{list_path}, line {number}: not an entry of a purge list") from error
    done = {(line["request_id"], name) for line in lines if line["status"] == "done" for name in line["document_ids"]}
    return [
        line
        for line in lines
        if line["status"] == "pending" and not {(line["request_id"], name) for name in line["document_ids"]} <= done
    ]


def run_pending_purges(list_path: Path, delete: DeleteDocument) -> list[dict[str, Any]]:
    """Delete what is pending and mark it done, request by request.

    Returns:
        The lines written.

    Raises:
        LazyAttentionError: `delete` failed; what was not done before stays pending.
    """
    settled = []
    for line in pending_purges(list_path):
        documents = list(_deleted(line["document_ids"], delete))
        kept = {key: line[key] for key in ("format", "request_id", "document_ids") if key in line}
        settled.append(kept | {"status": "done", "documents": documents})
        _append(list_path, settled[-1])
    return settled


def describe_purge(line: Mapping[str, Any]) -> str:
    """Say in one sentence what became of a purge."""
    if line["status"] == "pending":
        return f"PENDING for {', '.join(line['document_ids'])}: {line['reason']}"
    parts = []
    for entry in line["documents"]:
        part = f"{entry['document_id']} {entry['status']}"
        if entry.get("num_freed_bytes") is not None:
            part += f" ({entry['num_chunks']} chunks, {entry['num_freed_bytes'] / 2**20:.1f} MiB)"
        if entry.get("held_by"):
            part += f", still read by {len(entry['held_by'])} running request(s)"
        parts.append(part)
    return ", ".join(parts)


def _deleted(document_ids: Sequence[str], delete: DeleteDocument) -> Iterator[dict[str, Any]]:
    """Delete one document after the other: one that is not stored must not keep the next."""
    for document_id in document_ids:
        entry: dict[str, Any] = {"document_id": document_id, "status": "deleted"}
        try:
            answer = delete(document_id)
        except NotFoundError:
            entry["status"] = "not stored"
        else:
            if isinstance(answer, Mapping):
                entry |= {key: answer.get(key) for key in ("num_chunks", "num_freed_bytes", "held_by")}
        yield entry


def _append(list_path: Path, line: Mapping[str, Any]) -> None:
    list_path.parent.mkdir(parents=True, exist_ok=True)
    with list_path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
