"""A worker whose evaluations are cheap: claims, heartbeats and records are the real ones. And ways
to start several.

Each evaluation appends its number to LOG when it starts, so that a test sees what was run how
often.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autoshard.processes.supervisor import end_with_supervisor
from autoshard.search.study import journal_lock
from autoshard.search.study.claims import Claims, claim_of
from autoshard.search.study.heartbeat import WITHOUT_JAX
from autoshard.search.study.task_id import TaskId, TaskKind
from autoshard.search.study.task_queue import Result, Task, TaskQueue

ROOT = Path(__file__).parent.parent.parent
LEASE_S = 2.0
CROWDED_LEASE_S = 60.0
"""Where more processes start than the machine has cores: heartbeats are late, and that is not what
is tested."""


def value_of(number: int) -> float:
    """What an evaluation finds; 17 is the best of all."""
    return 1.0 + ((number - 17) % 101) ** 2


def evaluate(number: int, seconds: float, log: Path, what: str) -> Result:
    with log.open("a") as file:
        file.write(f"{number}\n")
    if what == "abort" and number == 3:
        os.abort()
    if what == "killed" and number == 3:
        os.kill(os.getpid(), signal.SIGKILL)  # as the system does when memory runs out
    if what in ("measure hang", "limit hang") and number == 3:
        time.sleep(1000)
    if what == "limit clutch" and number == 3:
        import ctypes

        ctypes.PyDLL(None).sleep(1000)  # one call, in which no other thread ever runs
    if what == "compiler":
        compile_beside(seconds)
    elif what == "busy":
        hold_the_interpreter(seconds)
    else:
        time.sleep(seconds)
    return Result({"number": number, "by": os.getpid()}, value_of(number))


def compile_beside(seconds: float) -> None:
    """A process of its own that takes a while; one that is killed is started once more."""
    for _ in range(2):
        if subprocess.run(["sleep", str(seconds)], check=False).returncode == 0:
            return
    raise RuntimeError("the compiler was killed twice")


def hold_the_interpreter(seconds: float) -> None:
    """One call into C that never lets another thread run, as a compiler may."""
    import ctypes

    sleep = ctypes.PyDLL(None).usleep  # PyDLL keeps the interpreter's lock
    for _ in range(max(1, round(seconds / 0.9))):
        sleep(900_000)


def die_while_appending(number: int) -> None:
    """At the nth append to a journal this process writes half of the record and is killed, the
    file's lock in hand."""
    import autoshard.search.study.journal as journal

    real, appends = os.write, []

    class Half:
        """The module `os`, as the journal sees it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, file: int, data: bytes) -> int:
            appends.append(file)
            if len(appends) == number:
                real(file, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(file, data)

    journal.os = Half()  # type: ignore[assignment]


def stall_while_appending(number: int) -> None:
    """At the nth append to a journal this process stalls with the lock in hand, for longer than
    others take it to live."""
    import autoshard.search.study.journal as journal

    real, appends = os.write, []

    class Slow:
        """The module `os`, as the journal sees it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, file: int, data: bytes) -> int:
            appends.append(file)
            if len(appends) == number:
                time.sleep(2.0)
            return real(file, data)

    journal.os = Slow()  # type: ignore[assignment]


def compile_id(number: int) -> TaskId:
    return TaskId(TaskKind.COMPILE, (str(number),))


def tasks_of(count: int, seconds: float, log: Path, what: str = "") -> dict[TaskId, Task]:
    def task(number: int) -> Task:
        return Task(
            lambda: evaluate(number, seconds, log, what),
            lambda reason: Result({"number": number, "rejected": reason}),
            "measure" if what.startswith("measure") else "compile",
            f"candidate {number}",
            single_candidate=True,
        )

    return {compile_id(number): task(number) for number in range(count)}


def start(
    where: str,
    count: int,
    seconds: float,
    log: Path,
    what: str = "",
    study: str = "s",
    lease_s: float = LEASE_S,
) -> subprocess.Popen[str]:
    """A worker in a process of its own, with standard error in a pipe."""
    command = worker_command(where, count, seconds, log, what, study, lease_s)
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def worker_command(
    where: str,
    count: int,
    seconds: float,
    log: Path,
    what: str = "",
    study: str = "s",
    lease_s: float = LEASE_S,
) -> list[str]:
    """The command line of such a worker."""
    program = WITHOUT_JAX + "from tests.jobs.crew import main; main()"
    arguments = (ROOT / "autoshard", where, study, count, seconds, log, what, lease_s)
    return [sys.executable, "-c", program, *map(str, arguments)]


@contextmanager
def crew(number: int, *arguments: Any, **options: Any) -> Iterator[list[subprocess.Popen[str]]]:
    """Several workers; those still running at the end are killed."""
    workers = [start(*arguments, **options) for _ in range(number)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            if worker.stderr is not None:
                worker.stderr.close()


def task_id_of(trial: Any) -> TaskId:
    claim = claim_of(trial)
    assert claim is not None
    return claim.task


def claims_of(where: str, study: str = "s") -> Claims:
    with TaskQueue(where, study, create=False) as queue:
        return queue.read()


def wait_for(condition: Any, timeout_s: float = 100.0) -> None:
    """Waits until the condition holds.

    Raises:
        TimeoutError: If it does not.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{condition} does not hold after {timeout_s} s")
        time.sleep(0.05)


def evaluations(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def main() -> None:
    where, study, count, seconds, log, what, lease_s = sys.argv[1:8]
    end_with_supervisor()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if what.startswith("append "):
        die_while_appending(int(what.split()[1]))
    if what.startswith("stall "):
        stall_while_appending(int(what.split()[1]))
    if "LOCK_GRACE_S" in os.environ:
        journal_lock.LOCK_GRACE_S = float(os.environ["LOCK_GRACE_S"])
    limit_s = 2.0 if what == "measure hang" or what.startswith("limit") else None
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    with TaskQueue(where, study, lease_s=float(lease_s), patience_s=60, limit_s=limit_s) as queue:
        records = queue.run(tasks_of(int(count), float(seconds), Path(log), what))
    accepted = [record for record in records.values() if "rejected" not in record]
    best = min(accepted, key=lambda record: value_of(record["number"]))
    print(json.dumps({"tasks": len(records), "best": best["number"]}), file=sys.stderr)


if __name__ == "__main__":
    main()
