# SPDX-License-Identifier: Apache-2.0
"""Where the command line writes: answers and results to standard output, everything about them to standard error."""

from rich.console import Console

from lazyattention import envs

out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, highlight=False)


def shows_progress() -> bool:
    """Whether spinners and bars are wanted: a terminal, and not turned off by LAZYATTENTION_PROGRESS=0."""
    return envs.PROGRESS and err.is_terminal
