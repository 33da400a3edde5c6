"""Doctor, logging, the SLURM script, and what a worker says of bad input."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

from autoshard.cli.app import app
from autoshard.cli.doctor import examine
from autoshard.cli.factory import use_processes
from autoshard.cli.job_file import arguments_of, parse_job, read_job
from autoshard.cli.job_log import log_events
from autoshard.errors import ArgumentError
from autoshard.evidence.candidate import Candidate, Origin
from autoshard.layout.pins import Only
from autoshard.processes.process_group import LOST
from autoshard.processes.supervisor import supervise
from autoshard.search.study.task_id import TaskId, TaskKind
from autoshard.search.study.task_queue import Result, Task, TaskQueue
from tests.jobs.crew import ROOT
from tests.jobs.test_workers import ENVIRONMENT, answer, autoshard, compiled_keys, job_in, said

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
    environment = {
        **ENVIRONMENT,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_NTASKS": "3",
        "SLURM_JOB_ID": "7",
    }
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
    assert len({e["pid"] for e in events if e["event"].startswith("finished: the best is")}) == 3


def test_the_doctor_says_what_is_there_and_what_to_do(tmp_path: Path) -> None:
    found = {f.what: f for f in examine(f"journal:{tmp_path / 'x.log'}")}
    assert found["storage"].level == "ok"
    assert found["devices"].state.startswith("8 cpu")
    assert "jax " in found["versions"].state
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
            logging.getLogger("autoshard.jobs").info(
                "lost %s\nand more", "postgresql://me:s3cret@h/x"
            )
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
    path.write_text(
        'factory = "a:b"\ncompiled = 5\nneeds = ["compile"]\n[pins]\n"params/w" = ["", ["x", "y"]]'
    )
    job = read_job(str(path), {"compiled": 7, "measured": None})
    assert (job.compiled, job.measured, job.needs) == (7, None, ("compile",))
    assert job.pins == {"params/w": ["", ["x", "y"]]}
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_job(str(tmp_path / "other.toml"), {})


def test_pins_of_a_job_file_are_those_of_optimize(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        factory = "a:b"
        mesh = "x=2"
        [pins]
        "w" = ["", ["x", "y"]]
        "re:.*/b" = { only = ["", "*", "x", ["x", "y"]] }
    """
    monkeypatch.setattr("autoshard.cli.job_file.call_factory", lambda _: {})
    pins = arguments_of(parse_job(text, "autoshard.toml"))["pins"]
    assert pins["w"] == P(None, ("x", "y"))
    assert pins[re.compile(".*/b")] == Only(None, P.UNCONSTRAINED, "x", ("x", "y"))
    with pytest.raises(ArgumentError, match="no regular expression"):
        arguments_of(parse_job(text.replace("re:.*", "re:*"), "autoshard.toml"))
    with pytest.raises(ArgumentError, match="unknown field"):
        parse_job(text.replace("only", "any"), "autoshard.toml")


def test_a_lost_worker_is_started_again(tmp_path: Path) -> None:
    log = tmp_path / "lives"
    program = (
        f"import os, pathlib; p = pathlib.Path({str(log)!r}); n = len(p.read_text()) if p.exists() "
        f"else 0; "
        f"p.write_text('x' * (n + 1)); "
        f"os.abort() if n == 0 else os._exit({LOST}) if n == 1 else os._exit(3)"
    )
    assert supervise([sys.executable, "-c", program], restarts=5) == 3
    assert log.read_text() == "xxx"
    assert supervise([sys.executable, "-c", "import os; os.abort()"], restarts=0) == 128 + 6


def commands_in(text: str) -> list[list[str]]:
    """The lines of a text that call autoshard, without what a shell does with them; of Markdown,
    those of its code."""
    if "```" in text:
        text = "\n".join(text.split("```")[1::2])
    lines = [line.strip().removeprefix("- run:").strip() for line in text.splitlines()]
    lines = [re.sub(r"^srun( --?\S+)* ", "", line) for line in lines]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("autoshard ")]


def check_command(arguments: list[str]) -> None:
    """Parses a command as the command line does, and runs nothing.

    Raises:
        UsageError: Of click, if it is none.
    """
    group: Any = typer.main.get_command(app)
    with group.make_context("autoshard", list(arguments), resilient_parsing=True):
        command = group.commands[arguments[0]]
    command.make_context(arguments[0], list(arguments[1:]))


@pytest.mark.parametrize(
    "file", ["README.md", "examples/slurm_search.sh", "examples/transformer.py"]
)
def test_the_commands_that_are_shown_exist_with_their_options(file: str) -> None:
    found = commands_in((ROOT / file).read_text())
    assert found
    for arguments in found:
        check_command(arguments)


def test_a_command_with_an_unknown_option_is_found_out() -> None:
    for wrong in (["worker", "autoshard.toml", "--no-such"], ["worker"], ["finish", "a", "b"]):
        with pytest.raises(
            Exception, match=r"No such option|Missing parameter|unexpected extra argument"
        ):
            check_command(wrong)


def test_the_kubernetes_manifest_is_a_job_of_workers() -> None:
    (job,) = yaml.safe_load_all((ROOT / "examples" / "kubernetes_search.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] in ("OnFailure", "Never")  # a Job allows no other
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    (container,) = pod["containers"]
    assert container["command"][0] == "autoshard"
    check_command(container["command"][1:])
    (variable,) = container["env"]
    assert variable["name"] == "AUTOSHARD_STORAGE"
    assert set(variable["valueFrom"]["secretKeyRef"]) == {"name", "key"}
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert container["command"][2].startswith(container["volumeMounts"][0]["mountPath"] + "/")


def test_the_github_action_runs_a_check() -> None:
    workflow = yaml.safe_load((ROOT / "examples" / "github_check.yml").read_text())
    assert (
        workflow[True] == "pull_request"
    )  # YAML 1.1 reads `on` as a truth value; GitHub reads it as a word
    (job,) = workflow["jobs"].values()
    steps = job["steps"]
    assert all(("uses" in step) ^ ("run" in step) for step in steps)
    assert all(
        re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step
    )
    (arguments,) = [a for step in steps if "run" in step for a in commands_in(step["run"])]
    assert arguments[0] == "check"
    check_command(arguments)


def test_status_can_be_watched(tmp_path: Path) -> None:
    where = f"journal:{tmp_path / 'study.log'}"
    queue = TaskQueue(where, "s")
    watching = autoshard(tmp_path, "status", "--storage", where, "--watch", "--json")
    assert watching.stdout is not None
    try:
        assert json.loads(watching.stdout.readline())["evaluated"] == 0
        record = {
            "candidates": [
                Candidate("fsdp", Origin.SEARCH, (), "anchors", "k").reject("too slow").to_dict()
            ],
            "note": "",
        }
        task = Task(lambda: Result(record), lambda reason: Result(record), "compile", "k")
        queue.run({TaskId(TaskKind.COMPILE, ("k",)): task})
        shown = json.loads(watching.stdout.readline())
        assert (shown["evaluated"], shown["rejected"]) == (
            1,
            [{"name": "fsdp", "reason": "too slow"}],
        )
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=60) == 0
    finally:
        watching.kill()
        watching.communicate()


VARIANTS = """
cpu_devices = 4
mesh = "data=2,model=2"
compiled = 0
measured = 0
out = "table.json"
samples_per_step = {small = 8, large = 32}
[variants]
small = "job.py:small"
large = "job.py:large"
"""
VARIANT_FACTORIES = """
from tests.models import mlp_args, mlp_step

def small():
    return dict(fn=mlp_step, example_args=mlp_args(8), donate_argnums=0)

def large():
    return dict(fn=mlp_step, example_args=mlp_args(32), donate_argnums=0)

def other():
    return dict(fn=mlp_step, example_args=mlp_args(32))
"""


def test_a_job_may_have_variants(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(VARIANT_FACTORIES)
    (tmp_path / "autoshard.toml").write_text(VARIANTS)
    words = said(autoshard(tmp_path, "search", "autoshard.toml", "--quiet"))
    assert (
        "variant large was chosen of 2" in words
    )  # the same weights are updated for four times the samples
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["inputs"]["x"]["shape"] == [32, 32]


def test_variants_must_agree_on_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(VARIANT_FACTORIES)
    Path("autoshard.toml").write_text(VARIANTS.replace("job.py:large", "job.py:other"))
    with pytest.raises(
        ArgumentError,
        match=r"variant 'large': job\.py:other gives another donate_argnums than 'small'",
    ):
        arguments_of(read_job("autoshard.toml", {}))
    for text in ("mesh = 'data=4'", 'factory = "a:b"\n[variants]\nx = "c:d"'):
        with pytest.raises(ArgumentError, match="either a factory or variants"):
            parse_job(text, "autoshard.toml")


@pytest.mark.slow
def test_workers_do_what_they_are_for_and_leave_the_rest_to_others(tmp_path: Path) -> None:
    folder = job_in(tmp_path / "job", "journal:study.log", 3)
    options = ("autoshard.toml", "--measured", "2", "--log-json")
    team = {
        needs: autoshard(folder, "worker", *options, "--needs", needs)
        for needs in ("predict,compile", "measure")
    }
    events = {
        needs: [
            json.loads(line)["event"] for line in said(worker).splitlines() if line.startswith("{")
        ]
        for needs, worker in team.items()
    }
    done = {
        needs: [e.split()[1] for e in all_ if e.startswith("done: ")]
        for needs, all_ in events.items()
    }
    assert sorted(done["predict,compile"]) == ["compile"] * 3 + ["propose"]
    assert set(done["measure"]) == {"verify", "measure"}
    assert any(e.startswith("waiting for a worker that can") for e in events["measure"])


@pytest.mark.parametrize("how", ["here", "host:1,2", "host:1,two,0"])
def test_odd_words_for_several_processes_are_refused(how: str) -> None:
    with pytest.raises(ArgumentError, match="write auto, or HOST:PORT,COUNT,NUMBER"):
        use_processes(how)
