# SPDX-License-Identifier: Apache-2.0
"""The report's figures as inline SVG: crisp at any size, one file, no network."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

_FORGET, _RETAIN, _GREY = "#c2410c", "#1d4ed8", "#64748b"


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    # The figure alone: no XML prologue, and no metadata, whose addresses would look like network use.
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def _axes(figure: Figure, position: int = 111) -> Any:  # noqa: ANN401 - matplotlib axes
    axes = figure.add_subplot(position)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def plot_trajectory(training: Mapping[str, Any], max_utility_drop: float) -> str:
    """Forgetting and utility over the steps of a run, with target and bound."""
    history = training["trajectory"]
    steps = [point["step"] for point in history]
    metric = training["target_metric"]
    key = "mean_nll" if metric == "loss" else metric
    figure = Figure(figsize=(8.6, 3.1))
    left, right = _axes(figure, 121), _axes(figure, 122)
    left.plot(steps, [p["forget"][key] for p in history], color=_FORGET, marker="o", markersize=3, label="forget set")
    if "retain" in history[0]:
        left.plot(
            steps, [p["retain"][key] for p in history], color=_RETAIN, marker="o", markersize=3, label="retain set"
        )
        utility = [100 * p["retain"]["exact_memorization"] for p in history]
        right.plot(steps, utility, color=_RETAIN, marker="o", markersize=3, label="retain set")
        if max_utility_drop < 100:
            right.axhline(utility[0] - max_utility_drop, color=_GREY, linestyle=":", label="bound")
    right.plot(
        steps, [100 * p["forget"]["exact_memorization"] for p in history], color=_FORGET, marker="o", markersize=3,
        label="forget set",
    )  # fmt: skip
    if training["target"] is not None:
        left.axhline(training["target"], color=_GREY, linestyle="--", label="target")
    for axes in (left, right):
        axes.axvline(training["kept_step"], color=_GREY, linewidth=0.8, label="weights kept")
    left.set(xlabel="step", ylabel="loss, nats per token" if metric == "loss" else metric.replace("_", " "))
    right.set(xlabel="step", ylabel="answer tokens predicted, %", ylim=(-3, 103))
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return _svg(figure)


def plot_neurons(neurons: Mapping[str, Any]) -> str:
    """Selected neurons per layer."""
    figure = Figure(figsize=(8.6, 2.4))
    axes = _axes(figure)
    counts: Sequence[int] = neurons["per_layer"]
    axes.bar(range(len(counts)), counts, color=_FORGET)
    axes.set(xlabel="layer", ylabel=f"neurons of {neurons['of']:,}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _svg(figure)


def plot_steps(steps: Sequence[Mapping[str, Any]]) -> str:
    """Loss terms, gradient norm and clipped share per step."""
    figure = Figure(figsize=(8.6, 2.4))
    left, right = _axes(figure, 121), _axes(figure, 122)
    for key, color in (("forget_loss", _FORGET), ("retain_loss", _RETAIN)):
        points = [(row["step"], row[key]) for row in steps if row.get(key) is not None]
        if points:
            left.plot(*zip(*points, strict=True), color=color, linewidth=1, label=key.replace("_", " "))
    for key, color in (("grad_norm", _GREY), ("clip_fraction", _RETAIN)):
        points = [(row["step"], row[key]) for row in steps if row.get(key) is not None]
        if points:
            right.plot(*zip(*points, strict=True), color=color, linewidth=1, label=key.replace("_", " "))
    left.set(xlabel="step", ylabel="objective's terms")
    right.set(xlabel="step")
    for axes in (left, right):
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return _svg(figure)


def plot_comparison(comparison: Mapping[str, Any]) -> str:
    """Trajectories of all runs, forgetting against utility, with the matched level."""
    metric, utility = comparison["level_metric"], comparison["utility_metric"]
    key, utility_key = ("mean_nll" if name == "loss" else name for name in (metric, utility))
    figure = Figure(figsize=(8.6, 3.4))
    axes = _axes(figure)
    names = [arm["arm"] for arm in comparison["arms"]]
    palette = ["#c2410c", "#1d4ed8", "#15803d", "#a21caf", "#0e7490", "#a16207", "#475569", "#be123c", "#4338ca"]
    for run in comparison["runs"]:
        index = names.index(run["arm"])
        axes.plot(
            [point["forget"][key] for point in run["trajectory"]],
            [point["retain"][utility_key] for point in run["trajectory"]],
            color=palette[index % len(palette)],
            linewidth=1.2,
            label=run["arm"] if run["seed"] == comparison["seeds"][0] else None,
        )
    axes.axvline(comparison["level"], color=_GREY, linestyle="--", label="matched level")
    axes.set(xlabel=f"forget set: {metric.replace('_', ' ')}", ylabel=f"retain set: {utility.replace('_', ' ')}")
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure)
