# SPDX-License-Identifier: Apache-2.0
"""Methods, controls and seeds at matched forgetting: what each keeps of the retain set once it has forgotten as much.

Runs stop at different places, so end points cannot be compared. Each run leaves a trajectory of forgetting and utility;
utility is read off where the trajectory first reaches the common level of forgetting, between measurements by linear
interpolation. Differences to the first arm are paired by seed and get a t interval.
"""

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lazyattention.errors import ConfigError
from lazyattention.unlearn.attribution import AttributionScores
from lazyattention.unlearn.config import UnlearnConfig
from lazyattention.unlearn.metrics.progress import Progress
from lazyattention.unlearn.simu import UnlearnResult, UnlearnSets, run_attribution, unlearn

SCHEMA = "lazyattention.unlearn.comparison/1"
# A bound that never stops a run: only the level does.
_NO_BOUND = 1e9
_METRIC_KEYS = {"loss": "mean_nll"}


@dataclass(frozen=True, slots=True)
class Arm:
    """One row of the comparison: a name such as "simu+random" and its options."""

    name: str
    config: UnlearnConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What is matched and what is read off.

    Attributes:
        seeds: One run per arm and seed.
        level_metric: Forget metric that is matched: "loss", "extraction_strength", "exact_memorization" or
            "answer_probability".
        level: Its value; None = the holdout set's value under the original model.
        utility_metric: Retain metric that is compared; any of the same names.
        confidence: Of the intervals.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    level_metric: str = "loss"
    level: float | None = None
    utility_metric: str = "exact_memorization"
    confidence: float = 0.95

    def __post_init__(self) -> None:
        known = ("loss", "extraction_strength", "exact_memorization", "answer_probability")
        for name in ("level_metric", "utility_metric"):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if not self.seeds or not 0 < self.confidence < 1:
            raise ConfigError("seeds must not be empty and confidence must lie between 0 and 1")


def compare(
    load_model: Callable[[], PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    sets: UnlearnSets,
    arms: Sequence[Arm],
    options: CompareOptions,
    *,
    on_result: Callable[[Arm, int, UnlearnResult], Mapping[str, Any]] | None = None,
    may_start: Callable[[], bool] = lambda: True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run every arm with every seed and compare utility at matched forgetting.

    Args:
        load_model: Returns a fresh copy of the original model each time.
        tokenizer: Of the model.
        sets: The same for all arms; a holdout set, unless `options.level` is given.
        arms: The first is the reference of the differences. A run ends where it reaches the level; the utility bound
            is lifted.
        options: See `CompareOptions`.
        on_result: Called after each run, for example to probe the model; what it returns is kept with the run.
        may_start: Asked before each run; after a no the runs so far are compared. Runs go seed by seed.
        progress: Shows one bar per run.

    Returns:
        JSON-able: "level", "runs" (trajectory, matched utility, times) and "arms" (means, intervals, differences).
    """
    if not arms:
        raise ConfigError("there is nothing to compare; give at least one method")
    scores: dict[str, Any] = {}
    runs: list[dict[str, Any]] = []
    level = options.level
    for seed in options.seeds:
        for arm in arms:
            if not may_start():
                break
            key = attribution_key(arm.config)
            if arm.config.needs_attribution and key not in scores:
                scores[key] = run_attribution(load_model(), tokenizer, sets, arm.config, progress=progress)
            at_level = dataclasses.replace(options, level=level)
            run, result = run_arm(
                load_model(), tokenizer, sets, arm, seed, at_level, scores=scores.get(key), progress=progress
            )
            level = run["level"]
            runs.append(run)
            if on_result is not None:
                runs[-1] |= on_result(arm, seed, result)
            del result
    if level is None:
        raise ConfigError("no run was started, so there is nothing to compare")
    return {
        "schema": SCHEMA,
        "level_metric": options.level_metric,
        "level": level,
        "utility_metric": options.utility_metric,
        "confidence": options.confidence,
        "seeds": list(options.seeds),
        "runs": runs,
        "arms": summarize_arms(runs, [arm.name for arm in arms], options),
        "timings_s": {"attribution": sum(score.elapsed_s for score in scores.values())},
    }


def attribution_key(config: UnlearnConfig) -> str:
    """Text that is equal for two configurations that step 1 gives the same scores."""
    return repr(config.attribution) + repr(config.neurons.dual != "keep")


def run_arm(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sets: UnlearnSets,
    arm: Arm,
    seed: int,
    options: CompareOptions,
    *,
    scores: AttributionScores | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Any], UnlearnResult]:
    """Run one arm with one seed until it reaches the level; `compare` is many of these and `summarize_arms`.

    Args:
        model: The original model; changed in place.
        tokenizer: Of the model.
        sets: See `compare`.
        arm: What to run.
        seed: Of data order, draws and random neurons.
        options: Its seeds are not read.
        scores: Of an earlier step 1 with the same `attribution_key`; skips it.
        progress: See `compare`.

    Returns:
        The run as in `compare`'s "runs", and what `unlearn` returned.
    """
    start = time.monotonic()
    config = _until_level(arm.config, seed, options)
    with tempfile.TemporaryDirectory() as folder:
        result = unlearn(model, tokenizer, sets, config, output_dir=Path(folder), scores=scores, progress=progress)
    level = result.guard.target
    if level is None:
        raise ConfigError("matched forgetting needs a level: give a holdout set, or options.level")
    return _describe_run(arm, seed, result, level, options, time.monotonic() - start), result


def _until_level(config: UnlearnConfig, seed: int, options: CompareOptions) -> UnlearnConfig:
    """The arm's options, but a run ends where the level is reached and nowhere else."""
    metric: Any = options.level_metric
    guards = dataclasses.replace(config.guards, max_utility_drop=_NO_BOUND, target_metric=metric, target=options.level)
    return dataclasses.replace(
        config,
        guards=guards,
        train=dataclasses.replace(config.train, seed=seed),
        neurons=dataclasses.replace(config.neurons, seed=seed),
    )


def _describe_run(
    arm: Arm, seed: int, result: UnlearnResult, level: float, options: CompareOptions, elapsed_s: float
) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "seed": seed,
        "level": level,
        "stop_reason": result.guard.stop_reason,
        "trajectory": result.guard.history,
        "matched_utility": matched_utility(result.guard.history, level, options),
        "final": result.guard.after,
        "neuron_share": result.mask.share,
        "num_trainable": result.num_trainable,
        "num_changed": result.num_changed,
        "clip_fraction": _mean([row["clip_fraction"] for row in result.steps if row.get("clip_fraction") is not None]),
        "elapsed_s": elapsed_s,
        "training_s": result.timings_s["training"],
        "peak_memory_bytes": result.peak_memory_bytes,
    }


def matched_utility(history: Sequence[Mapping[str, Any]], level: float, options: CompareOptions) -> float | None:
    """Utility where forgetting first reaches `level`; None when it never does.

    Between two measurements both values are taken to be linear in the step.
    """
    metric = _METRIC_KEYS.get(options.level_metric, options.level_metric)
    utility_key = _METRIC_KEYS.get(options.utility_metric, options.utility_metric)
    rises = options.level_metric == "loss"
    previous: Mapping[str, Any] | None = None
    for point in history:
        value = point["forget"][metric]
        if value >= level if rises else value <= level:
            utility = float(point["retain"][utility_key])
            if previous is None or previous["forget"][metric] == value:
                return utility
            start = float(previous["retain"][utility_key])
            share = (level - previous["forget"][metric]) / (value - previous["forget"][metric])
            return start + share * (utility - start) if math.isfinite(share) else utility
        previous = point
    return None


def summarize_arms(
    runs: Sequence[Mapping[str, Any]], names: Sequence[str], options: CompareOptions
) -> list[dict[str, Any]]:
    """Means and intervals per arm, and paired differences to the first arm."""
    by_arm = {name: {run["seed"]: run["matched_utility"] for run in runs if run["arm"] == name} for name in names}
    reference = by_arm[names[0]]
    rows = []
    for name in names:
        values = [value for value in by_arm[name].values() if value is not None]
        pairs = [
            value - reference[seed]
            for seed, value in by_arm[name].items()
            if value is not None and reference.get(seed) is not None
        ]
        difference = interval(pairs, options.confidence) if name != names[0] else None
        rows.append(
            {
                "arm": name,
                "num_runs": len(by_arm[name]),
                "num_matched": len(values),
                "utility": interval(values, options.confidence),
                "difference": difference,
                "verdict": _verdict(difference) if name != names[0] else "reference",
            }
        )
    return rows


def interval(values: Sequence[float], confidence: float) -> dict[str, float | None]:
    """Mean and t interval of a few values: "mean", "low", "high"; the bounds are None with fewer than two values."""
    mean = _mean(values)
    if mean is None or len(values) < 2:
        return {"mean": mean, "low": None, "high": None}
    from scipy import stats

    half = float(stats.t.ppf(0.5 + confidence / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _verdict(difference: Mapping[str, float | None] | None) -> str:
    """Say in words whether an arm differs from the reference; nothing is claimed without an interval."""
    if difference is None or difference["mean"] is None:
        return "not matched"
    low, high = difference["low"], difference["high"]
    if low is None or high is None:
        return "one seed, no interval"
    if low > 0:
        return "keeps more than the reference"
    if high < 0:
        return "keeps less than the reference"
    return "not distinguishable from the reference"
