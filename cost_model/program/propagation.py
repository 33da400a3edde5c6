"""Propagated shardings: where nothing is stated, the partitioner carries a split on.

Arguments, outputs, loop carries and what anchors read and write are stated (see
`layout.constraints`); any other value is unstated. The partitioner hands a split from one unstated
value to the next, both ways, along dimensions that run over the same factor, also where a window
shifts it. The dimensions that it so splits alike are a region; stated dimensions and factors that
touch it are its boundary. So an unstated value is split as its own logical axes say, and over each
other mesh axis as something at the boundary is, one of another logical axis for instance.

Reference:
    Shardy, `sdy-user-priority-propagate`: aggressive propagation, factors of kind pass-through and
    permutation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from autoshard.axes.sharding_rules import FactorKind
from autoshard.layout.placements import Placements
from autoshard.layout.problem import Problem
from autoshard.tracing.primitives import ANCHORS, CUT_KERNELS, SHIFTS
from autoshard.tracing.program import Eqn, MappingKind, Value

STATED = ANCHORS | CUT_KERNELS | SHIFTS
"""Primitives at whose operands and results the layout states its specs."""

_PROPAGATED = (FactorKind.PASS_THROUGH, FactorKind.PERMUTATION)

Dim = tuple[Value, int]
"""A dimension of a value."""


class Source(NamedTuple):
    """A dimension or factor whose mesh axes may split a dimension of an unstated value too.

    Attributes:
        column: Its column of the placements.
        place: The dimension, or the factor, of that column.
        dim: The dimension of the unstated value.
    """

    column: int
    place: int
    dim: int


Propagated = tuple[Source, ...]
"""What a value may inherit besides what its own logical axes say."""


def propagated(problem: Problem, placements: Placements) -> list[Propagated]:
    """By `Value.index`, what the partitioner may propagate to a value from elsewhere."""
    regions = _Regions(problem, placements)
    for eqn in problem.program.eqns:
        regions.add(eqn)
    return regions.propagated()


class _Regions:
    """Dimensions of unstated values that the partitioner splits alike, and their boundaries.

    A node is a dimension of a value, numbered through all values.
    """

    def __init__(self, problem: Problem, placements: Placements) -> None:
        self._placements = placements
        self._program = problem.program
        self._classes = problem.logical_axes.classes
        self._unstated = _unstated(problem)
        ranks = [len(v.shape) for v in problem.program.values]
        self._first_node = np.concatenate([[0], np.cumsum(ranks)]).astype(np.int64)
        self._edges: list[tuple[int, int]] = []
        # (node, (column, dimension or factor)): what is stated next to a node
        self._boundary: list[tuple[int, tuple[int, int]]] = []

    def add(self, eqn: Eqn) -> None:
        """Joins the dimensions that an equation, or its mappings to bodies, split alike."""
        for mapping in eqn.mappings:
            for dim in range(len(mapping.inner.shape)):
                self._join([(mapping.outer, dim + mapping.offset), (mapping.inner, dim)])
        if eqn.bodies:
            return
        for factor, dims in self._propagated_factors(eqn):
            if eqn.primitive in STATED:
                stated = (self._placements.factor_column(eqn), factor)
                unstated = [self._node(v, dim) for v, dim in dims if self._unstated[v.index]]
                self._boundary += [(node, stated) for node in unstated]
            else:
                self._join(dims)

    def propagated(self) -> list[Propagated]:
        """By `Value.index`, what reaches each unstated value from the boundaries of its regions."""
        region = self._region_of_node()
        boundaries: dict[int, dict[tuple[int, int], None]] = {}
        for node, stated in self._boundary:
            boundaries.setdefault(int(region[node]), {})[stated] = None
        # By column, dimension and region: values of one column share what they inherit.
        shared: dict[tuple[int, int, int], Propagated] = {}
        by_value: list[Propagated] = []
        for value in self._program.values:
            sources: list[Source] = []
            for dim in range(len(value.shape)) if self._unstated[value.index] else ():
                column = self._placements.value_column(value)
                key = (column, dim, int(region[self._node(value, dim)]))
                if key not in shared:
                    shared[key] = self._sources(column, dim, boundaries.get(key[-1], ()))
                sources += shared[key]
            by_value.append(tuple(sorted(sources)))
        return by_value

    def _region_of_node(self) -> NDArray[np.int32]:
        """[nodes] the region of each: connected components of the edges."""
        count = int(self._first_node[-1])
        if not count:
            return np.zeros(0, dtype=np.int32)
        ends = np.array(self._edges, dtype=np.int64).reshape(-1, 2)
        ones = np.ones(len(ends), dtype=bool)  # edges that occur twice are added up: or
        graph = coo_array((ones, (ends[:, 0], ends[:, 1])), shape=(count, count))
        _, region = connected_components(graph, directed=False)
        return np.asarray(region)

    def _propagated_factors(self, eqn: Eqn) -> Iterator[tuple[int, list[Dim]]]:
        """Each factor along which a split is carried on, with the dimensions that run over it."""
        rule = self._classes.rules[eqn.index]
        dims: list[list[Dim]] = [[] for _ in rule.kinds]
        for value, factors in rule.places(eqn):
            for dim, factor in enumerate(factors):
                if value.shape[dim] > 1:
                    dims[factor].append((value, dim))
        for factor, kind in enumerate(rule.kinds):
            # An anchor states the split of what it sums over as well: it is a boundary.
            summed = kind is FactorKind.REDUCTION and eqn.primitive in STATED
            if summed or kind in _PROPAGATED:
                yield factor, dims[factor]

    def _join(self, dims: Sequence[Dim]) -> None:
        """Dimensions of one factor: unstated ones are split alike, stated ones bound them."""
        unstated, stated = [], []
        for value, dim in dims:
            if self._unstated[value.index]:
                if value.shape[dim] > 1:
                    unstated.append(self._node(value, dim))
            elif not self._classes.constant[value.index]:
                stated.append((self._placements.value_column(value), dim))
        if unstated:
            self._edges += [(unstated[0], node) for node in unstated[1:]]
            self._boundary += [(unstated[0], place) for place in stated]

    def _node(self, value: Value, dim: int) -> int:
        return int(self._first_node[value.index]) + dim

    def _sources(self, own: int, dim: int, boundary: Iterable[tuple[int, int]]) -> Propagated:
        """What a dimension of a column may inherit from the boundary of its region."""
        alike = self._placements.alike  # those say the same as the column's own logical axes
        return tuple(
            Source(column, place, dim)
            for column, place in boundary
            if not alike(own, dim, column, place)
        )


def _unstated(problem: Problem) -> list[bool]:
    """By `Value.index`, True where the layout states no spec; False for constants too."""
    program = problem.program
    stated = [*program.body.inputs, *program.body.outputs]
    for eqn in program.eqns:
        if eqn.primitive in STATED:
            stated += eqn.outputs
        for carry in eqn.carries:
            stated += carry
        for mapping in eqn.mappings:
            if mapping.kind is MappingKind.CARRY:
                stated.append(mapping.outer)
    unstated = [not constant for constant in problem.logical_axes.classes.constant]
    for value in stated:
        unstated[value.index] = False
    return unstated
