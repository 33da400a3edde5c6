"""Stage 3: roles. Logical axes at isomorphic places of the program share one role, so decisions do
not grow with depth.

The axes of a program form a graph: two axes are neighbours where one equation loops over both, and
the edge carries which primitive, which operand and which dimension. A Weisfeiler-Lehman hash of
that graph, refined by sizes and by the arguments an axis touches, gives equal labels to the heads
of layer 1 and of layer 7. Two axes that meet in one value never share a role (the hidden axes of a
deep MLP alternate instead), so a role names one dimension of almost any value; where the *same
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

from autoshard.axes.axis_classes import NO_AXIS, LogicalAxes
from autoshard.tracing.program import Eqn, Value
from autoshard.tracing.source_lines import source_line

ROUNDS = 2
_RESERVED = re.compile(r"[\s()@]|->")
"""What separates the parts of an axis rule's text cannot be in a role's name."""


@dataclass(frozen=True, slots=True)
class Role:
    """One role.

    Attributes:
        index: Position in `Roles.roles`.
        name: Stable, readable name: the last part of a leaf path and the dimension (`wq.1`).
        axes: The logical axes that share it.
        sizes: Their distinct sizes, largest first.
        witness: Where it is seen: leaf path and dimension, or source line, primitive and dimension.
        scanned: True if a scan consumes it one slice at a time (it can be sharded in arguments
            only).
    """

    index: int
    name: str
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    witness: str
    scanned: bool


@dataclass(frozen=True, eq=False)
class Roles:
    """The roles of a program.

    Attributes:
        axes: The logical axes.
        roles: The roles, by first appearance.
        of_axis: By axis, its role.
        of_value: By `Value.index`, the role of each dimension (`NO_AXIS` for none).
    """

    axes: LogicalAxes
    roles: tuple[Role, ...]
    of_axis: tuple[int, ...]
    of_value: tuple[tuple[int, ...], ...]

    def by_name(self, name: str) -> Role | None:
        """The role of that name, or None."""
        return next((role for role in self.roles if role.name == name), None)

    def loops(self, eqn: Eqn) -> tuple[tuple[int, int], ...]:
        """(role, size) of each loop of an equation."""
        return tuple((self._role(axis), size) for axis, size in self.axes.loops(eqn))

    def _role(self, axis: int) -> int:
        return NO_AXIS if axis == NO_AXIS else self.of_axis[axis]


def find_roles(axes: LogicalAxes, given: Mapping[tuple[int, int], str] | None = None) -> Roles:
    """Groups the logical axes into roles and names them.

    Args:
        axes: The logical axes.
        given: By (argument leaf, dimension), what the model itself calls that dimension.
    """
    labels = _labels(axes)
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    meets = _meetings(axes)
    for axis in range(axes.count):
        colour = 0
        while any(other in meets[axis] for other in groups[(labels[axis], colour)]):
            colour += 1
        groups[(labels[axis], colour)].append(axis)
    members = sorted((g for g in groups.values() if g), key=lambda g: g[0])
    of_axis = [0] * axes.count
    for role, group in enumerate(members):
        for axis in group:
            of_axis[axis] = role
    named = _names(axes, members, given or {})
    sizes = _sizes(axes)
    roles = tuple(
        Role(
            index=i,
            name=named[i][0],
            axes=tuple(group),
            sizes=tuple(sorted(set().union(*(sizes[a] for a in group)), reverse=True)),
            witness=named[i][1],
            scanned=any(a in axes.scanned for a in group),
        )
        for i, group in enumerate(members)
    )
    of_value = tuple(
        tuple(NO_AXIS if a == NO_AXIS else of_axis[a] for a in dims) for dims in axes.of_value
    )
    return Roles(axes, roles, tuple(of_axis), of_value)


def _sizes(axes: LogicalAxes) -> list[set[int]]:
    sizes: list[set[int]] = [set() for _ in range(axes.count)]
    for value in axes.program.values:
        for axis, size in zip(axes.of_value[value.index], value.shape, strict=True):
            if axis != NO_AXIS:
                sizes[axis].add(size)
    return sizes


def _labels(axes: LogicalAxes) -> list[str]:
    """Weisfeiler-Lehman label of each axis."""
    places: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(axes.count)]
    edges: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for leaf, value in enumerate(axes.program.body.inputs):
        owner = zlib.crc32(str(axes.program.input_argnums[leaf]).encode())
        for dim, axis in enumerate(axes.of_value[value.index]):
            if axis != NO_AXIS:
                places[axis][(owner, dim, *value.shape)] += 1
    for eqn, _ in axes.program.walk():
        if eqn.bodies:
            continue
        name = zlib.crc32(eqn.primitive.encode())
        loops = axes.loops(eqn)
        for i, (axis, size) in enumerate(loops):
            if axis == NO_AXIS:
                continue
            places[axis][(name, len(loops), i, size)] += 1
            for j, (other, _) in enumerate(loops[:i]):
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
    return [hashes[axis][-1] for axis in range(axes.count)]


def _meetings(axes: LogicalAxes) -> list[set[int]]:
    """For each axis, the other axes that occur in one value with it."""
    meets: list[set[int]] = [set() for _ in range(axes.count)]
    for dims in set(axes.of_value):
        present = set(dims) - {NO_AXIS}
        for axis in present:
            meets[axis] |= present - {axis}
    return meets


def _names(
    axes: LogicalAxes, members: list[list[int]], given: Mapping[tuple[int, int], str]
) -> list[tuple[str, str]]:
    """(name, witness) of each role: the model's own, else of the first argument leaf, else of the
    equation.
    """
    program = axes.program
    leaf_of: dict[int, tuple[str, int]] = {}
    own: dict[int, str] = {}
    for leaf, (path, value) in enumerate(
        zip(program.input_paths, program.body.inputs, strict=True)
    ):
        for dim, axis in enumerate(axes.of_value[value.index]):
            leaf_of.setdefault(axis, (path, dim))
            if (leaf, dim) in given:
                own.setdefault(axis, _RESERVED.sub("_", given[leaf, dim]))
    maker_of: dict[int, tuple[Eqn, Value, int]] = {}
    for eqn in program.eqns:
        for value in eqn.outputs:
            for dim, axis in enumerate(axes.of_value[value.index]):
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
