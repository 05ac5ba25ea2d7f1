# SPDX-License-Identifier: Apache-2.0
"""The engine behind an event loop: one thread steps it, requests come in through an inbox, outputs go out per request.

Everything that touches the engine runs on its thread, one call at a time, between steps. So documents can be listed,
pinned or deleted while requests run.
"""

import asyncio
import concurrent.futures
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from lazyattention.config import ChunkOptions
from lazyattention.documents.document import Document
from lazyattention.engine.documents import DeletedDocument, DocumentInfo
from lazyattention.engine.engine import Engine
from lazyattention.engine.mailbox import OutputMailbox
from lazyattention.engine.outputs import RequestOutput
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import EngineDeadError, LazyAttentionError
from lazyattention.reuse import PromptLayout
from lazyattention.reuse.recompute import Recompute
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)
T = TypeVar("T")


class AsyncEngine:
    """Serves any number of concurrent callers of one event loop or several.

    Protocol: `start` once, then `generate`, `abort`, `documents` calls and `call` from any thread or loop; `stop` ends
    every live request with an error. A request's iterator always ends: done, aborted, or with an exception.
    """

    def __init__(self, engine: Engine) -> None:
        """Take over `engine`; nobody else may touch it until `stop`."""
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, Callable[[RequestOutput | BaseException], None]] = {}
        self._thread = threading.Thread(target=self._loop, name="lazyattention-engine", daemon=True)
        self._is_stopping = False
        self._dead: BaseException | None = None
        self._ids = itertools.count()

    @property
    def engine(self) -> Engine:
        """The engine; read constants only (config, loaded, prompts' options), everything else through `call`."""
        return self._engine

    @property
    def is_running(self) -> bool:
        """True between `start` and `stop`, unless the engine died."""
        return self._thread.is_alive() and self._dead is None

    @property
    def error(self) -> BaseException | None:
        """Why the engine died, if it did."""
        return self._dead

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End live requests with an error and stop the thread."""
        if self._thread.is_alive():
            self._is_stopping = True
            self._inbox.put(lambda: None)
            self._thread.join(timeout_s)

    async def generate(
        self,
        layout: PromptLayout,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        scope: str = "default",
        reuse: str = "auto",
        reuse_method: str | None = None,
        chunk_options: ChunkOptions | None = None,
        recompute: Recompute | str | None = None,
        deadline_s: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Run one request; yield its outputs as they come, the last one with `finished` set.

        A reader that is slower than the engine gets several steps' outputs as one, their deltas together. Closing or
        cancelling the iterator aborts the request and frees its blocks.

        Raises:
            RequestError: The request is malformed or can never fit.
            CapacityError: There is no room, or its deadline passed.
            EngineDeadError: The engine stopped.
        """
        request_id = request_id or f"async-{next(self._ids)}"
        loop = asyncio.get_running_loop()
        outputs = OutputMailbox()

        def deliver(item: RequestOutput | BaseException) -> None:
            # The loop may be gone already, for example when a server shuts down.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(outputs.put, item)

        was_added = threading.Event()

        def add() -> None:
            self._engine.add_request(
                request_id,
                layout,
                params,
                scope=scope,
                reuse=reuse,
                reuse_method=reuse_method,
                chunk_options=chunk_options,
                recompute=recompute,
                deadline_s=deadline_s,
            )
            was_added.set()
            self._streams[request_id] = deliver

        def abort() -> None:
            if was_added.is_set():  # else the id may be another request's
                self._abort(request_id)

        is_done = False
        try:
            await self.call(add)
            while not is_done:
                item = await outputs.get()
                if isinstance(item, BaseException):
                    is_done = True
                    raise item
                is_done = item.finished
                if item.error is not None:
                    raise item.error
                yield item
        finally:
            if not is_done:
                self._post(abort)

    async def abort(self, request_id: str) -> bool:
        """End a request; its iterator yields a last output with finish_reason "abort". False if it is not live."""
        return await self.call(lambda: self._engine.abort(request_id))

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine's thread, between steps, and return its result.

        Raises:
            EngineDeadError: The engine stopped.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._dead is not None:  # it came in too late
                future.set_exception(EngineDeadError("the engine has stopped; start a new one"))
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        if not self.is_running:
            raise EngineDeadError("the engine is not running; start a new one") from self._dead
        self._post(run)
        if self._dead is not None:  # the engine may have emptied its inbox for the last time before this came in
            self._empty_inbox()
        return await asyncio.wrap_future(future)

    # Documents -------------------------------------------------------------------------------------------------------

    async def upload_document(self, document: Document, *, scope: str = "default") -> str:
        """Keep a document's text, so that requests may name it by id."""
        return await self.call(lambda: self._engine.documents.upload(document, scope))

    async def warm_document(
        self, document: Document, *, messages: Sequence[Mapping[str, Any]] | None = None, scope: str = "default"
    ) -> RequestOutput:
        """Upload a document and compute it along the path of a request with these messages' instructions."""
        await self.upload_document(document, scope=scope)
        layout = await self.call(
            lambda: self._engine.prompts.chat(messages or [{"role": "user", "content": "?"}], [document])
        )
        warming = self.generate(layout, SamplingParams(max_tokens=1), scope=scope, reuse="always", recompute="none")
        outputs = [output async for output in warming]
        return outputs[-1]

    async def list_documents(self, *, scope: str = "default") -> list[DocumentInfo]:
        """Return what is stored of each document of this scope."""
        return await self.call(lambda: self._engine.documents.list(scope))

    async def pin_documents(
        self,
        document_ids: Sequence[str],
        *,
        ttl_s: float | None = None,
        scope: str = "default",
        max_bytes: int | None = None,
    ) -> None:
        """Forbid eviction of these documents; NotFoundError if one is not stored, CapacityError past `max_bytes`."""
        await self.call(lambda: self._engine.documents.pin(document_ids, ttl_s=ttl_s, scope=scope, max_bytes=max_bytes))

    async def unpin_documents(self, document_ids: Sequence[str], *, scope: str = "default") -> None:
        """Allow eviction of these documents again; NotFoundError if one is not stored."""
        await self.call(lambda: self._engine.documents.unpin(document_ids, scope=scope))

    async def delete_document(self, document_id: str, *, scope: str = "default") -> DeletedDocument:
        """Forget a document and everything computed from it; NotFoundError if nothing is known of it."""
        return await self.call(lambda: self._engine.documents.delete(document_id, scope=scope))

    async def stats(self) -> dict[str, Any]:
        """Return the engine's counters and gauges by name."""
        return await self.call(self._engine.describe)

    # The engine's thread ---------------------------------------------------------------------------------------------

    def _post(self, job: Callable[[], None]) -> None:
        self._inbox.put(job)

    def _loop(self) -> None:
        try:
            while not self._is_stopping:
                self._run_inbox()
                if self._engine.has_work:
                    for output in self._engine.step():
                        self._deliver(output)
        except BaseException as error:
            logger.exception("the engine stopped")
            self._dead = error
        finally:
            self._shut_down()

    def _run_inbox(self) -> None:
        """Run waiting calls; sleep until one comes while the engine is idle."""
        try:
            while True:
                self._inbox.get(block=not self._engine.has_work and not self._is_stopping)()
        except queue.Empty:
            return

    def _deliver(self, output: RequestOutput) -> None:
        deliver = self._streams.get(output.request_id)
        if deliver is not None:
            deliver(output)
        if output.finished:
            self._streams.pop(output.request_id, None)

    def _abort(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._engine.abort(request_id)

    def _shut_down(self) -> None:
        reason = EngineDeadError(f"the engine stopped: {self._dead or 'it was shut down'}")
        if isinstance(self._dead, LazyAttentionError):
            reason.__cause__ = self._dead
        for deliver in list(self._streams.values()):
            deliver(reason)
        self._streams.clear()
        if self._dead is None:
            for request_id in self._engine.live_request_ids:
                self._engine.abort(request_id)
        self._dead = self._dead or reason
        self._empty_inbox()

    def _empty_inbox(self) -> None:
        """Tell calls that came in too late that the engine is gone."""
        try:
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return
