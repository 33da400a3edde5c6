"""The clock: interleaving, dropping, stopping and intervals. Time is made here, so nothing depends
on the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.evaluate import measure as module
from autoshard.evaluate.measure import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    WARM_UP,
    RunError,
    measure,
    ratio_interval,
)

seconds = st.lists(st.floats(1e-6, 10), min_size=1, max_size=12)


@given(seconds)
def test_a_candidate_against_itself_is_one(a: list[float]) -> None:
    found = ratio_interval(a, a)
    assert found.low == found.ratio == found.high == 1.0


@given(seconds, seconds)
def test_the_ratio_is_that_of_the_medians_of_the_rounds_both_ran(
    a: list[float], b: list[float]
) -> None:
    n = min(len(a), len(b))
    found = ratio_interval(a, b)
    assert found.ratio == pytest.approx(np.median(a[:n]) / np.median(b[:n]))
    assert found.low <= found.high
    assert min(a) / max(b) * 0.999 <= found.low
    assert found.high <= max(a) / min(b) * 1.001


@given(seconds, seconds, st.floats(0.1, 10))
def test_the_interval_scales(a: list[float], b: list[float], factor: float) -> None:
    base, scaled = ratio_interval(a, b), ratio_interval([factor * x for x in a], b)
    for name in ("low", "ratio", "high"):
        assert getattr(scaled, name) == pytest.approx(factor * getattr(base, name))


@given(seconds, seconds)
def test_the_same_seed_gives_the_same_interval(a: list[float], b: list[float]) -> None:
    assert ratio_interval(a, b) == ratio_interval(a, b)


def test_a_clear_difference_excludes_one_and_noise_does_not() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(1.0, 0.02, (2, 15))
    assert ratio_interval(2 * a, b).low > 1.5
    close = ratio_interval(a, b)
    assert close.low < 1 < close.high


# The race


@dataclass
class Clock:
    """A clock that moves only when a candidate runs."""

    now: float = 0.0
    log: list[str] = field(default_factory=list)

    def candidate(self, name: str, takes: Callable[[int], float]) -> Any:
        def run(*leaves: Any) -> list[Any]:
            self.log.append(name)
            self.now += takes(self.log.count(name))
            return list(leaves)

        return SimpleNamespace(run=run, built=built(name))


def built(name: str) -> Any:
    return SimpleNamespace(in_shardings=(name,), in_same_memory=list)


class Inputs:
    """Counts how often inputs were made, by candidate."""

    def __init__(self, donated: Sequence[bool] = (False,)) -> None:
        self.call = SimpleNamespace(donated=tuple(donated))
        self.made: list[str] = []

    def place(self, shardings: Sequence[Any]) -> list[Any]:
        self.made.append(shardings[0])
        return [np.zeros(1)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module.time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(jax, "block_until_ready", lambda x: x)
    return made


def constant(value: float) -> Callable[[int], float]:
    return lambda _: value


def test_candidates_take_turns_after_warming_up(clock: Clock) -> None:
    candidates = {n: clock.candidate(n, constant(1 + i / 10)) for i, n in enumerate("abc")}
    found = measure(candidates, Inputs(), ())
    assert clock.log[: 3 * WARM_UP] == ["a"] * WARM_UP + ["b"] * WARM_UP + ["c"] * WARM_UP
    timed = "".join(clock.log[3 * WARM_UP :])
    assert timed == "abc" * (len(timed) // 3)
    assert {n: round(m.median_s, 6) for n, m in found.items()} == {"a": 1.0, "b": 1.1, "c": 1.2}
    assert all(m.rounds == len(m.seconds) == MIN_ROUNDS for m in found.values()), (
        "the order was clear"
    )


def test_an_unclear_order_is_measured_to_the_end(clock: Clock) -> None:
    candidates = {n: clock.candidate(n, constant(1.0)) for n in "ab"}
    assert {m.rounds for m in measure(candidates, Inputs(), ()).values()} == {MAX_ROUNDS}


def test_out_of_time_means_no_more_than_the_fewest_rounds(clock: Clock) -> None:
    candidates = {n: clock.candidate(n, constant(1.0)) for n in "ab"}
    assert {m.rounds for m in measure(candidates, Inputs(), (), late=lambda: True).values()} == {
        MIN_ROUNDS
    }


def test_the_hopeless_are_dropped_early(clock: Clock) -> None:
    candidates = {
        n: clock.candidate(n, constant(t)) for n, t in {"a": 1.0, "slow": 9.0, "near": 1.9}.items()
    }
    found = measure(candidates, Inputs(), ())
    assert found["slow"].rounds == 2
    assert found["near"].rounds == found["a"].rounds == MIN_ROUNDS


def test_one_slow_round_drops_nobody(clock: Clock) -> None:
    candidates = {
        "a": clock.candidate("a", constant(1.0)),
        "b": clock.candidate("b", lambda n: 50.0 if n == WARM_UP + 1 else 0.9),
    }
    found = measure(candidates, Inputs(), ())
    assert found["b"].rounds >= MIN_ROUNDS
    assert found["b"].median_s == pytest.approx(0.9)


def test_inputs_are_made_once_unless_they_do_not_fit_together(clock: Clock) -> None:
    candidates = {n: clock.candidate(n, constant(1.0 + (n == "b"))) for n in "ab"}
    inputs = Inputs()
    measure(candidates, inputs, ())
    assert sorted(inputs.made) == ["a", "b"]
    inputs = Inputs()
    found = measure(candidates, inputs, (), keep_inputs=False)
    assert inputs.made.count("a") == 1 + found["a"].rounds


def test_donated_inputs_are_fed_back_or_made_again(clock: Clock) -> None:
    fed, consumed = Inputs([True]), Inputs([True])
    measure({"a": clock.candidate("a", constant(1.0))}, fed, [(0, 0)])  # type: ignore[arg-type]
    assert fed.made == ["a"]
    found = measure({"a": clock.candidate("a", constant(1.0))}, consumed, ())  # type: ignore[arg-type]
    assert len(consumed.made) == WARM_UP + found["a"].rounds


def test_a_candidate_that_does_not_run_is_named(clock: Clock) -> None:
    def fails(*_: Any) -> Any:
        raise MemoryError("RESOURCE_EXHAUSTED: out of memory\nmore")

    broken = SimpleNamespace(run=fails, built=built("b"))
    with pytest.raises(
        RunError, match=r"^b: MemoryError: RESOURCE_EXHAUSTED: out of memory$"
    ) as error:
        measure({"a": clock.candidate("a", constant(1.0)), "b": broken}, Inputs(), ())
    assert error.value.name == "b"


def test_medians_are_told_round_by_round(clock: Clock) -> None:
    told: list[tuple[int, float]] = []
    candidates = {"a": clock.candidate("a", lambda n: float(n - WARM_UP))}
    found = measure(
        candidates, Inputs(), (), on_round=lambda n, medians: told.append((n, medians["a"]))
    )
    assert told[:3] == [(1, 1.0), (2, 1.5), (3, 2.0)]
    assert found["a"].median_s == told[-1][1]
