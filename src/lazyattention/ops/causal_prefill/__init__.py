# SPDX-License-Identifier: Apache-2.0
"""Causal attention of a step's new tokens over themselves, by the kernels that torch brings."""

from lazyattention.ops._causal_layout import LONG
from lazyattention.ops.causal_prefill.op import causal_prefill, causal_prefill_min_tokens

__all__ = ["LONG", "causal_prefill", "causal_prefill_min_tokens"]
