# SPDX-License-Identifier: Apache-2.0
"""When a run ends: at its target, before utility falls below its bound, or when numbers stop being finite."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lazyattention.errors import LazyAttentionError, RequestError
from lazyattention.unlearn.config import GuardConfig
from lazyattention.unlearn.snapshot import Snapshot, count_changes

Measurement = dict[str, dict[str, float]]
# What quick_metrics calls what GuardConfig.target_metric names.
_METRIC_KEYS = {"loss": "mean_nll"}


class CollapseError(LazyAttentionError):
    """The unlearned model lost what it should keep; it is not written unless forced."""


@dataclass(slots=True)
class Guard:
    """Watches one run.

    Attributes:
        config: Bounds.
        measure: Returns "forget" and, if there is one, "retain" metrics of the model as it is now.
        snapshot: Of the trainable entries.
        target: Value of the target metric at which the run ends; None = no target.
        history: One entry per measurement: "step", "forget", "retain".
        stop_reason: Why the run ended; None while it runs.
    """

    config: GuardConfig
    measure: Callable[[], Measurement]
    snapshot: Snapshot
    target: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    stop_reason: str | None = None
    _initial: dict[str, torch.Tensor] = field(default_factory=dict)
    _accepted: dict[str, torch.Tensor] = field(default_factory=dict)
    _accepted_index: int = 0

    def start(self) -> None:
        """Measure the original model and remember its weights; on resuming, remember the current ones as accepted."""
        self._initial = self._initial or self.snapshot.capture()
        if not self.history:
            self.history.append({"step": 0, **self.measure()})
        self._accepted, self._accepted_index = self.snapshot.capture(), len(self.history) - 1

    @property
    def initial(self) -> Mapping[str, torch.Tensor]:
        """The trainable entries of the original model."""
        return self._initial

    @property
    def before(self) -> dict[str, Any]:
        """The original model's measurement."""
        return self.history[0]

    @property
    def after(self) -> dict[str, Any]:
        """The measurement of the weights that are kept."""
        return self.history[self._accepted_index]

    def utility_drop(self, measurement: Mapping[str, Any]) -> float:
        """Fall of the retain set's exact memorisation against the original model, in points of 100."""
        if "retain" not in measurement:
            return 0.0
        before, now = self.before["retain"], measurement["retain"]
        return 100 * float(before["exact_memorization"] - now["exact_memorization"])

    def target_reached(self, measurement: Mapping[str, Any]) -> bool:
        """Whether the forget set is at the target: at or above for the loss, at or below for the others."""
        if self.target is None:
            return False
        metric = self.config.target_metric
        value = float(measurement["forget"][_METRIC_KEYS.get(metric, metric)])
        return value >= self.target if metric == "loss" else value <= self.target

    def check(self, step: int) -> str | None:
        """Measure, keep or take back the weights, and return the reason to stop, if any."""
        if self.history[-1]["step"] == step:
            return self.stop_reason
        measurement: dict[str, Any] = {"step": step, **self.measure()}
        self.history.append(measurement)
        if not all(math.isfinite(values["mean_nll"]) for key, values in measurement.items() if key != "step"):
            return self.fail("not finite")
        if self.utility_drop(measurement) > self.config.max_utility_drop:
            return self.fail("utility bound")
        self._accepted, self._accepted_index = self.snapshot.capture(), len(self.history) - 1
        if self.target_reached(measurement):
            self.stop_reason = "target reached"
        return self.stop_reason

    def fail(self, reason: str) -> str:
        """Go back to the last accepted weights and end the run."""
        self.snapshot.restore(self._accepted)
        self.stop_reason = reason
        return reason

    def finish(self, step: int) -> None:
        """Measure the final weights unless the run was stopped."""
        if self.stop_reason is None:
            self.check(step)
        self.stop_reason = self.stop_reason or "end of schedule"

    def num_changed(self) -> int:
        """Trainable entries that differ from the original model's.

        Raises:
            RequestError: None does; a run that changes nothing is an error, not a result.
        """
        changed = count_changes(self._initial, self.snapshot.capture())
        if changed == 0:
            raise RequestError(
                f"the run changed no weight (it ended with: {self.stop_reason}); lower optimizer.lr or "
                "guards.eval_every if utility fell at once, raise optimizer.lr if nothing moved"
            )
        return changed

    def refuse_collapse(self) -> None:
        """Raise CollapseError when the kept weights lost the retain set."""
        if "retain" not in self.after:
            return
        rise = self.after["retain"]["mean_nll"] - self.before["retain"]["mean_nll"]
        if not rise <= self.config.collapse_loss:
            raise CollapseError(
                f"the retain loss rose by {rise:.2f} nats per token, guards.collapse_loss allows "
                f"{self.config.collapse_loss}; lower optimizer.lr, raise objective.retain_weight, or force writing"
            )
