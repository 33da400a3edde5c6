"""TaskQueue on a journal: exact budgets, no duplicates, and what happens to workers while they are
at it."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState, create_trial

from autoshard.errors import StudyError
from autoshard.processes.process_group import LOST
from autoshard.search.study.claims import Claims, claim_of, record_of
from autoshard.search.study.heartbeat import Alive, Heartbeat
from autoshard.search.study.lease_watch import LEASE_S as LONG_LEASE_S
from autoshard.search.study.lease_watch import LeaseWatch
from autoshard.search.study.machine_lock import MachineLock
from autoshard.search.study.task_id import TaskId, TaskKind
from autoshard.search.study.task_queue import MAX_DEATHS, Result, Task, TaskQueue
from tests.jobs.crew import (
    CROWDED_LEASE_S,
    LEASE_S,
    claims_of,
    compile_id,
    crew,
    evaluations,
    task_id_of,
    tasks_of,
    value_of,
    wait_for,
)


@pytest.fixture
def where(tmp_path: Path) -> str:
    return f"journal:{tmp_path / 'study.log'}"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "evaluations.log"


def finish_alone(where: str, count: int, log: Path, what: str = "") -> dict[str, Any]:
    with TaskQueue(where, "s", lease_s=LEASE_S) as queue:
        records = queue.run(tasks_of(count, 0.0, log, what))
    return {str(task_id): record for task_id, record in records.items()}


def check_complete(where: str, count: int) -> None:
    """Each task has its result, once; the best is the best; nothing is left running."""
    trials = TaskQueue(where, "s", create=False).trials()
    done = [t for t in trials if t.state.is_finished() and t.state != TrialState.FAIL]
    assert sorted(map(str, map(task_id_of, done))) == sorted(f"compile {i}" for i in range(count))
    for trial in done:
        number = record_of(trial)["number"]
        assert task_id_of(trial) == compile_id(number)
        assert trial.value == value_of(number)
    assert not Claims.of(trials).live


def test_four_workers_share_a_budget_exactly(where: str, log: Path) -> None:
    with crew(4, where, 24, 0.05, log) as workers:
        said = [
            json.loads(worker.communicate(timeout=120)[1].splitlines()[-1]) for worker in workers
        ]
    assert said == [{"tasks": 24, "best": 17}] * 4
    assert sorted(evaluations(log)) == list(range(24))
    check_complete(where, 24)


def test_a_finished_study_runs_none(where: str, log: Path) -> None:
    first = finish_alone(where, 5, log)
    assert finish_alone(where, 5, log) == first
    assert sorted(evaluations(log)) == list(range(5))


def test_a_worker_that_is_killed_loses_nothing_and_its_task_runs_again_once(
    where: str, log: Path
) -> None:
    with crew(1, where, 3, 1.0, log) as (worker,):
        wait_for(lambda: len(evaluations(log)) == 2)  # the first is recorded, the second is running
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    before = claims_of(where)
    assert list(before.results) == [compile_id(0)]
    assert list(before.live) == [compile_id(1)]  # neither done nor failed meanwhile
    finish_alone(where, 3, log)
    assert Counter(evaluations(log)) == {0: 1, 1: 2, 2: 1}
    assert claims_of(where).deaths == {compile_id(1): 1}
    check_complete(where, 3)


@pytest.fixture
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock for measuring that nobody else on this machine takes."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_worker_that_is_killed_while_measuring_frees_the_machine_and_its_task(
    where: str, log: Path, own_machine: None
) -> None:
    with crew(1, where, 3, 1.0, log, "measure") as (worker,):
        wait_for(lambda: len(evaluations(log)) == 2)
        assert not MachineLock().take()  # it has the machine
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    finish_alone(where, 3, log, "measure")
    assert Counter(evaluations(log)) == {0: 1, 1: 2, 2: 1}
    assert claims_of(where).deaths == {compile_id(1): 1}
    check_complete(where, 3)


@pytest.mark.parametrize("append", [1, 2, 3, 4, 5, 6])
def test_a_worker_that_is_killed_while_writing_loses_no_finished_evaluation(
    append: int, where: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a record at the end of the journal, and the lock held by a dead process: claims,
    records, states in turn."""
    with crew(1, where, 2, 0.0, log, f"append {append}") as (worker,):
        worker.communicate(timeout=60)
        assert worker.returncode == -signal.SIGKILL
    assert os.path.lexists(f"{where.removeprefix('journal:')}.lock")
    monkeypatch.setattr("autoshard.search.study.journal_lock.LOCK_GRACE_S", 1)
    before = set(claims_of(where).results) if append > 1 else set()
    finish_alone(where, 2, log)
    counts = Counter(evaluations(log))
    assert set(counts) == {0, 1}
    assert all(counts[number] == 1 for number in range(2) if compile_id(number) in before)
    assert sum(counts.values()) <= 3
    check_complete(where, 2)


def test_a_candidate_that_hangs_on_the_devices_is_rejected_and_ends_its_worker(
    where: str, log: Path, own_machine: None
) -> None:
    with crew(1, where, 5, 0.0, log, "measure hang") as (worker,):
        said = worker.communicate(timeout=100)[1]
        assert worker.returncode == LOST
    assert "took longer than 2 s; this process ends" in said
    found = finish_alone(where, 5, log, "measure")
    assert found["compile 3"]["rejected"] == "running failed: it took longer than 2 s"
    assert sorted(evaluations(log)) == list(range(5))


def test_time_in_which_the_storage_was_away_counts_against_nobody() -> None:
    watch = LeaseWatch()
    claim = create_trial(state=TrialState.RUNNING, user_attrs={"heartbeat": 1})
    assert not watch.stale([claim], 100.0)
    for now_s in range(101, 101 + int(LONG_LEASE_S)):
        assert not watch.stale([claim], float(now_s))
    assert watch.stale([claim], 102.0 + LONG_LEASE_S) == [claim]
    assert not watch.stale([claim], 1000.0)  # nobody looked for long
    assert not watch.stale([claim], 1001.0)


def test_two_reapers_requeue_an_orphan_once(where: str, log: Path) -> None:
    with crew(1, where, 1, 60.0, log) as (worker,):
        wait_for(lambda: evaluations(log))
        worker.kill()
        worker.wait()
        with crew(3, where, 1, 0.2, log) as others:
            for other in others:
                assert json.loads(other.communicate(timeout=60)[1].splitlines()[-1])["tasks"] == 1
    assert evaluations(log) == [0, 0]
    check_complete(where, 1)


def test_a_worker_that_is_preempted_releases_its_task(where: str, log: Path) -> None:
    with crew(1, where, 2, 30.0, log) as (worker,):
        wait_for(lambda: evaluations(log))
        worker.send_signal(signal.SIGTERM)
        said = worker.communicate(timeout=20)[1]
        assert worker.returncode == 143
    assert "released: candidate 0" in said
    claims = claims_of(where)
    assert not claims.live
    assert not claims.deaths[compile_id(0)]  # free at once, and nothing is held against it
    start_s = time.monotonic()
    finish_alone(where, 2, log)
    assert time.monotonic() - start_s < 30
    check_complete(where, 2)


def test_a_task_that_holds_the_interpreter_longer_than_the_lease_keeps_its_claim(
    where: str, log: Path
) -> None:
    with crew(1, where, 1, 3 * LEASE_S, log, "busy") as (worker,):
        wait_for(lambda: evaluations(log))
        finish_alone(where, 1, log)
        worker.communicate(timeout=60)
    assert evaluations(log) == [0]
    assert not claims_of(where).deaths
    check_complete(where, 1)


@pytest.mark.parametrize("taken", [True, False], ids=["taken by another", "still free"])
def test_a_late_result_is_dropped_or_recorded(
    taken: bool, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    task_id = compile_id(0)
    with TaskQueue(where, "s", lease_s=LEASE_S) as slow:

        def run() -> Result:
            other = TaskQueue(where, "s", lease_s=LEASE_S)
            claim = other.read().live[task_id]
            held = claim_of(claim)
            assert held is not None
            assert other._end(claim._trial_id, held, "stale")
            if taken:
                other.run({task_id: Task(lambda: Result("other", 1.0), Result, "compile", "t")})
            return Result("slow", 2.0)

        records = slow.run({task_id: Task(run, Result, "compile", "t")})
    assert records == {task_id: "other" if taken else "slow"}
    assert ("dropped a late result" in caplog.text) is taken
    assert len([t for t in slow.trials() if t.state == TrialState.COMPLETE]) == 1


def test_a_candidate_that_kills_its_workers_is_given_up(where: str, log: Path) -> None:
    for _ in range(MAX_DEATHS):
        dead = TaskQueue(where, "s")
        task = Task(lambda: Result(None), Result, "compile", "candidate 0")
        held = dead._claim(compile_id(0), task)
        assert held is not None
        assert TaskQueue(where, "s")._end(held.trial_id, held.claim, "stale")
    found = finish_alone(where, 2, log)
    assert found["compile 0"]["rejected"] == f"{MAX_DEATHS} workers ended while they were at it"
    assert evaluations(log) == [1]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "how"), [("abort", signal.SIGABRT), ("killed", signal.SIGKILL)])
def test_a_candidate_that_aborts_ends_its_workers_not_the_job(
    what: str, how: signal.Signals, where: str, log: Path
) -> None:
    for _ in range(MAX_DEATHS):
        with crew(1, where, 5, 0.0, log, what) as (worker,):
            worker.communicate(timeout=60)
            assert worker.returncode == -how
    finish_alone(where, 5, log)
    assert Counter(evaluations(log)) == {0: 1, 1: 1, 2: 1, 3: MAX_DEATHS, 4: 1}


def test_no_clock_of_another_host_matters(
    where: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with crew(1, where, 1, 2 * LEASE_S, log) as (worker,):
        wait_for(lambda: evaluations(log))
        monkeypatch.setattr(time, "time", lambda: 4e9)
        monkeypatch.setattr(time, "time_ns", lambda: -1)
        finish_alone(where, 1, log)
        worker.communicate(timeout=60)
    assert evaluations(log) == [0]


def test_a_claim_of_which_the_answer_was_lost_is_made_once(where: str, log: Path) -> None:
    with TaskQueue(where, "s", lease_s=LEASE_S) as queue:
        make, calls = queue._storage.create_new_trial, []

        def lossy(*arguments: Any) -> int:
            number = make(*arguments)
            calls.append(number)
            if len(calls) == 1:
                raise ConnectionError("the answer was lost")
            return number

        queue._storage.create_new_trial = lossy  # type: ignore[method-assign]
        queue.run(tasks_of(1, 0.0, log))
        assert len(calls) == 2
        assert not queue.read().live
    assert evaluations(log) == [0]
    check_complete(where, 1)


def test_a_storage_that_is_away_is_waited_for_and_then_given_up(
    where: str, log: Path, tmp_path: Path
) -> None:
    with TaskQueue(where, "s", lease_s=LEASE_S, patience_s=1.0) as queue:
        queue.run(tasks_of(1, 0.0, log))
        os.rename(tmp_path / "study.log", tmp_path / "gone.log")
        with pytest.raises(StudyError, match=r"was away for .* What was recorded before is kept"):
            queue.run(tasks_of(2, 0.0, log))
        os.rename(tmp_path / "gone.log", tmp_path / "study.log")
        queue.run(tasks_of(2, 0.0, log))
    check_complete(where, 2)


def test_a_storage_that_comes_back_goes_on(where: str, log: Path, tmp_path: Path) -> None:
    with crew(1, where, 8, 0.3, log) as (worker,):
        wait_for(lambda: len(evaluations(log)) == 3)
        os.rename(tmp_path / "study.log", tmp_path / "gone.log")
        time.sleep(2 * LEASE_S)
        os.rename(tmp_path / "gone.log", tmp_path / "study.log")
        said = worker.communicate(timeout=60)[1]
        assert worker.returncode == 0, said
    assert "is away" in said
    check_complete(where, 8)


@pytest.mark.slow
def test_a_storage_that_is_away_for_half_a_minute_costs_nothing(
    where: str, log: Path, tmp_path: Path
) -> None:
    """The directory of the journal goes away and comes back, as a network file system does."""
    folder = tmp_path / "shared"
    folder.mkdir()
    where = f"journal:{folder / 'study.log'}"
    with crew(2, where, 12, 1.0, log) as workers:
        wait_for(lambda: len(evaluations(log)) >= 4)
        folder.rename(tmp_path / "gone")
        time.sleep(30)
        (tmp_path / "gone").rename(folder)
        said = [worker.communicate(timeout=120)[1] for worker in workers]
    assert any("is away" in text for text in said)
    assert sorted(evaluations(log)) == list(range(12))
    assert not claims_of(where).deaths.total()
    check_complete(where, 12)


@pytest.mark.slow
def test_sixteen_processes_start_in_the_same_second(where: str, log: Path) -> None:
    with crew(16, where, 40, 0.1, log, lease_s=CROWDED_LEASE_S) as workers:
        said = [
            json.loads(worker.communicate(timeout=600)[1].splitlines()[-1]) for worker in workers
        ]
    assert said == [{"tasks": 40, "best": 17}] * 16
    assert sorted(evaluations(log)) == list(range(40))
    check_complete(where, 40)


def test_the_first_value_of_a_name_stays(where: str) -> None:
    one, two = TaskQueue(where, "s"), TaskQueue(where, "s")
    short, large = TaskId.choice("compiled", 1, "x"), TaskId(TaskKind.PROPOSE, ("x",))
    assert one.setdefault(short, ["a", "b"]) == ["a", "b"]
    assert two.setdefault(short, ["b"]) == ["a", "b"]
    rules = [f"logical axis.{i}->model" for i in range(20_000)]
    assert two.setdefault(large, rules) == one.setdefault(large, []) == rules


def test_a_worker_waits_for_those_who_can_do_the_rest(where: str, log: Path) -> None:
    with (
        crew(1, where, 2, 0.1, log, "measure"),
        TaskQueue(where, "s", capabilities=("compile",), lease_s=LEASE_S) as queue,
    ):
        records = queue.run(tasks_of(2, 0.0, log, "measure"))
    assert {record["by"] for record in records.values()} != {os.getpid()}
    assert sorted(evaluations(log)) == [0, 1]


def test_one_at_a_time_measures_on_a_machine(tmp_path: Path) -> None:
    one, two = MachineLock(tmp_path / "lock"), MachineLock(tmp_path / "lock")
    assert one.take()
    assert not two.take()
    one.release()
    assert two.take()
    two.release()
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_a_heartbeat_ends_with_its_worker_and_is_replaced_when_it_dies(where: str) -> None:
    TaskQueue(where, "s")
    heartbeat = Heartbeat(where, LEASE_S)
    process = heartbeat._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    heartbeat.keep_alive(Alive(0, "nonce", 60.0, ends=False))
    assert heartbeat._process is not process
    heartbeat.close()


def test_an_unreadable_record_is_named(where: str) -> None:
    queue = TaskQueue(where, "s")
    queue.setdefault(compile_id(0), 1)
    trial = queue.trials()[0]
    trial.user_attrs["record.0"] = '{"a": '
    with pytest.raises(StudyError, match="no readable record of 'compile 0'"):
        record_of(trial)


def test_a_study_that_is_not_there_is_named(where: str) -> None:
    with pytest.raises(StudyError, match="no study 'other'"):
        TaskQueue(where, "other", create=False)


def test_sixteen_workers_start_in_the_same_second(where: str, log: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def one(number: int) -> dict[str, Any]:
        records = TaskQueue(where, "s").run(tasks_of(16, 0.0, log))
        return {str(task_id): record for task_id, record in records.items()}

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(one, range(16)))
    assert all(f == found[0] for f in found)
    assert sorted(evaluations(log)) == list(range(16))
    check_complete(where, 16)
