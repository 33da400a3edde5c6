"""Coefficients refitted to what programs took: hardware that was described wrongly is found out."""

from __future__ import annotations

import random

import pytest

from autoshard.cost_model.hardware.collectives import collective_s
from autoshard.cost_model.hardware.hardware import Hardware, Link, hardware_for
from autoshard.cost_model.hardware.refit import (
    Corrections,
    Parts,
    parts_of,
    refit,
    summary_s,
    time_s,
)
from autoshard.evidence.collectives import Collective, ring_bytes

DATA, MODEL = ("data",), ("model",)
TRUTH = {"compute": 1.0, DATA: 10.0, MODEL: 1.0}


def programs(count: int, overlap: float, seed: int = 0) -> list[tuple[Parts, float]]:
    """What the model says of programs, and what they take where links over `data` are ten times as
    slow; 3 % noise."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        parts = Parts(rng.uniform(0.5, 1.5), {DATA: rng.uniform(0, 1), MODEL: rng.uniform(0, 1)})
        true = Parts(parts.compute_s, {axes: TRUTH[axes] * s for axes, s in parts.comm_s.items()})
        made.append((parts, time_s(true, overlap) * rng.uniform(0.97, 1.03)))
    return made


@pytest.mark.parametrize("overlap", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_a_link_that_is_ten_times_as_slow_is_found(overlap: float, seed: int) -> None:
    found = refit(programs(8, overlap, seed), overlap)
    assert found.comm[DATA] == pytest.approx(10, rel=0.15)
    assert found.comm[MODEL] < 3
    assert found.compute < 2


def test_one_odd_program_does_not_bend_the_factors() -> None:
    (parts, found_s), *others = programs(8, 0.0)
    found = refit([(parts, 30 * found_s), *others], 0.0)
    assert found.comm[DATA] == pytest.approx(10, rel=0.2)


def test_one_program_says_only_what_all_parts_have_in_common() -> None:
    found = refit([(Parts(1.0, {DATA: 2.0}), 30.0)], 0.0)
    assert found.compute == pytest.approx(10)
    assert found.comm[DATA] == pytest.approx(10)
    assert found.scaled(Parts(1.0, {MODEL: 1.0})) == Parts(
        pytest.approx(10), {MODEL: pytest.approx(10)}
    )


def test_right_hardware_keeps_its_numbers_and_no_programs_say_nothing() -> None:
    made = [(parts, time_s(parts, 0.3)) for parts, _ in programs(6, 0.3)]
    found = refit(made, 0.3)
    assert [found.compute, *found.comm.values()] == pytest.approx([1, 1, 1])
    assert refit([], 0.3) == Corrections()
    assert refit([(Parts(0.0, {}), 1.0)], 0.3) == Corrections()


def test_a_summary_takes_what_its_collectives_take() -> None:
    hardware: Hardware = hardware_for("tpu_v5e").with_links({"data": Link(2e-6, 1e9)})
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "collective_permute"):
        sent = 3 * ring_bytes(kind, 4_000_000, 4)
        one = collective_s(kind, 4_000_000, Link(2e-6, 1e9), 4)
        assert summary_s(hardware, {"data": 4}, Collective(kind, DATA, 3, sent)) == pytest.approx(
            3 * one
        )
    parts = parts_of(
        hardware,
        {"data": 4},
        0.5,
        [Collective("all_gather", DATA, 1, 10), Collective("all_reduce", DATA, 1, 10)],
    )
    assert set(parts.comm_s) == {DATA}
