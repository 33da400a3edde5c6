"""Stage 2: axis classes. Each (value, dimension) is a node; sharding rules and ties join nodes;
classes are axes.

Invariants:

- only loops of kind PASS_THROUGH and REDUCTION join dimensions (an operand dimension that is sliced, padded,
  sorted or gathered is another axis than the result's);
- values that depend on no argument (iota, masks, tables) join nothing: one mask used for two
  sequences does not make them one; they are lent the axes of their first reader, because every
  device can make its own part;
- dimensions of size 1 have no axis;
- a scanned dimension never inherits an axis through a reshape: in `(B) -> (n_micro, b)` and a scan,
  b is the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from autoshard.axes.sharding_rules import FactorKind, ShardingRule, reshape_rule, rule_of
from autoshard.tracing.dataflow import computed_from
from autoshard.tracing.primitives import COPIES
from autoshard.tracing.program import Eqn, MappingKind, Program, Value

NO_AXIS = -1


@dataclass(frozen=True, eq=False)
class AxisClasses:
    """The axis classes of a program.

    Attributes:
        program: The program.
        count: Number of axes, numbered by first appearance (arguments first).
        of_value: By `Value.index`, the axis of each dimension (`NO_AXIS` for none).
        rules: By `Eqn.index`, the sharding rule.
        scanned: Axes that some scan consumes or stacks one slice at a time.
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
        """(axis, size) of each loop of the equation; a PERMUTATION loop has the axis of its result.

        The size of a loop that can only be cut between blocks is the number of blocks; that of a
        shifted dimension of `COPIES`, what all its sizes are multiples of.
        """
        if eqn.index not in self._factors:
            self._factors[eqn.index] = self._find_factors(eqn)
        return self._factors[eqn.index]

    def _find_factors(self, eqn: Eqn) -> tuple[tuple[int, int], ...]:
        rule = self.rules[eqn.index]
        found: list[tuple[int, int]] = [(NO_AXIS, 1)] * len(rule.kinds)
        common = [0] * len(rule.kinds)
        for value, factors in rule.places(eqn):
            for axis, size, factor in zip(
                self.of_value[value.index], value.shape, factors, strict=True
            ):
                if axis != NO_AXIS or found[factor][0] == NO_AXIS:
                    found[factor] = (axis, size)
                common[factor] = math.gcd(common[factor], size)
        for factor, pieces in rule.max_shards:
            found[factor] = (found[factor][0], pieces)
        if eqn.primitive in COPIES:
            for factor, kind in enumerate(rule.kinds):
                if kind is FactorKind.PERMUTATION:
                    found[factor] = (found[factor][0], common[factor])
        return tuple(found)


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
        The axes; every dimension of size > 1 of a value that depends on an argument has one.
    """
    from_arguments = computed_from(program, program.body.inputs)
    constant = [value.index not in from_arguments for value in program.values]
    rules = [rule_for(eqn) for eqn in program.eqns]
    first_node = np.concatenate([[0], np.cumsum([len(v.shape) for v in program.values])])
    sizes = np.array([size for v in program.values for size in v.shape], dtype=np.int64)
    edges: list[tuple[int, int]] = []

    def join(a: Value, i: int, b: Value, j: int) -> None:
        if not (constant[a.index] or constant[b.index]) and a.shape[i] > 1 and b.shape[j] > 1:
            edges.append((int(first_node[a.index]) + i, int(first_node[b.index]) + j))

    def join_factors(eqn: Eqn, rule: ShardingRule) -> None:
        places: list[list[tuple[Value, int]]] = [[] for _ in rule.kinds]
        for value, factors in rule.places(eqn):
            if not constant[value.index]:
                for dim, factor in enumerate(factors):
                    places[factor].append((value, dim))
        for kind, members in zip(rule.kinds, places, strict=True):
            if kind in (FactorKind.PASS_THROUGH, FactorKind.REDUCTION):
                for (a, i), (b, j) in pairwise(members):
                    join(a, i, b, j)

    scanned_nodes = []
    for eqn in program.eqns:
        for mapping in eqn.mappings:
            for dim in range(len(mapping.inner.shape)):
                join(mapping.outer, dim + mapping.offset, mapping.inner, dim)
        scanned_nodes += [int(first_node[v.index]) for v in eqn.scanned]
        if eqn.primitive != "reshape":
            join_factors(eqn, rules[eqn.index])
    for source, target in carry:
        a, b = program.body.inputs[source], program.body.outputs[target]
        for dim in range(len(a.shape)):
            join(a, dim, b, dim)

    labels = _components(len(sizes), edges)
    scanned = set(labels[scanned_nodes].tolist())
    for eqn in program.eqns:
        if eqn.primitive == "reshape":
            rule = _reshape(eqn, labels, first_node, scanned) or rules[eqn.index]
            rules[eqn.index] = rule
            join_factors(eqn, rule)
    labels = _components(len(sizes), edges)

    numbers: dict[int, int] = {}
    order = [*program.body.inputs, *program.values]
    for value in order:
        if not constant[value.index]:
            start = int(first_node[value.index])
            for dim, size in enumerate(value.shape):
                if size > 1:
                    numbers.setdefault(int(labels[start + dim]), len(numbers))

    def axes_of(value: Value) -> tuple[int, ...]:
        if constant[value.index]:
            return (NO_AXIS,) * len(value.shape)
        start = int(first_node[value.index])
        return tuple(
            numbers[int(labels[start + dim])] if size > 1 else NO_AXIS
            for dim, size in enumerate(value.shape)
        )

    of_value = [axes_of(v) for v in program.values]
    _lend(program, rules, constant, of_value)
    final_scanned = {numbers[int(labels[n])] for n in scanned_nodes if int(labels[n]) in numbers}
    return AxisClasses(
        program=program,
        count=len(numbers),
        of_value=tuple(of_value),
        rules=tuple(rules),
        scanned=frozenset(final_scanned),
        constant=tuple(constant),
    )


def _components(count: int, edges: list[tuple[int, int]]) -> np.ndarray:
    """Component number of each node."""
    if not count:
        return np.zeros(0, dtype=np.int64)
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2)
    graph = coo_array(
        (np.ones(len(ends), dtype=np.int8), (ends[:, 0], ends[:, 1])), shape=(count, count)
    )
    return np.asarray(connected_components(graph, directed=False)[1], dtype=np.int64)


def _reshape(
    eqn: Eqn, labels: np.ndarray, first_node: np.ndarray, scanned: set[int]
) -> ShardingRule | None:
    """The rule of a reshape some of whose dimensions are scanned; None where none is."""
    (operand, *rest), (result,) = eqn.inputs, eqn.outputs
    if rest:
        return None

    def dims(value: Value) -> frozenset[int]:
        start = int(first_node[value.index])
        return frozenset(d for d in range(len(value.shape)) if int(labels[start + d]) in scanned)

    skip_in, skip_out = dims(operand), dims(result)
    if not (skip_in or skip_out):
        return None
    return reshape_rule(operand.shape, result.shape, skip_in, skip_out)


def _lend(
    program: Program,
    rules: Sequence[ShardingRule],
    constant: Sequence[bool],
    of_value: list[tuple[int, ...]],
) -> None:
    """Lends each computed constant (zeros, masks) the axes of its first reader: every device makes
    just its own part.

    Nothing is joined by that: another reader with other axes makes its own part as well. Captured
    arrays (constvars) are whole on every device and get no axes.
    """
    made = {
        v.index for eqn in program.eqns if not eqn.bodies for v in eqn.outputs if constant[v.index]
    }
    for eqn in program.eqns:  # outer ones first
        made |= {
            t.inner.index for t in eqn.mappings if t.outer.index in made and constant[t.inner.index]
        }

    def lend(value: Value, axes: Sequence[int]) -> None:
        if value.index in made and all(a == NO_AXIS for a in of_value[value.index]):
            of_value[value.index] = tuple(
                axis if size > 1 else NO_AXIS for axis, size in zip(axes, value.shape, strict=True)
            )

    for eqn in reversed(program.eqns):
        for mapping in eqn.mappings:
            if mapping.kind is MappingKind.OPERAND_TO_INVAR:
                lend(mapping.outer, ((NO_AXIS,) * mapping.offset) + of_value[mapping.inner.index])
        rule = rules[eqn.index]
        axis_of: dict[int, int] = {}
        for value, factors in rule.places(eqn):
            for axis, factor in zip(of_value[value.index], factors, strict=True):
                if axis != NO_AXIS and rule.kinds[factor] is not FactorKind.NEED_REPLICATION:
                    axis_of[factor] = axis
        for value, factors in zip(eqn.inputs, rule.operands, strict=True):
            lend(value, [axis_of.get(factor, NO_AXIS) for factor in factors])
