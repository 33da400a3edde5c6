r"""Ways out: a spec table as what other tools read.

The forms are text: a Python module, ordered regular expressions, logical axis names with rules, the
constraints to paste, CSV and Markdown. Each is exact for every leaf, or the export fails; none of
them needs autoshard to be read.

Names in a table may be anybody's, and stay names in each form. What is not printable is written as
Python escapes it (`\x1b`). In CSV every cell is quoted, and one that a spreadsheet would run (it
starts with `=`, `+`, `-`, `@`) or that starts with an apostrophe gets an apostrophe before it
(OWASP, "CSV Injection"). In Markdown names are code spans with a fence longer than the backticks
inside. What is pasted as code is a literal, or a PartitionSpec that was parsed.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping

from autoshard.errors import ArgumentError, TableError
from autoshard.table.export_logical_rules import logical_text
from autoshard.table.export_python import python_text, regex_text
from autoshard.table.leaf_patterns import fold
from autoshard.table.read_table import inside_fault
from autoshard.table.schema import Leaf
from autoshard.table.spec_entry import spec_text
from autoshard.table.spec_table import SpecTable
from autoshard.text import printable


def export(table: SpecTable, to: str, argument: str | None = None) -> str:
    """The text of a form.

    Args:
        table: The table.
        to: `python`, `regex`, `logical-axis-rules`, `constraints`, `csv` or `markdown`.
        argument: Name of the argument whose leaves are meant, with paths relative to it (`wq`, not
            `params/wq`), for `regex` and `logical-axis-rules`; by default all arguments, with full
            paths.

    Raises:
        ArgumentError: If there is no such form or argument.
    """
    if to not in FORMS:
        raise ArgumentError(f"there is no form {to!r}. Use one of {', '.join(FORMS)}.")
    if argument is not None and to not in ("regex", "logical-axis-rules"):
        raise ArgumentError(f"{to} is of the whole table; leave the argument {argument!r} out.")
    return FORMS[to](table, table.inputs if argument is None else leaves_of(table, argument))


def leaves_of(table: SpecTable, argument: str) -> dict[str, Leaf]:
    """The leaves of one argument, by path relative to it.

    Raises:
        ArgumentError: If no leaf lies below it.
    """
    below = {}
    for path, leaf in table.inputs.items():
        if path.startswith(f"{argument}/"):
            below[path.removeprefix(f"{argument}/")] = leaf
    if not below:
        names = dict.fromkeys(path.split("/")[0] for path in table.inputs)
        raise ArgumentError(
            f"no leaf lies below {argument!r}; the arguments are {', '.join(names)}."
        )
    return below


def _constraints(table: SpecTable, _: Mapping[str, Leaf]) -> str:
    """What to paste into the model, by file and line.

    Raises:
        TableError: If a spec is none: what is pasted is run.
    """
    lines = [
        f"# Constraints of {table.function} on mesh {table.mesh.axes}, by line of the model.",
        "# `x` is the value that is named; from jax.sharding import PartitionSpec as P",
    ]
    if table.constraints == "arguments":
        lines.append("# None: this plan states its layout on arguments and outputs only.")
    source = None
    for entry in sorted(table.inside, key=lambda e: _line_key(e.source)):
        fault = inside_fault(entry)
        if fault:
            raise TableError(f"{printable(fault)}. Restore the table from version control.")
        if entry.source != source:
            source = entry.source
            lines += ["", f"# {source or 'no source line'}"]
        times = f", {entry.times} times" if entry.times > 1 else ""
        lines.append(f"# {entry.primitive}, {entry.place}, shape {entry.shape}{times}")
        lines.append(f"x = jax.lax.with_sharding_constraint(x, {entry.spec})")
    return "\n".join(map(printable, lines)) + "\n"


def _line_key(source: str) -> tuple[str, int]:
    name, _, line = source.rpartition(":")
    return name, int(line) if line.isascii() and line.isdigit() else 0


_RUN_BY_SPREADSHEETS = ("=", "+", "-", "@", "'", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Beginnings of a formula (the last four as wide characters, which Excel takes for the others), and
the apostrophe that says that a cell is none."""

_COLUMNS = ("side", "leaf", "shape", "dtype", "spec", "logical axes", "group")


def _csv(table: SpecTable, _: Mapping[str, Leaf]) -> str:
    """Every leaf, one a row; a dimension without a logical axis is a `.`."""
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for side, leaves in (("input", table.inputs), ("output", table.outputs)):
        for path, leaf in leaves.items():
            shape = "x".join(map(str, leaf.shape))
            logical_axes = " ".join(name or "." for name in leaf.logical_axes)
            spec = spec_text(leaf.spec)
            row = (side, path, shape, leaf.dtype, spec, logical_axes, leaf.group)
            writer.writerow(map(_csv_cell, row))
    return file.getvalue()


def _csv_cell(text: str) -> str:
    r"""Text that a spreadsheet shows and does not run.

    >>> _csv_cell("=1+1"), _csv_cell("w\n=1"), _csv_cell("params/w")
    ("'=1+1", 'w\\n=1', 'params/w')
    """
    shown = printable(text)
    return f"'{shown}" if shown.lstrip().startswith(_RUN_BY_SPREADSHEETS) else shown


def _markdown(table: SpecTable, _: Mapping[str, Leaf]) -> str:
    """For a pull request: rules, and leaves with regular ones folded."""
    mesh = ", ".join(f"{name}={size}" for name, size in table.mesh.axes.items())
    lines = [f"# {_code(table.function)} on {_code(mesh)}", "", "Rules, in order:", ""]
    rules = [f"{number}. {_code(rule)}" for number, rule in enumerate(table.rules, 1)]
    lines += rules or ["none: everything is replicated"]
    lines += ["", "## Arguments", "", *_markdown_rows(table.inputs)]
    lines += ["", "## Outputs", "", *_markdown_rows(table.outputs)]
    return "\n".join(lines) + "\n"


def _markdown_rows(leaves: Mapping[str, Leaf]) -> list[str]:
    lines = ["| leaf | array | spec | `*` |", "| --- | --- | --- | --- |"]
    rows = {
        path: (f"{leaf.dtype}{leaf.shape}", spec_text(leaf.spec)) for path, leaf in leaves.items()
    }
    for path, (each, (array, spec)) in fold(rows).items():
        cells = (_code(path), _code(array), _code(spec), "; ".join(each))
        lines.append(f"| {' | '.join(cell.replace('|', _BAR) for cell in cells)} |")
    return lines


_BAR = "\\|"
"""A bar in a cell; tables of Markdown know it in code spans as well (GFM, section 4.10)."""


def _code(text: str) -> str:
    r"""A code span that shows exactly a text, whatever backticks it has (CommonMark, section 6.1).

    >>> _code("a`b``c"), _code("`"), _code("w")
    ('```a`b``c```', '`` ` ``', '`w`')
    """
    shown = printable(text)
    if not shown:
        return "(no name)"
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    # One space inside each fence is taken off by who reads it, unless all is spaces.
    padded = shown[0] in "` " or shown[-1] in "` "
    space = " " if padded and shown.strip(" ") else ""
    return f"{fence}{space}{shown}{space}{fence}"


def _python(table: SpecTable, _: Mapping[str, Leaf]) -> str:
    return python_text(table)


FORMS: Mapping[str, Callable[[SpecTable, Mapping[str, Leaf]], str]] = {
    "python": _python,
    "regex": regex_text,
    "logical-axis-rules": logical_text,
    "constraints": _constraints,
    "csv": _csv,
    "markdown": _markdown,
}
"""What `export` can write."""
