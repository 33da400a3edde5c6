"""Which of the measured candidates wins: the clock decides; within noise the prediction, then the
canonical form."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import autoshard
from autoshard.evaluate.entry import Entry
from autoshard.evaluate.evaluation import fastest
from autoshard.evaluate.selection import by_compiled_time
from autoshard.evidence.candidate import Candidate, Measured, Origin, Predicted, Status
from tests.models import mlp_args, mlp_step
from tests.stages import mesh_of

NOISY = tuple(0.010 + 0.0002 * (i % 5) for i in range(15))


@pytest.fixture(scope="module")
def layout() -> Any:
    return autoshard.apply(mlp_step, mlp_args(), mesh_of(data=4, model=2), "dp").layout


def entry(layout: Any, key: str, predicted_s: float, seconds: tuple[float, ...]) -> Entry:
    predicted = Predicted(predicted_s, 0, 0)
    candidate = Candidate(key, Origin.SEARCH, (), "anchors", key, predicted=predicted)
    median = sorted(seconds)[len(seconds) // 2]
    proposal: Any = SimpleNamespace(prediction=predicted, layout=layout)
    measured = Measured(median, len(seconds), seconds)
    return Entry(proposal, replace(candidate, status=Status.MEASURED, measured=measured))


def winner(*entries: Entry) -> str:
    keys = {fastest(order).key for order in (entries, entries[::-1])}
    (key,) = keys
    return key


def test_the_clock_decides_what_is_clear(layout: Any) -> None:
    slow = tuple(2 * s for s in NOISY)
    assert winner(entry(layout, "a", 1.0, slow), entry(layout, "b", 9.0, NOISY)) == "b"


def test_within_noise_the_prediction_decides(layout: Any) -> None:
    other = NOISY[::-1]
    assert winner(entry(layout, "a", 2.0, NOISY), entry(layout, "b", 1.0, other)) == "b"


def test_with_equal_predictions_the_canonical_form_decides(layout: Any) -> None:
    other = NOISY[::-1]
    assert winner(entry(layout, "b", 1.0, NOISY), entry(layout, "a", 1.0, other)) == "a"


def compiled(layout: Any, key: str, seconds: float, rules: int, preset: str | None = None) -> Entry:
    candidate = Candidate(
        key,
        Origin.SEARCH if preset is None else Origin.PRESET,
        (),
        "anchors",
        key,
        preset=preset,
        predicted=Predicted(seconds, 0, 0),
    )
    shorter = replace(layout, rules=layout.rules[:rules])
    proposal: Any = SimpleNamespace(prediction=candidate.predicted, layout=shorter)
    return Entry(proposal, candidate)


def test_of_what_compiles_as_good_as_equal_the_fewest_rules_win(layout: Any) -> None:
    found = by_compiled_time(
        [
            compiled(layout, "a", 1.0, 2),
            compiled(layout, "b", 1.009, 1),
            compiled(layout, "c", 2, 0),
        ]
    )
    assert [c.candidate.key for c in found] == ["b", "a", "c"]


@pytest.mark.parametrize(("preset_s", "wins"), [(1.02, "b"), (1.005, "a"), (1.0, "p")])
def test_but_nothing_slower_than_a_preset_wins(layout: Any, preset_s: float, wins: str) -> None:
    searched = [
        compiled(layout, "a", 1.0 if preset_s > 1 else 1.001, 2),
        compiled(layout, "b", 1.009, 1),
    ]
    assert (
        by_compiled_time([*searched, compiled(layout, "p", preset_s, 2, "p")])[0].candidate.key
        == wins
    )
