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


def test_no_method_is_left_out_because_the_first_run_lacks_it():
    warm = {"ttft_p50_ms": 10.0, "ttft_p95_ms": 20.0, "requests_per_s": 8.0, "hit_rate": 0.5}
    settings = {"alpha": 1.0, "documents_per_request": 3, "document_len": "24", "budget": 1.0, "load": 0.0}
    few, many = ["rotate_query", "prefix"], ["rotate_query", "copy_rotate", "prefix", "full_recompute"]
    runs = [
        {"settings": settings, "methods": {method: {"warm": warm} for method in methods}} for methods in (few, many)
    ]
    results = {"model": "m", "runs": runs, "left_out": [], "commit": "c", "environment": {"gpu": ["g"]}}
    results["environment"]["versions"] = {"torch": "2"}
    section = report.serving_section([results])
    head, _, first, second = section.strip().splitlines()[-4:]
    assert head.split("|")[9:12] == [" `copy_rotate` ", " `prefix` ", " `full_recompute` "]
    assert [first.count(" - "), second.count(" - ")] == [2, 0]
    assert "In 4 comparisons" in section


def test_the_page_is_what_the_results_say_and_within_the_house_width():
    page = report.build_page()
    assert page == report.PAGE.read_text(), "run `python benchmarks/report.py`"
    assert max(len(line) for line in page.splitlines() if not line.startswith("|")) <= 130
