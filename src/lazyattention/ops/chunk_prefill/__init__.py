# SPDX-License-Identifier: Apache-2.0
"""Attention of many rows of one request over its chunks and its own text."""

from lazyattention.ops.chunk_prefill.op import chunk_prefill, has_unmasked_prefill

__all__ = ["chunk_prefill", "has_unmasked_prefill"]
