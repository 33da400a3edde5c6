"""Stage 3: roles. Axis classes at isomorphic places of the program share one logical axis, so decisions do
not grow with depth.

The axes of a program form a graph: two axes are neighbours where one equation loops over both, and
the edge carries which primitive, which operand and which dimension. A Weisfeiler-Lehman hash of
that graph, refined by sizes and by the arguments an axis touches, gives equal labels to the heads
of layer 1 and of layer 7. Two axes that meet in one value never share a logical axis (the hidden axes of a
deep MLP alternate instead), so a logical axis names one dimension of almost any value; where the *same
axis* occurs twice in a value (attention scores) that is a conflict, and a rule says which
occurrence it takes.

Reference: Shervashidze et al. (2011), Weisfeiler-Lehman graph kernels, section 2.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx

from autoshard.axes.axis_classes import NO_AXIS, AxisClasses
from autoshard.tracing.program import Eqn, Value
from autoshard.tracing.source_lines import source_line

ROUNDS = 2
_RESERVED = re.compile(r"[\s()@]|->")
"""What separates the parts of an axis rule's text cannot be in a role's name."""


@dataclass(frozen=True, slots=True)
class LogicalAxis:
    """One logical axis.

    Attributes:
        index: Position in `LogicalAxes.axes`.
        name: Stable, readable name: the last part of a leaf path and the dimension (`wq.1`).
        classes: The axis classes that share it.
        sizes: Their distinct sizes, largest first.
        witness: Where it is seen: leaf path and dimension, or source line, primitive and dimension.
        scanned: True if a scan consumes it one slice at a time (it can be sharded in arguments
            only).
    """

    index: int
    name: str
    classes: tuple[int, ...]
    sizes: tuple[int, ...]
    witness: str
    scanned: bool


@dataclass(frozen=True, eq=False)
class LogicalAxes:
    """The logical axes of a program.

    Attributes:
        classes: The axis classes.
        axes: The logical axes, by first appearance.
        of_class: By axis class, its logical axis.
        of_value: By `Value.index`, the logical axis of each dimension (`NO_AXIS` for none).
    """

    classes: AxisClasses
    axes: tuple[LogicalAxis, ...]
    of_class: tuple[int, ...]
    of_value: tuple[tuple[int, ...], ...]

    def by_name(self, name: str) -> LogicalAxis | None:
        """The logical axis of that name, or None."""
        return next((logical_axis for logical_axis in self.axes if logical_axis.name == name), None)

    def factors(self, eqn: Eqn) -> tuple[tuple[int, int], ...]:
        """(logical axis, size) of each loop of an equation."""
        return tuple((self._logical_axis(axis), size) for axis, size in self.classes.factors(eqn))

    def _logical_axis(self, axis: int) -> int:
        return NO_AXIS if axis == NO_AXIS else self.of_class[axis]


def find_logical_axes(
    classes: AxisClasses, given: Mapping[tuple[int, int], str] | None = None
) -> LogicalAxes:
    """Groups the axis classes into logical axes and names them.

    Args:
        classes: The axis classes.
        given: By (argument leaf, dimension), what the model itself calls that dimension.
    """
    labels = _labels(classes)
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    meets = _meetings(classes)
    for axis in range(classes.count):
        colour = 0
        while any(other in meets[axis] for other in groups[(labels[axis], colour)]):
            colour += 1
        groups[(labels[axis], colour)].append(axis)
    members = sorted((g for g in groups.values() if g), key=lambda g: g[0])
    of_class = [0] * classes.count
    for logical_axis, group in enumerate(members):
        for axis in group:
            of_class[axis] = logical_axis
    named = _names(classes, members, given or {})
    sizes = _sizes(classes)
    logical_axes = tuple(
        LogicalAxis(
            index=i,
            name=named[i][0],
            classes=tuple(group),
            sizes=tuple(sorted(set().union(*(sizes[a] for a in group)), reverse=True)),
            witness=named[i][1],
            scanned=any(a in classes.scanned for a in group),
        )
        for i, group in enumerate(members)
    )
    of_value = tuple(
        tuple(NO_AXIS if a == NO_AXIS else of_class[a] for a in dims) for dims in classes.of_value
    )
    return LogicalAxes(classes, logical_axes, tuple(of_class), of_value)


def _sizes(classes: AxisClasses) -> list[set[int]]:
    sizes: list[set[int]] = [set() for _ in range(classes.count)]
    for value in classes.program.values:
        for axis, size in zip(classes.of_value[value.index], value.shape, strict=True):
            if axis != NO_AXIS:
                sizes[axis].add(size)
    return sizes


def _labels(classes: AxisClasses) -> list[str]:
    """Weisfeiler-Lehman label of each axis."""
    places: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(classes.count)]
    edges: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for leaf, value in enumerate(classes.program.body.inputs):
        owner = zlib.crc32(str(classes.program.input_argnums[leaf]).encode())
        for dim, axis in enumerate(classes.of_value[value.index]):
            if axis != NO_AXIS:
                places[axis][(owner, dim, *value.shape)] += 1
    for eqn, _ in classes.program.walk():
        if eqn.bodies:
            continue
        name = zlib.crc32(eqn.primitive.encode())
        factors = classes.factors(eqn)
        for i, (axis, size) in enumerate(factors):
            if axis == NO_AXIS:
                continue
            places[axis][(name, len(factors), i, size)] += 1
            for j, (other, _) in enumerate(factors[:i]):
                if other not in (axis, NO_AXIS):
                    edges[min(axis, other), max(axis, other)][hash((name, j, i))] += 1
    graph = nx.Graph()
    for axis, seen in enumerate(places):
        graph.add_node(axis, place=str(sorted(seen.items())))
    graph.add_edges_from(
        (a, b, {"meet": str(sorted(seen.items()))}) for (a, b), seen in edges.items()
    )
    hashes = nx.weisfeiler_lehman_subgraph_hashes(
        graph, edge_attr="meet", node_attr="place", iterations=ROUNDS
    )
    return [hashes[axis][-1] for axis in range(classes.count)]


def _meetings(classes: AxisClasses) -> list[set[int]]:
    """For each axis, the other axes that occur in one value with it."""
    meets: list[set[int]] = [set() for _ in range(classes.count)]
    for dims in set(classes.of_value):
        present = set(dims) - {NO_AXIS}
        for axis in present:
            meets[axis] |= present - {axis}
    return meets


def _names(
    classes: AxisClasses, members: list[list[int]], given: Mapping[tuple[int, int], str]
) -> list[tuple[str, str]]:
    """(name, witness) of each logical axis: the model's own, else of the first argument leaf, else of the
    equation.
    """
    program = classes.program
    leaf_of: dict[int, tuple[str, int]] = {}
    own: dict[int, str] = {}
    for leaf, (path, value) in enumerate(
        zip(program.input_paths, program.body.inputs, strict=True)
    ):
        for dim, axis in enumerate(classes.of_value[value.index]):
            leaf_of.setdefault(axis, (path, dim))
            if (leaf, dim) in given:
                own.setdefault(axis, _RESERVED.sub("_", given[leaf, dim]))
    maker_of: dict[int, tuple[Eqn, Value, int]] = {}
    for eqn in program.eqns:
        for value in eqn.outputs:
            for dim, axis in enumerate(classes.of_value[value.index]):
                if axis not in leaf_of:
                    maker_of.setdefault(axis, (eqn, value, dim))
    candidates: list[list[str]] = []
    witnesses: list[str] = []
    for group in members:
        axis = next((a for a in group if a in leaf_of), group[0])
        if axis in leaf_of:
            path, dim = leaf_of[axis]
            parts = _RESERVED.sub("_", path).split("/")
            derived = ["/".join(parts[-n:]) + f".{dim}" for n in range(1, len(parts) + 1)]
            candidates.append([*[own[a] for a in group if a in own][:1], *derived])
            witnesses.append(f"{path} dimension {dim}")
        elif axis in maker_of:
            eqn, value, dim = maker_of[axis]
            candidates.append([f"{eqn.primitive}.{dim}", f"{eqn.primitive}{eqn.index}.{dim}"])
            witnesses.append(
                f"{source_line(eqn)} {eqn.primitive}{list(value.shape)} dimension {dim}"
            )
        else:
            candidates.append([f"axis{axis}"])
            witnesses.append("a body input")
    names = [c[0] for c in candidates]
    for level in range(1, max(map(len, candidates), default=1)):
        repeated = {name for name, n in Counter(names).items() if n > 1}
        names = [
            c[min(level, len(c) - 1)] if n in repeated else n
            for n, c in zip(names, candidates, strict=True)
        ]
    counts: Counter[str] = Counter()
    for i, name in enumerate(names):
        counts[name] += 1
        if counts[name] > 1:
            names[i] = f"{name}#{counts[name]}"
    return list(zip(names, witnesses, strict=True))
