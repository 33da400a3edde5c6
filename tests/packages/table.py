"""What the packages gate saw, kept in tests/golden/packages.json and .md and reviewed by eye.

`make test-packages WRITE=1` writes the rows of the jax generation that runs; the others stay.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.packages.gate import best_rival
from tests.whole_models.golden import generation
from tests.whole_models.search import SCALE_MODEL

JSON = Path(__file__).parent.parent / "golden" / "packages.json"
MARKDOWN = JSON.with_suffix(".md")

Row = dict[str, Any]


def read() -> dict[str, dict[str, Row]]:
    """By jax generation and program, a row."""
    return json.loads(JSON.read_text()) if JSON.exists() else {}


def write(name: str, row: Row) -> None:
    """Writes the row of a program, and both files."""
    rows = read()
    rows.setdefault(generation(), {})[name] = row
    JSON.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    MARKDOWN.write_text(markdown(rows))


def markdown(rows: dict[str, dict[str, Row]]) -> str:
    """The table that people review."""
    lines = [
        "# Programs on model code from packages",
        "",
        f"8 CPU devices as 4 x 2, compiled; times are for a {SCALE_MODEL.name}: the compiled",
        "program's collectives and predicted compute. The memory budget is half of what replication",
        "needs. Written by `make test-packages WRITE=1`.",
    ]
    for which in sorted(rows):
        lines += [
            "",
            f"## jax {which}",
            "",
            "| program | package | equations | found | ms | best rival that fits | ms | ratio "
            "| sent | peak / budget | seconds |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [_line(name, row) for name, row in sorted(rows[which].items())]
    return "\n".join(lines) + "\n"


def _line(name: str, row: Row) -> str:
    rival = best_rival(row)
    rival_text, ratio = "none fits | ", ""
    if rival is not None:
        rival_text = f"{rival[0]} | {rival[1]:.3g}"
        ratio = f"{row['time_ms'] / rival[1]:.3f}" if rival[1] else "1.000"
    seconds = ", ".join(f"{what} {took}" for what, took in row["seconds"].items())
    return (
        f"| {name} | {row['distribution']} | {row['equations']:,} | {row['found']} "
        f"| {row['time_ms']:.3g} | {rival_text} | {ratio} | {row['sent_bytes']:,} "
        f"| {row['peak_bytes']:,} / {row['budget_bytes']:,} | {seconds} |"
    )
