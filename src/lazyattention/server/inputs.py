# SPDX-License-Identifier: Apache-2.0
"""From request bodies to what the engine takes: sampling parameters, messages, documents."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lazyattention.documents.document import Document
from lazyattention.engine.sampling_params import LogitsProcessor, SamplingParams
from lazyattention.errors import RequestError
from lazyattention.reuse import PromptLayout
from lazyattention.server.config import ScopeConfig
from lazyattention.server.library import DocumentLibrary, StoredDocument
from lazyattention.server.protocol import (
    AssistantMessage,
    ChatBody,
    CompletionBody,
    DocumentBody,
    GenerationBody,
    Message,
    TextPart,
)

# OpenAI's default of the completions route; chat goes on to the end of the context.
_DEFAULT_COMPLETION_TOKENS = 16


@dataclass(slots=True)
class DocumentResolver:
    """Finds the documents of one request: given by text, or uploaded and named by id.

    Attributes:
        library: Uploaded documents.
        tenant: Whose request it is.
        used: Uploaded documents the request names.
        own_ids: Ids of documents whose text the request brings.
        num_documents: All documents of the request so far.
    """

    library: DocumentLibrary
    tenant: ScopeConfig
    used: list[StoredDocument] = field(default_factory=list)
    own_ids: set[str] = field(default_factory=set)
    num_documents: int = 0

    def resolve(self, body: "str | DocumentBody") -> Document:
        """Return the document; raises RequestError past the scope's number of documents, NotFoundError for an unknown id."""
        self.num_documents += 1
        if self.num_documents > self.tenant.max_documents:
            raise RequestError(
                f"the request has more than {self.tenant.max_documents} documents, which is this scope's limit; send fewer"
            )
        if isinstance(body, str) or body.text is not None:
            own = Document(body) if isinstance(body, str) else _to_document(body)
            self.own_ids.add(own.document_id)
            return own
        assert body.id is not None  # the model has text or id
        stored = self.library.get(self.tenant, body.id)
        self.used.append(stored)
        return stored.document

    def with_scopes(self, layout: PromptLayout) -> PromptLayout:
        """Mark the spans of shared scopes' documents, so that their KV is shared by all who read them.

        A document whose id the request also gives to a text of its own stays private.
        """
        scopes = {
            stored.document.document_id: stored.scope
            for stored in self.used
            if stored.scope != self.tenant.name and stored.document.document_id not in self.own_ids
        }
        if not scopes:
            return layout
        return PromptLayout(
            tuple(
                replace(span, scope=scopes[span.document_id]) if span.document_id in scopes else span
                for span in layout.spans
            )
        )


def _to_document(body: DocumentBody) -> Document:
    assert body.text is not None
    return Document(body.text, id=body.id, title=body.title, metadata=body.metadata)


def to_messages(messages: Sequence[Message], resolver: DocumentResolver) -> list[dict[str, Any]]:
    """Messages as `PromptBuilder.chat` takes them, documents with their text."""
    converted = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role}
        if message.content is not None:
            entry["content"] = _to_content(message.content, resolver)
        if message.name is not None:
            entry["name"] = message.name
        if isinstance(message, AssistantMessage) and message.tool_calls:
            entry.setdefault("content", "")
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    # Templates write arguments as an object.
                    "function": {"name": call.function.name, "arguments": _to_object(call.function.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.role == "tool":
            entry["tool_call_id"] = message.tool_call_id
        converted.append(entry)
    return converted


def _to_content(content: str | Sequence[Any], resolver: DocumentResolver) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
        else:
            document = resolver.resolve(part)
            named = {"text": document.text, "id": document.document_id, "title": document.title}
            parts.append({"type": "document", **named})
    return parts


def _to_object(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(
            "'tool_calls' holds 'arguments' that are not a JSON object; send back what the model answered"
        )
    return value


def to_sampling_params(
    body: GenerationBody,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    processors: Sequence[LogitsProcessor] = (),
    stop: Sequence[str] = (),
) -> SamplingParams:
    """Sampling parameters of a request.

    Args:
        body: The request.
        num_prompt_tokens: Positions its prompt takes: its length, unless chunk options say otherwise.
        max_model_len: Longest prompt plus output.
        vocab_size: Token ids are below it.
        processors: Grammar masks.
        stop: Stop strings besides the request's own.

    Raises:
        RequestError: The prompt leaves no room for an answer, or a value is out of its range.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens, documents included, and the model's limit is {max_model_len} tokens "
            "for prompt and answer; send fewer or shorter documents"
        )
    own_stop = [body.stop] if isinstance(body.stop, str) else list(body.stop or ())
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "seed": body.seed,
        "min_tokens": body.min_tokens,
        "stop_token_ids": body.stop_token_ids,
        "include_stop_str_in_output": body.include_stop_str_in_output,
        "ignore_eos": body.ignore_eos,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "n": body.n,
    }
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        max_tokens=_max_tokens(body, room, num_prompt_tokens, max_model_len),
        logprobs=_num_logprobs(body),
        stop=[*own_stop, *stop],
        logit_bias=_to_bias(body.logit_bias, vocab_size),
        logits_processors=processors,
    )


def _max_tokens(body: GenerationBody, room: int, num_prompt_tokens: int, max_model_len: int) -> int:
    if isinstance(body, ChatBody):
        wanted, name = body.max_completion_tokens, "max_completion_tokens"
        if wanted is None:
            wanted, name = body.max_tokens, "max_tokens"
        if wanted is None:
            return room
    else:
        assert isinstance(body, CompletionBody)
        wanted, name = body.max_tokens, "max_tokens"
        if wanted is None:
            return min(room, _DEFAULT_COMPLETION_TOKENS)
    if wanted > room:
        raise RequestError(
            f"{name} is {wanted}, but after a prompt of {num_prompt_tokens} tokens the model's limit of {max_model_len} "
            f"leaves room for {room}; lower it or leave it out"
        )
    return wanted


def _num_logprobs(body: GenerationBody) -> int | None:
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    assert isinstance(body, CompletionBody)
    return body.logprobs


def _to_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    converted = {}
    for token, value in bias.items():
        if not (
            token.isascii()
            and token.isdigit()
            and len(token) < 10
            and str(int(token)) == token
            and int(token) < vocab_size
        ):
            raise RequestError(f"'logit_bias' has the key {token!r:.40}, must be a token id below {vocab_size}")
        converted[int(token)] = value
    return converted
