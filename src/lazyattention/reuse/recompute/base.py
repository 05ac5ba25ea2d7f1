# SPDX-License-Identifier: Apache-2.0
"""What a recompute policy decides: which blocks of the documents a request computes anew. No tensors here.

Blocks are counted from the chunk's beginning; each can be read in place, or be replaced by one of the request's own.
"""

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from lazyattention.errors import RequestError

ChosenBlocks = tuple[tuple[int, ...], ...]
"""Per span of a prompt, the chosen blocks in order; none for text."""


class Evidence(enum.Enum):
    """What a policy must know of a prompt before it can choose."""

    KV_DEVIATION = "kv_deviation"
    """How far stored keys and values are from those under full attention, in an early layer."""
    QUESTION_ATTENTION = "question_attention"
    """How much the prompt's last text looks at each block, over all layers and heads."""


class RecomputePolicy(ABC):
    """Chooses blocks.

    Attributes:
        name: Its name in options and tables.
        summary: One line for docs/reuse_methods.md.
        amount_help: What its amount means.
        evidence: What must be measured first; None = nothing, the choice is made at once.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    amount_help: ClassVar[str]
    evidence: ClassVar[Evidence | None] = None

    @abstractmethod
    def check(self, amount: float) -> None:
        """Refuse an amount that means nothing (RequestError)."""

    @abstractmethod
    def num_blocks(self, amount: float, block_counts: Sequence[int], block_size: int) -> int:
        """Return how many blocks will be chosen of spans with so many blocks each (text: 0)."""

    @abstractmethod
    def choose(
        self, amount: float, block_counts: Sequence[int], block_size: int, scores: Sequence[Sequence[float]] | None
    ) -> ChosenBlocks:
        """Choose `num_blocks` blocks.

        Args:
            amount: How much.
            block_counts: Blocks of each span; text has none.
            block_size: Tokens per block.
            scores: Per span one number per block, larger = recompute rather; None if no evidence is needed.
        """


class HighestScores(RecomputePolicy):
    """Chooses a share of all documents' blocks: those with the highest scores, wherever they lie."""

    amount_help = "share of the documents' blocks, above 0 and at most 1"

    def check(self, amount: float) -> None:
        if not 0 < amount <= 1:
            raise RequestError(
                f"recompute={self.name}:{amount:g} is not allowed; give a share above 0 and at most 1, such as "
                f"{self.name}:0.15"
            )

    def num_blocks(self, amount: float, block_counts: Sequence[int], block_size: int) -> int:
        # Rounded up, but not because 0.15 * 20 is a hair above 3 in binary.
        return min(sum(block_counts), max(1, math.ceil(amount * sum(block_counts) - 1e-9)))

    def choose(
        self, amount: float, block_counts: Sequence[int], block_size: int, scores: Sequence[Sequence[float]] | None
    ) -> ChosenBlocks:
        assert scores is not None, "scores come from the engine"
        ranked = sorted((-score, span, block) for span, row in enumerate(scores) for block, score in enumerate(row))
        chosen = ranked[: self.num_blocks(amount, block_counts, block_size)]
        return tuple(
            tuple(sorted(block for _, owner, block in chosen if owner == span)) for span in range(len(block_counts))
        )
