# SPDX-License-Identifier: Apache-2.0
"""One picture of a run: how far each option is from full attention, over all questions and by group."""

from pathlib import Path
from typing import Any

from lazyattention.quality.options import FULL_ATTENTION
from lazyattention.utils.packages import require_package


def save_plot(summary: dict[str, Any], path: Path, title: str) -> None:
    """Draw differences to full attention with their intervals.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_package("matplotlib", "drawing plot.png", "quality")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    options = [name for name in summary["options"] if name != FULL_ATTENTION]
    has_golds = all("gold_nll" in summary["options"][name] for name in options)
    metric, label = ("gold_nll", "gold answer") if has_golds else ("nll", "full attention's answer")
    groups = [("all", summary)]
    groups += [(f"{group} documents", part) for group, part in summary["by_num_documents"].items()]
    groups += [(f"gold {group}", part) for group, part in summary["by_gold_position"].items()]
    figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.45 * len(groups)), layout="constrained")
    for row, name in enumerate(options):
        for place, (_, part) in enumerate(groups):
            entry = part["options"][name].get(metric)
            if entry is None:
                continue
            difference = entry["difference"]
            errors = [[difference["mean"] - difference["low"]], [difference["high"] - difference["mean"]]]
            height = place + 0.22 * (row - (len(options) - 1) / 2)
            axes.errorbar(
                difference["mean"], height, xerr=errors, fmt="o", color=f"C{row}", label=name if place == 0 else None
            )
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(groups)), [f"{name} ({part['num_questions']})" for name, part in groups])
    axes.invert_yaxis()
    axes.set_xlabel(f"NLL of the {label} above full attention's, nats per token (95 % interval)")
    axes.set_title(title, loc="left")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
