# SPDX-License-Identifier: Apache-2.0
"""Attention operations: plan once per step, run in every layer. Tensors only."""

from lazyattention.ops.attention import run
from lazyattention.ops.metadata import AttentionMetadata, LayerCall, Observer
from lazyattention.ops.plan import AttentionPlan, KVRange, RowGroup, WorkItem, make_plan
from lazyattention.ops.rotary import LayerRotary

__all__ = [
    "AttentionMetadata",
    "AttentionPlan",
    "KVRange",
    "LayerCall",
    "LayerRotary",
    "Observer",
    "RowGroup",
    "WorkItem",
    "make_plan",
    "run",
]
