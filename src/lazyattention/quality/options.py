# SPDX-License-Identifier: Apache-2.0
"""The ways of reuse that are compared with full attention: each is a request's reuse method and encoding."""

from dataclasses import dataclass

from lazyattention.utils.registry import Registry


@dataclass(frozen=True, slots=True)
class ReuseOption:
    """One column of the comparison.

    Attributes:
        name: As in options and reports.
        reuse_method: Name of the engine's reuse method.
        encoding: What a chunk sees when it is encoded.
        summary: One line for tables.
    """

    name: str
    reuse_method: str
    encoding: str
    summary: str


FULL_ATTENTION = ReuseOption("full", "full_recompute", "after_preamble", "full attention, every document recomputed")

REUSE_OPTIONS: Registry[ReuseOption] = Registry("reuse option")
for _option in (
    ReuseOption("after_preamble", "rotate_query", "after_preamble", "documents see the instructions and themselves"),
    ReuseOption("isolated", "rotate_query", "isolated", "documents see nothing but themselves"),
):
    REUSE_OPTIONS.register(_option.name, _option)
