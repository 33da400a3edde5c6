"""Tables as plain text, drawn by rich, which is imported when the first one is drawn."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from autoshard.text import printable

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 176
"""Characters of a line: the candidates table fits with the longest reasons that it shows. Chosen by
hand; texts are wrapped to it, no test depends on it."""


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


def columns(
    *names: str, right: Sequence[str] = (), wraps: Sequence[str] = ()
) -> tuple[Column, ...]:
    """Columns by name; those in `right` hold numbers, those in `wraps` long texts."""
    return tuple(Column(name, name in right, name in wraps) for name in names)


def render(*parts: str | TextTable) -> str:
    """Plain text of texts and tables, one below the other."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=WIDTH, color_system=None, highlight=False, markup=False)
    for part in parts:
        console.print(part if isinstance(part, str) else _rich_table(part))
    lines = [printable(line.rstrip()) for line in file.getvalue().split("\n")]
    return "\n".join(lines).rstrip("\n")


def _rich_table(table: TextTable) -> Table:
    from rich.table import Table

    drawn = Table(title=table.title, title_justify="left")
    for column in table.columns:
        justify: Literal["left", "right"] = "right" if column.right else "left"
        drawn.add_column(column.name, justify=justify, no_wrap=not column.wraps)
    for row in table.rows:
        drawn.add_row(*row)
    return drawn
