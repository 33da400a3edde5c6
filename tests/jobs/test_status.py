"""`autoshard status`: it changes nothing, and its numbers are those of the workers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoshard.cli.app import run
from autoshard.evidence.candidate import Candidate, Measured, Origin, Status
from autoshard.search.study.shared_study import SharedStudy
from autoshard.search.study.status import StudyStatus, status_of, status_text
from autoshard.search.study.task_id import TaskId, TaskKind
from autoshard.search.study.task_queue import Result, Task, TaskQueue
from tests.jobs.stand_in import evidence_of


def candidate(key: str, measured_s: float | None = None) -> Candidate:
    measured = None if measured_s is None else Measured(measured_s, 3, (measured_s,) * 3)
    return Candidate(
        key, Origin.SEARCH, (), "anchors", key, Status.COMPILED,
        compiled=evidence_of(key), measured=measured,
    )  # fmt: skip


def compile_all(queue: TaskQueue, *keys: str) -> None:
    def task(key: str) -> Task:
        record = {"candidates": [candidate(key).to_dict()], "note": ""}
        return Task(lambda: Result(record, 1.0), lambda reason: Result(record), "compile", key)

    queue.run({TaskId(TaskKind.COMPILE, (key,)): task(key) for key in keys})


@pytest.mark.parametrize("form", ["journal:{}/no/study.log", "{}/x.log", "sqlite:///{}/x.db"])
@pytest.mark.parametrize("study", [(), ("--study", "s")])
def test_a_mistyped_storage_is_an_error_and_creates_nothing(
    form: str, study: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", "--storage", form.format(tmp_path), *study]) == 2
    assert "check its name" in capfd.readouterr().err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("form", ["journal:{}/study.log", "sqlite:///{}/study.db"])
def test_reading_changes_no_file(
    form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    where = form.format(tmp_path)
    with TaskQueue(where, "s") as queue:
        compile_all(queue, "a", "b")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for study in ([], ["--study", "s"]):
        assert run(["status", "--storage", where, *study]) == 0
    assert "2 of ? candidates evaluated" in capfd.readouterr().out
    assert run(["status", "--storage", where, "--study", "other"]) == 2
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def status_after(*evaluated: str, **chosen: tuple[str, ...]) -> StudyStatus:
    with TaskQueue(None) as queue:
        study = SharedStudy(queue)
        for purpose, keys in chosen.items():
            study.choose(purpose, lambda keys=keys: keys)
        compile_all(queue, *evaluated)
        return status_of(queue)


def test_of_what_was_chosen_never_more_is_evaluated_than_wanted() -> None:
    alone = status_after("a", "b", "c", compiled=("a", "b"))
    assert (alone.evaluated, alone.wanted) == (3, 3)  # another search of this study wanted c
    more = status_after("a", "b", "c", compiled=("a", "b"), challengers=("c", "d"))
    assert (more.evaluated, more.wanted) == (3, 4)
    # One after the other until one is good: the rest is not waited for.
    rest = status_after("a", "b", compiled=("a",), smallest=("b", "c", "d"), next=("e",))
    assert (rest.evaluated, rest.wanted) == (2, 2)
    assert status_after("a").wanted == 0


def test_nothing_left_to_compile_is_not_the_end() -> None:
    status = status_after("a", "b", compiled=("a", "b"))
    assert status.left_s is None
    assert "left" not in status_text(status)
    assert "finished" not in status_text(status)
    assert not status.finished


def test_the_best_is_the_answer_of_the_search_that_ended(tmp_path: Path) -> None:
    """By the clock alone another would be: within noise predictions decide, and rules count."""
    where = f"journal:{tmp_path / 'study.log'}"
    with TaskQueue(where, "s") as queue:
        study = SharedStudy(queue)
        study.choose("compiled", lambda: ["a", "b"])
        compile_all(queue, "a", "b")
        assert not status_of(queue).finished
        study.conclude(candidate("a", 2.0))
        study.conclude(candidate("b", 1.0))
    with TaskQueue(where, "s", read_only=True) as queue:
        status = status_of(queue)
    assert status.best == candidate("b", 1.0)
    assert status.finished
    assert "best so far: b, 1 s measured" in status_text(status).replace("1.00 s", "1 s")
    assert "finished" in status_text(status)


def test_an_answer_that_cannot_be_read_is_none() -> None:
    with TaskQueue(None) as queue:
        compile_all(queue, "a")
        queue.note("answer", {"odd": 1})
        assert status_of(queue).best == candidate("a")
