# SPDX-License-Identifier: Apache-2.0
"""Recompute every document for every request, under the chunk mask: what reuse must equal."""

from lazyattention.reuse.base import ReuseMethod, SpanUse


class ChunkRecompute(ReuseMethod):
    """Documents do not see each other; their keys are computed at their true positions and never turned.

    An independent path to the answers that the other chunk methods must give.
    """

    name = "chunk_recompute"
    summary = "Recompute every document for every request, under the chunk mask: what reuse must equal."
    document_use = SpanUse.PRIVATE
    reuses_text = False
