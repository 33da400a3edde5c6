"""A spec table as logical axis names and rules: what t5x, MaxText, flax and levanter read.

A role is a logical axis already. But those libraries know no divisibility and no rule for a part of
the arrays, so a dimension whose role is split otherwise here than elsewhere gets a name of its own
(`wk.1:whole`, `wk.1:data+model`). After that each name has one meaning: the rules are exact in any
order, and as a plain dict too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

from autoshard.table.spec_table import Leaf, SpecTable

Axes = tuple[str, ...]


def logical_text(table: SpecTable, leaves: Mapping[str, Leaf]) -> str:
    """JSON, so YAML too: `logical_axis_rules` in the order of the table's rules, `logical_axes` of
    each leaf.
    """
    rules, names = logical_rules(table.rules, leaves)
    rows = [f"    {json.dumps([name, list(axes)])}" for name, axes in rules]
    leaf_rows = [f"    {json.dumps(path)}: {json.dumps(dims)}" for path, dims in names.items()]
    return (
        '{\n  "logical_axis_rules": [\n' + ",\n".join(rows) + '\n  ],\n  "logical_axes": {\n'
        + ",\n".join(leaf_rows) + "\n  }\n}\n"
    )  # fmt: skip


def logical_rules(
    order: list[str], leaves: Mapping[str, Leaf]
) -> tuple[list[tuple[str, Axes]], dict[str, list[str | None]]]:
    """(rules, names of the dimensions of each leaf).

    Args:
        order: The table's rules as text; names that come in them come first, in that order.
        leaves: The leaves.
    """
    seen: dict[str, Counter[Axes]] = {}
    for leaf in leaves.values():
        for logical_axis, axes in _dims(leaf):
            seen.setdefault(logical_axis, Counter())[axes] += 1
    usual = {
        logical_axis: max(counts, key=lambda axes: (bool(axes), counts[axes], axes))
        for logical_axis, counts in seen.items()
    }
    rules: dict[str, Axes] = {}
    names: dict[str, list[str | None]] = {}
    for path, leaf in leaves.items():
        row: list[str | None] = []
        for logical_axis, axes in _dims(leaf):
            name = (
                logical_axis
                if axes == usual[logical_axis]
                else f"{logical_axis}:{'+'.join(axes) or 'whole'}"
            )
            rules[name] = axes
            row.append(name)
        names[path] = row
    rank = {rule.split("->")[0].strip(): i for i, rule in reversed(list(enumerate(order)))}
    ordered = sorted(rules.items(), key=lambda rule: rank.get(rule[0].partition(":")[0], len(rank)))
    return ordered, names


def _dims(leaf: Leaf) -> list[tuple[str, Axes]]:
    """(role, mesh axes) of each dimension; a dimension without a role is called after its place."""
    spec = [() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in leaf.spec]
    spec += [()] * (len(leaf.shape) - len(spec))
    logical_axes = leaf.logical_axes or [None] * len(leaf.shape)
    dims = [
        (logical_axis or f"dim{i}", axes)
        for i, (logical_axis, axes) in enumerate(zip(logical_axes, spec, strict=True))
    ]
    repeated = Counter(dims)  # flax refuses a name twice in one array
    return [(f"{r}#{i}" if repeated[r, a] > 1 else r, a) for i, (r, a) in enumerate(dims)]
