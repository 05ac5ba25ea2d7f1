# SPDX-License-Identifier: Apache-2.0
"""What a user hands over as a document: its text, and optionally an id, a title and metadata."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lazyattention.errors import RequestError
from lazyattention.utils.hashing import digest_fields


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a request.

    Attributes:
        text: What the model reads. May be empty.
        id: The caller's name for it; None derives one from title and text (`document_id`).
        title: Shown to the model before the text, if given.
        metadata: The caller's own notes; never shown to the model.
    """

    text: str
    id: str | None = None
    title: str | None = None
    metadata: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check("text", self.text, str, optional=False)
        _check("id", self.id, str, optional=True)
        _check("title", self.title, str, optional=True)
        _check("metadata", self.metadata, Mapping, optional=True)
        if self.id == "":
            raise RequestError("document 'id' is an empty string; give a name, or leave it out to have one derived")

    @property
    def document_id(self) -> str:
        """The given id, or "doc-" and 16 hex digits that depend on title and text only, equal in every process."""
        if self.id is not None:
            return self.id
        # A missing title and an empty one are different documents.
        title_fields = [] if self.title is None else [self.title.encode("utf-8", "surrogatepass")]
        return "doc-" + digest_fields([*title_fields, self.text.encode("utf-8", "surrogatepass")]).hex()[:16]

    @classmethod
    def of(cls, value: "str | Mapping[str, Any] | Document") -> "Document":
        """Accept what the API accepts: a string (the text), an object with `text`, or a Document.

        Raises:
            RequestError: Another type, a missing or unknown key, or a value of the wrong type.
        """
        if isinstance(value, Document):
            return value
        if isinstance(value, str):
            return cls(value)
        if not isinstance(value, Mapping):
            raise RequestError(
                f"a document is a string or an object with 'text', got {type(value).__name__}; "
                "pass the text itself or {'text': ...}"
            )
        allowed = [field.name for field in fields(cls)]
        unknown = sorted(str(key) for key in value if key not in allowed)
        if unknown:
            raise RequestError(
                f"unknown document field(s) {', '.join(map(repr, unknown))}; allowed: {', '.join(allowed)}; "
                "put anything else into 'metadata'"
            )
        if "text" not in value:
            raise RequestError(f"a document needs 'text'; got an object with {sorted(map(str, value)) or 'no fields'}")
        return cls(**value)


def _check(name: str, value: object, kind: type, *, optional: bool) -> None:
    if isinstance(value, kind) or (optional and value is None):
        return
    word = "an object" if kind is Mapping else "a string"
    raise RequestError(f"document '{name}' must be {word}{' or null' if optional else ''}, got {type(value).__name__}")
