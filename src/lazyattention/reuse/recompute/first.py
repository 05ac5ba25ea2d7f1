# SPDX-License-Identifier: Apache-2.0
"""Recompute the first tokens of every document: where an encoding that starts anew differs most."""

from collections.abc import Sequence

from lazyattention.errors import RequestError
from lazyattention.reuse.recompute.base import ChosenBlocks, RecomputePolicy


class First(RecomputePolicy):
    """The first tokens of a chunk were attention sinks when it was encoded; inside a prompt they are not.

    Source: Hu et al. 2024, arXiv:2410.15332 (EPIC, first tokens); arXiv:2512.16822 (MEPIC, first block). Differences:
    whole blocks, so the number of tokens is rounded up.
    """

    name = "first"
    summary = "The first tokens of every document, rounded up to whole blocks."
    amount_help = "tokens of each chunk, at least 1"

    def check(self, amount: float) -> None:
        if not 1 <= amount < 2**31 or amount != int(amount):
            raise RequestError(
                f"recompute=first:{amount:g} is not allowed; give a whole number of tokens, at least 1, such as first:16"
            )

    def num_blocks(self, amount: float, block_counts: Sequence[int], block_size: int) -> int:
        return sum(min(count, _blocks_of(amount, block_size)) for count in block_counts)

    def choose(
        self, amount: float, block_counts: Sequence[int], block_size: int, scores: Sequence[Sequence[float]] | None
    ) -> ChosenBlocks:
        return tuple(tuple(range(min(count, _blocks_of(amount, block_size)))) for count in block_counts)


def _blocks_of(num_tokens: float, block_size: int) -> int:
    return -(-int(num_tokens) // block_size)
