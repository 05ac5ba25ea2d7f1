# SPDX-License-Identifier: Apache-2.0
"""What a reuse method decides: for each span of a prompt, whose KV serves it. No tensors here.

The engine asks `plan` once when a request is admitted and once more when it resumes after preemption.
"""

import enum
from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

from lazyattention.reuse.layout import PromptLayout


class SpanUse(enum.Enum):
    """Whose KV serves a span."""

    TEXT = "text"
    """Computed by the request, after everything before it; kept for identical prompts if the method reuses text."""
    SHARED = "shared"
    """The stored chunk's own blocks, read in place at this request's position."""
    COPIED = "copied"
    """A private copy of the stored chunk, its keys turned to this request's position."""
    PRIVATE = "private"
    """Computed by the request under the chunk mask, stored for nobody else."""


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """How one prompt's spans get their KV.

    Attributes:
        uses: One per span.
        preamble_index: Span that chunks were encoded after; None when they saw nothing else.
    """

    uses: tuple[SpanUse, ...]
    preamble_index: int | None


class ReuseMethod(ABC):
    """How stored KV becomes valid at a new position.

    Attributes:
        name: Its name in options and tables.
        summary: One line for `--help` and docs/reuse_methods.md.
        keys_turned: False when chunks are stored with unturned keys.
        reuses_text: True when identical prompt beginnings are reused.
        document_use: What serves a document's span.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    keys_turned: ClassVar[bool] = True
    reuses_text: ClassVar[bool] = True
    document_use: ClassVar[SpanUse]

    def plan(self, layout: PromptLayout, encoding: str) -> ReusePlan:
        """Decide whose KV serves each span.

        Args:
            layout: The prompt.
            encoding: "isolated" or "after_preamble".
        """
        uses = [self.document_use if span.is_document else SpanUse.TEXT for span in layout.spans]
        has_documents = any(span.is_document for span in layout.spans)
        preamble = layout.spans[0] if layout.spans and layout.spans[0].is_preamble else None
        sees_preamble = encoding == "after_preamble" and has_documents and self.document_use is not SpanUse.TEXT
        if preamble is None or not preamble.token_ids or not sees_preamble:
            return ReusePlan(tuple(uses), None)
        if self.document_use is not SpanUse.PRIVATE:
            uses[0] = SpanUse.SHARED  # the preamble is stored once, like a chunk: every encoding reads it
        return ReusePlan(tuple(uses), 0)
