# SPDX-License-Identifier: Apache-2.0
"""Recompute what the question looks at."""

from lazyattention.reuse.recompute.base import Evidence, HighestScores


class Attention(HighestScores):
    """Blocks that get most of the attention of the prompt's last text when all documents are reused as they are."""

    name = "attention"
    summary = "The share of blocks that the question looks at most, mean over layers and heads."
    evidence = Evidence.QUESTION_ATTENTION
