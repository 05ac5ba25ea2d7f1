# SPDX-License-Identifier: Apache-2.0
"""Attention of few rows per request, rows of many requests stacked over each KV range."""

from lazyattention.ops.shared_decode.op import shared_decode, shared_decodes

__all__ = ["shared_decode", "shared_decodes"]
