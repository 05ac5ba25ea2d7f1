# SPDX-License-Identifier: Apache-2.0
"""One prompt's way through admission and engine, with its deadline, its client's presence and the server's end in view."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from lazyattention.engine.outputs import RequestOutput
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import CapacityError, LazyAttentionError
from lazyattention.reuse import PromptLayout
from lazyattention.server.config import ScopeConfig
from lazyattention.server.errors import DeadlineError, ShuttingDownError
from lazyattention.server.limits import AdmissionQueue
from lazyattention.server.metrics import Metrics
from lazyattention.server.responses import document_report
from lazyattention.utils.logging import get_logger

logger = get_logger(__name__)


class Engine(Protocol):
    """What the server asks of the engine (`engine.async_engine.AsyncEngine`). All calls from one event loop."""

    def generate(
        self,
        layout: PromptLayout,
        params: SamplingParams,
        *,
        request_id: str,
        scope: str,
        reuse: str,
        recompute: str | None,
    ) -> AsyncIterator[RequestOutput]:
        """Run a prompt; one output per step that changed it, the last one `finished`. An async generator."""

    async def abort(self, request_id: str) -> bool:
        """End a request early; its iterator gets a last output with finish reason "abort"."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to run.

    Attributes:
        request_id: Unique.
        layout: The prompt.
        params: How to sample.
        tenant: Whose it is.
        deadline_s: Monotonic seconds at which it is given up.
        reuse: "auto", "always" or "never".
        recompute: Which blocks of stored documents to compute anew; None = as the engine's option says.
        headers: Of the HTTP request; its trace context is there.
        check: Called when the engine takes it; raises if it may not run any more.
    """

    request_id: str
    layout: PromptLayout
    params: SamplingParams
    tenant: ScopeConfig
    deadline_s: float
    reuse: str = "auto"
    recompute: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    check: Callable[[], object] = lambda: None


class Generator:
    """Runs jobs. Every job ends exactly once: with a finished output, an error, or because its client left."""

    def __init__(
        self,
        engine: Engine,
        admission: AdmissionQueue,
        metrics: Metrics,
        tracer: Any = None,  # noqa: ANN401  # optional package
        *,
        has_tenants: bool = False,
    ) -> None:
        """`has_tenants`: several scopes share the engine."""
        self._engine = engine
        self._has_tenants = has_tenants
        self._admission = admission
        self._metrics = metrics
        self._tracer = tracer
        self._running: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False

    @property
    def num_running(self) -> int:
        """Jobs inside the engine."""
        return len(self._running)

    async def run(self, job: Job) -> AsyncGenerator[RequestOutput, None]:
        """Yield the job's outputs, the last one finished. Closing the iterator frees what the job holds at once.

        Raises:
            OverloadedError: Too many requests.
            DeadlineError: Its time is over.
            ShuttingDownError: The server ends.
            LazyAttentionError: What the engine says.
        """
        arrival_s = time.monotonic()
        last: RequestOutput | None = None
        error: LazyAttentionError | None = None
        try:
            async with self._admission.place(job.tenant, max(0.0, job.deadline_s - arrival_s)):
                self._metrics.queue_s.observe(time.monotonic() - arrival_s)
                job.check()
                # Closed here and now: a generator left to the garbage collector would free its place late.
                async with aclosing(self._outputs(job)) as outputs:
                    async for output in outputs:
                        last = output
                        yield output
        except LazyAttentionError as caught:
            error = self._for_tenant(caught)
            if error is not caught:
                raise error from caught
            raise
        finally:
            self._metrics.note_end(job.tenant.name, last, error)
            if last is not None and logger.isEnabledFor(logging.DEBUG):
                report = document_report(last.documents)
                extra = {"request_id": job.request_id, "scope": job.tenant.name, "documents": report}
                logger.debug("what was reused", extra=extra)
            if self._tracer is not None:
                self._tracer.note_end(job, arrival_s, last, error)

    def end_all(self) -> None:
        """The grace period is over: end whatever still runs with ShuttingDownError."""
        self._is_over = True
        for request_id in list(self._running):
            self._abort_soon(request_id)

    async def _outputs(self, job: Job) -> AsyncGenerator[RequestOutput, None]:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(0.0, job.deadline_s - time.monotonic()), self._abort_soon, job.request_id)
        self._running.add(job.request_id)
        is_finished = False
        last_token_s: float | None = None
        options: dict[str, Any] = {
            "request_id": job.request_id,
            "scope": job.tenant.name,
            "reuse": job.reuse,
            "recompute": job.recompute,
        }
        stream = cast("AsyncGenerator[RequestOutput, None]", self._engine.generate(job.layout, job.params, **options))
        try:
            async with aclosing(stream):
                async for output in stream:
                    last_token_s = self._metrics.note_output(output, last_token_s)
                    is_finished = output.finished
                    if output.error is not None:
                        raise output.error
                    if output.finished and any(one.finish_reason == "abort" for one in output.outputs):
                        raise self._why_aborted(job)
                    yield output
        finally:
            timer.cancel()
            self._running.discard(job.request_id)
            if not is_finished:
                self._abort_soon(job.request_id)

    def _for_tenant(self, error: LazyAttentionError) -> LazyAttentionError:
        """Hide what the engine says of its pool where others fill it, too: it would show their use."""
        if self._has_tenants and type(error) is CapacityError:
            return CapacityError("no room for the request now; try again later, or unpin or delete documents of yours")
        return error

    def _why_aborted(self, job: Job) -> LazyAttentionError:
        if self._is_over:
            return ShuttingDownError("the server is shutting down and ended this request; send it again later")
        return DeadlineError("the request was not done within its deadline; raise 'deadline_s' or lower the work")

    def _abort_soon(self, request_id: str) -> None:
        task = asyncio.get_running_loop().create_task(self._abort(request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _abort(self, request_id: str) -> None:
        with suppress(LazyAttentionError):  # a dead engine has nothing to abort
            await self._engine.abort(request_id)
