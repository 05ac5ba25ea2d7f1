# SPDX-License-Identifier: Apache-2.0
"""What a reuse method decides: for each span of a prompt, whose KV serves it. No tensors here.

The engine asks `plan` once per request.
"""

import enum
from abc import ABC
from dataclasses import dataclass, field, replace
from typing import ClassVar

from lazyattention.config import ChunkOptions
from lazyattention.reuse.layout import PromptLayout, Span


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
class Chunking:
    """Chunk options, and the tokens of the text in them.

    Attributes:
        options: How documents are encoded, placed and looked at.
        sink: Tokens of `options.sink`.
    """

    options: ChunkOptions = field(default_factory=ChunkOptions)
    sink: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """One span of a prompt as it is computed: a layout's span, or a part of it.

    Attributes:
        span: Its tokens, and which document they come from; a sink comes from none.
        use: Whose KV serves it.
        start: Position of its first token.
        context: What a chunk sees besides itself, in order and as if directly before it: indices of earlier planned
            spans. Empty for text, which sees every earlier span that is not hidden.
        is_hidden: True if only the chunk behind it sees it.
    """

    span: Span
    use: SpanUse
    start: int
    context: tuple[int, ...] = ()
    is_hidden: bool = False

    @property
    def num_tokens(self) -> int:
        """Its length."""
        return len(self.span.token_ids)


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """How one prompt's spans get their KV.

    Attributes:
        spans: In an order in which nothing sees what comes later. A layout's spans, but that a chunk may have hidden
            spans of its own in front.
        num_positions: All positions are below this, those at which chunks are encoded included.
        options: The chunk options that hold; the default ones if documents are text.
    """

    spans: tuple[PlannedSpan, ...]
    num_positions: int
    options: ChunkOptions


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

    def plan(self, layout: PromptLayout, chunking: Chunking) -> ReusePlan:
        """Decide whose KV serves each span, where it stands and what it sees."""
        if self.document_use is SpanUse.TEXT:
            chunking = Chunking()
        planner = _Planner(self.document_use, chunking)
        has_documents = any(span.is_document for span in layout.spans)
        for span in layout.spans:
            if span.is_document and span.token_ids and self.document_use is not SpanUse.TEXT:
                planner.add_document(span)
            else:
                planner.add_text(span, has_documents=has_documents)
        return ReusePlan(tuple(planner.spans), planner.num_positions, chunking.options)


class _Planner:
    """Places spans one after the other."""

    def __init__(self, document_use: SpanUse, chunking: Chunking) -> None:
        self._document_use = document_use
        # What only the chunk behind it sees is in no copy.
        self._hidden_use = SpanUse.SHARED if document_use is SpanUse.COPIED else document_use
        self._options = chunking.options
        self._sink = chunking.sink
        self._preamble: tuple[int, ...] = ()
        self._start = 0  # where the next span goes
        self._first = 0  # where the first of neighbouring documents stands
        self._end = 0  # behind all spans so far
        self.spans: list[PlannedSpan] = []
        self.num_positions = 0

    def add_text(self, span: Span, *, has_documents: bool) -> None:
        use = SpanUse.TEXT
        sees_it = self._document_use is not SpanUse.TEXT and self._options.encoding == "after_preamble"
        if span.is_preamble and span.token_ids and not self.spans and has_documents and sees_it:
            self._preamble = (0,)
            if self._document_use is not SpanUse.PRIVATE:
                use = SpanUse.SHARED  # the preamble is stored once, like a chunk: every encoding reads it
        if not span.is_document:
            self._start = self._end
        self._add(span, use)
        if not span.is_document:
            self._first = self._end

    def add_document(self, span: Span) -> None:
        if self._options.positions == "parallel" and span.chunk_index == 0:
            self._start = self._first
        context = self._preamble
        if self._sink:
            # It stands nowhere in the prompt: where it is computed, if not for all, matters to nobody.
            self.spans.append(
                PlannedSpan(
                    Span(self._sink, scope=span.scope), self._hidden_use, self._len(context), context, is_hidden=True
                )
            )
            context = (*context, len(self.spans) - 1)
        num_hidden = min(self._options.num_hidden, len(span.token_ids) - 1)
        if num_hidden:
            head = replace(span, token_ids=span.token_ids[:num_hidden])
            self._add(head, self._hidden_use, context, is_hidden=True)
            context = (*context, len(self.spans) - 1)
            span = replace(span, token_ids=span.token_ids[num_hidden:])
        self._add(span, self._document_use, context)
        self.num_positions = max(self.num_positions, self._len(context) + len(span.token_ids))

    def _add(self, span: Span, use: SpanUse, context: tuple[int, ...] = (), *, is_hidden: bool = False) -> None:
        self.spans.append(PlannedSpan(span, use, self._start, context, is_hidden))
        self._start += len(span.token_ids)
        self._end = max(self._end, self._start)
        self.num_positions = max(self.num_positions, self._end)

    def _len(self, context: tuple[int, ...]) -> int:
        return sum(self.spans[index].num_tokens for index in context)
