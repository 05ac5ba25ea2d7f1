# SPDX-License-Identifier: Apache-2.0
"""The page on metrics names every metric and probe, and no other."""

import re
from pathlib import Path

from lazyattention.unlearn.metrics import METRICS
from lazyattention.unlearn.probes import PROBES, ProbeOptions

PAGE = (Path(__file__).parents[2] / "docs" / "unlearning_metrics.md").read_text(encoding="utf-8")


def rows(title):
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)


def test_tables_list_what_is_registered():
    assert sorted(rows("Metrics")) == sorted(METRICS)
    assert sorted(rows("Probes")) == sorted(PROBES)


def test_defaults_stand_on_the_page():
    options = ProbeOptions()
    assert f"{options.quantize_bits} bits" in PAGE
    assert f"groups of {options.quantize_group_size}" in PAGE
    assert ", ".join(map(str, options.relearn_steps)) in PAGE
    assert f"{options.relearn_fraction:.0%}".replace("%", " %") + " of forget" in PAGE
    assert f"first {options.answer_start_fraction:.0%}".replace("%", " %") in PAGE
