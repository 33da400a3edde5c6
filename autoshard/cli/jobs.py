"""Commands of shared studies: worker, status, finish."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.markup import escape

from autoshard.cli.factory import use_cpu_devices, use_processes
from autoshard.cli.job_file import Job, read_job, run_job
from autoshard.cli.job_log import log_events
from autoshard.errors import ArgumentError, StudyError
from autoshard.evidence.candidate import winner_of
from autoshard.processes.supervisor import supervise
from autoshard.search.study.status import status_json, status_of, status_text
from autoshard.search.study.storage import (
    close_storage,
    open_storage,
    study_names,
    without_password,
)
from autoshard.search.study.task_queue import Tasks
from autoshard.text import seconds_text

WATCH_S = 2.0

RUN_TIMEOUT_S = 3600.0
"""Compiling what is to be run counts in; nothing that was ever seen to end took longer."""

JOB = "A job file (autoshard.toml), or a factory: pkg.module:factory or file.py:factory"

What = Annotated[str, typer.Argument(help=JOB)]
Storage = Annotated[
    str | None,
    typer.Option(
        envvar="AUTOSHARD_STORAGE",
        help="journal:PATH, sqlite:///PATH, postgresql://... or grpc://host:port.",
    ),
]
Study = Annotated[str | None, typer.Option(help="Name of the study in the storage.")]
Mesh = Annotated[
    str | None, typer.Option(help="Mesh over the local devices, such as data=4,model=2.")
]
Target = Annotated[str | None, typer.Option(help="Hardware that is not here, such as tpu:v5e:4x4.")]
Compiled = Annotated[
    int | None, typer.Option(help="Candidates to compile, by all workers together.")
]
Measured = Annotated[int | None, typer.Option(help="Candidates to measure.")]
Seed = Annotated[int | None, typer.Option(help="Of the sampler.")]
CpuDevices = Annotated[int | None, typer.Option(help="Work on this many CPU devices.")]
Lease = Annotated[
    float | None,
    typer.Option(help="Seconds without a sign of life after which a worker has lost its task."),
]
Distributed = Annotated[
    str | None,
    typer.Option(
        help="One of several processes that search together: auto (SLURM, Open MPI, Kubernetes, Cloud TPU), or "
        "HOST:PORT,COUNT,NUMBER."
    ),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log one JSON object a line.")]


def worker(
    what: What,
    storage: Storage = None,
    study: Study = None,
    needs: Annotated[
        str | None,
        typer.Option(help="What this worker does, of predict,compile,measure; by default all."),
    ] = None,
    mesh: Mesh = None,
    target: Target = None,
    compiled: Compiled = None,
    measured: Measured = None,
    seed: Seed = None,
    cpu_devices: CpuDevices = None,
    distributed: Distributed = None,
    lease: Lease = None,
    run_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds until verifying or measuring a candidate has failed.", show_default="3600"
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
        own = [a for a in sys.argv[1:] if not a.startswith("--restarts=")]
        if "--restarts" in own:
            at = own.index("--restarts")
            del own[at : at + 2]
        raise typer.Exit(
            supervise([sys.executable, "-m", "autoshard", *own, "--restarts", "0"], restarts)
        )
    options: dict[str, Any] = {
        "storage": storage, "study": study, "mesh": mesh, "target": target, "compiled": compiled,
        "measured": measured, "seed": seed, "cpu_devices": cpu_devices,
        "distributed": distributed, "lease_s": lease,
        "run_timeout_s": run_timeout,
        "needs": None if needs is None else tuple(part.strip() for part in needs.split(",")),
    }  # fmt: skip
    job = read_job(what, options)
    if job.run_timeout_s is None:
        job = job.updated({"run_timeout_s": RUN_TIMEOUT_S})
    if job.storage is None:
        raise ArgumentError(
            "a worker needs the storage of its study: pass --storage, or name it in the job file."
        )
    plan = with_job(job, progress=False)
    if jax.process_index() != 0:
        return
    best = winner_of(plan.candidates)
    assert best is not None
    seconds = "" if best.measured is None else f", measured {seconds_text(best.measured.median_s)}"
    logging.getLogger("autoshard.jobs").info("finished: the best is %s%s", best.name, seconds)


def finish(
    what: What,
    out: Annotated[Path | None, typer.Option(help="Where to save the spec table.")] = None,
    storage: Storage = None,
    study: Study = None,
    mesh: Mesh = None,
    target: Target = None,
    compiled: Compiled = None,
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
    options: dict[str, Any] = {
        "storage": storage, "study": study, "mesh": mesh, "target": target, "compiled": compiled,
        "measured": measured, "seed": seed, "cpu_devices": cpu_devices,
        "distributed": distributed, "lease_s": lease,
        "out": None if out is None else str(out),
    }  # fmt: skip
    job = read_job(what, options)
    if job.storage is None:
        raise ArgumentError(
            "there is no study to finish: pass --storage, or name it in the job file."
        )
    if job.out is None:
        raise ArgumentError(
            "where to save the table: pass --out specs/step.json, or write out = ... in the job "
            "file."
        )
    plan = with_job(job, again=True, progress=False)
    if jax.process_index() == 0:
        sys.stdout.write(f"{plan}\n")


def with_job(job: Job, *, again: bool = False, progress: bool = True) -> Any:
    """Runs a job in a process of the command line: its devices, its cache, and its hand-back when
    it is pre-empted.
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
    """Ends the process by an exception, on whose way the task in work is handed back."""
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
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Shows how a study stands: what is done and rejected, what runs where, the best so far, the
    time left.
    """
    name = study or _only_study(storage)
    with Tasks(storage, name, create=False) as tasks:
        if not watch:
            standing = status_of(tasks)
            sys.stdout.write(
                (json.dumps(status_json(standing)) if as_json else status_text(standing)) + "\n"
            )
            return
        _watch(tasks, name, as_json=as_json)


def _watch(tasks: Tasks, name: str, *, as_json: bool) -> None:
    """Shows how a study stands until Ctrl-C: in place on a terminal, else again whenever it has
    changed.
    """
    console, shown = Console(), ""

    def text() -> str:
        standing = status_of(tasks)
        return json.dumps(status_json(standing)) if as_json else status_text(standing)

    with suppress(KeyboardInterrupt):
        if console.is_terminal and not as_json:
            with console.status(name) as line:
                while True:
                    line.update(escape(f"{name}\n{text()}"))
                    time.sleep(WATCH_S)
        while True:
            before, shown = shown, text()
            if shown != before:
                sys.stdout.write(shown + "\n")
                sys.stdout.flush()
            time.sleep(WATCH_S)


def _only_study(storage: str) -> str:
    opened = open_storage(storage)
    names = study_names(opened)
    close_storage(opened)
    if len(names) != 1:
        listed = ", ".join(names) or "none"
        raise StudyError(
            f"{without_password(storage)} has {len(names)} studies ({listed}); name one with "
            f"--study."
        )
    return names[0]
