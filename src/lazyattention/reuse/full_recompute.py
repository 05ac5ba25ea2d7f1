# SPDX-License-Identifier: Apache-2.0
"""Recompute everything for every request, with full causal attention: the yardstick for answer quality."""

from lazyattention.reuse.base import ReuseMethod, SpanUse


class FullRecompute(ReuseMethod):
    """Documents are ordinary text; nothing is ever found in the store."""

    name = "full_recompute"
    summary = "Recompute everything for every request, with full causal attention: the yardstick for answer quality."
    document_use = SpanUse.TEXT
    reuses_text = False
