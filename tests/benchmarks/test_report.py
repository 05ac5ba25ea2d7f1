# SPDX-License-Identifier: Apache-2.0
"""The benchmark page says what the results say."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_serving
import report


def test_serving_tables_come_from_the_sweeps_own_report(tmp_path):
    path = tmp_path / "serving.json"
    bench_serving.main(["--smoke", "--out", str(path)])
    results = json.loads(path.read_text())
    warm = results["runs"][0]["methods"]["rotate_query"]["warm"]
    warm |= {"ttft_p50_ms": 10.0, "ttft_p95_ms": 20.0, "requests_per_s": 8.0, "hit_rate": 0.5}
    results["runs"][0]["methods"]["prefix"]["warm"] |= {"ttft_p50_ms": 35.0, "requests_per_s": 16.0}
    del results["runs"][0]["methods"]["copy_rotate"]["warm"]
    results["runs"].append({**results["runs"][0], "settings": {**results["runs"][0]["settings"], "load": 0.6}})
    results["runs"][0]["methods"] = {m: p for m, p in results["runs"][0]["methods"].items() if "warm" in p}
    results["runs"][1]["methods"] = results["runs"][0]["methods"]
    section = report.serving_section([results])
    head, _, closed, opened = section.strip().splitlines()[-4:]
    assert head.split("|")[9:11] == [" `rotate_key` ", " `prefix` "]
    assert closed.startswith("| 1.0 | 3 | 24-40 | 1.0 | closed | 10, 20 | 8.0 | 50% |")
    assert closed.split("|")[10] == " 3.50 x, 0.50 x "
    assert opened.split("|")[5] == " 0.6 "
    assert "tiny (random weights)" in section


def test_the_page_is_what_the_results_say_and_within_the_house_width():
    page = report.build_page()
    assert page == report.PAGE.read_text(), "run `python benchmarks/report.py`"
    assert max(len(line) for line in page.splitlines() if not line.startswith("|")) <= 130
