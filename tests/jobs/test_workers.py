"""Whole workers on one study: the command line's own, on a journal and on PostgreSQL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from autoshard.search.study.task_id import TaskKind
from autoshard.search.study.task_queue import TaskQueue
from tests.jobs.crew import ROOT, task_id_of
from tests.jobs.postgres import PASSWORD, Server

JOB = """
factory = "job.py:factory"
mesh = "data=2,model=2"
cpu_devices = 4
compiled = {compiled}
measured = 0
isolate = false
storage = "{storage}"
study = "mlp"
lease_s = 5.0
"""
FACTORY = """
from tests.models import mlp_args, mlp_step

def factory():
    return dict(fn=mlp_step, example_args=mlp_args(), donate_argnums=0)
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def autoshard(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "autoshard", *arguments],
        cwd=cwd, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def said(process: subprocess.Popen[str]) -> str:
    out, error = process.communicate(timeout=400)
    assert process.returncode == 0, error
    return out + error


def job_in(folder: Path, storage: str, compiled: int) -> Path:
    folder.mkdir()
    (folder / "job.py").write_text(FACTORY)
    (folder / "autoshard.toml").write_text(JOB.format(storage=storage, compiled=compiled))
    return folder


def compiled_keys(where: str) -> list[str]:
    """The candidates that a study has evaluations of, as often as it has them."""
    with TaskQueue(where, "mlp", create=False) as queue:
        done = [t for t in queue.trials() if t.state.name in ("COMPLETE", "PRUNED")]
    return [task_id_of(t).key for t in done if task_id_of(t).kind is TaskKind.COMPILE]


def answer(folder: Path) -> Any:
    table = json.loads((folder / "table.json").read_text())
    return table["rules"], table["inputs"]


def check_shared(tmp_path: Path, where: str, workers: int, compiled: int) -> str:
    alone = job_in(tmp_path / "alone", "journal:study.log", compiled)
    said(autoshard(alone, "search", "autoshard.toml", "--out", "table.json", "--quiet"))
    shared = job_in(tmp_path / "shared", where, compiled)
    start_s = time.monotonic()
    team = [autoshard(shared, "worker", "autoshard.toml", "--log-json") for _ in range(workers)]
    texts = [said(worker) for worker in team]
    print(f"{workers} workers on {where.partition(':')[0]}: {time.monotonic() - start_s:.0f} s")
    said(autoshard(shared, "search", "autoshard.toml", "--out", "table.json", "--quiet"))
    assert answer(shared) == answer(alone)
    keys = compiled_keys(where)
    assert sorted(keys) == sorted(compiled_keys(f"journal:{alone / 'study.log'}"))
    assert max(Counter(keys).values()) == 1
    assert len(keys) == compiled
    events = [
        json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")
    ]
    assert sum(e["event"].startswith("done: compile") for e in events) == compiled
    return "".join(texts)


def test_two_workers_find_what_one_finds(tmp_path: Path) -> None:
    where = f"journal:{tmp_path / 'shared.log'}"
    check_shared(tmp_path, where, 2, 3)
    shown = said(autoshard(tmp_path, "status", "--storage", where))
    assert "3 of 3 candidates evaluated" in shown
    assert "best so far: " in shown
    listed = json.loads(said(autoshard(tmp_path, "status", "--storage", where, "--json")))
    assert listed["evaluated"] == listed["wanted"] == 3
    assert not listed["running"]


@pytest.mark.slow
def test_four_workers_on_a_journal_find_what_one_finds(tmp_path: Path) -> None:
    check_shared(tmp_path, f"journal:{tmp_path / 'shared.log'}", 4, 8)


@pytest.mark.slow
def test_four_workers_on_postgresql_find_what_one_finds(tmp_path: Path, server: Server) -> None:
    assert PASSWORD not in check_shared(tmp_path, server.url, 4, 8)


@pytest.mark.slow
def test_finish_measures_once_more_and_writes_the_table(tmp_path: Path) -> None:
    folder = job_in(tmp_path / "job", "journal:study.log", 3)
    options = ("autoshard.toml", "--measured", "2")
    said(autoshard(folder, "worker", *options))
    for _ in range(2):
        said(autoshard(folder, "finish", *options, "--out", "table.json"))
    with TaskQueue(f"journal:{folder / 'study.log'}", "mlp", create=False) as queue:
        measured = [t for t in queue.read().results if t.kind is TaskKind.MEASURE]
    assert len(measured) == 3
    assert answer(folder)[1]
