# SPDX-License-Identifier: Apache-2.0
"""What a request gives back: text, and what happened to each of its documents."""

from dataclasses import dataclass, field

from lazyattention.engine.sampler import TokenLogprobs
from lazyattention.errors import LazyAttentionError


@dataclass(frozen=True, slots=True)
class DocumentReuse:
    """What happened to one chunk of one document, found out when the request was first admitted.

    Attributes:
        document_id: The document's id.
        title: Its title, if any.
        chunk_index: Which piece of the document, from 0.
        num_tokens: Tokens of this chunk.
        status: "hit" (its KV was there), "miss" (it was not and was computed) or "computed" (the method never looks).
        reason: For a hit "reused", "in flight" (another request was just computing it) or "same request". For a miss
            "new", "evicted", "expired", "deleted" or "other preamble". Else "not reused by <method>", "empty",
            "recomputed" (all of it was to be computed anew), or
            "identical prefix"/"no identical prefix" with the number of tokens found.
        num_reused_tokens: Tokens that were not computed for this request.
        num_bytes: Size of its KV.
        num_recomputed_tokens: Tokens in blocks that were computed anew, after all that stands before them in the prompt;
            a cold chunk's were computed twice.
    """

    document_id: str
    title: str | None
    chunk_index: int
    num_tokens: int
    status: str
    reason: str
    num_reused_tokens: int
    num_bytes: int
    num_recomputed_tokens: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` completions.

    Attributes:
        index: From 0.
        text: All text so far.
        token_ids: All tokens so far, the end-of-sequence token included.
        logprobs: One entry per token, if asked for.
        delta_text: Text new since the request's last output.
        delta_token_ids: Tokens new since then.
        finish_reason: None while running; "stop", "length", "abort" or "error".
        stop_reason: The stop string or stop token id that ended it, if one did.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    delta_text: str = ""
    delta_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Timings:
    """When things happened to a request, in monotonic seconds; None = not yet.

    Attributes:
        arrival_s: It came in.
        first_scheduled_s: It was first admitted.
        selected_s: It was known which blocks are recomputed, if that had to be measured.
        first_token_s: Its first token was there.
        finished_s: It ended.
        num_output_tokens: Tokens generated until then, all completions together.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    selected_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_output_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, waiting included."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def selection_s(self) -> float | None:
        """Time from the first admission until the blocks to recompute were known; None if nothing had to be measured."""
        if self.selected_s is None or self.first_scheduled_s is None:
            return None
        return self.selected_s - self.first_scheduled_s

    @property
    def e2e_s(self) -> float | None:
        """Time to the end."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s

    @property
    def itl_s(self) -> float | None:
        """Mean gap between tokens after the first (one completion)."""
        if self.finished_s is None or self.first_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.num_output_tokens - 1)


@dataclass(slots=True)
class RequestOutput:
    """A request's state after a step, or at its end.

    Attributes:
        request_id: The request.
        prompt_token_ids: All prompt tokens, documents included, in order.
        outputs: One entry per completion.
        finished: True once; nothing follows.
        documents: One entry per chunk of each document, in prompt order.
        num_prompt_tokens: Length of the prompt.
        num_computed_tokens: Prompt tokens that were computed for this request (cold chunks included).
        num_reused_tokens: Prompt tokens that were not.
        timings: When things happened.
        error: Why it failed, with `finish_reason` "error".
        num_recomputed_tokens: Document tokens in blocks that were computed anew. They are not among the reused ones.
        num_selection_tokens: Tokens computed only to choose these blocks, in the share of the model's layers that they
            went through.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    documents: list[DocumentReuse]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_reused_tokens: int
    timings: Timings
    error: LazyAttentionError | None = None
    num_recomputed_tokens: int = 0
    num_selection_tokens: float = 0.0

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.outputs[0].text
