# SPDX-License-Identifier: Apache-2.0
"""Reuse KV only where the whole prompt before it is identical: what prefix caching does."""

from lazyattention.reuse.base import ReuseMethod, SpanUse


class Prefix(ReuseMethod):
    """Documents are ordinary text with full causal attention."""

    name = "prefix"
    summary = "Reuse KV only where the whole prompt before it is identical: what prefix caching does."
    document_use = SpanUse.TEXT
