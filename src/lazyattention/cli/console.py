# SPDX-License-Identifier: Apache-2.0
"""Where the command line writes: answers and results to standard output, everything about them to standard error."""

from rich.console import Console

from lazyattention import envs

out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, highlight=False)


def shows_progress() -> bool:
    """Whether spinners and bars are wanted: a terminal, and not turned off by LAZYATTENTION_PROGRESS=0."""
    return envs.PROGRESS and err.is_terminal


def write_answer(text: str) -> None:
    """Write a model's text as it is; on a terminal without control characters, which could do anything there."""
    if out.is_terminal:
        text = "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")
    out.file.write(text)
    out.file.flush()
