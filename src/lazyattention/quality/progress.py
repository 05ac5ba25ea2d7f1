# SPDX-License-Identifier: Apache-2.0
"""Progress bars on standard error: on a terminal only, and not with LAZYATTENTION_PROGRESS=0."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lazyattention import envs


@contextlib.contextmanager
def progress_bar(title: str, total: int, *, is_enabled: bool = True) -> Iterator[Callable[..., None]]:
    """Yield a function to call with the number of things just done (1 if left out) and, as `note`, a word on how it goes."""
    console = Console(stderr=True)
    shown = is_enabled and envs.PROGRESS and console.is_terminal
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task(title, total=total, note="")

        def advance(count: int = 1, note: str | None = None) -> None:
            bar.advance(task, count)
            if note is not None:
                bar.update(task, note=note)

        yield advance
