# SPDX-License-Identifier: Apache-2.0
"""The offline facade: load a model, ask, read the answers. See async_engine.py for servers."""

import itertools
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lazyattention import envs
from lazyattention.config import ChunkOptions, EngineConfig
from lazyattention.documents.document import Document
from lazyattention.engine.documents import DeletedDocument, DocumentInfo
from lazyattention.engine.engine import Engine
from lazyattention.engine.outputs import RequestOutput
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import RequestError
from lazyattention.models.loaded_model import LoadedModel
from lazyattention.models.loader import load_model
from lazyattention.reuse import PromptLayout
from lazyattention.reuse.recompute import Recompute

DocumentLike = str | Mapping[str, Any] | Document
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model and a store of documents that it has read.

    Example:
        >>> llm = LLM()
        >>> documents = [Document("The Nile is about 6,650 km long.", title="Nile")]
        >>> outputs = llm.chat([{"role": "user", "content": "How long is the Nile?"}], documents=documents)
        >>> outputs[0].text, outputs[0].documents[0].status
    """

    def __init__(
        self,
        model: str | LoadedModel | None = None,
        *,
        adapter: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        config: EngineConfig | None = None,
        progress: bool | None = None,
        **options: Any,  # noqa: ANN401 - the fields of the config classes, checked there
    ) -> None:
        """Load a model and reserve memory for KV.

        Args:
            model: A folder, a GGUF file, a hub name, a LoadedModel, or None for a small default model.
            adapter: Folder of a PEFT adapter.
            dtype: "auto" or a torch float dtype's name.
            device: "auto", "cpu", "cuda" ...
            config: Options; `options` are applied on top.
            progress: Show progress bars; None = when standard error is a terminal.
            **options: Fields of EngineConfig, CacheConfig and SchedulerConfig, such as `reuse_method`.

        Raises:
            ConfigError: An option is unknown or not allowed, or the model cannot be read.
            UnsupportedError: The model cannot be served exactly.
        """
        self._progress = envs.PROGRESS and sys.stderr.isatty() if progress is None else progress
        config = EngineConfig.of(config, **options)
        if isinstance(model, LoadedModel):
            loaded = model
        else:
            loaded = load_model(model, dtype=dtype, device=device, adapter=adapter, progress=self._progress)
        self.engine = Engine(loaded, config)
        self.documents = Documents(self)
        self._ids = (f"request-{number}" for number in itertools.count())
        # Streams and calls may be under way side by side; whoever steps the engine files the outputs of all.
        self._mailboxes: dict[str, deque[RequestOutput]] = {}
        self._left: deque[str] = deque()

    @property
    def model_name(self) -> str:
        """The model's name."""
        return self.engine.loaded.name

    @property
    def tokenizer(self) -> Any:  # noqa: ANN401 - a transformers tokenizer; the engine does not import transformers
        """The model's tokenizer."""
        return self.engine.loaded.tokenizer

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        documents: Sequence[DocumentLike] | Sequence[Sequence[DocumentLike]] | None = None,
        reuse: str = "auto",
        reuse_method: str | None = None,
        chunk_options: ChunkOptions | None = None,
        recompute: Recompute | str | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue plain prompts; documents stand before the prompt.

        Args:
            prompts: One prompt, several, or token ids.
            sampling_params: For all, or one per prompt.
            documents: For all, or one list per prompt.
            reuse: "auto" = as `max_loss` decided; "always"; "never" = recompute documents with full attention.
            reuse_method: Another method than the engine's.
            chunk_options: Other chunk options than the engine's.
            recompute: Which blocks of stored documents to compute anew: "first:16", "deviation:0.15", "attention:0.15" or
                "none"; None = as the engine's option says.
            progress: Overrides the LLM's setting.

        Returns:
            One output per prompt, in order. A request that failed has `error` set; the others are unharmed.

        Raises:
            RequestError: A prompt or document is malformed; nothing was run.
        """
        if not isinstance(prompts, Sequence):
            raise RequestError(f"prompts must be a string or a list of prompts, got {type(prompts).__name__}")
        many: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        given = _spread(documents, len(many))
        layouts = [
            self.engine.prompts.text(prompt, [Document.of(d) for d in docs])
            for prompt, docs in zip(many, given, strict=True)
        ]
        return self._run(
            layouts,
            sampling_params,
            reuse_method,
            progress,
            reuse=reuse,
            chunk_options=chunk_options,
            recompute=recompute,
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        documents: Sequence[DocumentLike] | Sequence[Sequence[DocumentLike]] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reuse: str = "auto",
        reuse_method: str | None = None,
        chunk_options: ChunkOptions | None = None,
        recompute: Recompute | str | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or many at once.

        Args:
            messages: One list of messages, or a list of such lists. Content may hold parts of type "document" anywhere.
            sampling_params: For all, or one per conversation.
            documents: Documents beside the messages: for all, or one list per conversation.
            tools: Tool descriptions for the chat template.
            reuse: "auto" = as `max_loss` decided; "always"; "never" = recompute documents with full attention.
            reuse_method: Another method than the engine's.
            chunk_options: Other chunk options than the engine's.
            recompute: Which blocks of stored documents to compute anew: "first:16", "deviation:0.15", "attention:0.15" or
                "none"; None = as the engine's option says.
            progress: Overrides the LLM's setting.

        Returns:
            One output per conversation, in order. A request that failed has `error` set; the others are unharmed.

        Raises:
            RequestError: A message or document is malformed; nothing was run.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError(f"messages must be a non-empty list of messages, got {messages!r:.80}")
        many: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
        given = _spread(documents, len(many))
        layouts = [self._chat_layout(conversation, docs, tools) for conversation, docs in zip(many, given, strict=True)]
        return self._run(
            layouts,
            sampling_params,
            reuse_method,
            progress,
            reuse=reuse,
            chunk_options=chunk_options,
            recompute=recompute,
        )

    def stream(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        documents: Sequence[DocumentLike] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        reuse: str = "auto",
        reuse_method: str | None = None,
        chunk_options: ChunkOptions | None = None,
        recompute: Recompute | str | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation as it comes: an output per step, with new text in `outputs[i].delta_text`.

        Leaving the loop early aborts the request.

        Raises:
            RequestError: A message or document is malformed, before anything runs.
            LazyAttentionError: The request failed.
        """
        layout = self._chat_layout(messages, documents or (), tools)
        request_id = next(self._ids)
        self.engine.add_request(
            request_id,
            layout,
            sampling_params,
            reuse=reuse,
            reuse_method=reuse_method,
            chunk_options=chunk_options,
            recompute=recompute,
        )
        self._mailboxes[request_id] = deque()
        stream = self._stream(request_id)
        # A generator that was dropped before its first step never gets to its `finally`.
        weakref.finalize(stream, self._left.append, request_id).atexit = False
        return stream

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters and gauges by name."""
        return self.engine.describe()

    def close(self) -> None:
        """End live requests and let go of the KV memory."""
        for request_id in self.engine.live_request_ids:
            self.engine.abort(request_id)
        self.engine.model_runner.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _chat_layout(
        self,
        messages: Messages,
        documents: Sequence[DocumentLike],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> PromptLayout:
        return self.engine.prompts.chat(
            messages, [Document.of(d) for d in documents], tools=tools, find_document=self.engine.documents.find
        )

    def _stream(self, request_id: str) -> Iterator[RequestOutput]:
        outputs = self._mailboxes[request_id]
        try:
            while True:
                while not outputs:
                    self._step()
                output = outputs.popleft()
                if output.error is not None:
                    raise output.error
                yield output
                if output.finished:
                    return
        finally:
            self._leave(request_id)

    def _step(self) -> None:
        """Step the engine and file its outputs by request."""
        while self._left:
            self._leave(self._left.popleft())
        for output in self.engine.step():
            if output.request_id in self._mailboxes:
                self._mailboxes[output.request_id].append(output)

    def _leave(self, request_id: str) -> None:
        self._mailboxes.pop(request_id, None)
        self.engine.abort(request_id)

    def _run(
        self,
        layouts: Sequence[PromptLayout],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        reuse_method: str | None,
        progress: bool | None,
        title: str = "Answering",
        reuse: str = "auto",
        chunk_options: ChunkOptions | None = None,
        recompute: Recompute | str | None = None,
    ) -> list[RequestOutput]:
        """Run all layouts to the end. If one is refused, none runs."""
        if isinstance(sampling_params, Sequence) and len(sampling_params) != len(layouts):
            raise RequestError(
                f"got {len(sampling_params)} sampling_params for {len(layouts)} prompts; give one or all"
            )
        ids = [next(self._ids) for _ in layouts]
        new: deque[RequestOutput] = deque()
        outputs: dict[str, RequestOutput] = {}
        with _progress(title, len(layouts), self._progress if progress is None else progress) as bar:
            try:
                for index, (request_id, layout) in enumerate(zip(ids, layouts, strict=True)):
                    params = sampling_params[index] if isinstance(sampling_params, Sequence) else sampling_params
                    self.engine.add_request(
                        request_id,
                        layout,
                        params,
                        reuse=reuse,
                        reuse_method=reuse_method,
                        chunk_options=chunk_options,
                        recompute=recompute,
                    )
                    self._mailboxes[request_id] = new
                while len(outputs) < len(ids):
                    self._step()
                    while new:
                        output = new.popleft()
                        if output.finished:
                            outputs[output.request_id] = output
                            bar.advance()
            finally:
                for request_id in ids:
                    self._leave(request_id)
        return [outputs[request_id] for request_id in ids]


class Documents:
    """The life of stored documents: `llm.documents`."""

    def __init__(self, llm: LLM) -> None:
        """Belong to one LLM."""
        self._llm = llm

    def warm(
        self,
        documents: Sequence[DocumentLike],
        *,
        messages: Messages | None = None,
        pin: bool = False,
        ttl_s: float | None = None,
        progress: bool | None = None,
    ) -> list[DocumentInfo]:
        """Compute documents before anybody asks, along the very path of a request, and keep their texts by id.

        Args:
            documents: What to compute.
            messages: A conversation like those to come; only its instructions (what stands before the documents) matter.
                None = a bare user message.
            pin: Also forbid eviction.
            ttl_s: With pin: for so many seconds.
            progress: Overrides the LLM's setting.

        Returns:
            What is stored of each document now.

        Raises:
            LazyAttentionError: A document cannot be computed, for example because it does not fit.
        """
        messages = messages or [{"role": "user", "content": "?"}]
        engine = self._llm.engine
        given = [Document.of(document) for document in documents]
        layouts = [self._llm._chat_layout(messages, [document], None) for document in given]
        outputs = self._llm._run(
            layouts,
            SamplingParams(max_tokens=1),
            None,
            progress,
            title="Reading documents",
            reuse="always",
            recompute="none",
        )
        for output in outputs:
            if output.error is not None:
                raise output.error
        ids = [engine.documents.upload(document) for document in given]
        if pin:
            engine.documents.pin(ids, ttl_s=ttl_s)
        stored = {info.document_id: info for info in engine.documents.list()}
        return [stored[document_id] for document_id in ids]

    def pin(self, document_ids: str | Sequence[str], *, ttl_s: float | None = None) -> None:
        """Forbid eviction of these documents until `unpin`, or for `ttl_s` seconds; NotFoundError if one is not stored."""
        self._llm.engine.documents.pin(_as_list(document_ids), ttl_s=ttl_s)

    def unpin(self, document_ids: str | Sequence[str]) -> None:
        """Allow eviction of these documents again; NotFoundError if one is not stored."""
        self._llm.engine.documents.unpin(_as_list(document_ids))

    def delete(self, document_ids: str | Sequence[str]) -> list[DeletedDocument]:
        """Forget these documents and everything computed from them; NotFoundError at the first one not stored."""
        return [self._llm.engine.documents.delete(document_id) for document_id in _as_list(document_ids)]

    def list(self) -> list[DocumentInfo]:
        """Return what is stored of each document."""
        return self._llm.engine.documents.list()


class _Bar:
    def __init__(self, progress: Progress, task: Any) -> None:  # noqa: ANN401 - rich's own id type
        self._progress, self._task = progress, task

    def advance(self) -> None:
        self._progress.advance(self._task)

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):
            self._progress.stop()


def _progress(title: str, total: int, enabled: bool) -> _Bar:
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    progress = Progress(*columns, console=console, transient=True, disable=not (enabled and console.is_terminal))
    return _Bar(progress, progress.add_task(title, total=total))


def _as_list(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _spread(documents: Any, num_prompts: int) -> list[Sequence[Any]]:  # noqa: ANN401 - see LLM.chat
    """Return one list of documents per prompt, from one list for all or one for each."""
    if documents is None:
        return [()] * num_prompts
    if isinstance(documents, str | Mapping | Document):
        raise RequestError("documents must be a list; put the single document into one")
    if not isinstance(documents, Iterable):
        raise RequestError(f"documents must be a list of documents, got {type(documents).__name__}")
    given = list(documents)
    is_nested = bool(given) and all(isinstance(d, Sequence) and not isinstance(d, str) for d in given)
    if not is_nested:
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(f"got {len(given)} lists of documents for {num_prompts} prompts; give one list or one each")
    return given
