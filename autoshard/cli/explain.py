"""`autoshard explain`: a saved plan explained, one of its leaves, or its fewest annotations."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Annotated, Any

import typer

from autoshard._apply import apply
from autoshard.cli.factory import call_factory, use_cpu_devices
from autoshard.cli.options import CpuDevices, Factory, Hardware, Table
from autoshard.devices.mesh_text import axes_text
from autoshard.table.spec_table import SpecTable, candidates_of


def explain(
    table: Table,
    factory: Factory,
    leaf: Annotated[
        str | None, typer.Option(help="A leaf path: its spec and what others would cost.")
    ] = None,
    minimal: Annotated[
        bool, typer.Option("--minimal", help="The fewest constraints, as lines to paste.")
    ] = False,
    patch: Annotated[
        bool, typer.Option("--patch", help="The same as a diff for `git apply`.")
    ] = False,
    hardware: Hardware = None,
    samples_per_step: Annotated[
        float | None, typer.Option(help="Samples of a step, for the throughput.")
    ] = None,
    cpu_devices: CpuDevices = None,
) -> None:
    """Says what a plan moves, from which source line and rule, what each device stores, and why no
    preset is better.
    """
    loaded = SpecTable.load(table)
    axes = loaded.mesh.axes
    if cpu_devices is not None:
        use_cpu_devices(max(cpu_devices, math.prod(axes.values())))
    arguments = _apply_arguments(factory)
    arguments |= {
        "mesh": axes_text(axes),
        "layout": loaded,
    }
    if samples_per_step is not None:
        arguments["samples_per_step"] = samples_per_step

    plan = replace(apply(**arguments), candidates=tuple(candidates_of(loaded)))
    if patch:
        typer.echo(plan.minimise().patch(), nl=False)
    elif minimal:
        typer.echo(str(plan.minimise()))
    elif leaf:
        typer.echo(str(plan.explain(leaf, hardware=hardware)))
    else:
        typer.echo(str(plan.explain(hardware=hardware)))


def _apply_arguments(factory: str) -> dict[str, Any]:
    """What a factory gives, without what only `optimize` takes."""
    taken = inspect.signature(apply).parameters
    return {name: value for name, value in call_factory(factory).items() if name in taken}
