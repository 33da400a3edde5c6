"""Writes a table as text: one leaf or pattern, rule, constraint or candidate a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from autoshard.table.leaf_patterns import Each, alike, fold
from autoshard.table.schema import SCHEMA, Leaf, TableData, as_output
from autoshard.table.spec_entry import spec_text

DIGITS = 4
"""Significant digits of numbers in the evidence: measurements are no better, and a diff stays
quiet. Chosen by hand; test_numbers_of_the_evidence_are_rounded_so_that_a_diff_stays_quiet pins
it."""


_REQUIRED = ("fingerprint", "verified", "versions")
"""Fields of the evidence that a file must have, empty or not."""


def write_table(table: TableData) -> str:
    """The text of the file."""
    inputs = {path: as_output(leaf) for path, leaf in table.inputs.items()}
    # An edit by program may have taken leaves away; then the subtrees are not alike any more.
    likes = {
        prefix: source
        for prefix, source in table.outputs_like.items()
        if alike(table.outputs, prefix, inputs, source)
    }
    fields = {
        "schema": _text(SCHEMA),
        "function": _text(table.function),
        "mesh": _text(msgspec.to_builtins(table.mesh)),
        "rules": _rows(map(_text, table.rules)),
        "constraints": _text(table.constraints),
        "inputs": _leaves(table.inputs),
        "outputs": _leaves(_outputs_unlike(table.outputs, likes, inputs)),
        "outputs_like": _text(likes),
        "inside": _rows(_text(msgspec.to_builtins(entry)) for entry in table.inside),
        "evidence": _evidence(table),
    }
    rows = [f"  {_text(name)}: {text}" for name, text in fields.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _outputs_unlike(
    outputs: Mapping[str, Leaf], likes: Mapping[str, str], inputs: Mapping[str, Leaf]
) -> dict[str, Leaf]:
    """Outputs that differ from the argument that they are like, or are like none."""
    return {
        path: leaf
        for path, leaf in outputs.items()
        if not any(
            path.startswith(f"{prefix}/") and leaf == inputs[source + path.removeprefix(prefix)]
            for prefix, source in likes.items()
        )
    }


def _evidence(table: TableData) -> str:
    """The evidence without what is empty; lists have a row for each item."""
    rows = {}
    for name, value in msgspec.to_builtins(table.evidence).items():
        if isinstance(value, list):
            rows[name] = _rows(map(_text, value), 4)
        elif value not in ("", None) or name in _REQUIRED:
            rows[name] = _text(value)
    return _object(rows)


def _leaves(leaves: Mapping[str, Leaf]) -> str:
    return _object({path: _line(each, leaf) for path, (each, leaf) in fold(leaves).items()})


def _line(each: Each, leaf: Leaf) -> str:
    fields: dict[str, Any] = {
        "spec": leaf.spec,
        "text": spec_text(leaf.spec),
        "shape": leaf.shape,
        "dtype": leaf.dtype,
    }
    if leaf.logical_axes:
        fields["logical_axes"] = leaf.logical_axes
    if leaf.group:
        fields["group"] = leaf.group
    if each:
        fields["each"] = list(each)
    return _text(fields)


def _object(texts: Mapping[str, str]) -> str:
    return _braced([f"{_text(name)}: {text}" for name, text in texts.items()], "{}", 2)


def _rows(rows: Iterable[str], indent: int = 2) -> str:
    return _braced(list(rows), "[]", indent)


def _braced(rows: Sequence[str], braces: str, indent: int) -> str:
    if not rows:
        return braces
    margin = " " * indent
    inner = ",\n".join(f"{margin}  {row}" for row in rows)
    return f"{braces[0]}\n{inner}\n{margin}{braces[1]}"


def _text(value: Any) -> str:
    """JSON on one line.

    What is not printable is escaped, so that looking at the file does nothing to a terminal.
    """
    text = json.dumps(_rounded(value), ensure_ascii=False)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _rounded(value: Any) -> Any:
    """Floats to `DIGITS` significant digits, in whatever they are."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(item) for item in value]
    return value
