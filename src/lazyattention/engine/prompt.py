# SPDX-License-Identifier: Apache-2.0
"""From messages and documents to a PromptLayout: template, token ids, spans.

Every document is tokenised alone, in a wrapper of its own and without special tokens, so the same text gives the same
ids whatever stands beside it. Documents are cut out of the rendered template by markers that are never tokenised.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lazyattention.config import ChunkOptions
from lazyattention.documents.document import Document
from lazyattention.documents.splitter import split_text
from lazyattention.engine.span_memo import SpanMemo
from lazyattention.errors import ConfigError, NotFoundError, RequestError
from lazyattention.reuse import Chunking, PromptLayout, Span

PLAIN_CHAT_TEMPLATE = (
    "{% if bos_token is defined and bos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
ROLES = ("system", "developer", "user", "assistant", "tool")
# Private-use characters: they mean nothing to any template and occur in no ordinary text.
_MARKER = "\ue0a0{}\ue0a1"
_MARKER_PATTERN = re.compile("\ue0a0([0-9]+|p)\ue0a1")
_MEMO_SIZE = 4096
# A text is counted in slices of this many characters, where its length matters. A cut adds a token or two.
_SLICE_CHARS = 2**14


class PromptBuilder:
    """Builds layouts for one tokenizer."""

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - a transformers tokenizer, which this package must not import
        *,
        max_chunk_len: int,
        documents_place: str = "first_user",
        chat_template: str | None = None,
        max_prompt_len: int | None = None,
        find_document: Callable[[str], Document | None] = lambda _: None,
    ) -> None:
        """Prepare a builder.

        Args:
            tokenizer: A transformers tokenizer; used from one thread at a time.
            max_chunk_len: Longer documents are split into pieces of at most this many tokens, wrapper aside.
            documents_place: Where documents given beside the messages go: "first_user", "last_user" or "system".
            chat_template: None = the tokenizer's own; "plain"; or a Jinja template.
            max_prompt_len: Prompts of more than twice as many tokens are refused without being tokenised to their end.
            find_document: Looks up a document that a message names by id only.
        """
        self._max_prompt_len = max_prompt_len
        self._tokenizer = tokenizer
        self._max_chunk_len = max_chunk_len
        self._documents_place = documents_place
        self._chat_template = PLAIN_CHAT_TEMPLATE if chat_template == "plain" else chat_template
        self._find_document = find_document
        self.chunking = functools.lru_cache(maxsize=_MEMO_SIZE)(self._chunking)
        self.memo = SpanMemo()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        documents: Sequence[Document] = (),
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        find_document: Callable[[str], Document | None] | None = None,
    ) -> PromptLayout:
        """Lay out a conversation.

        Args:
            messages: OpenAI's form. `content` is a string or parts: `{"type": "text", "text": ...}` and
                `{"type": "document", "text": ..., "title": ..., "id": ...}` (or with these fields under "document"),
                anywhere. A document with an id and no text is looked up.
            documents: Documents given beside the messages.
            tools: Tool descriptions for the template.
            template_options: Further variables for the template.
            find_document: Overrides the builder's lookup, for one tenant's documents.

        Raises:
            RequestError: A message is malformed, or the template cannot render the conversation.
            NotFoundError: A document named by id is not there.
        """
        find = find_document or self._find_document
        placed: list[Document] = []
        rendered_messages = self._mark_messages(_check_messages(messages), list(documents), placed, find)
        text = self._render(rendered_messages, tools, template_options or {})
        return self._cut(text, placed)

    def text(self, prompt: str | Sequence[int], documents: Sequence[Document] = ()) -> PromptLayout:
        """Lay out a plain prompt behind its documents; the tokenizer's own first token, if it adds one, stays first.

        Raises:
            RequestError: The prompt is empty, or token ids are not whole numbers within the vocabulary.
        """
        token_ids = self._token_ids_of(prompt)
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one character or token")
        if not documents:
            return PromptLayout.of_text(token_ids)
        first = self.first_token_ids()
        num_first = len(first) if list(token_ids[: len(first)]) == first else 0
        if num_first == len(token_ids):
            raise RequestError("the prompt is empty behind its documents; give at least one character or token")
        spans = [Span(tuple(token_ids[:num_first]), is_preamble=True)] if num_first else []
        for document in documents:
            spans += self._document_spans_of(document)
            self._check_total(spans)
        spans.append(Span(tuple(token_ids[num_first:])))
        return PromptLayout(tuple(spans))

    def _chunking(self, options: ChunkOptions) -> Chunking:
        """Tokenise the text in chunk options.

        Raises:
            ConfigError: The sink is to be a beginning-of-sequence token, and the tokenizer has none.
        """
        if options.sink != "bos":
            return Chunking(options, tuple(self._tokenize_untrusted(options.sink)) if options.sink else ())
        if self._tokenizer.bos_token_id is None:
            raise ConfigError(
                "the tokenizer has no beginning-of-sequence token; give a text as sink, such as a line break"
            )
        return Chunking(options, (self._tokenizer.bos_token_id,))

    def forget_documents(self) -> None:
        """Drop the memo of tokenised documents: it holds their texts."""
        self.memo.clear()

    def document_spans(self, document: Document) -> list[Span]:
        """Return the spans a document contributes to any prompt, in order."""
        return self._document_spans_of(document)

    # Messages --------------------------------------------------------------------------------------------------------

    def _mark_messages(
        self,
        messages: list[dict[str, Any]],
        documents: list[Document],
        placed: list[Document],
        find: Callable[[str], Document | None],
    ) -> list[dict[str, Any]]:
        """Replace documents by markers; `placed` receives them in marker order."""
        user_indices = [index for index, message in enumerate(messages) if message["role"] == "user"]
        first_user = user_indices[0] if user_indices else None
        target: int | None = None
        if documents:
            if self._documents_place == "system" and messages[0]["role"] in ("system", "developer"):
                target = 0
            elif user_indices:
                target = user_indices[-1] if self._documents_place == "last_user" else user_indices[0]
            else:
                raise RequestError("documents were given, but there is no user message to put them before; add one")
        marked = []
        for index, message in enumerate(messages):
            beside = documents if index == target else []
            before = "" if target == 0 and message["role"] != "user" else self._mark(beside, placed)
            content = message.get("content")
            text = "" if content is None else self._mark_content(content, placed, find, index)
            after = "" if before or not beside else "\n\n" + self._mark(beside, placed)
            start = _MARKER.format("p") if index == first_user else ""
            has_content = content is not None or bool(beside)
            marked.append({**message, "content": start + before + text + after} if has_content else dict(message))
        return marked

    def _mark_content(
        self,
        content: str | list[Any],
        placed: list[Document],
        find: Callable[[str], Document | None],
        message_index: int,
    ) -> str:
        if isinstance(content, str):
            return _check_text(content, message_index)
        pieces = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text":
                pieces.append(_check_text(part.get("text"), message_index))
            elif kind == "document":
                pieces.append(self._mark([_document_of_part(part, find)], placed))
            else:
                raise RequestError(
                    f"messages[{message_index}].content has a part of type {kind!r}; allowed: 'text', 'document'"
                )
        return "".join(pieces)

    @staticmethod
    def _mark(documents: Sequence[Document], placed: list[Document]) -> str:
        markers = []
        for document in documents:
            markers.append(_MARKER.format(len(placed)))
            placed.append(document)
        return "".join(markers)

    def _render(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, options: Mapping[str, Any]
    ) -> str:
        template = self._chat_template
        if template is None and not getattr(self._tokenizer, "chat_template", None):
            raise RequestError(
                "the model's tokenizer has no chat template; choose one with chat_template='plain' or a Jinja template"
            )
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages,
                chat_template=template,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=True,
                **options,
            )
        except RequestError:
            raise
        except Exception as error:  # templates raise whatever their author chose
            raise RequestError(f"the model's chat template cannot render the messages: {error}") from error
        return str(rendered)

    def _cut(self, text: str, placed: list[Document]) -> PromptLayout:
        pieces = _MARKER_PATTERN.split(text)  # text, marker, text, marker, ..., text
        found = [marker for marker in pieces[1::2] if marker != "p"]
        if sorted(map(int, found)) != list(range(len(placed))):
            raise RequestError(
                "the chat template drops or repeats message content that holds documents; use another template or "
                "place the documents in user messages"
            )
        if not placed:
            return PromptLayout.of_text(self._tokenize("".join(pieces[0::2])))
        spans: list[Span] = []
        pending = pieces[0]
        for marker, following in zip(pieces[1::2], pieces[2::2], strict=True):
            # Text is cut behind the instructions and around documents, nowhere else.
            if marker == "p" and spans:
                pending += following
                continue
            if pending:
                spans.append(Span(tuple(self._tokenize(pending)), is_preamble=not spans))
                pending = ""
            if marker != "p":
                spans += self._document_spans_of(placed[int(marker)])
                self._check_total(spans)
            pending = following
        if not pending:
            raise RequestError("the prompt ends with a document; the chat template must add text for the answer")
        spans.append(Span(tuple(self._tokenize(pending))))
        return PromptLayout(tuple(spans))

    # Tokens ----------------------------------------------------------------------------------------------------------

    def _document_spans_of(self, document: Document) -> list[Span]:
        key = (document.text, document.title, document.document_id)
        return list(self.memo.get(key, lambda: self._tokenize_document(*key)))

    def _tokenize_document(self, text: str, title: str | None, document_id: str) -> tuple[Span, ...]:
        if not text.strip():
            return (Span((), document_id, title),)  # nothing to read; a heading alone would only take room
        self._check_length(text, self._tokenize_untrusted)
        pieces = split_text(text, lambda piece: len(self._tokenize_untrusted(piece)), self._max_chunk_len)
        spans = []
        for index, piece in enumerate(pieces):
            name = f": {title}" if title else ""
            part = f", part {index + 1}" if len(pieces) > 1 else ""
            body = piece.strip("\n")
            token_ids = self._tokenize_untrusted(f"[Document{name}{part}]\n{body}\n\n")
            spans.append(Span(tuple(token_ids), document_id, title, index))
        return tuple(spans)

    def _check_length(self, text: str, tokenize: Callable[[str], list[int]]) -> None:
        """Refuse a text that cannot fit, by its beginning: to tokenise 30 MB takes minutes."""
        if self._max_prompt_len is None or len(text) <= _SLICE_CHARS:
            return
        num_tokens = 0
        for start in range(0, len(text), _SLICE_CHARS):
            num_tokens += len(tokenize(text[start : start + _SLICE_CHARS]))
            self._check_num_tokens(num_tokens)

    def _check_total(self, spans: Sequence[Span]) -> None:
        if self._max_prompt_len is not None:
            self._check_num_tokens(sum(len(span.token_ids) for span in spans))

    def _check_num_tokens(self, num_tokens: int) -> None:
        if self._max_prompt_len is not None and num_tokens > 2 * self._max_prompt_len:
            raise RequestError(
                f"the prompt has more than {2 * self._max_prompt_len} tokens, documents included, and the model's limit is "
                f"{self._max_prompt_len} tokens for prompt and answer; send fewer or shorter documents"
            )

    def _tokenize(self, text: str) -> list[int]:
        self._check_length(text, self._tokenize_whole)
        return self._tokenize_whole(text)

    def _tokenize_whole(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _tokenize_untrusted(self, text: str) -> list[int]:
        """Tokenise text in which the spelling of a control token is just letters."""
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def first_token_ids(self) -> list[int]:
        """Return what the tokenizer puts before any text, usually BOS or nothing."""
        with_special = list(self._tokenizer("a")["input_ids"])
        bare = self._tokenize("a")
        start = next((i for i in range(len(with_special)) if with_special[i : i + len(bare)] == bare), 0)
        return with_special[:start]

    def _token_ids_of(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            self._check_length(_check_text(prompt, None), self._tokenize_whole)
            return list(self._tokenizer(prompt)["input_ids"]) if prompt else []
        is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if not is_list:
            raise RequestError(
                f"a prompt is a string or a list of token ids, got {type(prompt).__name__}: {prompt!r:.80}"
            )
        vocab_size = len(self._tokenizer)
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise RequestError(f"prompt token id {token_id!r} is not a whole number in [0, {vocab_size})")
        return list(prompt)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"messages must be a non-empty list of objects with role and content, got {messages!r:.80}")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, Mapping) else message
            raise RequestError(f"messages[{index}].role must be one of {', '.join(ROLES)}, got {role!r:.80}")
        content = message.get("content")
        is_parts = isinstance(content, Sequence) and not isinstance(content, str | bytes)
        is_call = content is None and message["role"] == "assistant" and message.get("tool_calls")
        if not (isinstance(content, str) or is_parts or is_call):
            raise RequestError(
                f"messages[{index}].content must be a string or a list of parts, got {type(content).__name__}"
            )
        checked.append(dict(message))
    return checked


def _check_text(text: object, message_index: int | None) -> str:
    where = "prompt" if message_index is None else f"messages[{message_index}].content"
    if not isinstance(text, str):
        raise RequestError(f"{where} holds a text of type {type(text).__name__}; it must be a string")
    if _MARKER_PATTERN.search(text):
        raise RequestError(f"{where} contains the private-use characters U+E0A0 and U+E0A1 around digits; remove them")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} is not valid Unicode at character {error.start}; remove lone surrogates"
        ) from error
    return text


def _document_of_part(part: Mapping[str, Any], find: Callable[[str], Document | None]) -> Document:
    fields = part.get("document", {key: value for key, value in part.items() if key != "type"})
    if isinstance(fields, Mapping) and set(fields) == {"id"}:
        return find_by_id(str(fields["id"]), find)
    return Document.of(fields)


def find_by_id(document_id: str, find: Callable[[str], Document | None]) -> Document:
    """Return the document of this id.

    Raises:
        NotFoundError: There is none.
    """
    document = find(document_id)
    if document is None:
        raise NotFoundError(f"document {document_id!r} is not known; upload it first, or send its text")
    return document
