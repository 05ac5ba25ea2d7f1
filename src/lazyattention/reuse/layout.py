# SPDX-License-Identifier: Apache-2.0
"""A prompt as the engine sees it: token spans in order, each text or a piece of a document."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lazyattention.utils.hashing import digest_fields


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one prompt.

    Attributes:
        token_ids: At least none; empty spans are legal and change nobody's position.
        document_id: The document these tokens come from; None for text.
        title: The document's title, for reports.
        chunk_index: Which piece of the document this is, from 0.
        is_preamble: True for the prompt's first text, when it is what chunks may be encoded after (instructions that
            many prompts share, never a conversation's history).
        scope: Whose document this is, if not the request's own tenant's: its KV is shared by all who may read it.
    """

    token_ids: tuple[int, ...]
    document_id: str | None = None
    title: str | None = None
    chunk_index: int = 0
    is_preamble: bool = False
    scope: str | None = None
    _digest: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def digest(self) -> bytes:
        """Hash of its tokens; made once, since a document's spans come with many prompts."""
        if not self._digest:
            self._digest.append(digest_fields(("tokens",), self.token_ids))
        return self._digest[0]

    @property
    def is_document(self) -> bool:
        """True for a piece of a document."""
        return self.document_id is not None


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """Token spans in prompt order.

    Attributes:
        spans: In order; the last one is text, since the model answers after text.
    """

    spans: tuple[Span, ...]

    @classmethod
    def of_text(cls, token_ids: Sequence[int]) -> "PromptLayout":
        """A prompt without documents."""
        return cls((Span(tuple(token_ids)),))

    @property
    def num_tokens(self) -> int:
        """Length of the whole prompt."""
        return sum(len(span.token_ids) for span in self.spans)

    @property
    def token_ids(self) -> list[int]:
        """All tokens in order."""
        token_ids: list[int] = []
        for span in self.spans:
            token_ids += span.token_ids
        return token_ids
