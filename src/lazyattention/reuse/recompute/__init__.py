# SPDX-License-Identifier: Apache-2.0
"""Which pages of stored documents are computed anew for a request: one policy, one file."""

from lazyattention.reuse.recompute.base import Evidence, Pages, RecomputePolicy
from lazyattention.reuse.recompute.option import NO_RECOMPUTE, RECOMPUTE_POLICIES, Recompute

__all__ = ["NO_RECOMPUTE", "RECOMPUTE_POLICIES", "Evidence", "Pages", "Recompute", "RecomputePolicy"]
