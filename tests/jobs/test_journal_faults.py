"""What happens to a journal and its workers while they are at it: writers that stall, files that
shrink or are replaced, locks that nobody has, workers that hang, supervisors that are killed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState, create_trial

from autoshard.errors import StorageAwayError, StudyError
from autoshard.processes.process_group import LOST
from autoshard.processes.supervisor import AWAY, supervise
from autoshard.search.study import journal as journal_module
from autoshard.search.study.claims import CLAIM, record_attributes
from autoshard.search.study.journal import Journal
from autoshard.search.study.journal_lock import JournalLock
from autoshard.search.study.storage import close_storage, open_storage, resolved
from autoshard.search.study.task_queue import TaskQueue
from tests.jobs.crew import (
    LEASE_S,
    claims_of,
    compile_id,
    crew,
    evaluations,
    tasks_of,
    wait_for,
)
from tests.jobs.postgres import Server
from tests.jobs.process_tree import descendants, lives, parent_of
from tests.jobs.test_task_queue import check_complete
from tests.jobs.test_workers import autoshard


def slow(value: object) -> Any:
    """A neighbour of what runs in every suite."""
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "study.log"


@pytest.fixture
def where(path: Path) -> str:
    return f"journal:{path}"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "evaluations.log"


# Writers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("append", [slow(1), 2, slow(5)])
def test_a_writer_that_stalls_overwrites_nothing(
    append: int, where: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is taken for a dead process's, the others write on, and its record comes late."""
    monkeypatch.setenv("LOCK_GRACE_S", "0.3")
    stalling = crew(1, where, 6, 0.05, log, f"stall {append}")
    with stalling as first, crew(2, where, 6, 0.2, log) as others:
        for worker in (*others, *first):
            said = worker.communicate(timeout=120)[1]
            assert json.loads(said.splitlines()[-1])["tasks"] == 6
    assert sorted(set(evaluations(log))) == list(range(6))
    assert b"\n\n" not in Path(where.removeprefix("journal:")).read_bytes()
    check_complete(where, 6)
    assert not os.path.lexists(f"{where.removeprefix('journal:')}.lock")


def test_of_two_writers_at_once_each_record_counts_once(path: Path) -> None:
    """Without any lock, as if both had broken the other's."""
    journals = [Journal(path, 60.0) for _ in range(3)]
    for journal in journals:
        journal._lock = FreeLock(f"{path}.lock", 60.0)
    journals[0].append_logs([{"op_code": 0, "study_name": "s", "directions": [1]}])

    def write(number: int) -> None:
        for i in range(20):
            journals[number].append_logs([{"op_code": 4, "study_id": 0, "who": [number, i]}])

    threads = [threading.Thread(target=write, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for journal in (*journals, Journal(path, 60.0)):
        records = list(journal.read_logs(1))
        assert sorted(r["who"] for r in records) == [[n, i] for n in range(3) for i in range(20)]
        assert [r["at"][2] for r in records] == list(range(60))


class FreeLock(JournalLock):
    """A lock that everybody has."""

    def _acquire(self) -> None:
        pass

    def is_own(self) -> bool:
        return True


def test_a_lock_is_released_by_its_holder_alone(tmp_path: Path) -> None:
    mine, other = (JournalLock(str(tmp_path / "x.lock"), 1.0) for _ in range(2))
    with mine.held():
        assert mine.is_own()
        os.unlink(mine.path)  # taken for a dead process's
        with other.held():
            assert not mine.is_own()
            with pytest.raises(TimeoutError, match=r"has been held for 1 s"), mine.held():
                pass
            assert other.is_own()
    assert not os.path.lexists(mine.path)


@pytest.mark.parametrize("target", ["sub/study.log", "/elsewhere/study.log", "host:1:x"])
def test_a_stale_lock_beside_a_relative_path_is_broken_without_a_spin(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoshard.search.study.journal_lock.LOCK_GRACE_S", 0.5)
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    real, calls = os.symlink, []

    def symlink(*arguments: Any) -> None:
        calls.append(arguments)
        real(*arguments)

    os.symlink(target, "sub/study.log.lock")
    monkeypatch.setattr(os, "symlink", symlink)
    queue = TaskQueue("journal:sub/study.log", "s")
    monkeypatch.chdir("/")
    assert queue.setdefault(compile_id(0), 1) == 1
    assert len(calls) < 40
    assert os.listdir(tmp_path / "sub") == ["study.log"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a/study.log", "journal:{cwd}/a/study.log"),
        ("journal:study.log", "journal:{cwd}/study.log"),
        ("journal:/x/study.log", "journal:/x/study.log"),
        ("sqlite:///a.db?mode=rw", "sqlite:///{cwd}/a.db?mode=rw"),
        ("sqlite:////x/a.db", "sqlite:////x/a.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("grpc://localhost:1", "grpc://localhost:1"),
    ],
)
def test_a_storage_is_named_for_any_working_directory(
    given: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolved(given) == expected.format(cwd=tmp_path.resolve())


def test_a_lock_that_is_never_free_ends_with_the_patience(where: str, path: Path) -> None:
    with TaskQueue(where, "s", patience_s=0.5) as queue:
        os.symlink("another:1:x", f"{path}.lock")
        start_s = time.monotonic()
        with pytest.raises(StorageAwayError, match=r"study\.log\.lock has been held"):
            queue.setdefault(compile_id(0), 1)
        assert time.monotonic() - start_s < 15


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [slow("cut"), "cut in a line", "replaced", slow("written over")])
def test_a_journal_that_goes_back_under_a_live_worker_is_read_again(
    how: str, where: str, path: Path, log: Path
) -> None:
    """Back to a state of it with fewer records: what was lost is done again."""
    with crew(1, where, 6, 0.4, log) as (worker,):
        wait_for(lambda: len(evaluations(log)) >= 2)
        before = path.read_bytes()
        wait_for(lambda: len(evaluations(log)) >= 4)
        if how == "cut":
            os.truncate(path, len(before))
        elif how == "cut in a line":
            os.truncate(path, len(before) - 17)
        elif how == "replaced":
            path.with_suffix(".old").write_bytes(before)
            os.rename(path.with_suffix(".old"), path)
        else:
            path.write_bytes(before)
        said = worker.communicate(timeout=100)[1]
        assert worker.returncode == 0, said
    counts = Counter(evaluations(log))
    assert set(counts) == set(range(6))
    assert max(counts.values()) <= 2
    assert "it was replaced or cut" in said
    check_complete(where, 6)


@pytest.mark.parametrize("other", [b"", b"nothing of a journal\n" * 1000])
def test_a_journal_that_is_emptied_under_a_live_worker_ends_it_with_an_error(
    other: bytes, where: str, path: Path, log: Path
) -> None:
    with TaskQueue(where, "s", lease_s=LEASE_S) as queue:
        queue.run(tasks_of(2, 0.0, log))
        path.write_bytes(other)
        with pytest.raises(StudyError, match="no longer in its storage, which was emptied"):
            queue.run(tasks_of(3, 0.0, log))


@pytest.mark.parametrize("line", ['{"op_code":99}', '{"op_code":4}', '{"op_code":6,"trial_id":0}'])
def test_lines_of_another_kind_are_skipped_and_named(
    line: str, where: str, path: Path, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TaskQueue(where, "s") as queue:
        first = queue.run(tasks_of(2, 0.0, log))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], line.encode() + b"\n", *lines[3:]]))
    with TaskQueue(where, "s") as queue:
        assert queue.run(tasks_of(2, 0.0, log)) == first
    at = sum(map(len, lines[:3]))
    assert f"{path}: skipped a broken record at byte {at} ({len(line) + 1} bytes)" in caplog.text


@pytest.mark.parametrize("record", [{"op_code": 99}, {"op_code": 4}, {"op_code": 2, "study_id": 0}])
def test_what_optuna_does_not_understand_ends_no_reader(
    record: dict[str, int], where: str, path: Path, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a record may even have a number and a digest: another version may write it."""
    with TaskQueue(where, "s") as queue:
        first = queue.run(tasks_of(2, 0.0, log))
        Journal(path, 60.0).append_logs([{**record, "worker_id": "x"}])
        assert queue.run(tasks_of(2, 0.0, log)) == first
        assert len(queue.run(tasks_of(3, 0.0, log))) == 3
    assert "which Optuna does not understand" in caplog.text
    check_complete(where, 3)


@pytest.mark.parametrize("fault", ["text", "another claim", "missing"])
def test_a_record_that_is_not_the_claims_own_counts_as_none(
    fault: str, where: str, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In any storage: the task is done again, and the reason said once."""
    with TaskQueue(where, "s", lease_s=LEASE_S) as queue:
        claim = queue._new_claim(compile_id(0), "candidate 0")
        other = queue._new_claim(compile_id(0), "candidate 0")
        attributes = record_attributes(claim, {"number": 0, "by": 1})
        if fault == "text":
            attributes["record.0"] = attributes["record.0"].replace("1}", "2}")
        if fault == "another claim":
            attributes = record_attributes(other, {"number": 0, "by": 1})
        if fault == "missing":
            attributes = {}
        written = create_trial(
            state=TrialState.PRUNED, user_attrs={CLAIM: claim.attribute(), **attributes}
        )
        queue._storage.create_new_trial(queue._study_id, written)
        records = queue.run(tasks_of(2, 0.0, log))
    assert records[compile_id(0)]["by"] == os.getpid()
    assert evaluations(log) == [0, 1]
    assert caplog.text.count("no readable record of 'compile 0'") == 1


# Workers ------------------------------------------------------------------------------------------


def test_a_compilation_that_hangs_is_rejected_and_ends_its_worker(where: str, log: Path) -> None:
    with crew(1, where, 5, 0.0, log, "limit hang") as (worker,):
        said = worker.communicate(timeout=100)[1]
        assert worker.returncode == LOST
    assert "took longer than 2 s; this process ends" in said
    with TaskQueue(where, "s", lease_s=LEASE_S) as queue:
        records = queue.run(tasks_of(5, 0.0, log))
    assert records[compile_id(3)]["rejected"] == "compilation failed: it took longer than 2 s"
    assert sorted(evaluations(log)) == list(range(5))


def test_a_worker_that_hangs_with_the_interpreter_loses_its_task_and_is_killed(
    where: str, log: Path
) -> None:
    with crew(1, where, 4, 0.0, log, "limit clutch") as (worker,):
        wait_for(lambda: 3 in evaluations(log))
        with TaskQueue(where, "s", lease_s=LEASE_S) as queue:
            queue.run(tasks_of(4, 0.0, log))
        worker.communicate(timeout=60)
        assert worker.returncode == -signal.SIGKILL
    assert Counter(evaluations(log))[3] == 2
    assert claims_of(where).deaths == {compile_id(3): 1}
    check_complete(where, 4)


SLOW_COMPILER = '''
from autoshard.compiler import isolated

PROGRAM = """
import sys, time
from autoshard.compiler import worker
from autoshard.jax_internals import executables
executables.compile_requested = lambda *args: time.sleep(1000)
worker.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""
isolated.Isolation.__init__.__kwdefaults__["command"] = (*isolated.COMMAND[:2], "-c", PROGRAM)
'''


@pytest.mark.parametrize("victim", ["supervisor", slow("worker")])
def test_nothing_outlives_its_parent(victim: str, tmp_path: Path) -> None:
    """The worker is in the middle of a compilation, with a heartbeat beside it."""
    from tests.jobs import test_worker_faults

    folder = test_worker_faults.job_in(tmp_path / "job", patch=SLOW_COMPILER, isolate=True)
    supervisor = autoshard(folder, "worker", "autoshard.toml", "--restarts", "1")
    try:
        where = f"journal:{folder / 'study.log'}"
        wait_for(lambda: (folder / "study.log").exists() and claims_of_task(where), 200)
        family = descendants(supervisor.pid)
        assert len(family) >= 3  # worker, compiler, heartbeat
        if victim == "supervisor":
            supervisor.kill()
            wait_for(lambda: not any(map(lives, family)), 60)
            claims = claims_of(where, "mlp")
            assert not claims.live  # it was released
            assert not claims.deaths.total()
        else:
            (worker,) = [pid for pid in family if parent_of(pid) == supervisor.pid]
            os.kill(worker, signal.SIGKILL)
            wait_for(lambda: not any(map(lives, family)), 60)
    finally:
        for pid in [*descendants(supervisor.pid), supervisor.pid]:
            if lives(pid):
                os.kill(pid, signal.SIGKILL)
        supervisor.communicate()


def claims_of_task(where: str) -> bool:
    try:
        live = claims_of(where, "mlp").live
    except StudyError:
        return False
    return any(str(task).startswith("compile ") for task in live)


# Storages that are away ---------------------------------------------------------------------------


def test_a_worker_that_gave_up_a_storage_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoshard.processes.supervisor.PAUSE_S", 0.1)
    log = tmp_path / "lives"
    program = (
        f"import os, pathlib; log = pathlib.Path({str(log)!r}); "
        f"n = len(log.read_text()) if log.exists() else 0; log.write_text('x' * (n + 1)); "
        f"os._exit({AWAY} if n < 2 else 0)"
    )
    assert supervise([sys.executable, "-c", program], restarts=5) == 0
    assert log.read_text() == "xxx"


def test_a_full_connection_table_is_a_storage_that_is_away(server: Server) -> None:
    import psycopg

    taken = []
    try:
        with contextlib.suppress(psycopg.OperationalError):
            while True:
                taken.append(psycopg.connect(server.url))
        with pytest.raises(StorageAwayError, match="too many clients"):
            open_storage(server.url, patience_s=0.5)
    finally:
        for connection in taken:
            connection.close()
    close_storage(open_storage(server.url, patience_s=60))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "symlink"])
def test_a_file_system_that_refuses_is_an_error_at_once(
    code: int, call: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = TaskQueue(where, "s")
    real = getattr(os, call)

    def refuse(*arguments: Any, **options: Any) -> Any:
        if call == "open" and not arguments[1] & os.O_APPEND:
            return real(*arguments, **options)
        raise OSError(code, os.strerror(code), str(arguments[0]))

    monkeypatch.setattr(journal_module.os, call, refuse)
    start_s = time.monotonic()
    with pytest.raises(StudyError, match=f"cannot be used: {os.strerror(code)}"):
        queue.setdefault(compile_id(0), 1)
    assert time.monotonic() - start_s < 10
    assert queue.read().results == {}


def test_a_read_only_mount_can_be_read_and_not_written(tmp_path: Path, log: Path) -> None:
    """A real one, where this machine lets one be made."""
    folder = tmp_path / "share"
    folder.mkdir()
    where = f"journal:{folder / 'study.log'}"
    with TaskQueue(where, "s") as queue:
        queue.run(tasks_of(2, 0.0, log))
    program = f"""
import subprocess, sys
from autoshard.errors import StudyError
from autoshard.search.study.task_queue import TaskQueue
from tests.jobs.crew import compile_id
subprocess.run(["mount", "--bind", "-o", "ro", {str(folder)!r}, {str(folder)!r}], check=True)
with TaskQueue({where!r}, "s", read_only=True) as queue:
    assert len(queue.read().results) == 2
try:
    TaskQueue({where!r}, "s")
except StudyError as error:
    print(error)
"""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    if subprocess.run(["unshare", "-m", "mount", "--bind", folder, folder], check=False).returncode:
        pytest.skip("this process may not mount")
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", program],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "cannot be used: Read-only file system" in done.stdout
