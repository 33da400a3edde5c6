"""One search by several processes (`jax.distributed`), for real: 2 CPU devices each, joined by gloo
on this host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.ranks import finish, ranks

LIMIT_S = 900.0
"""After that the processes are killed; on an idle machine of two cores they take half a minute."""

Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of two processes found in each case of `ranks.CASES`."""
    folder = tmp_path_factory.mktemp("ranks")
    with ranks(2, "manners", folder) as processes:
        return finish(processes, folder, LIMIT_S)


def same_on_both(found: Found, case: str) -> dict[str, Any]:
    one, two = ({k: v for k, v in each[case].items() if k != "seconds"} for each in found)
    assert one == two
    return one


def check_demo(count: int, folder: Path, compiled: int) -> None:
    with ranks(count, "demo", folder, compiled=compiled) as processes:
        plans = finish(processes, folder, LIMIT_S)
    first = plans[0]
    assert all(plan == first for plan in plans)
    assert first["rules"]  # sharded: what is replicated does not fit
    assert first["verified"][0]
    assert sum(t["measured"] is not None for t in first["candidates"]) == 2
    assert any(
        "not isolated: the mesh belongs to several processes" in note for note in first["notes"]
    )
    alone, searched, applied = first["losses"]
    assert searched == pytest.approx(alone, rel=1e-5)
    assert applied == pytest.approx(alone, rel=1e-5)
    assert alone[2] < alone[0]


def test_two_processes_find_measure_and_apply_a_plan_for_the_demo(tmp_path: Path) -> None:
    check_demo(2, tmp_path, compiled=2)


@pytest.mark.slow
def test_four_processes_find_measure_and_apply_a_plan_for_the_demo(tmp_path: Path) -> None:
    check_demo(4, tmp_path, compiled=4)


def test_all_processes_return_the_same_verified_plan_of_arrays_that_span_them(found: Found) -> None:
    plan = same_on_both(found, "global_arrays")
    assert plan["verified"][0]
    assert not plan["rejected"]
    assert sum(t["measured"] is not None for t in plan["candidates"]) == 2


def test_shapes_of_the_mesh_are_searched_together(found: Found) -> None:
    plan = same_on_both(found, "any_shape")
    assert plan["verified"][0]
    assert any("was chosen of" in note for note in plan["notes"])


def test_explicit_axes_span_processes_as_well(found: Found) -> None:
    assert same_on_both(found, "explicit_axes")["verified"][0]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (
            "compile_fails",
            "compilation failed: ProcessFailedError: on process 1: MemoryError: no memory on this "
            "host",
        ),
        (
            "placing_fails",
            "running failed: ProcessFailedError: on process 1: MemoryError: no memory on this host",
        ),
        (
            "wrong_numbers",
            "wrong numbers: leaf differs from that of the unsharded function by 1, tolerance 0.5",
        ),
    ],
)
def test_what_fails_on_one_process_fails_on_all_and_the_search_goes_on(
    case: str, reason: str, found: Found
) -> None:
    plan = same_on_both(found, case)
    assert list(plan["rejected"].values()) == [reason]
    assert plan["verified"][0]


def test_the_slowest_process_counts(found: Found) -> None:
    plan = same_on_both(found, "one_is_slow")
    assert all(
        s > 1.0 for t in plan["candidates"] if t["measured"] for s in t["measured"]["seconds"]
    )


def test_all_processes_raise_what_the_first_one_raises(found: Found) -> None:
    assert same_on_both(found, "nothing_fits")["error"] == "NoFeasiblePlanError"


@pytest.mark.parametrize(
    ("case", "what"), [("other_values", "values of arguments"), ("other_function", "program")]
)
def test_processes_that_are_called_for_other_things_say_which(
    case: str, what: str, found: Found
) -> None:
    for each in found:
        assert each[case]["error"] == "ProcessesError"
        assert f"process 1 was called for something else ({what}: " in each[case]["text"]


def test_a_process_that_does_not_come_is_waited_for_so_long(found: Found) -> None:
    assert found[0]["late"]["error"] == "ProcessesError"
    assert "process 1 has not answered for 2 s" in found[0]["late"]["text"]
    assert "process 0 ended the search (process 1 has not answered" in found[1]["late"]["text"]


def test_an_interruption_anywhere_gives_all_the_best_so_far(found: Found) -> None:
    assert same_on_both(found, "other_interrupted")["verified"] == [
        False, "the search was interrupted before the comparison",
    ]  # fmt: skip
    assert same_on_both(found, "leader_interrupted")["verified"][0]  # it came while they measured
