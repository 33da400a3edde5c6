"""Tables as plain text, drawn by rich, which is imported when the first one is drawn."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoshard.text import printable

WIDTH = 176
"""Columns of a rendered text: the candidates table with the longest reasons it shows fits (chosen by
hand)."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its head; may have several lines.
        right: True for numbers, which are aligned right.
        wraps: True if a long cell goes on in the next line.
    """

    name: str
    right: bool = False
    wraps: bool = False


@dataclass(frozen=True, slots=True)
class TextTable:
    """A titled table of texts."""

    title: str
    columns: tuple[Column, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Adds a row, a cell for each column."""
        self.rows.append(cells)


def render(*parts: object) -> str:
    """Plain text of texts and tables, one below the other."""
    from rich.console import Console
    from rich.table import Table

    file = io.StringIO()
    console = Console(file=file, width=WIDTH, color_system=None, highlight=False, markup=False)
    for part in parts:
        if not isinstance(part, TextTable):
            console.print(part)
            continue
        table = Table(title=part.title, title_justify="left")
        for column in part.columns:
            justify = "right" if column.right else "left"
            table.add_column(column.name, justify=justify, no_wrap=not column.wraps)
        for row in part.rows:
            table.add_row(*row)
        console.print(table)
    lines = [printable(line.rstrip()) for line in file.getvalue().split("\n")]
    return "\n".join(lines).rstrip("\n")


def columns(*names: str, right: Sequence[str] = (), wraps: Sequence[str] = ()) -> tuple[Column, ...]:
    """Columns by name; those in `right` hold numbers, those in `wraps` long texts."""
    return tuple(Column(name, name in right, name in wraps) for name in names)
