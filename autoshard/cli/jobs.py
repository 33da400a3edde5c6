"""Commands of shared studies: worker, finish, status."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Annotated

import jax
import typer
from rich.console import Console
from rich.markup import escape

from autoshard.cli.factory import use_cpu_devices, use_processes
from autoshard.cli.job_file import Job, read_job, run_job
from autoshard.cli.job_log import log_events
from autoshard.cli.options import (
    AsJson,
    CpuDevices,
    Distributed,
    Lease,
    LogJson,
    Measured,
    Mesh,
    Out,
    Seed,
    SharedCompiled,
    Storage,
    Study,
    Target,
    What,
)
from autoshard.errors import ArgumentError, StudyError
from autoshard.evidence.candidate import winner_of
from autoshard.plan import Plan
from autoshard.processes.supervisor import end_with_supervisor, supervise
from autoshard.search.study.lease_watch import LEASE_S
from autoshard.search.study.passwords import without_password
from autoshard.search.study.status import status_json, status_of, status_text
from autoshard.search.study.storage import (
    close_storage,
    open_storage,
    study_names,
)
from autoshard.search.study.task_queue import LIMIT_S, TaskQueue
from autoshard.text import seconds_text

WATCH_S = 2.0
"""How often `status --watch` reads the study. Chosen by hand; `test_status_can_be_watched` waits
for the second reading."""


def worker(  # noqa: PLR0913 - a command has as many options as its users need
    what: What,
    storage: Storage = None,
    study: Study = None,
    needs: Annotated[
        str | None,
        typer.Option(help="What this worker does, of predict,compile,measure; by default all."),
    ] = None,
    mesh: Mesh = None,
    target: Target = None,
    compiled: SharedCompiled = None,
    measured: Measured = None,
    seed: Seed = None,
    cpu_devices: CpuDevices = None,
    distributed: Distributed = None,
    lease: Lease = None,
    run_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds until a task (compiling, verifying, measuring) has failed.",
            show_default="3600",
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(help="Start again this often after an abort or a kill.")
    ] = 10,
    log_json: LogJson = False,
) -> None:
    """Works on a shared study until it is finished; start any number, anywhere, and stop them at
    will.
    """
    log_events(logging.INFO, as_json=log_json)
    if restarts:
        command = [sys.executable, "-m", "autoshard", *_without_restarts(sys.argv[1:])]
        raise typer.Exit(supervise([*command, "--restarts", "0"], restarts))

    end_with_supervisor()
    capabilities = None if needs is None else tuple(part.strip() for part in needs.split(","))
    options = {
        "storage": storage,
        "study": study,
        "needs": capabilities,
        "mesh": mesh,
        "target": target,
        "compiled": compiled,
        "measured": measured,
        "seed": seed,
        "cpu_devices": cpu_devices,
        "distributed": distributed,
        "lease_s": lease,
        "run_timeout_s": run_timeout,
    }
    job = read_job(what, options)
    if job.run_timeout_s is None:
        job = job.updated({"run_timeout_s": LIMIT_S})
    if job.storage is None:
        raise ArgumentError(
            "a worker needs the storage of its study: pass --storage, or name it in the job file."
        )
    plan = run_here(job, progress=False)
    if jax.process_index() == 0:
        _log_best(plan)


def _without_restarts(arguments: Sequence[str]) -> list[str]:
    """The arguments of a worker but for `--restarts N` and `--restarts=N`."""
    rest = [argument for argument in arguments if not argument.startswith("--restarts=")]
    if "--restarts" in rest:
        at = rest.index("--restarts")
        del rest[at : at + 2]
    return rest


def _log_best(plan: Plan) -> None:
    best = winner_of(plan.candidates)
    assert best is not None
    seconds = "" if best.measured is None else f", measured {seconds_text(best.measured.median_s)}"
    logging.getLogger("autoshard.jobs").info("finished: the best is %s%s", best.name, seconds)


def finish(  # noqa: PLR0913 - a command has as many options as its users need
    what: What,
    out: Out = None,
    storage: Storage = None,
    study: Study = None,
    mesh: Mesh = None,
    target: Target = None,
    compiled: SharedCompiled = None,
    measured: Measured = None,
    seed: Seed = None,
    cpu_devices: CpuDevices = None,
    distributed: Distributed = None,
    lease: Lease = None,
    log_json: LogJson = False,
) -> None:
    """Measures the best few of a study once more, on this machine alone, and writes the table.

    What is left of the study is done first.
    """
    log_events(logging.INFO, as_json=log_json)
    options = {
        "out": None if out is None else str(out),
        "storage": storage,
        "study": study,
        "mesh": mesh,
        "target": target,
        "compiled": compiled,
        "measured": measured,
        "seed": seed,
        "cpu_devices": cpu_devices,
        "distributed": distributed,
        "lease_s": lease,
    }
    job = read_job(what, options)
    if job.run_timeout_s is None:
        job = job.updated({"run_timeout_s": LIMIT_S})
    if job.storage is None:
        raise ArgumentError(
            "there is no study to finish: pass --storage, or name it in the job file."
        )
    if job.out is None:
        raise ArgumentError(
            "where to save the table: pass --out specs/step.json, or write out = ... in the job "
            "file."
        )
    plan = run_here(job, again=True, progress=False)
    if jax.process_index() == 0:
        typer.echo(str(plan))


def run_here(job: Job, *, again: bool = False, progress: bool = True) -> Plan:
    """Runs a job in a process of the command line, with the devices and the compilation cache that
    it asks for; a task in hand is released when the process is pre-empted.
    """
    use_cpu_devices(job.cpu_devices)
    use_processes(job.distributed)
    if job.distributed is not None and jax.process_index() != 0:
        logging.getLogger("autoshard").setLevel(logging.WARNING)  # the first process logs for all
    if job.compilation_cache is not None:
        jax.config.update("jax_compilation_cache_dir", job.compilation_cache)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = job.compilation_cache
    if job.storage is not None:
        signal.signal(signal.SIGTERM, _preempted)
    return run_job(job, again=again, progress=progress)


def _preempted(number: int, frame: FrameType | None) -> None:
    """Ends the process by an exception, on whose way the task in hand is released."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def status(
    storage: Annotated[
        str, typer.Option(envvar="AUTOSHARD_STORAGE", help="Where the study is kept.")
    ],
    study: Study = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again every few seconds.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Shows the status of a study: what is done and rejected, what runs where, the best so far, the
    time left.
    """
    name = study or _only_study(storage)
    with TaskQueue(storage, name, read_only=True) as queue:
        if watch:
            with suppress(KeyboardInterrupt):
                _watch(queue, name, as_json=as_json)
        else:
            typer.echo(_status(queue, as_json))


def _status(queue: TaskQueue, as_json: bool) -> str:
    now = status_of(queue)
    return json.dumps(status_json(now)) if as_json else status_text(now)


def _watch(queue: TaskQueue, name: str, *, as_json: bool) -> None:
    """Shows the status of a study until Ctrl-C: in place on a terminal, else again whenever it has
    changed.
    """
    console = Console()
    if console.is_terminal and not as_json:
        with console.status(name) as line:
            while True:
                line.update(escape(f"{name}\n{_status(queue, as_json)}"))
                time.sleep(WATCH_S)
    shown = ""
    while True:
        text = _status(queue, as_json)
        if text != shown:
            shown = text
            typer.echo(text)
        time.sleep(WATCH_S)


def _only_study(where: str) -> str:
    storage = open_storage(where, patience_s=LEASE_S, read_only=True)
    names = study_names(storage)
    close_storage(storage)
    if len(names) != 1:
        listed = ", ".join(names) or "none"
        raise StudyError(
            f"{without_password(where)} has {len(names)} studies ({listed}); name one with --study."
        )
    return names[0]
