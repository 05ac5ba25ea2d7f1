# SPDX-License-Identifier: Apache-2.0
"""How many requests may run and wait: rate limits, concurrency, one bounded queue that is fair between scopes."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from lazyattention.server.config import ScopeConfig
from lazyattention.server.errors import DeadlineError, OverloadedError, ShuttingDownError


class RateLimiter:
    """A token bucket per scope: bursts up to one minute's allowance, then an even rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds, so that a change of the wall clock changes nothing."""
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # scope -> (allowance left, when that was true)

    def check(self, scope: ScopeConfig) -> None:
        """Count one request.

        Raises:
            OverloadedError: The scope's allowance is used up.
        """
        limit = scope.max_requests_per_minute
        if limit is None:
            return
        now = self._clock()
        left, since_s = self._buckets.get(scope.name, (float(limit), now))
        left = min(float(limit), left + (now - since_s) * limit / 60)
        if left < 1:
            raise OverloadedError(
                f"rate limit of {limit} requests per minute reached; try again later",
                retry_after_s=(1 - left) * 60 / limit,
            )
        self._buckets[scope.name] = (left - 1, now)


@dataclass(slots=True)
class _ScopeQueue:
    num_running: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class AdmissionQueue:
    """Lets at most `max_running` requests into the engine; the others wait, at most `max_waiting`.

    Whenever a place becomes free, the scope with the fewest running requests gets it; among equals, the one served least
    recently. So a scope that sends a thousand requests does not delay another one's single request.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        # Order: least recently served first.
        self._scopes: OrderedDict[str, _ScopeQueue] = OrderedDict()
        self.is_closed = False
        self.num_running = 0
        self.num_waiting = 0

    @asynccontextmanager
    async def place(self, scope: ScopeConfig, timeout_s: float) -> AsyncIterator[None]:
        """Wait for a place in the engine and keep it for the block.

        Raises:
            OverloadedError: The queue is full, or the scope has its full number of requests in it.
            DeadlineError: No place within `timeout_s`.
            ShuttingDownError: The server ends.
        """
        await self._enter(scope, timeout_s)
        try:
            yield
        finally:
            self._leave(scope.name)

    def close(self) -> None:
        """Refuse whoever comes or waits from now on; those inside go on."""
        self.is_closed = True
        for queue in self._scopes.values():
            for future in queue.waiting:
                if not future.done():
                    future.set_exception(_shutting_down())

    async def _enter(self, scope: ScopeConfig, timeout_s: float) -> None:
        if self.is_closed:
            raise _shutting_down()
        queue = self._scopes.setdefault(scope.name, _ScopeQueue())
        if queue.num_running + len(queue.waiting) >= scope.max_concurrent_requests:
            raise OverloadedError(
                f"{scope.max_concurrent_requests} requests of this scope run or wait already, which is its limit; "
                "try again when one has ended",
                retry_after_s=1,
            )
        if self.num_running < self._max_running:
            self._admit(scope.name, queue)
            return
        if self.num_waiting >= self._max_waiting:
            raise OverloadedError("the server's queue is full; try again later", retry_after_s=2)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.waiting.append(future)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except BaseException as error:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._leave(scope.name)  # admitted in the same moment
            elif future in queue.waiting:
                queue.waiting.remove(future)
                self.num_waiting -= 1
            if isinstance(error, TimeoutError):
                raise DeadlineError(f"no place in the engine within {timeout_s:g} s; the server is busy") from None
            raise

    def _admit(self, name: str, queue: _ScopeQueue) -> None:
        queue.num_running += 1
        self.num_running += 1
        self._scopes.move_to_end(name)

    def _leave(self, name: str) -> None:
        self._scopes[name].num_running -= 1
        self.num_running -= 1
        if self.is_closed:
            return
        while self.num_waiting and self.num_running < self._max_running:
            waiting = [(queue.num_running, name) for name, queue in self._scopes.items() if queue.waiting]
            _, name = min(waiting, key=lambda entry: entry[0])  # min keeps the first: the least recently served
            queue = self._scopes[name]
            future = queue.waiting.popleft()
            self.num_waiting -= 1
            if not future.done():  # its waiter gave up and has not run yet
                self._admit(name, queue)
                future.set_result(None)


def _shutting_down() -> ShuttingDownError:
    return ShuttingDownError("the server is shutting down; send the request to another one or try again later")
