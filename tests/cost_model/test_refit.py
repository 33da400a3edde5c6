"""Correction factors refitted to what programs took: hardware described wrongly is found out."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model.hardware.collectives import collective_s
from autoshard.cost_model.hardware.hardware import Hardware, Link, hardware_for
from autoshard.cost_model.hardware.refit import Corrections, refit
from autoshard.cost_model.hardware.step_components import (
    StepComponents,
    step_components,
    step_s,
    summary_s,
)
from autoshard.evidence.collectives import Collective, ring_bytes

DATA, MODEL = ("data",), ("model",)
TRUTH = {"compute": 1.0, DATA: 10.0, MODEL: 1.0}
seconds = st.floats(0, 1e3)


def programs(count: int, overlap: float, seed: int = 0) -> list[tuple[StepComponents, float]]:
    """What the model says of programs, and what they take where links over `data` are ten times as
    slow; 3 % noise."""
    rng = random.Random(seed)
    measured = []
    for _ in range(count):
        comm_s = {DATA: rng.uniform(0, 1), MODEL: rng.uniform(0, 1)}
        predicted = StepComponents(rng.uniform(0.5, 1.5), comm_s)
        true_comm_s = {axes: TRUTH[axes] * s for axes, s in predicted.comm_s.items()}
        true = StepComponents(predicted.compute_s, true_comm_s)
        measured.append((predicted, true.step_s(overlap) * rng.uniform(0.97, 1.03)))
    return measured


@pytest.mark.parametrize("overlap", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_a_link_that_is_ten_times_as_slow_is_found(overlap: float, seed: int) -> None:
    corrections = refit(programs(8, overlap, seed), overlap)
    assert corrections.comm[DATA] == pytest.approx(10, rel=0.15)
    assert corrections.comm[MODEL] < 3
    assert corrections.compute < 2


@pytest.mark.parametrize(("times", "within"), [(30, 0.2), (2, 0.1)])
def test_one_odd_program_does_not_bend_the_factors(times: float, within: float) -> None:
    (components, measured_s), *others = programs(8, 0.0)
    corrections = refit([(components, times * measured_s), *others], 0.0)
    assert corrections.comm[DATA] == pytest.approx(10, rel=within)


def test_one_program_says_only_what_all_components_have_in_common() -> None:
    corrections = refit([(StepComponents(1.0, {DATA: 2.0}), 30.0)], 0.0)
    assert corrections.compute == pytest.approx(10)
    assert corrections.comm[DATA] == pytest.approx(10)
    assert corrections.scaled(StepComponents(1.0, {MODEL: 1.0})) == StepComponents(
        pytest.approx(10), {MODEL: pytest.approx(10)}
    )


def test_right_hardware_keeps_its_numbers_and_no_programs_say_nothing() -> None:
    right = [(components, components.step_s(0.3)) for components, _ in programs(6, 0.3)]
    corrections = refit(right, 0.3)
    assert [corrections.compute, *corrections.comm.values()] == pytest.approx([1, 1, 1])
    assert refit([], 0.3) == Corrections()
    assert refit([(StepComponents(0.0, {}), 1.0)], 0.3) == Corrections()


def test_a_summary_takes_what_its_collectives_take() -> None:
    hardware: Hardware = hardware_for("tpu_v5e").with_links({"data": Link(2e-6, 1e9)})
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "collective_permute"):
        sent = 3 * ring_bytes(kind, 4_000_000, 4)
        one = collective_s(kind, 4_000_000, Link(2e-6, 1e9), 4)
        assert summary_s(hardware, {"data": 4}, Collective(kind, DATA, 3, sent)) == pytest.approx(
            3 * one
        )
    components = step_components(
        hardware,
        {"data": 4},
        0.5,
        [Collective("all_gather", DATA, 1, 10), Collective("all_reduce", DATA, 1, 10)],
    )
    assert set(components.comm_s) == {DATA}


@given(seconds, seconds, st.floats(0, 1))
def test_a_step_lies_between_the_longer_of_the_two_and_both(
    compute_s: float, comm_s: float, overlap: float
) -> None:
    one = step_s(compute_s, comm_s, overlap)
    assert type(one) is float
    assert max(compute_s, comm_s) * (1 - 1e-12) <= one <= compute_s + comm_s
    assert step_s(np.array([compute_s]), np.array([comm_s]), overlap).tolist() == [one]
