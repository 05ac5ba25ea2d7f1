# SPDX-License-Identifier: Apache-2.0
"""The tuning tool refuses what is wrong, changes nothing but the order and cut of the work, and puts the best first."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

pytest.importorskip("triton")

import tune_ops
from tune_ops import NO_TURN, TOLERANCE, DecodeSetting, MergeShape, check_problem, decode_layer, error_of, mix

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there the tool itself checks the compiled kernels")
BASELINE = DecodeSetting(tune_ops.TILES.decode_few, tune_ops.TILES.decode_many)


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    return check_problem(24, 32)


@pytest.mark.parametrize(
    "setting",
    [BASELINE, replace(BASELINE, is_mixed=True, part_keys=16), replace(BASELINE, merge=MergeShape(4, 4, 4))],
    ids=["before", "mixed, short parts", "merge"],
)
def test_settings_change_nothing_but_the_time(small, setting):
    assert error_of(small, decode_layer, setting) < TOLERANCE


def test_wrong_turns_and_unwritten_outputs_are_seen(small):
    assert error_of(small, lambda problem, setting, _: decode_layer(problem, setting, NO_TURN), BASELINE) > 0.1
    # Without the merge nothing is written: the poison stays.
    unmerged = error_of(small, lambda *arguments: decode_layer(*arguments, "attend"), BASELINE)
    assert not unmerged < TOLERANCE


def test_mixing_keeps_every_task_and_longest_first_among_the_long(small):
    plan = tune_ops.build_device_plan(small.arrays, small.positions, small.spec(), tune_ops.DEVICE)
    tasks = plan.decode[-1].tasks
    mixed = mix(tasks)
    assert sorted(mixed.tolist()) == sorted(tasks.tolist())
    is_short = mixed[:, 4] == tune_ops.NO_END
    assert bool(is_short[: len(mixed) // 2].any())
    assert not bool(is_short[-1])
    assert mixed[~is_short].tolist() == tasks[tasks[:, 4] != tune_ops.NO_END].tolist()


def test_tuning_keeps_what_was_there_unless_something_is_clearly_better(tmp_path, monkeypatch):
    """Kernels that do not compile or are wrong are left out; a gain within the noise does not count."""
    fast, broken, wrong = tune_ops.FEW[2], tune_ops.FEW[3], tune_ops.FEW[4]
    problem = check_problem(2, 32)
    monkeypatch.setattr(tune_ops, "decode_problems", lambda: {"2 a=1.0": problem, "64 a=0.0": problem})
    monkeypatch.setattr(tune_ops, "error_of", lambda *arguments: float("nan") if arguments[2].few == wrong else 0.003)
    monkeypatch.setattr(tune_ops, "decode_layer", lambda _problem, setting, *_: (None, setting))
    monkeypatch.setattr(tune_ops, "turn_cost", lambda *_: 0.0)

    def samples(_timer, launches, rounds, num_layers=4):
        def time_of(setting):
            return (0.8 if setting.few == fast else 1.0) * (0.998 if setting.priority else 1.0)

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
