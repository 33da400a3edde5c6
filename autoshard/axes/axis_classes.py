"""Axis classes: which dimensions of a program are one and the same.

Each (value, dimension) is a node of a graph; sharding rules and body mappings join nodes; the
connected components are the classes. Invariants:

- only factors of kind PASS_THROUGH and REDUCTION join dimensions (an operand dimension that is
  sliced, padded, sorted or gathered is of another class than the result's);
- values that depend on no argument (iota, masks, tables) join nothing: one mask used for two
  sequences does not make them one; they adopt the classes of a reader, because every device
  can compute its own shard;
- dimensions of size 1 have no class;
- a scanned dimension never inherits a class through a reshape: in `(B) -> (n_micro, b)` and a scan,
  b is the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from autoshard.axes.sharding_rules import FactorKind, ShardingRule, reshape_rule, rule_of
from autoshard.tracing.dataflow import computed_from
from autoshard.tracing.primitives import COPIES
from autoshard.tracing.program import Eqn, MappingKind, Program, Value

NO_AXIS = -1
"""Stands for the class of a dimension that has none."""

_JOINING = (FactorKind.PASS_THROUGH, FactorKind.REDUCTION)


@dataclass(frozen=True, eq=False)
class AxisClasses:
    """The axis classes of a program.

    Attributes:
        program: The program.
        count: Number of classes, numbered by first appearance (arguments first).
        of_value: By `Value.index`, the class of each dimension (`NO_AXIS` for none).
        rules: By `Eqn.index`, the sharding rule.
        scanned: Classes that some scan consumes or stacks one slice at a time.
        constant: By `Value.index`, True where the value depends on no argument.
    """

    program: Program
    count: int
    of_value: tuple[tuple[int, ...], ...]
    rules: tuple[ShardingRule, ...]
    scanned: frozenset[int]
    constant: tuple[bool, ...]
    _factors: dict[int, tuple[tuple[int, int], ...]] = field(
        init=False, repr=False, default_factory=dict
    )

    def factors(self, eqn: Eqn) -> tuple[tuple[int, int], ...]:
        """(class, size) of each factor of the equation; a PERMUTATION has the class of its result.

        The size of a factor that can only be cut between blocks is the number of blocks; that of a
        shifted dimension of `COPIES`, what all its sizes are multiples of.
        """
        if eqn.index not in self._factors:
            self._factors[eqn.index] = self._find_factors(eqn)
        return self._factors[eqn.index]

    def _find_factors(self, eqn: Eqn) -> tuple[tuple[int, int], ...]:
        rule = self.rules[eqn.index]
        classes = [NO_AXIS] * len(rule.kinds)
        sizes = [1] * len(rule.kinds)
        common_sizes = [0] * len(rule.kinds)  # gcd(0, size) is size
        for value, factors in rule.places(eqn):
            dims = zip(self.of_value[value.index], value.shape, factors, strict=True)
            for axis_class, size, factor in dims:
                # Results come last: theirs stay.
                if axis_class != NO_AXIS or classes[factor] == NO_AXIS:
                    classes[factor], sizes[factor] = axis_class, size
                common_sizes[factor] = math.gcd(common_sizes[factor], size)

        for factor, max_shards in rule.max_shards:
            sizes[factor] = max_shards
        if eqn.primitive in COPIES:
            for factor, kind in enumerate(rule.kinds):
                if kind is FactorKind.PERMUTATION:
                    sizes[factor] = common_sizes[factor]
        return tuple(zip(classes, sizes, strict=True))


def axis_classes(
    program: Program,
    carry: Sequence[tuple[int, int]] = (),
    rule_for: Callable[[Eqn], ShardingRule] = rule_of,
) -> AxisClasses:
    """Finds the axis classes of a program.

    Args:
        program: From `trace`.
        carry: Pairs (input leaf, output leaf) that are the same array one step later; their
            dimensions are joined.
        rule_for: The sharding rule of an equation; by default what the registry says.

    Returns:
        The classes; every dimension of size > 1 of a value that depends on an argument has one.
    """
    from_arguments = computed_from(program, program.body.inputs)
    constant = tuple(value.index not in from_arguments for value in program.values)
    rules = [rule_for(eqn) for eqn in program.eqns]

    graph = _DimensionGraph(program, constant)
    graph.join_mappings()
    graph.join_carry(carry)
    for eqn in program.eqns:
        if eqn.primitive != "reshape":
            graph.join_factors(eqn, rules[eqn.index])
    _join_reshapes(program, graph, rules)

    labels = graph.component_labels()
    class_of_label = graph.numbered(labels)
    of_value = graph.classes_of_values(labels, class_of_label)
    _adopt_classes_of_readers(program, rules, constant, of_value)
    scanned_labels = {labels[node] for node in graph.nodes_of_scanned()}
    scanned = [class_of_label[label] for label in scanned_labels if label in class_of_label]
    return AxisClasses(
        program=program,
        count=len(class_of_label),
        of_value=tuple(of_value),
        rules=tuple(rules),
        scanned=frozenset(scanned),
        constant=constant,
    )


class _DimensionGraph:
    """The dimensions of all values of a program, and which of them are one and the same."""

    def __init__(self, program: Program, constant: Sequence[bool]) -> None:
        self._program = program
        self._constant = constant
        self._first_node = [0, *accumulate(len(value.shape) for value in program.values)]
        self._edges: list[tuple[int, int]] = []

    def _nodes(self, value: Value) -> range:
        return range(self._first_node[value.index], self._first_node[value.index + 1])

    def _join(self, a: Value, i: int, b: Value, j: int) -> None:
        """Makes dimension i of a and j of b one, unless one is constant or of size 1."""
        if self._constant[a.index] or self._constant[b.index]:
            return
        if a.shape[i] > 1 and b.shape[j] > 1:
            self._edges.append((self._first_node[a.index] + i, self._first_node[b.index] + j))

    def join_mappings(self) -> None:
        """Joins what goes into bodies and comes out of them."""
        for eqn in self._program.eqns:
            for mapping in eqn.mappings:
                for dim in range(len(mapping.inner.shape)):
                    self._join(mapping.outer, dim + mapping.offset, mapping.inner, dim)

    def join_carry(self, carry: Sequence[tuple[int, int]]) -> None:
        """Joins input and output leaves that are the same array one step later."""
        body = self._program.body
        for input_leaf, output_leaf in carry:
            before, after = body.inputs[input_leaf], body.outputs[output_leaf]
            for dim in range(len(before.shape)):
                self._join(before, dim, after, dim)

    def join_factors(self, eqn: Eqn, rule: ShardingRule) -> None:
        """Joins the dimensions of an equation that run over one factor."""
        members: list[list[tuple[Value, int]]] = [[] for _ in rule.kinds]
        for value, factors in rule.places(eqn):
            if not self._constant[value.index]:
                for dim, factor in enumerate(factors):
                    members[factor].append((value, dim))
        for kind, places in zip(rule.kinds, members, strict=True):
            if kind in _JOINING:
                for (a, i), (b, j) in pairwise(places):
                    self._join(a, i, b, j)

    def component_labels(self) -> list[int]:
        """By node, a label of its connected component."""
        count = self._first_node[-1]
        if not count:
            return []
        ends = np.array(self._edges, dtype=np.int64).reshape(-1, 2)  # [edges, 2]: the two nodes
        ones = np.ones(len(ends), dtype=bool)  # edges that occur twice are added up: or
        graph = coo_array((ones, (ends[:, 0], ends[:, 1])), shape=(count, count))
        labels: list[int] = connected_components(graph, directed=False)[1].tolist()
        return labels

    def nodes_of_scanned(self) -> list[int]:
        """Nodes of the dimensions that a scan consumes or stacks one slice at a time."""
        return [self._first_node[v.index] for eqn in self._program.eqns for v in eqn.scanned]

    def dims_labelled(self, value: Value, labels: list[int], wanted: set[int]) -> frozenset[int]:
        """Dimensions of a value that have one of these labels."""
        nodes = enumerate(self._nodes(value))
        return frozenset(dim for dim, node in nodes if labels[node] in wanted)

    def numbered(self, labels: list[int]) -> dict[int, int]:
        """By label, the number of its class: by first appearance, arguments first."""
        class_of_label: dict[int, int] = {}
        for value in (*self._program.body.inputs, *self._program.values):
            if self._constant[value.index]:
                continue
            for node, size in zip(self._nodes(value), value.shape, strict=True):
                if size > 1:
                    class_of_label.setdefault(labels[node], len(class_of_label))
        return class_of_label

    def classes_of_values(
        self, labels: list[int], class_of_label: dict[int, int]
    ) -> list[tuple[int, ...]]:
        """By value, the class of each dimension."""
        rows = []
        for value in self._program.values:
            row = [NO_AXIS] * len(value.shape)
            if not self._constant[value.index]:
                for dim, node in enumerate(self._nodes(value)):
                    if value.shape[dim] > 1:
                        row[dim] = class_of_label[labels[node]]
            rows.append(tuple(row))
        return rows


def _join_reshapes(program: Program, graph: _DimensionGraph, rules: list[ShardingRule]) -> None:
    """Joins the dimensions of reshapes, whose rules are changed where dimensions are scanned.

    After everything else, since what a scan takes apart is known only then.
    """
    labels = graph.component_labels()
    scanned = {labels[node] for node in graph.nodes_of_scanned()}
    for eqn in program.eqns:
        if eqn.primitive == "reshape":
            operand, result = eqn.inputs[0], eqn.outputs[0]
            skip_in = graph.dims_labelled(operand, labels, scanned)
            skip_out = graph.dims_labelled(result, labels, scanned)
            # A reshape to sizes that are operands themselves (dynamic shapes) keeps its rule.
            if len(eqn.inputs) == 1 and (skip_in or skip_out):
                rules[eqn.index] = reshape_rule(operand.shape, result.shape, skip_in, skip_out)
            graph.join_factors(eqn, rules[eqn.index])


def _adopt_classes_of_readers(
    program: Program,
    rules: Sequence[ShardingRule],
    constant: Sequence[bool],
    of_value: list[tuple[int, ...]],
) -> None:
    """Gives each computed constant (zeros, masks) the classes of its last reader that has any.

    Every device computes just its own shard. Nothing is joined by that: another reader of other
    classes computes its own shard as well. Captured arrays (constvars) are whole on every device
    and get no classes.

    Args:
        program: The program.
        rules: By `Eqn.index`, the sharding rule.
        constant: By `Value.index`, whether the value depends on no argument.
        of_value: By `Value.index`, the class of each dimension; changed in place.
    """
    computed = _computed_constants(program, constant)
    # Backwards, so that a constant that others are computed from finds theirs adopted already.
    for eqn in reversed(program.eqns):
        for mapping in eqn.mappings:
            if mapping.kind is MappingKind.OPERAND_TO_INVAR and mapping.outer.index in computed:
                leading = (NO_AXIS,) * mapping.offset
                _adopt(mapping.outer, leading + of_value[mapping.inner.index], of_value)
        rule = rules[eqn.index]
        of_factor = _classes_of_factors(eqn, rule, of_value)
        for value, factors in zip(eqn.inputs, rule.operands, strict=True):
            if value.index in computed:
                _adopt(value, [of_factor.get(factor, NO_AXIS) for factor in factors], of_value)


def _adopt(value: Value, classes: Sequence[int], of_value: list[tuple[int, ...]]) -> None:
    """Gives a value these classes, unless it has some."""
    if all(axis_class == NO_AXIS for axis_class in of_value[value.index]):
        pairs = zip(classes, value.shape, strict=True)
        of_value[value.index] = tuple(c if size > 1 else NO_AXIS for c, size in pairs)


def _computed_constants(program: Program, constant: Sequence[bool]) -> set[int]:
    """Numbers of the constants that the program computes, as it hands them into bodies too."""
    computed: set[int] = set()
    for eqn in program.eqns:
        if not eqn.bodies:
            computed.update(v.index for v in eqn.outputs if constant[v.index])
    for eqn in program.eqns:  # outer ones first
        for mapping in eqn.mappings:
            if mapping.outer.index in computed and constant[mapping.inner.index]:
                computed.add(mapping.inner.index)
    return computed


def _classes_of_factors(
    eqn: Eqn, rule: ShardingRule, of_value: Sequence[tuple[int, ...]]
) -> dict[int, int]:
    """By factor that can be split, the class of its dimensions; the last one where they differ."""
    of_factor = {}
    for value, factors in rule.places(eqn):
        for axis_class, factor in zip(of_value[value.index], factors, strict=True):
            if axis_class != NO_AXIS and rule.kinds[factor] is not FactorKind.NEED_REPLICATION:
                of_factor[factor] = axis_class
    return of_factor
