# SPDX-License-Identifier: Apache-2.0
"""Progress bars on standard error: shown on a terminal only, off with LAZYATTENTION_PROGRESS=0."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from lazyattention import envs


@dataclass(frozen=True, slots=True)
class Progress:
    """Shows one bar at a time; with `is_enabled=False`, or away from a terminal, shows nothing."""

    is_enabled: bool = True

    @contextlib.contextmanager
    def task(self, description: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yield a function to call with the number of things just finished."""
        console = Console(stderr=True)
        if not (self.is_enabled and envs.PROGRESS and console.is_terminal):
            yield lambda _: None
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=console, transient=True) as bar:
            task_id = bar.add_task(description, total=total)
            yield lambda count: bar.advance(task_id, count)
