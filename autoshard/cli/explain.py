"""`autoshard explain`: a saved plan explained, one of its leaves, or its fewest annotations."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard._apply import apply
from autoshard.cli.factory import FACTORY, call_factory, use_cpu_devices
from autoshard.table.spec_table import SpecTable, candidates_of


def explain(
    table: Annotated[Path, typer.Argument(help="A spec table.")],
    factory: Annotated[str, typer.Argument(help=FACTORY)],
    leaf: Annotated[
        str | None, typer.Option(help="A leaf path: its spec and what others would cost.")
    ] = None,
    minimal: Annotated[
        bool, typer.Option("--minimal", help="The fewest constraints, as lines to paste.")
    ] = False,
    patch: Annotated[
        bool, typer.Option("--patch", help="The same as a diff for `git apply`.")
    ] = False,
    hardware: Annotated[
        str | None, typer.Option(help="Preset, or a file written by calibration.")
    ] = None,
    samples_per_step: Annotated[
        float | None, typer.Option(help="Samples of a step, for the throughput.")
    ] = None,
    cpu_devices: Annotated[int | None, typer.Option(help="Work on this many CPU devices.")] = None,
) -> None:
    """Says what a plan moves, from which source line and rule, what each device stores, and why no
    preset is better.
    """
    loaded = SpecTable.load(table)
    axes = loaded.mesh.axes
    use_cpu_devices(
        cpu_devices if cpu_devices is None else max(cpu_devices, math.prod(axes.values()))
    )
    known = set(inspect.signature(apply).parameters)
    arguments: dict[str, Any] = {k: v for k, v in call_factory(factory).items() if k in known}
    arguments |= {
        "mesh": ",".join(f"{name}={size}" for name, size in axes.items()),
        "layout": loaded,
    }
    if samples_per_step is not None:
        arguments["samples_per_step"] = samples_per_step
    plan = replace(apply(**arguments), candidates=tuple(candidates_of(loaded)))
    if patch:
        typer.echo(plan.minimise().patch(), nl=False)
    elif minimal:
        typer.echo(str(plan.minimise()))
    else:
        typer.echo(
            str(plan.explain(leaf, hardware=hardware) if leaf else plan.explain(hardware=hardware))
        )
