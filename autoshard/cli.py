"""The command line. Exit codes: 0 ok, 1 no feasible plan or a failed check, 2 usage; one line on standard error."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard import cli_doctor, cli_explain, cli_hardware, cli_jobs, cli_table, cli_target
from autoshard.errors import AutoshardError, NoFeasiblePlanError, SearchFailedError
from autoshard.job import read_job
from autoshard.plan import Plan
from autoshard.report import printable, table_text
from autoshard.table import SpecTable

app = typer.Typer(
    name="autoshard",
    help="Searches for the layout of a JAX function on a mesh.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def common(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every command."""
    context.obj = debug
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, stream=sys.stderr)


@app.command()
def search(
    what: cli_jobs.What,
    mesh: Annotated[str | None, typer.Option(help="Mesh over the local devices, such as data=4,model=2.")] = None,
    target: Annotated[str | None, typer.Option(help="Hardware that is not here, such as tpu:v5e:4x4.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to save the spec table.")] = None,
    storage: cli_jobs.Storage = None,
    study: cli_jobs.Study = None,
    lease: cli_jobs.Lease = None,
    memory_budget: Annotated[str | None, typer.Option(help="Per device, such as 16GiB.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Preset, or a file written by calibration.")] = None,
    compiled: Annotated[int | None, typer.Option(help="Candidates to compile.", show_default="12")] = None,
    measured: Annotated[int | None, typer.Option(help="Candidates to measure.", show_default="4")] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop measuring after this long.")] = None,
    seed: cli_jobs.Seed = None,
    isolate: Annotated[
        bool | None,
        typer.Option("--isolate/--no-isolate", help="Compile in a process of its own.", show_default="isolate"),
    ] = None,
    compile_timeout: Annotated[float | None, typer.Option(help="Seconds until a compilation has failed.")] = None,
    compile_memory: Annotated[str | None, typer.Option(help="For the compiler's process, such as 16GiB.")] = None,
    cpu_devices: Annotated[int | None, typer.Option(help="Work on this many CPU devices.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON on standard output.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    explained: Annotated[bool, typer.Option("--explain", help="Say what moves, what is stored, and why.")] = False,
) -> None:
    """Searches, and prints the plan."""
    job = read_job(
        what,
        {
            "mesh": mesh, "target": target, "out": None if out is None else str(out), "storage": storage,
            "study": study, "lease_s": lease, "memory_budget": memory_budget, "hardware": hardware,
            "compiled": compiled, "measured": measured, "seconds": seconds, "seed": seed, "isolate": isolate,
            "compile_timeout_s": compile_timeout, "compile_memory": compile_memory, "cpu_devices": cpu_devices,
        },
    )  # fmt: skip
    plan = cli_jobs.with_job(job, progress=not quiet)
    print(json.dumps(plan_json(plan), indent=1) if as_json else str(plan))
    if explained and not as_json:
        print(f"\n{plan.explain(hardware=hardware)}")


@app.command()
def show(
    table: Annotated[Path, typer.Argument(help="A spec table.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Prints a spec table for people."""
    loaded = SpecTable.load(table)
    print(loaded.dumps() if as_json else table_text(loaded))


app.command()(cli_jobs.worker)
app.command()(cli_jobs.status)
app.command()(cli_jobs.finish)
app.command()(cli_doctor.doctor)
app.command()(cli_explain.explain)
app.command()(cli_table.check)
app.command()(cli_table.diff)
app.command()(cli_table.export)
app.command()(cli_table.report)
app.command()(cli_target.capture_target)
app.command()(cli_hardware.calibrate)
app.command()(cli_hardware.memory)


def plan_json(plan: Plan) -> dict[str, Any]:
    """What `search --json` prints: the answer, and a record of every trial."""
    return {
        "function": plan.traced.program.name,
        "mesh": dict(plan.mesh.axes),
        "rules": [str(rule) for rule in plan.rules],
        "constraints": "anchors" if plan.layout.inside else "arguments",
        "verified": {"ok": plan.verified.ok, "reason": plan.verified.reason},
        "specs": {path: leaf.spec for path, leaf in plan.table.inputs.items()},
        "notes": list(plan.notes),
        "skipped": [{"name": s.name, "reason": s.reason} for s in plan.skipped],
        "trials": [trial.to_dict() for trial in plan.trials],
    }


def main() -> None:
    """Entry point of the `autoshard` command."""
    debug = "--debug" in sys.argv
    try:
        sys.exit(app(standalone_mode=False))  # what a command's typer.Exit says, else None
    except (NoFeasiblePlanError, SearchFailedError) as error:
        _fail(error, 1, debug)
    except AutoshardError as error:
        _fail(error, 2, debug)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own usage errors
            print(f"autoshard: {error.format_message()}", file=sys.stderr)
            sys.exit(2)
        raise


def _fail(error: AutoshardError, code: int, debug: bool) -> None:
    if debug:
        raise error
    print(f"autoshard: {type(error).__name__}: {printable(' '.join(str(error).split()))}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
