# SPDX-License-Identifier: Apache-2.0
"""How stored KV becomes valid at a new position: one method, one file."""

from lazyattention.reuse.base import Chunking, PlannedSpan, ReuseMethod, ReusePlan, SpanUse
from lazyattention.reuse.layout import PromptLayout, Span
from lazyattention.reuse.registry import REUSE_METHODS

__all__ = ["REUSE_METHODS", "Chunking", "PlannedSpan", "PromptLayout", "ReuseMethod", "ReusePlan", "Span", "SpanUse"]
