"""The command line. Exit codes: 0 ok, 1 no feasible plan or a failed check, 2 usage; one line on
standard error.

Of several processes that search together, one that lost the others ends with code 70, and one that
gave up a storage which was away with 75; either may be started again.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from typing import Annotated, Any

import jax
import msgspec
import typer

from autoshard.cli import doctor, explain, hardware, jobs, tables, targets
from autoshard.cli.job_file import read_job
from autoshard.cli.job_log import WithoutPasswords
from autoshard.cli.options import (
    CpuDevices,
    Distributed,
    Hardware,
    Lease,
    Mesh,
    Out,
    Seed,
    Storage,
    Study,
    Target,
    What,
)
from autoshard.errors import (
    AutoshardError,
    NoFeasiblePlanError,
    ProcessesError,
    SearchFailedError,
    StorageAwayError,
)
from autoshard.plan import Plan
from autoshard.processes.process_group import LOST
from autoshard.processes.supervisor import AWAY
from autoshard.search.study.passwords import remember_password, without_password
from autoshard.text import printable
from autoshard.version import own_version

FAILED, USAGE, INTERRUPTED = 1, 2, 130
"""Exit codes: what was asked for cannot be had; it was asked for wrongly (as click and argparse
say); Ctrl-C (128 + SIGINT, as shells say)."""

app = typer.Typer(
    name="autoshard",
    help="Searches for the layout of a JAX function on a mesh.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autoshard {own_version()}")
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options of every command."""
    context.obj = debug
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(WithoutPasswords(logging.BASIC_FORMAT))
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, handlers=[handler])


@app.command()
def search(  # noqa: PLR0913 - a command has as many options as its users need
    what: What,
    mesh: Mesh = None,
    target: Target = None,
    out: Out = None,
    storage: Storage = None,
    study: Study = None,
    lease: Lease = None,
    memory_budget: Annotated[str | None, typer.Option(help="Per device, such as 16GiB.")] = None,
    hardware: Hardware = None,
    compiled: Annotated[
        int | None, typer.Option(help="Candidates to compile.", show_default="12")
    ] = None,
    measured: Annotated[
        int | None, typer.Option(help="Candidates to measure.", show_default="4")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop measuring after this long.")] = None,
    seed: Seed = None,
    isolate: Annotated[
        bool | None,
        typer.Option(
            "--isolate/--no-isolate",
            help="Compile in a process of its own.",
            show_default="isolate",
        ),
    ] = None,
    compile_timeout: Annotated[
        float | None, typer.Option(help="Seconds until a compilation has failed.")
    ] = None,
    compile_memory: Annotated[
        str | None, typer.Option(help="For the compiler's process, such as 16GiB.")
    ] = None,
    cpu_devices: CpuDevices = None,
    distributed: Distributed = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the outcome as JSON on standard output.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    explained: Annotated[
        bool, typer.Option("--explain", help="Say what moves, what is stored, and why.")
    ] = False,
) -> None:
    """Searches, and prints the plan."""
    options = {
        "mesh": mesh,
        "target": target,
        "out": None if out is None else str(out),
        "storage": storage,
        "study": study,
        "lease_s": lease,
        "memory_budget": memory_budget,
        "hardware": hardware,
        "compiled": compiled,
        "measured": measured,
        "seconds": seconds,
        "seed": seed,
        "isolate": isolate,
        "compile_timeout_s": compile_timeout,
        "compile_memory": compile_memory,
        "cpu_devices": cpu_devices,
        "distributed": distributed,
    }
    plan = jobs.run_here(read_job(what, options), progress=not quiet)
    if jax.process_index() != 0:
        return
    if as_json:
        typer.echo(json.dumps(plan_json(plan), indent=1))
        return
    typer.echo(str(plan))
    if explained:
        typer.echo(f"\n{plan.explain(hardware=hardware)}")


app.command()(tables.show)
app.command()(jobs.worker)
app.command()(jobs.status)
app.command()(jobs.finish)
app.command()(doctor.doctor)
app.command()(explain.explain)
app.command()(tables.check)
app.command()(tables.diff)
app.command()(tables.export)
app.command()(tables.report)
app.command()(targets.capture_target)
app.command()(hardware.calibrate)
app.command()(hardware.memory)


def plan_json(plan: Plan) -> dict[str, Any]:
    """What `search --json` prints: the answer, and a record of every candidate."""
    return {
        "function": plan.traced.program.name,
        "mesh": dict(plan.mesh.axes),
        "rules": [str(rule) for rule in plan.rules],
        "constraints": "anchors" if plan.layout.inside else "arguments",
        "verified": {"ok": plan.verified.ok, "reason": plan.verified.reason},
        "specs": {path: leaf.spec for path, leaf in plan.table.inputs.items()},
        "notes": list(plan.notes),
        "skipped": [{"name": s.name, "reason": s.reason} for s in plan.skipped],
        "candidates": [candidate.to_dict() for candidate in plan.candidates],
        "timings": None if plan.timings is None else msgspec.to_builtins(plan.timings),
    }


def main() -> None:
    """Entry point of the `autoshard` command."""
    code = run(sys.argv[1:])
    if code and jax.distributed.is_initialized():
        # At a normal exit jax waits minutes for the other processes, which may be waiting for this
        # one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Runs a command; returns its exit code."""
    for named in (*arguments, os.environ.get("AUTOSHARD_STORAGE", "")):
        remember_password(named)
    try:
        code = app(arguments, standalone_mode=False)  # what a command's typer.Exit says, else None
        return int(code or 0)
    except AutoshardError as error:
        _print_error(error, debug="--debug" in arguments)
        return _exit_code(error)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:
        return INTERRUPTED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else FAILED
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own usage errors
            _say(error.format_message())
            return USAGE
        print(without_password(traceback.format_exc()), file=sys.stderr, end="")
        return FAILED


def _exit_code(error: AutoshardError) -> int:
    if isinstance(error, ProcessesError):
        return LOST
    if isinstance(error, StorageAwayError):
        return AWAY
    if isinstance(error, NoFeasiblePlanError | SearchFailedError):
        return FAILED
    return USAGE


def _print_error(error: AutoshardError, *, debug: bool) -> None:
    if debug:
        text = "".join(traceback.format_exception(error))
        print(without_password(text), file=sys.stderr, end="")
    else:
        _say(f"{type(error).__name__}: {error}")


def _say(text: str) -> None:
    """One line on standard error, which does nothing to a terminal and has no passwords."""
    line = printable(" ".join(without_password(text).split()))
    print(f"autoshard: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
