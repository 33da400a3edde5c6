"""What values inherit from their neighbours: where nothing is stated, the partitioner carries a
split on.

Arguments, outputs, loop carries and what anchors read and write are stated (see `constrain`); any
other value is open. The partitioner hands a split from one open value to the next, both ways, along
dimensions that run over the same loop, also where a window shifts it. So an open value is split as
its own logical axes say, and over each other mesh axis as something stated at the border of its region is,
one of another logical axis for instance.

Reference:
    Shardy, `sdy-user-priority-propagate`: aggressive propagation, factors of kind pass-through and
    permutation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from autoshard.axes.sharding_rules import FactorKind
from autoshard.layout.placements import Placements
from autoshard.layout.problem import Problem
from autoshard.tracing.primitives import ANCHORS, CUT_KERNELS, SHIFTS
from autoshard.tracing.program import Eqn, MappingKind, Value

STATED = ANCHORS | CUT_KERNELS | SHIFTS
_CARRIES_ON = (FactorKind.PASS_THROUGH, FactorKind.PERMUTATION)

Borrowed = tuple[tuple[int, int, int], ...]
"""Entries (column of the placements, its dimension or loop, own dimension): that one's mesh axes
are taken on here."""


def borrowed(problem: Problem, placements: Placements) -> list[Borrowed]:
    """By `Value.index`, what a value may inherit beside what its own logical axes say."""
    return _Regions(problem, placements).found()


class _Regions:
    """Open dimensions that the partitioner splits alike, and what is stated at their borders."""

    def __init__(self, problem: Problem, placements: Placements) -> None:
        self._problem = problem
        self._placements = placements
        program = problem.program
        self._first = np.concatenate(
            [[0], np.cumsum([len(v.shape) for v in program.values])]
        ).astype(np.int64)
        self._open = self._find_open()

    def _find_open(self) -> list[bool]:
        program, constant = self._problem.program, self._problem.logical_axes.classes.constant
        is_open = [not gone for gone in constant]
        for value in (*program.body.inputs, *program.body.outputs):
            is_open[value.index] = False
        for eqn in program.eqns:
            stated = eqn.outputs if eqn.primitive in STATED else ()
            for value in (*stated, *(v for pair in eqn.carries for v in pair)):
                is_open[value.index] = False
            for mapping in eqn.mappings:
                if mapping.kind is MappingKind.CARRY:
                    is_open[mapping.outer.index] = False
        return is_open

    def found(self) -> list[Borrowed]:
        program = self._problem.program
        edges: list[tuple[int, int]] = []
        borders: list[tuple[int, tuple[int, int]]] = []  # (node, (column, dimension or loop))
        for eqn in program.eqns:
            for mapping in eqn.mappings:
                for dim in range(len(mapping.inner.shape)):
                    self._meet(
                        [(mapping.outer, dim + mapping.offset), (mapping.inner, dim)],
                        edges,
                        borders,
                    )
            if eqn.bodies:
                continue
            column = self._placements.factor_column(eqn) if eqn.primitive in STATED else None
            for factor, members in self._members(eqn):
                if column is None:
                    self._meet(members, edges, borders)
                else:
                    borders += [
                        (self._node(v, d), (column, factor))
                        for v, d in members
                        if self._open[v.index]
                    ]
        count = int(self._first[-1])
        ends = np.array(edges, dtype=np.int64).reshape(-1, 2)
        graph = coo_array(
            (np.ones(len(ends), dtype=np.int8), (ends[:, 0], ends[:, 1])), shape=(count, count)
        )
        region = (
            connected_components(graph, directed=False)[1] if count else np.zeros(0, dtype=np.int64)
        )
        stated: dict[int, dict[tuple[int, int], None]] = {}
        for node, border in borders:
            stated.setdefault(int(region[node]), {})[border] = None
        lent: dict[tuple[int, int, int], Borrowed] = {}

        def of(value: Value) -> Borrowed:
            own = self._placements.value_column(value)
            taken: list[tuple[int, int, int]] = []
            for dim in range(len(value.shape)):
                key = (own, dim, int(region[self._node(value, dim)]))
                if key not in lent:
                    lent[key] = self._lent(own, dim, stated.get(key[-1], {}))
                taken += lent[key]
            return tuple(sorted(taken))

        return [of(value) if self._open[value.index] else () for value in program.values]

    def _members(self, eqn: Eqn) -> Iterator[tuple[int, list[tuple[Value, int]]]]:
        """(loop, dimensions of operands and results that run over it), where a split is carried
        on.
        """
        rule = self._problem.logical_axes.classes.rules[eqn.index]
        places: list[list[tuple[Value, int]]] = [[] for _ in rule.kinds]
        for value, factors in rule.places(eqn):
            for dim, factor in enumerate(factors):
                if value.shape[dim] > 1:
                    places[factor].append((value, dim))
        for factor, kind in enumerate(rule.kinds):
            if kind in _CARRIES_ON or (eqn.primitive in STATED and kind is FactorKind.REDUCTION):
                yield factor, places[factor]

    def _meet(
        self,
        members: list[tuple[Value, int]],
        edges: list[tuple[int, int]],
        borders: list[tuple[int, tuple[int, int]]],
    ) -> None:
        """Dimensions of one loop: open ones are split alike, stated ones are their border."""
        free = [(v, d) for v, d in members if self._open[v.index] and v.shape[d] > 1]
        if not free:
            return
        node = self._node(*free[0])
        edges += [(node, self._node(v, d)) for v, d in free[1:]]
        constant = self._problem.logical_axes.classes.constant
        for value, dim in members:
            if not self._open[value.index] and not constant[value.index]:
                borders.append((node, (self._placements.value_column(value), dim)))

    def _node(self, value: Value, dim: int) -> int:
        return int(self._first[value.index]) + dim

    def _lent(self, own: int, dim: int, border: Iterable[tuple[int, int]]) -> Borrowed:
        """What a dimension of a column may inherit from the border of its region."""
        alike = self._placements.alike
        return tuple(
            (column, place, dim) for column, place in border if not alike(own, dim, column, place)
        )
