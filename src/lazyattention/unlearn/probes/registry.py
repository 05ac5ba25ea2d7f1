# SPDX-License-Identifier: Apache-2.0
"""Name to probe. Adding one: a file that defines a `Probe`, and a line in `probes/__init__.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lazyattention.unlearn.probes.context import ProbeContext
from lazyattention.utils.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """An attack that tries to bring back what was forgotten.

    Attributes:
        name: Its key in results.
        run: Returns "method" (what was done, in words), "before" and "after" (set name to `Measurement.as_dict()`),
            "change" (after minus before), and details of its own. Raises ProbeUnavailableError if a set is missing.
        source: Where the attack comes from.
    """

    name: str
    run: Callable[[ProbeContext], dict[str, Any]]
    source: str


PROBES: Registry[Probe] = Registry("probe")


def register(probe: Probe) -> Probe:
    """Add a probe under its name."""
    return PROBES.register(probe.name, probe)
