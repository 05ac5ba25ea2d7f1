# SPDX-License-Identifier: Apache-2.0
"""Read stored chunks in place and turn the query instead: one copy, any position, shared reads."""

from lazyattention.reuse.base import ReuseMethod, SpanUse


class RotateQuery(ReuseMethod):
    """One turn per query row and chunk, never one per key; the chunk's memory is only read.

    Source: Xia et al. 2026, arXiv:2606.04302 (LazyAttention).
    """

    name = "rotate_query"
    summary = "Read stored chunks in place and turn the query instead: one copy, any position, shared reads."
    document_use = SpanUse.SHARED
