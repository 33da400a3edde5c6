"""Which of the measured candidates wins: the clock decides; within noise the prediction, then the canonical form."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import autoshard
from autoshard.race import Candidate, Race
from autoshard.trial import Measured, Predicted, Trial
from tests.models import mlp_args, mlp_step
from tests.stages import mesh_of

NOISY = tuple(0.010 + 0.0002 * (i % 5) for i in range(15))


@pytest.fixture(scope="module")
def layout() -> Any:
    return autoshard.apply(mlp_step, mlp_args(), mesh_of(data=4, model=2), "dp").layout


def candidate(layout: Any, key: str, predicted_s: float, seconds: tuple[float, ...]) -> Candidate:
    trial = Trial(key, "search", (), "anchors", key, predicted=Predicted(predicted_s, 0, 0))
    median = sorted(seconds)[len(seconds) // 2]
    proposal: Any = SimpleNamespace(prediction=trial.predicted)
    measured = Measured(median, len(seconds), seconds)
    return Candidate(layout, proposal, replace(trial, status="measured", measured=measured))


def winner(*candidates: Candidate) -> str:
    keys = {Race.fastest(None, order).trial.key for order in (candidates, candidates[::-1])}  # type: ignore[arg-type]
    (key,) = keys
    return key


def test_the_clock_decides_what_is_clear(layout: Any) -> None:
    slow = tuple(2 * s for s in NOISY)
    assert winner(candidate(layout, "a", 1.0, slow), candidate(layout, "b", 9.0, NOISY)) == "b"


def test_within_noise_the_prediction_decides(layout: Any) -> None:
    other = NOISY[::-1]
    assert winner(candidate(layout, "a", 2.0, NOISY), candidate(layout, "b", 1.0, other)) == "b"


def test_with_equal_predictions_the_canonical_form_decides(layout: Any) -> None:
    other = NOISY[::-1]
    assert winner(candidate(layout, "b", 1.0, NOISY), candidate(layout, "a", 1.0, other)) == "a"
