"""The commands about spec tables: show, check, diff, export, report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard.cli.factory import call_factory, use_cpu_devices
from autoshard.cli.options import AsJson, Factory, Table
from autoshard.devices.mesh_text import parse_axes
from autoshard.report.html import report_html
from autoshard.report.plan_text import table_text
from autoshard.table.check import Finding
from autoshard.table.check import check as check_table
from autoshard.table.diff import diff_text
from autoshard.table.export import FORMS
from autoshard.table.export import export as export_table
from autoshard.table.spec_table import SpecTable
from autoshard.text import printable


def show(table: Table, as_json: AsJson = False) -> None:
    """Prints a spec table for people."""
    loaded = SpecTable.load(table)
    typer.echo(loaded.dumps() if as_json else table_text(loaded))


def check(
    table: Table,
    factory: Factory,
    mesh: Annotated[
        str | None, typer.Option(help="Another mesh than the table's, such as data=4,model=2.")
    ] = None,
    cpu_devices: Annotated[
        int | None, typer.Option(help="CPU devices to check on; by default what is needed.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings are failures too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Checks a table against the code; exits with 1 if it does not fit. For CI: no accelerator, no
    search.
    """
    loaded = SpecTable.load(table)
    axes = loaded.mesh.axes if mesh is None else parse_axes(mesh)
    use_cpu_devices(math.prod(axes.values()) if cpu_devices is None else cpu_devices)
    arguments: dict[str, Any] = call_factory(factory)
    if mesh is not None:
        arguments["mesh"] = mesh
    findings = check_table(loaded, **arguments)
    failures = findings if strict else _fatal(findings)
    if as_json:
        typer.echo(_findings_json(findings))
    else:
        for finding in findings:
            typer.echo(printable(str(finding)))
        verdict = "does not fit" if failures else "fits"
        typer.echo(printable(f"{table}: {verdict} {factory} ({len(findings)} findings)"))
    if failures:
        raise typer.Exit(1)


def _fatal(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.fatal]


def _findings_json(findings: Sequence[Finding]) -> str:
    rows = [{"kind": f.kind, "fatal": f.fatal, "text": f.text} for f in findings]
    return json.dumps(rows, indent=1)


def diff(old: Table, new: Annotated[Path, typer.Argument(help="Another one.")]) -> None:
    """Says how two tables differ."""
    text = diff_text(SpecTable.load(old), SpecTable.load(new))
    typer.echo(text or "the same plan, the same numbers")


def export(
    table: Table,
    to: Annotated[str, typer.Option("--to", help=f"One of {', '.join(FORMS)}.")],
    argument: Annotated[
        str | None, typer.Option(help="One argument only, with paths relative to it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write; by default standard output.")
    ] = None,
) -> None:
    """Writes a table as what other tools read."""
    text = export_table(SpecTable.load(table), to, argument)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")


def report(
    table: Table,
    html: Annotated[Path, typer.Option("--html", help="Where to write the page.")],
) -> None:
    """Writes a table as one HTML page for people: no network needed to read it."""
    page = report_html(SpecTable.load(table))
    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(page, encoding="utf-8")
    typer.echo(f"{html}: {len(page.encode())} bytes")
