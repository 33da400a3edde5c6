"""Logical axes: axis classes at isomorphic places of the program, so that decisions do not grow
with its depth. The word is Flax's and MaxText's: a name that rules send to mesh axes.

The classes of a program form a graph: two are neighbours where an operand or result of an equation
has both, and the edge carries which primitive and which of its factors. A Weisfeiler-Lehman hash of
that graph, refined by sizes and by the arguments a class touches, gives equal labels to the heads
of layer 1 and of layer 7. Two classes that meet in one value never share a logical axis (the hidden
axes of a deep MLP alternate instead), so a logical axis names one dimension of almost any value;
where the *same class* occurs twice in a value (attention scores) that is a conflict, and a rule
says which occurrence it takes.

Reference: Shervashidze et al. (2011), Weisfeiler-Lehman graph kernels, section 2.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from autoshard.axes.axis_classes import NO_AXIS, AxisClasses
from autoshard.axes.sharding_rules import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn, Value
from autoshard.tracing.source_lines import source_line

ROUNDS = 2
"""Neighbourhoods that a label sees. Chosen by hand, as few as tell apart what should differ: with
each round one more layer at either end of a stack differs from the others.
`test_the_hidden_axes_of_a_deep_mlp_alternate` fails with 3."""

_RESERVED = re.compile(r"[\s()@]|->")
"""What separates the parts of an axis rule's text cannot be in a logical axis's name."""


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
        return next((axis for axis in self.axes if axis.name == name), None)

    def factors(self, eqn: Eqn) -> tuple[tuple[int, int], ...]:
        """(logical axis, size) of each factor of an equation."""
        return tuple(
            (NO_AXIS if axis_class == NO_AXIS else self.of_class[axis_class], size)
            for axis_class, size in self.classes.factors(eqn)
        )


def find_logical_axes(
    classes: AxisClasses, model_names: Mapping[tuple[int, int], str] | None = None
) -> LogicalAxes:
    """Groups the axis classes into logical axes and names them.

    Args:
        classes: The axis classes.
        model_names: By (argument leaf, dimension), what the model itself calls that dimension.
    """
    members = _isomorphic_groups(classes)
    of_class = [0] * classes.count
    for index, group in enumerate(members):
        for axis_class in group:
            of_class[axis_class] = index

    sizes = _sizes(classes)
    names, witnesses = _names(classes, members, model_names or {})
    logical_axes = []
    for index, group in enumerate(members):
        sizes_of_group = set().union(*(sizes[axis_class] for axis_class in group))
        logical_axes.append(
            LogicalAxis(
                index=index,
                name=names[index],
                classes=tuple(group),
                sizes=tuple(sorted(sizes_of_group, reverse=True)),
                witness=witnesses[index],
                scanned=not classes.scanned.isdisjoint(group),
            )
        )
    of_class_or_none = [*of_class, NO_AXIS]  # NO_AXIS is -1: it finds itself at the end
    of_value = tuple(tuple(of_class_or_none[c] for c in dims) for dims in classes.of_value)
    return LogicalAxes(classes, tuple(logical_axes), tuple(of_class), of_value)


def _isomorphic_groups(classes: AxisClasses) -> list[list[int]]:
    """Classes of one label that never meet in a value, ascending; groups by their first class."""
    # Equal labels are not enough: rows and columns of a square weight may have one label.
    labels, meets = _labels(classes), _meetings(classes)
    groups: dict[tuple[str, int], list[int]] = {}
    for axis_class in range(classes.count):
        colour = 0  # greedy colouring: the first group of this label in which it meets no other
        while not meets[axis_class].isdisjoint(groups.get((labels[axis_class], colour), ())):
            colour += 1
        groups.setdefault((labels[axis_class], colour), []).append(axis_class)
    return sorted(groups.values(), key=lambda group: group[0])


def _sizes(classes: AxisClasses) -> list[set[int]]:
    """By class, the sizes of its dimensions."""
    sizes: list[set[int]] = [set() for _ in range(classes.count)]
    for value in classes.program.values:
        for axis_class, size in zip(classes.of_value[value.index], value.shape, strict=True):
            if axis_class != NO_AXIS:
                sizes[axis_class].add(size)
    return sizes


class _ClassGraph:
    """Where each class occurs, and which classes equations run over together.

    Attributes:
        places: By class, how often it occurs at each place of an argument leaf or an equation.
        edges: By pair of classes, how often they meet as which factors of which primitive.
    """

    def __init__(self, count: int) -> None:
        self.places: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(count)]
        self.edges: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)

    def add_leaf(self, argument: int | str, value: Value, dims: Sequence[int]) -> None:
        """Adds the dimensions of an argument leaf; leaves of one argument and shape are alike."""
        owner = zlib.crc32(str(argument).encode())  # not hash(): that differs between processes
        for dim, axis_class in enumerate(dims):
            if axis_class != NO_AXIS:
                self.places[axis_class][(owner, dim, *value.shape)] += 1

    def add_eqn(
        self, primitive: str, factors: Sequence[tuple[int, int]], rule: ShardingRule
    ) -> None:
        """Adds the factors of an equation, and their meetings in its operands and results."""
        name = zlib.crc32(primitive.encode())
        if all(kind is FactorKind.NEED_REPLICATION for kind in rule.kinds):
            for axis_class, size in factors:  # what it relates to nothing has no position either
                if axis_class != NO_AXIS:
                    self.places[axis_class][(name, size)] += 1
            return
        for i, (axis_class, size) in enumerate(factors):
            if axis_class != NO_AXIS:
                self.places[axis_class][(name, len(factors), i, size)] += 1
        for j, i in _meeting_factors(rule):
            axis_class, other = factors[i][0], factors[j][0]
            if axis_class != other and NO_AXIS not in (axis_class, other):
                pair = min(axis_class, other), max(axis_class, other)
                # hash() of integers only is the same in every process
                self.edges[pair][hash((name, j, i))] += 1

    def labels(self) -> list[str]:
        """Weisfeiler-Lehman label of each class."""
        graph = nx.Graph()
        for axis_class, places in enumerate(self.places):
            graph.add_node(axis_class, place=str(sorted(places.items())))
        for (a, b), meetings in self.edges.items():
            graph.add_edge(a, b, meet=str(sorted(meetings.items())))
        hashes = nx.weisfeiler_lehman_subgraph_hashes(
            graph, edge_attr="meet", node_attr="place", iterations=ROUNDS
        )
        return [hashes[axis_class][-1] for axis_class in range(len(self.places))]


def _meeting_factors(rule: ShardingRule) -> set[tuple[int, int]]:
    """Pairs of factors that one operand or result has; the smaller first."""
    pairs: set[tuple[int, int]] = set()
    for dims in (*rule.operands, *rule.results):
        pairs.update(itertools.combinations(sorted(set(dims)), 2))
    return pairs


def _labels(classes: AxisClasses) -> list[str]:
    """Weisfeiler-Lehman label of each class."""
    program = classes.program
    graph = _ClassGraph(classes.count)
    for argument, value in zip(program.input_argnums, program.body.inputs, strict=True):
        graph.add_leaf(argument, value, classes.of_value[value.index])
    for eqn in program.eqns:
        if not eqn.bodies:
            graph.add_eqn(eqn.primitive, classes.factors(eqn), classes.rules[eqn.index])
    return graph.labels()


def _meetings(classes: AxisClasses) -> list[set[int]]:
    """For each class, the other classes that occur in one value with it."""
    meets: list[set[int]] = [set() for _ in range(classes.count)]
    for dims in set(classes.of_value):
        present = set(dims) - {NO_AXIS}
        for axis_class in present:
            meets[axis_class] |= present - {axis_class}
    return meets


def _names(
    classes: AxisClasses, members: list[list[int]], model_names: Mapping[tuple[int, int], str]
) -> tuple[list[str], list[str]]:
    """Name and witness of each logical axis.

    The name is the model's own, else that of a leaf, else that of an equation.
    """
    own_names = _own_names(classes, model_names)
    leaf_dims = _first_leaf_dims(classes)
    result_dims = _first_result_dims(classes)
    candidates: list[list[str]] = []
    witnesses: list[str] = []
    for group in members:
        # A leaf's path says more to the user than the equation that a class comes from.
        axis_class = next((c for c in group if c in leaf_dims), group[0])
        if axis_class in leaf_dims:
            path, dim = leaf_dims[axis_class]
            own = [own_names[c] for c in group if c in own_names]
            candidates.append([*own[:1], *_names_of_leaf(path, dim)])
            witnesses.append(f"{path} dimension {dim}")
        elif axis_class in result_dims:
            eqn, value, dim = result_dims[axis_class]
            candidates.append([f"{eqn.primitive}.{dim}", f"{eqn.primitive}{eqn.index}.{dim}"])
            witnesses.append(
                f"{source_line(eqn)} {eqn.primitive}{list(value.shape)} dimension {dim}"
            )
        else:
            candidates.append([f"axis{axis_class}"])
            witnesses.append("a body input")
    return _unique(candidates), witnesses


def _names_of_leaf(path: str, dim: int) -> list[str]:
    """Names after a leaf, from its last part to its whole path: `wq.1`, `layers/wq.1`, ..."""
    parts = _RESERVED.sub("_", path).split("/")
    return ["/".join(parts[-n:]) + f".{dim}" for n in range(1, len(parts) + 1)]


def _own_names(classes: AxisClasses, model_names: Mapping[tuple[int, int], str]) -> dict[int, str]:
    """By class, what the model calls it: at its first named dimension among the leaves."""
    own_names: dict[int, str] = {}
    for leaf, value in enumerate(classes.program.body.inputs):
        for dim, axis_class in enumerate(classes.of_value[value.index]):
            if (leaf, dim) in model_names:
                own_names.setdefault(axis_class, _RESERVED.sub("_", model_names[leaf, dim]))
    return own_names


def _first_leaf_dims(classes: AxisClasses) -> dict[int, tuple[str, int]]:
    """By class, path and dimension of the first argument leaf that has it."""
    leaf_dims: dict[int, tuple[str, int]] = {}
    leaves = zip(classes.program.input_paths, classes.program.body.inputs, strict=True)
    for path, value in leaves:
        for dim, axis_class in enumerate(classes.of_value[value.index]):
            leaf_dims.setdefault(axis_class, (path, dim))
    return leaf_dims


def _first_result_dims(classes: AxisClasses) -> dict[int, tuple[Eqn, Value, int]]:
    """By class, the first result of an equation that has it, and the dimension."""
    result_dims: dict[int, tuple[Eqn, Value, int]] = {}
    for eqn in classes.program.eqns:
        for value in eqn.outputs:
            for dim, axis_class in enumerate(classes.of_value[value.index]):
                result_dims.setdefault(axis_class, (eqn, value, dim))
    return result_dims


def _unique(candidates: list[list[str]]) -> list[str]:
    """Of each list of candidates the shortest name that no other list shares.

    Names that are still repeated when the candidates run out are numbered.
    """
    names = [own[0] for own in candidates]
    for level in range(1, max(map(len, candidates), default=1)):
        counts = Counter(names)
        for i, own in enumerate(candidates):
            if counts[names[i]] > 1:
                names[i] = own[min(level, len(own) - 1)]

    occurrences: Counter[str] = Counter()
    for i, name in enumerate(names):
        occurrences[name] += 1
        if occurrences[name] > 1:
            names[i] = f"{name}#{occurrences[name]}"
    return names
