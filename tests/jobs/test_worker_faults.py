"""What a candidate can do to a real worker of the command line, and what can be done to one that
measures or writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.search.study.task_id import TaskKind
from autoshard.search.study.task_queue import MAX_DEATHS
from autoshard.table.spec_table import SpecTable
from tests.jobs.crew import ROOT, claims_of, wait_for
from tests.jobs.test_workers import ENVIRONMENT, answer, autoshard, compiled_keys, said

JOB = """
factory = "job.py:factory"
mesh = "data=2,model=2"
cpu_devices = 4
compiled = 3
measured = {measured}
isolate = {isolate}
compile_timeout_s = 20.0
storage = "journal:study.log"
study = "mlp"
lease_s = 4.0
"""
FACTORY = """
import pathlib
import sys

from tests.models import mlp_args, mlp_step

{patch}

def factory():
    return dict(fn=mlp_step, example_args=mlp_args(), donate_argnums=0)
"""

IN_THE_COMPILER = '''
from autoshard.compiler import isolated

PROGRAM = """
import os, pathlib, sys, time
from autoshard.compiler import worker
from autoshard.jax_internals import executables
real, once = executables.compile_requested, pathlib.Path("once")

def compile_requested(*args):
    if once.exists() or not once.write_text("x"):
        return real(*args)
    {deed}

executables.compile_requested = compile_requested
worker.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""
isolated.Isolation.__init__.__kwdefaults__["command"] = (*isolated.COMMAND[:2], "-c", PROGRAM)
'''

IN_THE_WORKER = """
import os

from autoshard.evaluate import device_runner

real, victim = device_runner.DeviceRunner.compile, pathlib.Path("victim")


def compile(self, key, *args):
    if not victim.exists():
        victim.write_text(key)
    if victim.read_text() == key:
        {deed}
    return real(self, key, *args)


device_runner.DeviceRunner.compile = compile
"""


def job_in(folder: Path, *, patch: str = "", isolate: bool = False, measured: int = 0) -> Path:
    folder.mkdir()
    (folder / "job.py").write_text(FACTORY.format(patch=patch))
    (folder / "autoshard.toml").write_text(
        JOB.format(measured=measured, isolate=str(isolate).lower())
    )
    return folder


def reasons(folder: Path) -> list[str]:
    """Why candidates were rejected when they were compiled."""
    claims = claims_of(f"journal:{folder / 'study.log'}", "mlp")
    candidates = [
        claims.record(task)["candidates"][0]
        for task in claims.results
        if task.kind is TaskKind.COMPILE
    ]
    return [candidate["reason"] for candidate in candidates if candidate["status"] == "rejected"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("os.abort()", "the compiler aborted the process (SIGABRT)"),
        ("os.kill(os.getpid(), 9)", None),  # once, which may have been for another's memory
        ("time.sleep(1000)", "it took longer than 20 s; the compiler's process was ended"),
    ],
    ids=["aborts", "is killed once", "hangs"],
)
def test_a_candidate_that_fails_in_the_compiler_is_rejected_by_the_worker(
    deed: str, reason: str | None, tmp_path: Path
) -> None:
    folder = job_in(tmp_path / "job", patch=IN_THE_COMPILER.format(deed=deed), isolate=True)
    words = said(autoshard(folder, "worker", "autoshard.toml", "--log-json", "--restarts", "0"))
    assert "finished: the best is" in words
    found = reasons(folder)
    assert len(found) == (reason is not None)
    assert all(text.startswith("compilation failed: ") and reason in text for text in found)
    keys = compiled_keys(f"journal:{folder / 'study.log'}")
    assert len(keys) == len(set(keys)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "deed", ["os.abort()", "os.kill(os.getpid(), 9)"], ids=["aborts", "runs out of memory"]
)
def test_a_candidate_that_ends_its_worker_is_given_up_by_the_next_ones(
    deed: str, tmp_path: Path
) -> None:
    folder = job_in(tmp_path / "job", patch=IN_THE_WORKER.format(deed=deed))
    words = said(autoshard(folder, "worker", "autoshard.toml", "--log-json"))
    assert words.count("starting it again") == MAX_DEATHS
    assert "finished: the best is" in words
    assert reasons(folder) == [f"{MAX_DEATHS} workers ended while they were at it"]
    keys = compiled_keys(f"journal:{folder / 'study.log'}")
    assert len(keys) == len(set(keys)) == 3


@pytest.mark.slow
def test_a_candidate_that_hangs_on_the_devices_is_rejected_and_the_job_goes_on(
    tmp_path: Path,
) -> None:
    patch = """
import time

from autoshard.evaluate import device_runner

real, once = device_runner.DeviceRunner._run_and_compare, pathlib.Path("once")


def run(self, *args):
    if not once.exists():
        once.write_text("x")
        time.sleep(1000)
    return real(self, *args)


device_runner.DeviceRunner._run_and_compare = run
"""
    folder = job_in(tmp_path / "job", patch=patch, measured=2)
    words = said(autoshard(folder, "worker", "autoshard.toml", "--log-json", "--run-timeout", "60"))
    assert words.count("starting it again") == 1
    claims = claims_of(f"journal:{folder / 'study.log'}", "mlp")
    candidates = [
        claims.record(task)["candidates"][0]
        for task in claims.results
        if task.kind is TaskKind.VERIFY
    ]
    assert [t["reason"] for t in candidates if t["status"] == "rejected"] == [
        "running failed: it took longer than 60 s"
    ]
    assert any(task.kind is TaskKind.MEASURE for task in claims.results)


@pytest.mark.slow
def test_a_worker_that_is_killed_while_measuring_is_followed_by_the_same_answer(
    tmp_path: Path,
) -> None:
    alone = job_in(tmp_path / "alone", measured=2)
    said(autoshard(alone, "finish", "autoshard.toml", "--out", "table.json"))
    patch = """
import time

from autoshard.evaluate import device_runner

real = device_runner.DeviceRunner.measure


def measure(self, *args):
    if pathlib.Path("slowly").exists():
        time.sleep(60)
    return real(self, *args)


device_runner.DeviceRunner.measure = measure
"""
    folder = job_in(tmp_path / "job", patch=patch, measured=2)
    (folder / "slowly").touch()
    log = folder / "worker.log"
    with log.open("w") as file:
        command = [sys.executable, "-m", "autoshard", "worker", "autoshard.toml", "--restarts", "0"]
        worker = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stderr=file)
    wait_for(lambda: "claimed: measure" in log.read_text(), 300)
    worker.kill()
    worker.wait()
    (folder / "slowly").unlink()
    evaluated = compiled_keys(f"journal:{folder / 'study.log'}")
    said(autoshard(folder, "finish", "autoshard.toml", "--out", "table.json"))
    assert (
        compiled_keys(f"journal:{folder / 'study.log'}") == evaluated
    )  # nothing was compiled again
    assert {tuple(t["rules"]) for t in measured(folder)} == {
        tuple(t["rules"]) for t in measured(alone)
    }
    assert answer(folder)[1]


def measured(folder: Path) -> list[dict[str, list[str]]]:
    """The candidates of a table that were measured; which of them wins is the clock's to say."""
    table = json.loads((folder / "table.json").read_text())
    return [candidate for candidate in table["evidence"]["candidates"] if "measured" in candidate]


def test_a_process_that_is_killed_while_it_writes_a_table_leaves_the_old_one(
    tmp_path: Path,
) -> None:
    program = """
import os, pathlib, signal, sys
from autoshard.table.spec_table import SpecTable
real = pathlib.Path.write_text

def half(self, text, **options):
    real(self, text[: len(text) // 2], **options)
    os.kill(os.getpid(), signal.SIGKILL)

table = SpecTable.load(sys.argv[1])
pathlib.Path.write_text = half
table.save(sys.argv[1])
"""
    path = tmp_path / "table.json"
    SpecTable.load(ROOT / "tests" / "golden" / "tables" / "mlp_schema_1.json").save(path)
    before = path.read_bytes()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program, str(path)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
