# SPDX-License-Identifier: Apache-2.0
"""The host's way before a step is measured on what a GPU would be given, with every piece in its total."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import host_path


def test_every_piece_is_timed_and_lies_within_the_whole():
    ms = host_path.measure(runs=3, num_documents=2, document_len=40)
    assert {label for label, _, _ in host_path.PIECES} < set(ms)
    assert all(value > 0 for value in ms.values())
    parts = ("add_request", "schedule", "build batch", "plan and inputs of the graph")
    assert sum(ms[part] for part in parts) < 2 * ms["until launch"] < 2 * ms["until the step's end"]
    assert ms["  of it: layout"] < ms["plan and inputs of the graph"]


def test_the_step_after_a_request_joined_is_timed_planned_ahead_and_not():
    ms = host_path.measure_joins(runs=2, num_running=2, num_documents=2, document_len=40)
    assert len(ms) == 2
    assert all(value > 0 for value in ms.values())


def test_plans_are_timed_alone_and_kept(tmp_path):
    host_path.main(["--plan", str(tmp_path / "plan_cpu.json")])
    report = json.loads((tmp_path / "plan_cpu.json").read_text())
    plan, parts = report["plan"], ("layout", "packing", "collecting rows", "sending", "views")
    assert 0 < plan["same batch, one token on, ms"] < plan["another batch, ms"]
    assert all(0 < plan[f"of it: {part}, ms"] < plan["another batch, ms"] for part in parts)
    assert report["environment"]["processor"]
