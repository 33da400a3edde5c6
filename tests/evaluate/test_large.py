"""A function that does not fit on one device: compared with a second layout, and at smaller
sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import autoshard
from autoshard import Effort
from autoshard.cost_model.hardware.hardware import hardware_for
from autoshard.evaluate import evaluation
from tests.models import decoder_args, decoder_step, mlp_args, mlp_step

TINY = dataclasses.replace(hardware_for("cpu"), memory_bytes=40_000)
EFFORT = Effort(compiled=4, measured=0)


@pytest.mark.parametrize(
    ("step", "args"), [(mlp_step, mlp_args(32, 64, 128)), (decoder_step, decoder_args())]
)
def test_a_second_layout_and_smaller_sizes_vouch_for_what_fits_on_no_single_device(
    step: Any, args: Any
) -> None:
    plan = autoshard.optimize(
        step, args, "data=4,model=2", hardware=TINY, donate_argnums=0, effort=EFFORT, progress=False
    )
    assert plan.verified
    assert "layout" in str(plan.verified)
    assert "unsharded function at sizes divided by up to" in str(plan.verified)


def test_without_a_second_layout_the_plan_says_why_it_is_not_verified() -> None:
    plan = autoshard.optimize(
        mlp_step,
        mlp_args(32, 64, 128),
        "data=8",
        hardware=TINY,
        effort=Effort(compiled=1, measured=0),
        progress=False,
    )
    assert not plan.verified
    assert "no second layout" in str(plan.verified)


@pytest.mark.parametrize("measured", [0, 1])
def test_what_the_host_has_no_memory_for_is_not_run(
    monkeypatch: pytest.MonkeyPatch, measured: int
) -> None:
    monkeypatch.setattr(evaluation, "host_bytes", lambda: 1000)
    plan = autoshard.optimize(
        mlp_step,
        mlp_args(),
        "data=4,model=2",
        effort=Effort(compiled=2, measured=measured),
        progress=False,
    )
    assert not plan.verified
    assert "not run: it needs" in str(plan.verified)
    assert "this host has 1000 B" in str(plan.verified)
    assert not any(candidate.measured for candidate in plan.candidates)


def test_what_fits_on_the_host_is_run_beside_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {
        name: autoshard.apply(mlp_step, mlp_args(), "data=4,model=2", name)
        .compile()
        .evidence.peak_bytes
        for name in ("replicated", "fsdp")
    }
    assert peaks["fsdp"] < peaks["replicated"]
    monkeypatch.setattr(evaluation, "host_bytes", lambda: 8 * peaks["replicated"] - 1)
    plan = autoshard.optimize(
        mlp_step,
        mlp_args(),
        "data=4,model=2",
        effort=Effort(compiled=6, measured=3),
        progress=False,
    )
    assert plan.verified
    for candidate in plan.candidates:
        assert (
            candidate.compiled is None
            or candidate.measured is None
            or candidate.compiled.peak_bytes < peaks["replicated"]
        )
    assert any(candidate.measured for candidate in plan.candidates)
