# SPDX-License-Identifier: Apache-2.0
"""Answer bodies as models: what /docs and the OpenAPI description promise, and tests check."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """An answer body; nothing but what is listed."""

    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(Answer):
    """How many prompt tokens were not computed."""

    cached_tokens: int


class Usage(Answer):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class DocumentReport(Answer):
    """What happened to one document of the prompt."""

    id: str
    title: str | None
    status: Literal["hit", "miss", "computed", "partial"]
    reason: str
    num_tokens: int
    num_reused_tokens: int
    num_recomputed_tokens: int
    num_bytes: int
    num_chunks: int


class TopLogprob(Answer):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The token at one place, and the likeliest ones there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of an answer's tokens."""

    content: list[TokenLogprob] | None
    refusal: None


class CalledFunction(Answer):
    """Name and arguments (JSON text)."""

    name: str
    arguments: str


class CalledTool(Answer):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    """The answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(Answer):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Answer):
    """Answer of /v1/chat/completions without `stream`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    documents: list[DocumentReport] | None = None


class CompletionLogprobs(Answer):
    """Log-probabilities, one entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Answer):
    """Answer of /v1/completions without `stream`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    documents: list[DocumentReport] | None = None


class ModelInfo(Answer):
    """The served model. `reuse_method`: what requests get unless they say otherwise; `reuse_reason`: the gate's, if any."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    reuse_method: str
    reuse_reason: str | None


class ModelList(Answer):
    """All served models."""

    object: Literal["list"]
    data: list[ModelInfo]


class ErrorInfo(Answer):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """Body of every error."""

    error: ErrorInfo


class UploadedDocument(Answer):
    """What became of one uploaded document."""

    id: str
    object: Literal["document"]
    title: str | None
    status: Literal["kept", "warmed", "already warm", "failed"]
    num_tokens: int | None = None
    num_bytes: int | None = None
    num_chunks: int | None = None
    num_done: int
    num_documents: int
    error: ErrorInfo | None = None


class UploadReport(Answer):
    """Answer of POST /v1/documents without `stream`."""

    object: Literal["list"]
    data: list[UploadedDocument]


class DocumentInfo(Answer):
    """An uploaded document and what is stored of it. `num_bytes`: its KV. `idle_s`: since a request named it.

    Of a read-only document, which belongs to another scope, use is not told.
    """

    id: str
    object: Literal["document"]
    title: str | None
    metadata: dict[str, Any] | None
    created: int
    num_text_bytes: int
    num_tokens: int | None
    is_stored: bool
    is_pinned: bool
    is_read_only: bool
    num_bytes: int
    num_hits: int | None
    num_uses: int | None
    idle_s: float | None


class FullDocument(DocumentInfo):
    """The same with its text."""

    text: str


class DocumentList(Answer):
    """Answer of GET /v1/documents. `num_stored_bytes`: KV of your scope's documents."""

    object: Literal["list"]
    data: list[DocumentInfo]
    has_more: bool
    num_documents: int
    num_stored_bytes: int


class PinnedDocument(Answer):
    """A document's pin."""

    id: str
    object: Literal["document"]
    is_pinned: bool
    pin_ttl_s: float | None


class DeletedDocument(Answer):
    """What a deletion freed. `held_by`: running requests that still read it; the rest is freed when they end."""

    id: str
    object: Literal["document.deleted"]
    deleted: bool
    num_chunks: int
    num_freed_bytes: int
    held_by: list[str]


class Health(Answer):
    """Whether requests are served."""

    status: Literal["ok", "dead", "shutting down"]
