"""Four workers, a hundred candidates, and every three seconds something is killed, stopped for a
while, or taken away: workers, heartbeats, compilers, supervisors, the storage."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from optuna.trial import TrialState

from autoshard.search.study.claims import record_of
from autoshard.search.study.heartbeat import PROGRAM, WITHOUT_JAX
from autoshard.search.study.task_queue import TaskQueue
from tests.jobs.crew import (
    ROOT,
    claims_of,
    compile_id,
    evaluations,
    task_id_of,
    value_of,
    wait_for,
    worker_command,
)
from tests.jobs.postgres import Server
from tests.jobs.process_tree import command_of, descendants, lives

COUNT, WORKERS, EVERY_S, LEASE_S, EVALUATION_S = 100, 4, 3.0, 8.0, 1.5
KINDS = ("worker", "compiler", "storage", "heartbeat", "supervisor")
SUPERVISED = (
    WITHOUT_JAX + "import logging; logging.basicConfig(level=logging.INFO)\n"
    "from autoshard.processes.supervisor import supervise; sys.exit(supervise(sys.argv[1:], 1000))"
)


@dataclass
class Soak:
    """The team, and what was done to it.

    Attributes:
        command: Of a worker.
        away: Takes the storage away for a while.
        chance: Which process it is.
        steps: How often something was to be done.
        team: Supervisors.
        deeds: What was done, by what and to whom.
        stopped: Processes to continue, and when.
        ever: Every process that there was.
    """

    command: list[str]
    away: Callable[[], None]
    chance: random.Random
    steps: int = 0
    team: list[subprocess.Popen[bytes]] = field(default_factory=list)
    deeds: Counter[str] = field(default_factory=Counter)
    stopped: list[tuple[float, int]] = field(default_factory=list)
    ever: set[int] = field(default_factory=set)

    def start(self) -> None:
        """Starts a supervisor, and with it a worker."""
        program = [sys.executable, "-c", SUPERVISED, str(ROOT / "autoshard"), *self.command]
        self.team.append(subprocess.Popen(program, cwd=ROOT, stderr=subprocess.DEVNULL))

    def step(self) -> None:
        """Does one thing to one process."""
        what = KINDS[self.steps % len(KINDS)]
        self.steps += 1
        if what == "storage":
            self.deeds["storage away"] += 1
            self.away()
            return
        victims = [pid for pid in self.look() if self.kind_of(pid) == what]
        if not victims:
            return
        victim = self.chance.choice(victims)
        how = "killed" if self.steps % 2 else "stopped"
        self.deeds[f"{what} {how}"] += 1
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "stopped":
            self.stopped.append((time.monotonic() + self.chance.uniform(1, 1.5 * LEASE_S), victim))

    def kind_of(self, pid: int) -> str:
        command = command_of(pid)
        if SUPERVISED in command:
            return "supervisor"
        if PROGRAM in command:
            return "heartbeat"
        return "compiler" if command.startswith("sleep ") else "worker"

    def look(self) -> list[int]:
        """All processes of the team that live."""
        pids = [member.pid for member in self.team if member.poll() is None]
        for pid in list(pids):
            pids += descendants(pid)
        self.ever.update(pids)
        return [pid for pid in self.ever if lives(pid)]

    def go_on(self, *, at_once: bool = False) -> None:
        """Continues what was stopped for long enough."""
        now_s = time.monotonic()
        for until_s, pid in list(self.stopped):
            if at_once or now_s > until_s:
                self.stopped.remove((until_s, pid))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def run(self, done: Callable[[], bool]) -> None:
        """Until the workers have ended; supervisors that were killed are started again."""
        for _ in range(WORKERS):
            self.start()
        next_s = time.monotonic() + EVERY_S
        while any(member.poll() is None for member in self.team):
            time.sleep(0.1)
            self.look()
            self.go_on()
            for member in list(self.team):
                if member.poll() not in (None, 0):
                    self.team.remove(member)
                    self.start()
            if time.monotonic() > next_s and not done():
                self.step()
                next_s = time.monotonic() + EVERY_S
        self.go_on(at_once=True)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["journal", "postgresql"])
def test_soak(storage: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    log, path = tmp_path / "evaluations.log", tmp_path / "study.log"
    where = f"journal:{path}"

    def without_file() -> None:
        with suppress(FileNotFoundError):
            path.rename(path.with_suffix(".away"))
            time.sleep(2.0)
            path.with_suffix(".away").rename(path)

    away = without_file
    if storage == "postgresql":
        server: Server = request.getfixturevalue("server")
        where = server.url

        def without_server() -> None:
            server.stop()
            time.sleep(2.0)
            server.start()

        away = without_server
    command = worker_command(where, COUNT, EVALUATION_S, log, "compiler", "soak", LEASE_S)
    soak = Soak(command, away, random.Random(7))
    start_s = time.monotonic()
    try:
        soak.run(lambda: len(set(evaluations(log))) >= 0.95 * COUNT)
        wait_for(lambda: not soak.look(), 60)
    finally:
        left = soak.look()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    print(
        f"{storage}: {time.monotonic() - start_s:.0f} s, {soak.deeds.total()} deeds "
        f"({dict(sorted(soak.deeds.items()))}), {len(evaluations(log))} evaluations started, "
        f"{len(soak.ever)} processes"
    )
    assert not left
    assert soak.deeds.total() >= 10
    assert [member.returncode for member in soak.team] == [0] * WORKERS
    with TaskQueue(where, "soak", create=False) as queue:
        trials = queue.trials()
    done = [t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    assert sorted(record_of(t)["number"] for t in done) == list(range(COUNT))
    assert all(task_id_of(t) == compile_id(record_of(t)["number"]) for t in done)
    assert all(t.value == value_of(record_of(t)["number"]) for t in done)
    assert not claims_of(where, "soak").live
    assert not list(tmp_path.glob("study.log.*"))
