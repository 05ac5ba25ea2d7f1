# SPDX-License-Identifier: Apache-2.0
"""Copy stored chunks into private blocks and turn the copied keys: position re-encoding."""

from lazyattention.reuse.base import ReuseMethod, SpanUse


class CopyRotate(ReuseMethod):
    """Each request that uses a chunk pays one more copy of it in memory.

    Source: Ma et al. 2025, arXiv:2409.15355 (Block-Attention).
    """

    name = "copy_rotate"
    summary = "Copy stored chunks into private blocks and turn the copied keys: position re-encoding."
    document_use = SpanUse.COPIED
