"""Ways out: a spec table as what other tools read. Each form is exact for every leaf, or the export
fails.

The forms are text: a Python module, ordered regular expressions, axis class names with rules, the
constraints to paste, CSV and Markdown. None of them needs autoshard to be read.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping

from autoshard.errors import ArgumentError
from autoshard.table.export_logical_rules import logical_text
from autoshard.table.export_python import python_text, regex_text
from autoshard.table.leaf_patterns import fold
from autoshard.table.spec_table import Leaf, SpecTable, spec_text
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
    below = {
        p.removeprefix(f"{argument}/"): leaf
        for p, leaf in table.inputs.items()
        if p.startswith(f"{argument}/")
    }
    if not below:
        names = dict.fromkeys(path.split("/")[0] for path in table.inputs)
        raise ArgumentError(
            f"no leaf lies below {argument!r}; the arguments are {', '.join(names)}."
        )
    return below


def _constraints(table: SpecTable, _: Mapping[str, Leaf]) -> str:
    """What to paste into the model, by file and line; the anchors of a layout, its work and where
    results are kept.
    """
    lines = [
        f"# Constraints of {table.function} on mesh {table.mesh.axes}, by line of the model.",
        "# `x` is the value that is named; from jax.sharding import PartitionSpec as P",
    ]
    if table.constraints == "arguments":
        lines.append("# None: this plan states its layout on arguments and outputs only.")
    source = None
    for entry in sorted(table.inside, key=lambda e: _line_key(e.source)):
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


_COLUMNS = ("side", "leaf", "shape", "dtype", "spec", "logical axes", "group")


def _csv(table: SpecTable, _: Mapping[str, Leaf]) -> str:
    """Every leaf, one a row."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for side, leaves in (("input", table.inputs), ("output", table.outputs)):
        for path, leaf in leaves.items():
            logical_axes = " ".join(logical_axis or "-" for logical_axis in leaf.logical_axes)
            shape = "x".join(map(str, leaf.shape))
            writer.writerow(
                [side, path, shape, leaf.dtype, spec_text(leaf.spec), logical_axes, leaf.group]
            )
    return file.getvalue()


def _markdown(table: SpecTable, _: Mapping[str, Leaf]) -> str:
    """For a pull request: rules, and leaves with regular ones folded."""
    mesh = ", ".join(f"{name}={size}" for name, size in table.mesh.axes.items())
    lines = [f"# {_cell(table.function)} on {_cell(mesh)}", "", "Rules, in order:", ""]
    lines += [f"{i}. {_code(rule)}" for i, rule in enumerate(table.rules, 1)] or [
        "none: everything is replicated"
    ]
    for title, leaves in (("Arguments", table.inputs), ("Outputs", table.outputs)):
        lines += [
            "",
            f"## {title}",
            "",
            "| leaf | array | spec | `*` |",
            "| --- | --- | --- | --- |",
        ]
        rows = {
            p: (f"{leaf.dtype}{leaf.shape}", spec_text(leaf.spec)) for p, leaf in leaves.items()
        }
        for path, (each, (array, spec)) in fold(rows).items():
            lines.append(
                f"| {_code(path)} | {_code(array)} | {_code(spec)} | {_cell('; '.join(each))} |"
            )
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _code(text: str) -> str:
    """Inline code that no backtick or bar inside ends."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{printable(text)}{fence}".replace("|", "\\|")


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
