"""Workers of several processes each (`jax.distributed`) that die, get stuck or are pre-empted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from autoshard.search.study.task_id import TaskKind
from autoshard.search.study.task_queue import TaskQueue
from tests.jobs.crew import claims_of, wait_for
from tests.jobs.ranks import free_port
from tests.jobs.test_workers import ENVIRONMENT, compiled_keys

LIMIT_S = 500.0

# One mesh axis over all devices, and not enough memory for replication: whatever is moved is moved
# between processes.
JOB = """
factory = "job.py:factory"
mesh = "model=4"
cpu_devices = 2
memory_budget = "42KiB"
compiled = 4
measured = 2
storage = "journal:study.log"
study = "mlp"
lease_s = 5.0
"""
FACTORY = """
import pathlib
import time

import jax

from autoshard.evaluate import device_runner
from autoshard.processes import process_group
from tests.models import mlp_args, mlp_step

process_group.ProcessGroup.__init__.__kwdefaults__["grace_s"] = 3.0
run, build = device_runner.DeviceRunner._run_and_compare, device_runner.compile_built
once = pathlib.Path("once")


def stuck(self, compiled, inputs, reference):
    if compiled.evidence.collective_bytes and not once.exists():
        once.write_text(compiled.built.function.__name__)
        self.peers.run_on_all(lambda: None)  # the inputs are placed; the others go on to run
        raise MemoryError("no memory on this host")
    return run(self, compiled, inputs, reference)


def slow(*args, **kwargs):
    time.sleep({pause})
    return build(*args, **kwargs)


def factory():
    device_runner.compile_built = slow
    if {stuck} and jax.process_index() == 1:
        device_runner.DeviceRunner._run_and_compare = stuck
    return dict(fn=mlp_step, example_args=mlp_args(), donate_argnums=0)
"""


@contextmanager
def group(
    folder: Path, *, stuck: bool = False, pause_s: float = 0.0
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that are one worker, each under its supervisor; their words are in 0.log and
    1.log."""
    (folder / "job.py").write_text(FACTORY.format(stuck=stuck, pause=pause_s))
    (folder / "autoshard.toml").write_text(JOB)
    port, workers = free_port(), []
    try:
        for number in range(2):
            options = [
                "worker",
                "autoshard.toml",
                "--log-json",
                "--distributed",
                f"127.0.0.1:{port},2,{number}",
            ]
            with (folder / f"{number}.log").open("w") as log:
                command = [sys.executable, "-m", "autoshard", *options]
                workers.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env=ENVIRONMENT,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        yield workers
    finally:
        for worker in workers:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def ended(workers: list[subprocess.Popen[bytes]], folder: Path) -> None:
    for number, worker in enumerate(workers):
        assert worker.wait(timeout=LIMIT_S) == 0, said(folder, number)[-4000:]


def said(folder: Path, number: int) -> str:
    return (folder / f"{number}.log").read_text()


def child_of(worker: subprocess.Popen[bytes]) -> int:
    """The process that a supervisor started."""
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    return int(children[0])


def check_complete(folder: Path) -> None:
    """Each candidate evaluated once, and the study has what was asked for."""
    keys = compiled_keys(f"journal:{folder / 'study.log'}")
    assert len(keys) == len(set(keys)) >= 4
    claims = claims_of(f"journal:{folder / 'study.log'}", "mlp")
    assert any(task.kind is TaskKind.MEASURE for task in claims.results)
    assert not claims.live


@pytest.mark.slow
def test_two_processes_are_one_worker_and_only_the_first_one_writes(tmp_path: Path) -> None:
    with group(tmp_path) as workers:
        ended(workers, tmp_path)
    check_complete(tmp_path)
    events = [json.loads(line) for line in said(tmp_path, 0).splitlines() if line.startswith("{")]
    assert any(event["event"].startswith("finished: the best is") for event in events)
    assert not [line for line in said(tmp_path, 1).splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_a_layout_that_gets_the_others_stuck_is_rejected_and_the_job_goes_on(
    tmp_path: Path,
) -> None:
    with group(tmp_path, stuck=True) as workers:
        ended(workers, tmp_path)
    check_complete(tmp_path)
    claims = claims_of(f"journal:{tmp_path / 'study.log'}", "mlp")
    reasons = [
        claims.record(task)["candidates"][0]["reason"]
        for task in claims.results
        if task.kind is TaskKind.VERIFY
    ]
    assert (
        Counter(reasons)["running failed: on process 1: MemoryError: no memory on this host"] == 1
    )
    assert "is stuck on its devices since another process failed" in said(tmp_path, 0)
    assert "starting it again" in said(tmp_path, 0)
    assert "starting it again" in said(tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_takes_the_others_along_and_all_start_again(
    victim: int, tmp_path: Path
) -> None:
    with group(tmp_path, pause_s=3.0) as workers:
        wait_for(lambda: '"claimed: compile' in said(tmp_path, 0), LIMIT_S)
        os.kill(child_of(workers[victim]), signal.SIGKILL)
        ended(workers, tmp_path)
    check_complete(tmp_path)
    assert "starting it again" in said(tmp_path, 1 - victim)


@pytest.mark.slow
def test_a_group_that_is_preempted_releases_its_task(tmp_path: Path) -> None:
    with group(tmp_path, pause_s=5.0) as workers:
        wait_for(lambda: '"claimed: compile' in said(tmp_path, 0), LIMIT_S)
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        assert [worker.wait(timeout=60) for worker in workers] == [143, 143]
    assert "released: compile" in said(tmp_path, 0)
    with TaskQueue(f"journal:{tmp_path / 'study.log'}", "mlp", create=False) as queue:
        assert not queue.read().live
