# SPDX-License-Identifier: Apache-2.0
"""The tuning tool refuses what is wrong, changes nothing but the order and cut of the work, and puts the best first."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

pytest.importorskip("triton")

import tune_ops
from tune_ops import NO_TURN, TOLERANCE, DecodeSetting, TileShape, check_problem, decode_layer, error_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there the tool itself checks the compiled kernels")
BASELINE = DecodeSetting(tune_ops.TILES.decode_few, tune_ops.TILES.decode_many)


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    return check_problem(24, 32)


@pytest.mark.parametrize(
    "setting",
    [BASELINE, DecodeSetting(TileShape(32, 16, 4, 2), TileShape(64, 16, 4, 2, 3), merge_warps=1, priority=0)],
    ids=["before", "all else"],
)
def test_settings_change_nothing_but_the_time(small, setting):
    assert error_of(small, decode_layer, setting) < TOLERANCE


def test_wrong_turns_and_unwritten_outputs_are_seen(small):
    assert error_of(small, lambda problem, setting, _: decode_layer(problem, setting, NO_TURN), BASELINE) > 0.1
    # Without the merge nothing is written: the poison stays.
    unmerged = error_of(small, lambda *arguments: decode_layer(*arguments, "attend"), BASELINE)
    assert not unmerged < TOLERANCE


def test_tuning_keeps_what_was_there_unless_something_is_clearly_better(tmp_path, monkeypatch):
    """Kernels that do not compile or are wrong are left out; a gain within the noise does not count."""
    fast, broken, wrong = tune_ops.FEW[1:4]
    problem = check_problem(2, 32)
    monkeypatch.setattr(tune_ops, "decode_problems", lambda: {"2 a=1.0": problem, "64 a=0.0": problem})
    monkeypatch.setattr(tune_ops, "error_of", lambda *arguments: float("nan") if arguments[2].few == wrong else 0.003)
    monkeypatch.setattr(tune_ops, "decode_layer", lambda _problem, setting, *_: (None, setting))
    monkeypatch.setattr(tune_ops, "turn_cost", lambda *_: 0.0)

    def samples(_timer, launches, rounds, num_layers=4):
        def time_of(setting):
            return (0.8 if setting.few == fast else 1.0) * (1.0 if setting.priority else 0.998)

        return {name: [time_of(setting)] * rounds for name, setting in launches.items()}

    monkeypatch.setattr(tune_ops.Timer, "samples", samples)

    class Pool:
        def apply_async(self, _function, arguments):
            self.last = arguments
            return type("Result", (), {"get": lambda _self, _wait: (1.0, "no" if arguments[1] == broken else "")})()

    run = tune_ops.Tuning(tmp_path / "tune.json", 1e9, Pool())
    run.results["ceilings"] = {"read_tb_s": 4.5}
    tune_ops.tune_decode(run)
    best = run.results["decode"]["best"]
    assert (best["few"], best["priority"]) == (tune_ops.dataclasses.asdict(fast), tune_ops.SIDE_PRIORITY)
    timed = set(itertools.chain(*run.results["decode"]["stages"]["tiles"].values()))
    assert len(timed) == (len(tune_ops.FEW) - 2) * len(tune_ops.MANY)
    assert sum("WRONG" in line for line in run.table) == 1


def test_as_is_times_what_the_table_has_and_tries_nothing_else(tmp_path, monkeypatch):
    problem = check_problem(2, 32)
    monkeypatch.setattr(tune_ops, "decode_problems", lambda: {"2 a=1.0": problem})
    monkeypatch.setattr(tune_ops, "error_of", lambda *_: 0.003)
    monkeypatch.setattr(tune_ops, "turn_cost", lambda *_: 0.0)
    timed = []

    def samples(_timer, launches, rounds, num_layers=4):
        timed.extend(launches)
        return {name: [1.0] * rounds for name in launches}

    monkeypatch.setattr(tune_ops.Timer, "samples", samples)

    class Pool:
        def apply_async(self, *_):
            return type("Result", (), {"get": lambda _self, _wait: (1.0, "")})()

    run = tune_ops.Tuning(tmp_path / "tune.json", 1e9, Pool())
    run.results["ceilings"] = {"read_tb_s": 4.5}
    tune_ops.tune_decode(run, as_is=True)
    assert run.results["decode"]["best"] == tune_ops.dataclasses.asdict(BASELINE)
    assert run.results["decode"]["stages"] == {}
    assert {name.split(",")[0] for name in timed} == {"before", "best"}
    monkeypatch.setattr(tune_ops, "error_of", lambda *_: 1.0)
    run = tune_ops.Tuning(tmp_path / "tune.json", 1e9, Pool())
    run.results["ceilings"] = {"read_tb_s": 4.5}
    tune_ops.tune_decode(run, as_is=True)
    assert "final" not in run.results["decode"]
