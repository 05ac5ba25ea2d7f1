# SPDX-License-Identifier: Apache-2.0
"""What every route works with, made once at start-up."""

import asyncio
import copy
import queue
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from lazyattention import __version__
from lazyattention.documents.document import Document
from lazyattention.engine.prompt import PromptBuilder
from lazyattention.errors import EngineDeadError
from lazyattention.reuse import REUSE_METHODS, PromptLayout
from lazyattention.server.config import ScopeConfig, ServerConfig
from lazyattention.server.errors import DeadlineError, OverloadedError, ShuttingDownError, UnknownModelError
from lazyattention.server.generation import Generator
from lazyattention.server.library import DocumentLibrary
from lazyattention.server.limits import AdmissionQueue
from lazyattention.server.metrics import Metrics
from lazyattention.server.structured import GrammarCompiler
from lazyattention.server.token_text import TokenText

if TYPE_CHECKING:
    from lazyattention.engine.async_engine import AsyncEngine
    from lazyattention.engine.engine import Engine

T = TypeVar("T")
# Tokenising and grammar compilation leave the event loop free; both release the GIL for most of their time.
_NUM_WORKERS = 4
_NUM_TOKENIZERS = 2
# How many of the longest documents a prompt may hold at the same positions.
_MAX_SIDE_BY_SIDE = 32


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The model's facts that requests depend on.

    Attributes:
        name: What clients call it.
        max_model_len: Longest prompt plus output, tokens.
        vocab_size: Rows of the logits.
        eos_token_ids: Any of these ends an answer.
        chat_template: As text; None = there is none.
        fingerprint: Changes with the weights and with our version.
        created_s: Unix time of the start.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    fingerprint: str
    created_s: int


class PromptPool:
    """Prompt builders for worker threads: a tokenizer copy each, since one must not be used by two threads at a time.

    Every scope has builders of its own: what they remember would otherwise show one tenant, by time, what another sent.
    """

    def __init__(self, engine: "Engine") -> None:
        """Copies the engine's tokenizer."""
        self._slots: queue.SimpleQueue[tuple[Any, dict[str, PromptBuilder]]] = queue.SimpleQueue()
        self._builders: list[dict[str, PromptBuilder]] = [{} for _ in range(_NUM_TOKENIZERS)]
        for builders in self._builders:
            self._slots.put((copy.deepcopy(engine.loaded.tokenizer), builders))
        self._config = engine.config
        # Documents that stand side by side take the positions of one.
        is_parallel = engine.config.chunk.positions == "parallel"
        self._max_prompt_len = engine.max_model_len * (_MAX_SIDE_BY_SIDE if is_parallel else 1)

    def use(self, scope: str, work: Callable[[PromptBuilder], T]) -> T:
        """Run `work` with a builder of this scope; waits while all tokenizers are in use."""
        tokenizer, builders = slot = self._slots.get()
        try:
            if scope not in builders:
                builders[scope] = PromptBuilder(
                    tokenizer,
                    max_chunk_len=self._config.cache.max_chunk_len,
                    documents_place=self._config.documents_place,
                    chat_template=self._config.chat_template,
                    max_prompt_len=self._max_prompt_len,
                )
            return work(builders[scope])
        finally:
            self._slots.put(slot)

    def forget_documents(self, scopes: Collection[str]) -> None:
        """Drop what is remembered of these scopes' documents; from any thread."""
        for builders in self._builders:
            for name, builder in list(builders.items()):
                if name in scopes:
                    builder.forget_documents()


class PromptPlanner:
    """Plans prompts as the engine will."""

    def __init__(self, engine: "Engine", prompts: PromptPool) -> None:
        """Reads the engine's options."""
        self._chunking = prompts.use("", lambda builder: builder.chunking(engine.config.chunk))
        names = {"auto": engine.gate.reuse_method, "always": engine.config.reuse_method, "never": "full_recompute"}
        self._methods = {reuse: REUSE_METHODS[name] for reuse, name in names.items()}

    def num_positions(self, layout: PromptLayout, reuse: str) -> int:
        """See ServerContext."""
        return self._methods[reuse].plan(layout, self._chunking).num_positions


class ServerContext:
    """The server's parts.

    Attributes:
        engine: Runs on its own thread.
        config: The server's options.
        model: The model's facts.
        admission: Who may enter the engine.
        preparation: Who may have a prompt tokenised; as fair as `admission`.
        generator: Runs jobs.
        library: Uploaded documents.
        metrics: Prometheus.
        grammars: Compiles schemas.
        token_text: Bytes of tokens.
    """

    def __init__(self, engine: "AsyncEngine", config: ServerConfig, tracer: Any = None) -> None:  # noqa: ANN401  # optional package
        self.engine = engine
        self.config = config
        self._prompts = PromptPool(engine.engine)
        self.model = _model_card(engine.engine, config)
        self._planner = PromptPlanner(engine.engine, self._prompts)
        max_running = config.max_running or engine.engine.config.scheduler.max_num_seqs
        self.admission = AdmissionQueue(max_running, config.max_waiting)
        self.metrics = Metrics()
        self.preparation = AdmissionQueue(_NUM_TOKENIZERS, config.max_waiting)
        self.metrics.queued.set_function(lambda: self.admission.num_waiting + self.preparation.num_waiting)
        self.generator = Generator(engine, self.admission, self.metrics, tracer, has_tenants=len(config.scopes) > 1)
        self.library = DocumentLibrary()
        self.tokenizer = engine.engine.loaded.tokenizer
        self.grammars = GrammarCompiler(
            self.tokenizer, vocab_size=self.model.vocab_size, eos_token_ids=self.model.eos_token_ids
        )
        self.token_text = TokenText(self.tokenizer)
        self._workers: ThreadPoolExecutor | None = None

    async def in_worker(self, work: Callable[[], T]) -> T:
        """Run `work`, which may take long, off the event loop."""
        if self._workers is None:
            self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="prompt")
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def check_model(self, name: str) -> None:
        """Refuse a request for another model.

        Raises:
            UnknownModelError: It is not this one.
        """
        if name != self.model.name:
            raise UnknownModelError(f"the model {name!r:.200} is not served here; served: {self.model.name!r}")

    def deadline_s(self, wanted_s: float | None) -> float:
        """Monotonic seconds at which a request that starts now is given up."""
        limit_s = self.config.max_deadline_s
        return time.monotonic() + (limit_s if wanted_s is None else min(wanted_s, limit_s))

    async def chat_layout(
        self,
        messages: Sequence[Mapping[str, Any]],
        documents: Sequence[Document],
        tools: Sequence[Mapping[str, Any]] | None,
        tenant: ScopeConfig,
        deadline_s: float,
    ) -> PromptLayout:
        """Lay out a conversation, off the event loop."""
        return await self._lay_out(lambda builder: builder.chat(messages, documents, tools=tools), tenant, deadline_s)

    async def text_layout(
        self, prompt: str | list[int], documents: Sequence[Document], tenant: ScopeConfig, deadline_s: float
    ) -> PromptLayout:
        """Lay out a plain prompt, off the event loop."""
        return await self._lay_out(lambda builder: builder.text(prompt, documents), tenant, deadline_s)

    async def _lay_out(
        self, work: Callable[[PromptBuilder], PromptLayout], tenant: ScopeConfig, deadline_s: float
    ) -> PromptLayout:
        try:
            async with self.preparation.place(tenant, max(0.0, deadline_s - time.monotonic())):
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    return await self.in_worker(lambda: self._prompts.use(tenant.name, work))
        except TimeoutError:
            error = DeadlineError("the prompt was not tokenised within the deadline; raise 'deadline_s' or send less")
            self.metrics.note_end(tenant.name, None, error)
            raise error from None
        except (OverloadedError, DeadlineError, ShuttingDownError) as error:
            self.metrics.note_end(tenant.name, None, error)
            raise

    def num_positions(self, layout: PromptLayout, reuse: str) -> int:
        """Positions that a prompt takes, as the engine will count them: its tokens, if chunk options change nothing."""
        return self._planner.num_positions(layout, reuse)

    def refuse_new(self) -> None:
        """Begin the end: requests that come or wait are refused from now on."""
        self.admission.close()
        self.preparation.close()

    def forget_documents(self, scope: str) -> None:
        """A document of this scope was deleted: let no tokenizer remember its text, nor those of scopes that read it."""
        scopes = self.config.scopes.values()
        self._prompts.forget_documents([other.name for other in scopes if scope in (other.name, *other.reads)])

    @property
    def status(self) -> str:
        """In one word, for /health."""
        if not self.engine.is_running:
            return "dead"
        return "shutting down" if self.admission.is_closed else "ok"

    async def metrics_text(self) -> bytes:
        """All metrics; those of the engine as they were last while it lived."""
        with suppress(EngineDeadError):
            self.metrics.engine_values = await self.engine.stats()
            for scope in self.config.scopes:
                infos = await self.engine.list_documents(scope=scope)
                self.metrics.stored_bytes.labels("device", scope).set(sum(info.num_bytes for info in infos))
        return self.metrics.text()

    def close(self) -> None:
        """Stop the workers; work that comes later starts new ones."""
        if self._workers is not None:
            self._workers.shutdown(wait=False, cancel_futures=True)
            self._workers = None


def context_of(request: Request) -> ServerContext:
    """The context of the app that serves `request`."""
    context: ServerContext = request.app.state.context
    return context


def tenant_of(request: Request) -> ScopeConfig:
    """The scope the request's key belongs to."""
    tenant: ScopeConfig = request.scope["state"]["tenant"]
    return tenant


def unique_id_of(request: Request) -> str:
    """What the engine may call the request; the log has it beside the client's own id."""
    unique_id: str = request.scope["state"]["unique_id"]
    return unique_id


def note_for_log(request: Request, **notes: object) -> None:
    """Add what the client said about itself to the request's log line."""
    given = {name: value for name, value in notes.items() if value is not None}
    request.scope["state"].setdefault("notes", {}).update(given)


def _model_card(engine: "Engine", config: ServerConfig) -> ModelCard:
    loaded = engine.loaded
    template = engine.config.chat_template or getattr(loaded.tokenizer, "chat_template", None)
    return ModelCard(
        name=config.model_name or loaded.name,
        max_model_len=engine.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=tuple(sorted(loaded.eos_token_ids)),
        chat_template=template if isinstance(template, str) else None,
        fingerprint=f"lazyattention-{__version__}-{loaded.weights_id[:12]}",
        created_s=int(time.time()),
    )
