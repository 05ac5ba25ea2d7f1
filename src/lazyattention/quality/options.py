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
        recompute: Which pages of stored documents are computed anew; None = as the engine's option says.
    """

    name: str
    reuse_method: str
    encoding: str
    summary: str
    recompute: str | None = None


FULL_ATTENTION = ReuseOption("full", "full_recompute", "after_preamble", "full attention, every document recomputed")

REUSE_OPTIONS: Registry[ReuseOption] = Registry("reuse option")
for _option in (
    ReuseOption("after_preamble", "rotate_query", "after_preamble", "documents see the instructions and themselves"),
    ReuseOption("isolated", "rotate_query", "isolated", "documents see nothing but themselves"),
    ReuseOption(
        "recompute_first_16",
        "rotate_query",
        "after_preamble",
        "as after_preamble, the first 16 tokens of each document computed anew",
        "first:16",
    ),
    ReuseOption(
        "recompute_deviation_15",
        "rotate_query",
        "after_preamble",
        "as after_preamble, the 15 % of pages that deviate most computed anew",
        "deviation:0.15",
    ),
    ReuseOption(
        "recompute_attention_15",
        "rotate_query",
        "after_preamble",
        "as after_preamble, the 15 % of pages the question looks at most computed anew",
        "attention:0.15",
    ),
):
    REUSE_OPTIONS.register(_option.name, _option)
