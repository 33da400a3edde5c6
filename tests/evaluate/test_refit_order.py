"""The order of candidates revised by evidence: hardware described ten times wrongly does not decide
the winner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import autoshard
from autoshard.cost_model.hardware.hardware import Hardware, Link, hardware_for
from autoshard.cost_model.hardware.step_components import step_components
from autoshard.evaluate import device_runner, refit, selection
from autoshard.evaluate.effort import Effort
from autoshard.evaluate.evaluation import Evaluation
from autoshard.evidence.candidate import Candidate, Measured
from autoshard.evidence.collectives import Collective
from tests.models import mlp_args, mlp_step
from tests.stages import mesh_of

AXES = {"data": 4, "model": 2}
SLOW, FAST = Link(alpha_s=0.0, bytes_per_s=1e9), Link(alpha_s=0.0, bytes_per_s=1e10)
BASE = hardware_for("tpu_v5e")
GIVEN = BASE.with_links({"data": SLOW, "model": FAST})
TRUE = BASE.with_links({"data": FAST, "model": SLOW})
"""Both links ten times off, in opposite directions."""


def seconds(hardware: Hardware, collectives: tuple[Collective, ...]) -> float:
    return step_components(hardware, AXES, 1e-9, collectives).step_s(0.0)


def clock(compiled: Mapping[str, Any], *_: Any, **__: Any) -> dict[str, Measured]:
    """What a clock would say on the true hardware."""
    found = {name: seconds(TRUE, c.evidence.collectives) for name, c in compiled.items()}
    return {name: Measured(s, 7, (s,) * 7) for name, s in found.items()}


def searched(monkeypatch: pytest.MonkeyPatch, challenges: int) -> tuple[Candidate, list[Candidate]]:
    monkeypatch.setattr(device_runner, "measure", clock)
    monkeypatch.setattr(selection, "REEVALUATIONS", challenges)
    plan = autoshard.optimize(
        mlp_step, mlp_args(batch=64, d=128, h=256), mesh_of(**AXES), hardware=GIVEN, progress=False,
        memory_budget_bytes="500KiB", effort=Effort(compiled=6, measured=3),
    )  # fmt: skip
    winner = next(t for t in plan.candidates if t.status == "winner")
    return winner, list(plan.candidates)


def test_what_the_clock_says_brings_others_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    misled, _ = searched(monkeypatch, 0)
    winner, candidates = searched(monkeypatch, 2)
    assert misled.measured is not None
    assert winner.measured is not None
    assert winner.measured.median_s < 0.8 * misled.measured.median_s
    known = [
        t.compiled.collectives
        for t in candidates
        if t.compiled is not None and t.status != "rejected"
    ]
    assert winner.measured.median_s <= 1.05 * min(seconds(TRUE, c) for c in known)


def test_programs_say_how_far_predictions_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[refit.Refit] = []

    class Seen(refit.Refit):
        def __init__(self, of: Evaluation) -> None:
            super().__init__(of)
            seen.append(self)

    monkeypatch.setattr(selection, "Refit", Seen)
    searched(monkeypatch, 0)
    assert len(seen) == 1
    assert seen[0].to_compiled[True].programs >= 2
    assert seen[0].to_measured.programs == 0
