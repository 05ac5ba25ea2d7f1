# SPDX-License-Identifier: Apache-2.0
"""Merge partial attention states over disjoint keys into attention over all of them."""

from lazyattention.ops.merge_states.op import merge_parts, merge_states

__all__ = ["merge_parts", "merge_states"]
