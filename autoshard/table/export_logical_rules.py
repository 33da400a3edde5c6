"""A spec table as logical axis names and rules: what t5x, MaxText, flax and levanter read.

Those libraries know no divisibility and no rule for a part of the arrays, so a dimension whose
logical axis is split differently here than elsewhere gets a name of its own (`wk.1:whole`,
`wk.1:data+model`). After that each name has one meaning: the rules are exact in any order, and as a
plain dict too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from autoshard.errors import TableError
from autoshard.table.schema import Leaf
from autoshard.table.spec_entry import mesh_axes_by_dim
from autoshard.table.spec_table import SpecTable

Axes = tuple[str, ...]


def logical_text(table: SpecTable, leaves: Mapping[str, Leaf]) -> str:
    """JSON, which is YAML too: `logical_axis_rules`, and `logical_axes` of each leaf.

    The rules are in the order of the table's.
    """
    rules, names = logical_rules(table.rules, leaves)
    rule_rows = [f"    {json.dumps([name, list(axes)])}" for name, axes in rules]
    leaf_rows = [f"    {json.dumps(path)}: {json.dumps(dims)}" for path, dims in names.items()]
    lines = [
        "{",
        '  "logical_axis_rules": [',
        ",\n".join(rule_rows),
        "  ],",
        '  "logical_axes": {',
        ",\n".join(leaf_rows),
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def logical_rules(
    order: Sequence[str], leaves: Mapping[str, Leaf]
) -> tuple[list[tuple[str, Axes]], dict[str, list[str]]]:
    """(rules, names of the dimensions of each leaf).

    Args:
        order: The table's rules as text; names that come in them come first, in that order.
        leaves: The leaves.

    Raises:
        TableError: If a logical axis is called as another one would have to be.
    """
    usual = _usual_axes(leaves)
    rules: dict[str, Axes] = {}
    names: dict[str, list[str]] = {}
    for path, leaf in leaves.items():
        names[path] = []
        for logical_axis, axes in _dims(leaf):
            name = logical_axis
            if axes != usual[logical_axis]:
                name = f"{logical_axis}:{'+'.join(axes) or 'whole'}"
            if rules.setdefault(name, axes) != axes:
                raise TableError(
                    f"{name!r} would be the name of dimensions over {rules[name]} and over {axes}: "
                    f"rename that logical axis, or export another form."
                )
            names[path].append(name)
    ranks: dict[str, int] = {}  # of logical axes, by the first rule that names them
    for rank, rule in enumerate(order):
        ranks.setdefault(rule.split("->")[0].strip(), rank)

    def rank_of(rule: tuple[str, Axes]) -> int:
        logical_axis = rule[0].partition(":")[0]
        return ranks.get(logical_axis, len(ranks))

    return sorted(rules.items(), key=rank_of), names


def _usual_axes(leaves: Mapping[str, Leaf]) -> dict[str, Axes]:
    """By logical axis, the mesh axes that most of its dimensions are split over, if any are."""
    counts: dict[str, Counter[Axes]] = {}
    for leaf in leaves.values():
        for logical_axis, axes in _dims(leaf):
            counts.setdefault(logical_axis, Counter())[axes] += 1
    usual = {}
    # A split comes before no split, so that the plain name is of use in the other library.
    for logical_axis, of_axis in counts.items():
        split_first = [(bool(axes), count, axes) for axes, count in of_axis.items()]
        usual[logical_axis] = max(split_first)[2]
    return usual


def _dims(leaf: Leaf) -> list[tuple[str, Axes]]:
    """(logical axis, mesh axes) of each dimension; one without is called after its place."""
    rank = len(leaf.shape)
    by_dim = mesh_axes_by_dim(leaf.spec)
    by_dim += [()] * (rank - len(by_dim))
    names = leaf.logical_axes or [None] * rank
    dims = []
    for i, (name, axes) in enumerate(zip(names, by_dim, strict=True)):
        dims.append((name or f"dim{i}", axes))
    repeated = Counter(dims)  # flax refuses a name twice in one array
    return [
        (f"{name}#{i}" if repeated[name, axes] > 1 else name, axes)
        for i, (name, axes) in enumerate(dims)
    ]
