"""The command line, in processes of its own: exit codes, one line on standard error, resuming after
a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoshard.search.study.claims import claim_of, record_of
from autoshard.search.study.storage import open_storage, study_names
from autoshard.search.study.task_id import TaskKind
from autoshard.search.study.task_queue import TaskQueue

FACTORY = """
import jax
from tests.models import mlp_args, mlp_step

def factory():
    return dict(fn=mlp_step, example_args=mlp_args(), donate_argnums=0)

def pair():
    return mlp_step, mlp_args()

def nothing():
    return 3

def failing():
    raise RuntimeError("no data here")
"""
ROOT = Path(__file__).parents[2]
SEARCH = ("--mesh", "data=4,model=2", "--cpu-devices", "8", "--compiled", "3", "--measured", "0")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(FACTORY)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "autoshard", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def run(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_search_saves_a_table_that_another_process_applies(here: Path) -> None:
    found = run(here, "search", "job:factory", *SEARCH, "--out", "specs/mlp.json", "--json")
    assert found.returncode == 0, found.stderr
    said = json.loads(found.stdout)
    winner = next(t for t in said["candidates"] if t["status"] == "winner")
    assert said["verified"]["ok"]
    fields = "name origin rules status reason predicted partitioned compiled verified measured constraints"
    assert set(fields.split()) <= set(winner)
    sizes = {
        f"{part}_bytes" for part in ("collective", "argument", "output", "alias", "temp", "peak")
    }
    assert sizes | {"collectives", "full_remat_warnings", "time_s"} <= set(winner["compiled"])
    script = """
import jax; jax.config.update("jax_num_cpu_devices", 8)
import autoshard, job, json, dataclasses, numpy as np
plan = autoshard.apply(mesh="data=4,model=2", layout="specs/mlp.json", **job.factory())
args = job.factory()["example_args"]
expected = jax.tree.leaves(jax.jit(job.mlp_step)(*args))
for a, b in zip(jax.tree.leaves(plan(*args)), expected): np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
assert not plan.candidates
print(json.dumps([dataclasses.asdict(c) for c in plan.compile().evidence.collectives]))
"""
    applied = subprocess.run(
        [sys.executable, "-c", script],
        cwd=here,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert applied.returncode == 0, applied.stderr
    assert json.loads(applied.stdout) == winner["compiled"]["collectives"]
    shown = run(here, "show", "specs/mlp.json")
    assert shown.returncode == 0
    assert "params/w1" in shown.stdout


def compiled_seconds(log: Path) -> dict[str, list[float]]:
    """By candidate, the compile times that its study has: one, unless it was compiled twice."""
    found: dict[str, list[float]] = {}
    if not log.exists():
        return found
    for name in study_names(open_storage(str(log))):
        for trial in TaskQueue(str(log), name, create=False).trials():
            claim = claim_of(trial)
            assert claim is not None
            task_id = claim.task
            if task_id.kind is TaskKind.COMPILE and trial.state.name in ("COMPLETE", "PRUNED"):
                (record,) = record_of(trial)["candidates"]
                found.setdefault(task_id.key, []).append(record["compiled"]["compile_s"])
    return found


def test_a_killed_search_continues_and_repeats_no_finished_candidate(here: Path) -> None:
    study = ("--storage", "study.log", "--lease", "3")
    arguments = (
        "search",
        "job:factory",
        *SEARCH[:-4],
        "--compiled",
        "6",
        "--measured",
        "0",
        *study,
    )
    first = subprocess.Popen(
        command(*arguments),
        cwd=here,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log = here / "study.log"
    deadline = time.monotonic() + 200
    while len(compiled_seconds(log)) < 2 and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = compiled_seconds(log)
    assert before
    second = run(here, *arguments, "--json")
    assert second.returncode == 0, second.stderr
    after = compiled_seconds(log)
    assert len(after) == 6
    assert all(len(seconds) == 1 for seconds in after.values())
    for key, seconds in before.items():
        assert after[key] == seconds
    third = run(here, *arguments)
    assert third.returncode == 0
    assert "compiled in" not in third.stderr
    assert compiled_seconds(log) == after


def test_ctrl_c_ends_the_search_and_saves_the_best_so_far(here: Path) -> None:
    arguments = (*SEARCH[:-4], "--compiled", "12", "--measured", "4", "--out", "best.json")
    job = subprocess.Popen(
        command("search", "job:factory", *arguments),
        cwd=here, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert job.stderr is not None
    seen = next(line for line in job.stderr if "compiled in" in line)
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=200)
    assert job.returncode == 0, seen + err
    assert "interrupted" in err
    assert "verified: no (the search was interrupted" in out or "verified: yes" in out
    assert (here / "best.json").exists()


def test_a_study_of_another_program_is_refused(here: Path) -> None:
    study = ("--storage", "study.log", "--study", "mine")
    assert run(here, "search", "job:factory", *SEARCH, *study).returncode == 0
    other = run(
        here,
        "search",
        "job:pair",
        *SEARCH[:-4],
        "--mesh",
        "data=8",
        "--compiled",
        "1",
        "--measured",
        "0",
        *study,
    )
    assert other.returncode == 2
    assert "mesh: 'data=4,model=2' there, 'data=8' here" in other.stderr


BAD = {
    "a factory that does not exist": (("search", "job:nope", *SEARCH), 2, "has no function 'nope'"),
    "a module that does not exist": (("search", "nojob:factory", *SEARCH), 2, "no module 'nojob'"),
    "no factory at all": (("search", "job", *SEARCH), 2, "pkg.module:factory"),
    "a factory that returns something else": (
        ("search", "job:nothing", *SEARCH),
        2,
        "return (fn, example_args)",
    ),
    "a factory that fails": (("search", "job:failing", *SEARCH), 2, "no data here"),
    "no mesh": (("search", "job:factory", "--cpu-devices", "8"), 2, "--mesh"),
    "another number of devices": (
        ("search", "job:factory", "--mesh", "data=4", "--cpu-devices", "8"),
        2,
        "has 8",
    ),
    "a budget that nothing fits": (
        ("search", "job:factory", *SEARCH, "--memory-budget", "1KiB"),
        1,
        "smallest predicted peak",
    ),
    "a command that does not exist": (("serch",), 2, "serch"),
    "a table that does not exist": (("show", "nothing.json"), 2, "cannot be read"),
    "a table that is cut short": (("show", "cut.json"), 2, "is no JSON"),
    "a table that is something else": (("show", "other.json"), 2, "is no spec table"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_line_and_an_exit_code(what: str, here: Path) -> None:
    (here / "cut.json").write_text('{"schema": 1, "function": "st')
    (here / "other.json").write_text('{"schema": 1, "function": 7}')
    arguments, code, words = BAD[what]
    failed = run(here, *arguments, *(("--quiet",) if arguments[0] == "search" else ()))
    assert failed.returncode == code, failed.stderr
    lines = [line for line in failed.stderr.splitlines() if line.startswith("autoshard")]
    assert len(lines) == 1
    assert words in lines[0]
    assert "Traceback" not in failed.stderr
    assert not failed.stdout


def test_debug_shows_the_traceback(here: Path) -> None:
    failed = run(here, "--debug", "show", "nothing.json")
    assert "Traceback" in failed.stderr
