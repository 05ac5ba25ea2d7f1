# SPDX-License-Identifier: Apache-2.0
"""Combinations that a serving sweep runs, the most telling first, so that a sweep cut short has still seen every factor."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Combo:
    """One combination.

    Attributes:
        alpha: Zipf exponent of the documents' popularity; 0 = uniform.
        documents_per_request: All different.
        document_len: As `workloads.Lengths`.
        budget: KV memory over the working set.
        load: 0 = closed loop; else Poisson arrivals at this share of the requests/s that `rotate_query` served warm in
            the closed loop.
    """

    alpha: float
    documents_per_request: int
    document_len: str
    budget: float
    load: float = 0.0

    def settings(self) -> dict[str, Any]:
        """Return all fields, as they stand in reports."""
        return asdict(self)


# Popular documents, memory for all of them; then what changes one thing at a time; then where nothing can be gained.
_FIRST = (
    Combo(1.0, 5, "512", 1.0),
    Combo(0.0, 5, "512", 1.0),
    Combo(1.0, 5, "512", 1.0, load=0.6),
    Combo(1.0, 5, "512", 0.25),
    Combo(0.0, 1, "128", 1.0),
    Combo(2.1, 20, "512", 1.0),
    Combo(1.0, 5, "512~0.8", 2.5),
    Combo(0.0, 20, "128", 0.5),
)


def standard_combos() -> list[Combo]:
    """Return every combination of the standard sweep, chosen ones first, then by what has not been seen together."""
    factors = ((0.0, 1.0, 2.1), (5, 20), ("128", "512", "512~0.8"), (0.25, 0.5, 1.0, 2.5), (0.0, 0.6))
    rest = [Combo(*values) for values in itertools.product(*factors)]  # type: ignore[arg-type]
    ordered = list(_FIRST)
    rest = [combo for combo in rest if combo not in ordered]
    seen = Counter(pair for combo in ordered for pair in _pairs(combo))
    while rest:
        # What was never measured together counts most; of equals the first, so that the order is always the same.
        best = max(rest, key=lambda combo: sum((1 + seen[pair]) ** -2 for pair in _pairs(combo)))
        ordered.append(best)
        rest.remove(best)
        seen.update(_pairs(best))
    return ordered


def shard_of(combos: Sequence[Combo], shard: str) -> list[Combo]:
    """Return shard "i/n", i from 0: every n-th combination, so that each shard starts with telling ones.

    Raises:
        ValueError: The text is no shard.
    """
    index, _, count = shard.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"shard must be i/n with 0 <= i < n, such as 0/2, got {shard!r}")
    return list(combos[int(index) :: int(count)])


def _pairs(combo: Combo) -> set[tuple[Any, ...]]:
    """Return all pairs of settings that the combination brings together."""
    return set(itertools.combinations(combo.settings().items(), 2))


def methods_of(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return every method that some run has, in the order of the run with most of them."""
    by_number = sorted((run["methods"] for run in runs), key=len, reverse=True)
    return list(dict.fromkeys(method for methods in by_number for method in methods))
