"""Doctor, logging, the SLURM script, and what a worker says of bad input."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoshard.agreement import LOST
from autoshard.cli import app
from autoshard.cli_doctor import examine
from autoshard.errors import ArgumentError
from autoshard.events import log_events
from autoshard.job import parse_job, read_job
from autoshard.supervise import supervise
from tests.jobs.crew import ROOT
from tests.jobs.test_workers import ENVIRONMENT, answer, compiled_keys, job_in

SRUN = """#!/bin/bash
# A stand-in for srun: N local processes with SLURM's environment variables.
count=${SLURM_NTASKS:-1}
while [[ ${1:-} == --* ]]; do [[ $1 == --ntasks=* ]] && count=${1#--ntasks=}; shift; done
pids=()
for ((i = 0; i < count; i++)); do SLURM_PROCID=$i SLURM_NTASKS=$count SLURM_LOCALID=$i "$@" & pids+=($!); done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""


@pytest.mark.slow
def test_the_slurm_script_with_a_stand_in_for_srun(tmp_path: Path) -> None:
    job = job_in(tmp_path / "job", "journal:study.log", 4)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(SRUN)
    (programs / "autoshard").write_text(f'#!/bin/sh\nexec {sys.executable} -m autoshard "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    environment = {**ENVIRONMENT, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7"}
    script = ROOT / "examples" / "slurm_search.sh"
    done = subprocess.run(
        ["bash", str(script), "autoshard.toml", "table.json"],
        cwd=job, env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert answer(job)[1]
    keys = compiled_keys(f"journal:{job / 'study.log'}")
    assert len(keys) == len(set(keys)) == 4
    events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"time"')]
    workers = {e["pid"] for e in events if e["event"].startswith("claimed")}
    assert len(workers) > 1


def test_the_doctor_says_what_is_there_and_what_to_do(tmp_path: Path) -> None:
    found = {f.what: f for f in examine(f"journal:{tmp_path / 'x.log'}")}
    assert found["storage"].level == "ok"
    assert found["devices"].found.startswith("8 cpu")
    assert "jax " in found["versions"].found
    assert all(f.fix for f in found.values() if f.level != "ok")
    broken = CliRunner().invoke(app, ["doctor", "--storage", "sqlite+odd://u:hidden@h/x", "--json"])
    assert broken.exit_code == 1
    assert "hidden" not in broken.stdout
    assert json.loads(broken.stdout)[-1]["level"] == "broken"


def test_one_event_is_one_line_without_passwords(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("autoshard")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        for as_json in (True, False):
            log_events(logging.INFO, as_json=as_json)
            logging.getLogger("autoshard.jobs").info("lost %s\nand more", "postgresql://me:s3cret@h/x")
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert json.loads(said[0])["event"] == "lost postgresql://me:***@h/x and more"
    assert "s3cret" not in said[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("factory = 3", "factory"),
        ('factory = "a:b"\ncompiled = "many"', "compiled"),
        ('factory = "a:b"\nneeds = ["think"]', "needs"),
        ('factory = "a:b"\nbudget = 3', "unknown field 'budget'"),
        ("mesh = 'data=4'", "factory"),
        ("factory = ", "no TOML"),
    ],
)
def test_a_bad_job_file_names_the_field(text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"job file autoshard.toml.*{words}"):
        parse_job(text, "autoshard.toml")


def test_options_stand_over_the_job_file(tmp_path: Path) -> None:
    path = tmp_path / "autoshard.toml"
    path.write_text('factory = "a:b"\ncompiled = 5\nneeds = ["compile"]\n[pins]\n"params/w" = ["", ["x", "y"]]')
    job = read_job(str(path), {"compiled": 7, "measured": None})
    assert (job.compiled, job.measured, job.needs) == (7, None, ("compile",))
    assert job.pins == {"params/w": ["", ["x", "y"]]}
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_job(str(tmp_path / "other.toml"), {})


def test_a_lost_worker_is_started_again(tmp_path: Path) -> None:
    log = tmp_path / "lives"
    program = (
        f"import os, pathlib; p = pathlib.Path({str(log)!r}); n = len(p.read_text()) if p.exists() else 0; "
        f"p.write_text('x' * (n + 1)); "
        f"os.abort() if n == 0 else os._exit({LOST}) if n == 1 else os._exit(3)"
    )
    assert supervise([sys.executable, "-c", program], restarts=5) == 3
    assert log.read_text() == "xxx"
    assert supervise([sys.executable, "-c", "import os; os.abort()"], restarts=0) == 128 + 6
