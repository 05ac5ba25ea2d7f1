# SPDX-License-Identifier: Apache-2.0
"""Name to metric. Adding one: a file that defines a `Metric`, and a line in `metrics/__init__.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lazyattention.utils.registry import Registry

if TYPE_CHECKING:
    from lazyattention.unlearn.metrics.context import EvalContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A measurement and how to read it.

    Attributes:
        name: Its key in results.
        compute: From the context to a JSON-able result: either `{split: {"value": …}}` under "splits", or a
            "value" of its own with the parts it was made of. Raises MetricUnavailableError if something is missing.
        unit: Of the value.
        value_range: In words, for example "0 to 1".
        direction: What a higher value means, and what is wanted on which set.
        source: Where the definition comes from.
    """

    name: str
    compute: Callable[["EvalContext"], dict[str, Any]]
    unit: str
    value_range: str
    direction: str
    source: str


METRICS: Registry[Metric] = Registry("metric")


def register(metric: Metric) -> Metric:
    """Add a metric under its name."""
    return METRICS.register(metric.name, metric)
