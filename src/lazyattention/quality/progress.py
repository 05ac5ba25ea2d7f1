# SPDX-License-Identifier: Apache-2.0
"""How far long work has come, on standard error: a bar on a terminal, plain lines in a log; LAZYATTENTION_PROGRESS=0 = neither."""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lazyattention import envs

LINE_EVERY_S = 30.0
"""Seconds between two lines at least."""


@contextlib.contextmanager
def progress_bar(title: str, total: int, *, is_enabled: bool = True) -> Iterator[Callable[..., None]]:
    """Yield a function to call with the number of things just done (1 if left out) and, as `note`, a word on how it goes.

    On a terminal a bar that disappears at the end; elsewhere a line at the beginning, one every `LINE_EVERY_S` seconds at
    most, and one at the end if it took that long.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not (is_enabled and envs.PROGRESS and total):
        yield lambda *_, **__: None
    elif console.is_terminal:
        with _bar(title, total, console) as advance:
            yield advance
    else:
        lines = _Lines(title, total, console)
        yield lines.advance
        lines.end()


@contextlib.contextmanager
def _bar(title: str, total: int, console: Console) -> Iterator[Callable[..., None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total, note="")

        def advance(count: int = 1, note: str | None = None) -> None:
            bar.advance(task, count)
            if note is not None:
                bar.update(task, note=note)

        yield advance


class _Lines:
    """What a log can hold of a bar."""

    def __init__(self, title: str, total: int, console: Console) -> None:
        self._title, self._total, self._console = title, total, console
        self._num_done = 0
        self._note = ""
        self._started_s = self._last_s = time.monotonic()
        # When the first things were done, and how many: those done by an earlier run say nothing about speed.
        self._first: tuple[float, int] | None = None
        self._print("")

    def advance(self, count: int = 1, note: str | None = None) -> None:
        now_s = time.monotonic()
        self._num_done += count
        self._note = self._note if note is None else note
        if self._first is None:
            self._first = now_s, self._num_done
        if now_s - self._last_s < LINE_EVERY_S or self._num_done >= self._total:
            return
        self._last_s = now_s
        since_s, num_before = now_s - self._first[0], self._num_done - self._first[1]
        left = f", {_time(since_s / num_before * (self._total - self._num_done))} left" if num_before else ""
        self._print(f", {_time(now_s - self._started_s)}{left}")

    def end(self) -> None:
        took_s = time.monotonic() - self._started_s
        if took_s >= LINE_EVERY_S:
            self._print(f" done in {_time(took_s)}")

    def _print(self, times: str) -> None:
        note = f"; {self._note}" if self._note else ""
        self._console.print(f"{self._title}: {self._num_done} of {self._total}{times}{note}", markup=False)


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
