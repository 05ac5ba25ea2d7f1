# SPDX-License-Identifier: Apache-2.0
"""Which blocks of stored documents are computed anew for a request: one policy, one file."""

from lazyattention.reuse.recompute.base import ChosenBlocks, Evidence, RecomputePolicy
from lazyattention.reuse.recompute.option import NO_RECOMPUTE, RECOMPUTE_POLICIES, Recompute

__all__ = ["NO_RECOMPUTE", "RECOMPUTE_POLICIES", "ChosenBlocks", "Evidence", "Recompute", "RecomputePolicy"]
