# SPDX-License-Identifier: Apache-2.0
"""Long work says how far it is: a bar on a terminal, a line now and then in a log, nothing where it is not wanted."""

import pytest

from lazyattention import envs
from lazyattention.quality import progress
from lazyattention.quality.progress import progress_bar


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is told to move."""

    class Clock:
        now_s = 1000.0

        def move(self, seconds):
            self.now_s += seconds

    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now_s)
    return clock


@pytest.fixture(autouse=True)
def wanted(monkeypatch):
    monkeypatch.setattr(envs, "PROGRESS", True)


def test_a_log_gets_a_line_now_and_then(clock, capsys):
    with progress_bar("measuring notes-5", 200) as advance:
        for _ in range(200):
            clock.move(1.0)
            advance(1)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "measuring notes-5: 0 of 200",
        "measuring notes-5: 30 of 200, 0:00:30, 0:02:50 left",
        "measuring notes-5: 60 of 200, 0:01:00, 0:02:20 left",
        "measuring notes-5: 90 of 200, 0:01:30, 0:01:50 left",
        "measuring notes-5: 120 of 200, 0:02:00, 0:01:20 left",
        "measuring notes-5: 150 of 200, 0:02:30, 0:00:50 left",
        "measuring notes-5: 180 of 200, 0:03:00, 0:00:20 left",
        "measuring notes-5: 200 of 200 done in 0:03:20",
    ]


def test_what_an_earlier_run_did_does_not_make_this_one_look_fast(clock, capsys):
    with progress_bar("training", 300) as advance:
        advance(100)
        clock.move(40.0)
        advance(1, "loss 0.5")
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "training: 101 of 300, 0:00:40, 2:12:40 left; loss 0.5"


def test_slow_steps_give_a_line_each_and_the_first_no_forecast(clock, capsys):
    with progress_bar("training", 3) as advance:
        for note in ("a [b] c", None, "d"):
            clock.move(3600.0)
            advance(1, note)
    assert capsys.readouterr().err.splitlines() == [
        "training: 0 of 3",
        "training: 1 of 3, 1:00:00; a [b] c",
        "training: 2 of 3, 2:00:00, 1:00:00 left; a [b] c",
        "training: 3 of 3 done in 3:00:00; d",
    ]


def test_quick_work_is_announced_only(clock, capsys):
    with progress_bar("answering", 4) as advance:
        advance(4)
    assert capsys.readouterr().err == "answering: 0 of 4\n"


def test_nothing_is_said_where_it_is_not_wanted(clock, capsys, monkeypatch):
    def work(total, **more):
        with progress_bar("answering", total, **more) as advance:
            clock.move(100.0)
            advance(1, note="x")

    work(4, is_enabled=False)
    work(0)
    monkeypatch.setattr(envs, "PROGRESS", False)
    work(4)
    assert capsys.readouterr().err == ""


def test_failed_work_is_not_called_done(clock, capsys):
    def work():
        with progress_bar("answering", 4):
            clock.move(100.0)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert "done" not in capsys.readouterr().err


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("answering", 4) as advance:
        advance(2, "half")
    err = capsys.readouterr().err
    assert "\x1b[" in err
    assert "answering: 0 of 4" not in err
