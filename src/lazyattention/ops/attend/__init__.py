# SPDX-License-Identifier: Apache-2.0
"""Attention of every query row over its KV range: the plan's work items become partial states."""

from lazyattention.ops.attend.op import attend
from lazyattention.ops.attend.options import AttendOptions

__all__ = ["AttendOptions", "attend"]
