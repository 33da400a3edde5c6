"""Wall time by stage."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autoshard.processes import stopwatch
from autoshard.processes.stopwatch import Stopwatch


class Clock:
    """A clock that is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(stopwatch, "time", SimpleNamespace(monotonic=lambda: self.now_s))


def test_a_stage_within_another_has_its_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watch = Stopwatch()
    clock.now_s += 1  # of no stage
    with watch.stage("verify"):
        clock.now_s += 2
        with watch.stage("compile"):
            clock.now_s += 4
            with watch.stage("verify"):
                clock.now_s += 8
        clock.now_s += 16
    with watch.stage("compile"):
        clock.now_s += 32
    assert watch.seconds == {"verify": 26.0, "compile": 36.0}
    assert watch.counts == {"verify": 2, "compile": 2}
    assert watch.mean_s("compile") == 18.0
    assert watch.mean_s("measure") == 0.0
    assert watch.total_s == 63.0


def test_what_fails_took_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watch = Stopwatch()

    def fail() -> None:
        with watch.stage("outer"):
            clock.now_s += 1
            with watch.stage("inner"):
                clock.now_s += 2
                raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.now_s += 4
    assert watch.seconds == {"inner": 2.0, "outer": 1.0}
