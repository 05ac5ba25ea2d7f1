# SPDX-License-Identifier: Apache-2.0
"""Recompute what full attention would change most, judged by an early layer."""

from lazyattention.reuse.recompute.base import Evidence, HighestScores


class Deviation(HighestScores):
    """Blocks whose keys and values differ most from those under full attention, in the second layer.

    The first layer's keys and values depend on each token alone, so the second one is the first to differ.

    Source: Yao et al. 2024, arXiv:2405.16444 (CacheBlend). Differences: blocks of KV blocks instead of tokens, chosen once
    for all layers; recomputed blocks see everything before them.
    """

    name = "deviation"
    summary = "The share of blocks whose stored KV differs most from full attention's in the second layer."
    evidence = Evidence.KV_DEVIATION
