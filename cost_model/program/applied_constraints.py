"""Constraints that the partitioner applies to the producer of a value.

Where all constraints on a value say the same, every dimension of it, and nothing else states its
spec, the partitioner takes the constraint for the value itself. Its producer is then split as most
of its operands and the result are (constants are whole): `where(mask, x, 0)` of two split arrays
that a contraction reads whole is computed from two gathers, `x * y` from one.

Reference:
    Shardy, `sdy-apply-sharding-constraints`: the sharding of a constraint goes to its input if the
    input has none, the constraint is fully closed, and no other constraint on that input differs;
    `sdy-insert-explicit-reshards`: a majority vote of the operands and results where they disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.axes.sharding_rules import FactorKind
from autoshard.cost_model.program.ragged import Ragged
from autoshard.layout.constraints import closed_dims, leaves_open
from autoshard.layout.narrow import Narrow, NarrowType, narrowed
from autoshard.layout.placements import ABSENT, OPEN, Placements
from autoshard.layout.problem import Problem
from autoshard.tracing.primitives import ANCHORS, CUT_KERNELS, SHIFTS
from autoshard.tracing.program import Eqn, Value

Array = NDArray[np.int64]
Mask = NDArray[np.bool_]
Index = NDArray[np.int32]
"""[n, mesh axes + 1] rows of `Placements` of n layouts."""
Dims = Narrow
"""[n, mesh axes] the dimension, or the factor, that each mesh axis splits; negative for none. Of
`Placements.dtype`."""

_NO_FACTOR = -3
"""The factor of a dimension beyond the rank: no mesh axis splits it (see `ABSENT` and `OPEN`)."""

_UNSPLITTABLE = {FactorKind.REDUCTION, FactorKind.NEED_REPLICATION}
"""With such a factor a producer cannot be split just as its result is."""


class Reader(NamedTuple):
    """An equation that reads a value.

    Attributes:
        eqn: The equation.
        factors: The factor of each dimension of the value.
    """

    eqn: Eqn
    factors: tuple[int, ...]


AppliedConstraints = Mapping[int, tuple[Reader, ...]]
"""By `Value.index`, the anchors that constrain a value which has no other spec, one of each kind.
The partitioner applies the constraint to the producer where they agree."""


def find_applied_constraints(problem: Problem) -> AppliedConstraints:
    """The constraints of a problem that may be applied to producers."""
    computed, stated = _computed_values(problem), _stated_values(problem)
    applied = {}
    for index, readers in _anchors_of_values(problem).items():
        if index in computed and index not in stated:
            applied[index] = readers
    return applied


def _computed_values(problem: Problem) -> set[int]:
    """By `Value.index`, results that depend on arguments and whose producer states nothing."""
    constant = problem.logical_axes.classes.constant
    computed: set[int] = set()
    for eqn in problem.program.eqns:
        if eqn.bodies or eqn.primitive in ANCHORS or eqn.primitive in CUT_KERNELS:
            continue
        computed.update(out.index for out in eqn.outputs if not constant[out.index])
    return computed


def _stated_values(problem: Problem) -> set[int]:
    """By `Value.index`, pins, loop carries, and operands of which an anchor leaves a part open."""
    rules = problem.logical_axes.classes.rules
    stated = set(problem.pins)
    for eqn in problem.program.eqns:
        stated.update(out.index for _, out in eqn.carries)
        if eqn.primitive in ANCHORS:
            rule = rules[eqn.index]
            for value, factors in zip(eqn.inputs, rule.operands, strict=True):
                if leaves_open(eqn.primitive, rule, factors):
                    stated.add(value.index)
    return stated


def _anchors_of_values(problem: Problem) -> dict[int, tuple[Reader, ...]]:
    """By `Value.index`, the anchors that read it, one of each kind, in a stable order."""
    rules = problem.logical_axes.classes.rules
    by_kind: dict[int, dict[object, Reader]] = {}
    for eqn in problem.program.eqns:
        if eqn.primitive not in ANCHORS:
            continue
        for value, factors in zip(eqn.inputs, rules[eqn.index].operands, strict=True):
            if value.shape and not value.literal and value.bytes:
                kind = (problem.factor_signature(eqn), factors)
                by_kind.setdefault(value.index, {}).setdefault(kind, Reader(eqn, factors))
    return {
        index: tuple(readers[kind] for kind in sorted(readers, key=repr))
        for index, readers in by_kind.items()
    }


def _producers(problem: Problem, applied: AppliedConstraints) -> dict[int, Value]:
    """By `Eqn.index` of a producer that can be split as its result is, that result."""
    rules = problem.logical_axes.classes.rules
    results = {}
    for eqn in problem.program.eqns:
        if len(eqn.outputs) != 1 or eqn.outputs[0].index not in applied:
            continue
        if _UNSPLITTABLE.isdisjoint(rules[eqn.index].kinds):
            results[eqn.index] = eqn.outputs[0]
    return results


class Assignment(NamedTuple):
    """Where the mesh axes go in n columns.

    Attributes:
        dims: [n, mesh axes] the dimension, or the factor, that each mesh axis splits; negative for
            none.
        order: [n] which of `Placements.orders` says who is major where two share a dimension.
    """

    dims: Dims
    order: Narrow


class _Constraint(NamedTuple):
    """What an anchor says of a value that it reads.

    Attributes:
        column: Column of the factors of the anchor.
        factors: The factor of each dimension of the value.
        shifted: Dimensions that the anchor shifts. Where it splits one of them otherwise than the
            value is, the value is stated in its own spec.
    """

    column: int
    factors: tuple[int, ...]
    shifted: frozenset[int]


class _Voter(NamedTuple):
    """An operand of a producer: its column, and the factor of each dimension."""

    column: int
    factors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _AppliedColumn:
    """A column that follows constraints: that of a value, or of the factors of its producer.

    Attributes:
        fallback: The column of the placements that holds where the constraints disagree.
        value: The column of the value.
        constraints: Of the anchors that read the value.
        sizes: Of the dimensions of the value.
        targets: By dimension of the value, what is split where the constraint splits it: that
            dimension, or the factor of the producer.
        voters: For a producer, its operands that are no constants.
        constants: For a producer, how many of its operands are constants.
        shifted: Dimensions that the producer shifts: where the value is split there, it is stated
            in its own spec.
    """

    fallback: int
    value: int
    constraints: tuple[_Constraint, ...]
    sizes: tuple[int, ...]
    targets: tuple[int, ...]
    voters: tuple[_Voter, ...] = ()
    constants: int = 0
    shifted: frozenset[int] = frozenset()


class AppliedColumns:
    """Columns of values and of factors under applied constraints.

    Those that follow a constraint are numbered on after the placements' own columns.
    """

    def __init__(
        self,
        problem: Problem,
        placements: Placements,
        applied: AppliedConstraints,
    ) -> None:
        """Prepares the columns.

        Args:
            problem: The problem.
            placements: Its placements.
            applied: Its applied constraints.
        """
        classes = problem.logical_axes.classes
        self._placements = placements
        self._applied = applied
        self._results = _producers(problem, applied)
        self._rules, self._constant = classes.rules, classes.constant
        self._max_rank = max((len(v.shape) for v in problem.program.values), default=0)
        self._shifted_by_producer: dict[int, frozenset[int]] = {}
        for eqn in problem.program.eqns:
            if eqn.primitive in SHIFTS:
                rule = self._rules[eqn.index]
                for value, factors in zip(eqn.outputs, rule.results, strict=True):
                    shifted = closed_dims(eqn, rule, factors)
                    self._shifted_by_producer[value.index] = shifted
        self._numbers: dict[_AppliedColumn, int] = {}
        self._padded: _Tables | None = None  # built when first used after the last new column

    def of_value(self, value: Value) -> int:
        """Column of a value."""
        own = self._placements.value_column(value)
        if value.index not in self._applied:
            return own
        return self._number(value, own, targets=tuple(range(len(value.shape))))

    def of_eqn(self, eqn: Eqn) -> int:
        """Column of an equation's factors."""
        own = self._placements.factor_column(eqn)
        result = self._results.get(eqn.index)
        if result is None:
            return own
        rule = self._rules[eqn.index]
        voters, constants = [], 0
        for operand, factors in zip(eqn.inputs, rule.operands, strict=True):
            if self._constant[operand.index]:
                constants += 1
            elif operand.shape:
                voters.append(_Voter(self._placements.value_column(operand), factors))
        return self._number(result, own, rule.results[0], tuple(voters), constants)

    def bases(self, column: int) -> tuple[int, ...]:
        """The columns of the placements on which one depends."""
        if column < self._placements.columns:
            return (column,)
        applied = list(self._numbers)[column - self._placements.columns]
        return (
            applied.fallback,
            *(constraint.column for constraint in applied.constraints),
            *(voter.column for voter in applied.voters),
        )

    def assignment(self, index: Index, columns: Array) -> Assignment:
        """What layouts say of one column each.

        Args:
            index: [n, mesh axes + 1] rows of `Placements`.
            columns: [n] columns.
        """
        number = columns - self._placements.columns  # [n]: negative for columns of the placements
        applied = np.flatnonzero(number >= 0)
        if not len(applied):
            return self._placed(index, columns)
        tables, number = self._tables(), number[applied]
        columns = columns.copy()
        columns[applied] = tables.fallback[number]
        dims, order = self._placed(index, columns)

        constraint, agreed = self._agreed(tables, number, index[applied])
        # [applied, mesh axes]: dimension or factor that is split where the constraint is applied
        split = look_up(tables.targets[number], constraint.dims)
        agreed &= self._wins_vote(tables, number, index[applied], (split, dims[applied]))
        dims[applied] = np.where(agreed[:, None], split, dims[applied])
        order[applied] = np.where(agreed, constraint.order, order[applied])
        return Assignment(dims, order)

    def _number(
        self,
        value: Value,
        fallback: int,
        targets: tuple[int, ...],
        voters: tuple[_Voter, ...] = (),
        constants: int = 0,
    ) -> int:
        """The number of the column that follows the constraints on a value."""
        column = _AppliedColumn(
            fallback=fallback,
            value=self._placements.value_column(value),
            constraints=tuple(map(self._constraint, self._applied[value.index])),
            sizes=value.shape,
            targets=targets,
            voters=voters,
            constants=constants,
            shifted=self._shifted_by_producer.get(value.index, frozenset()),
        )
        self._padded = None
        return self._numbers.setdefault(column, self._placements.columns + len(self._numbers))

    def _constraint(self, reader: Reader) -> _Constraint:
        eqn, factors = reader
        shifted = closed_dims(eqn, self._rules[eqn.index], factors)
        return _Constraint(self._placements.factor_column(eqn), factors, shifted)

    def _agreed(self, tables: _Tables, number: Array, index: Index) -> tuple[Assignment, Mask]:
        """What the first anchor says of each value, and [n] whether the partitioner applies it.

        It does where all anchors say the same, closed, and the mesh axes divide the dimensions.
        """
        own = self._placed(index, tables.value[number])
        first, agreed = self._constrained(tables, 0, number, index, own)
        for position in range(1, tables.constraint.shape[1]):
            exists = tables.constraint[number, position] >= 0  # [n]
            other, closed = self._constrained(tables, position, number, index, own)
            same = (other.dims == first.dims).all(axis=1) & (other.order == first.order)
            agreed &= ~exists | (same & closed)
        agreed &= self._divides(tables.sizes[number], first.dims)
        return first, agreed

    def _constrained(
        self, tables: _Tables, position: int, number: Array, index: Index, own: Assignment
    ) -> tuple[Assignment, Mask]:
        """What the anchors at one position say of their values, and [n] whether it is closed."""
        column = np.maximum(tables.constraint[number, position], 0)
        factors, order = self._placed(index, column)
        dims = dims_over(tables.factors[number, position], factors)
        by_anchor = tables.shifted_by_anchor[number, position]  # [n, dimensions + 1]
        by_producer = tables.shifted_by_producer[number]
        shifted = (  # [n, mesh axes]: where such a split differs, the value is in its own spec
            look_up(by_anchor, dims) | look_up(by_anchor, own.dims) | look_up(by_producer, own.dims)
        )
        in_own_spec = ((dims != own.dims) & shifted).any(axis=1)
        dims = np.where(in_own_spec[:, None], own.dims, dims)
        order = np.where(in_own_spec, own.order, order)
        return Assignment(dims, order), (factors != OPEN).all(axis=1)

    def _divides(self, sizes: Array, dims: Dims) -> Mask:
        """[n] whether the mesh axes of each dimension divide its size together."""
        shard_counts = np.ones_like(sizes)  # [n, dimensions]
        for axis, size in enumerate(self._placements.sizes):
            split = np.flatnonzero(dims[:, axis] >= 0)
            shard_counts[split, dims[split, axis]] *= size
        return np.asarray((sizes % shard_counts == 0).all(axis=1))

    def _wins_vote(
        self, tables: _Tables, number: Array, index: Index, sides: tuple[Dims, Dims]
    ) -> Mask:
        """[n] whether the applied constraint has as many votes as the producer's own split.

        Args:
            tables: The columns.
            number: [n] which column.
            index: [n, mesh axes + 1] the layouts.
            sides: [n, mesh axes] factors that the applied constraint splits, and those that are
                split without it.
        """
        votes = 1 + tables.constants[number]  # the result; constants are split as they are needed
        owner, entry = tables.voters_of.of(number)
        operand, _ = self._placed(index[owner], tables.voter[entry])
        factors = tables.voter_factors[entry]  # [operands, dimensions + 1]
        split = look_up(factors, np.maximum(operand, -1))  # [operands, mesh axes]: factors
        for sides_of_n, vote in zip(sides, (1, -1), strict=True):
            side = sides_of_n[owner]
            has_factor = (factors[:, None, :] == side[:, :, None]).any(axis=2)
            wanted = np.where(has_factor & (side >= 0), side, factors.dtype.type(-1))
            agrees = (wanted == split).all(axis=1)
            votes += vote * np.bincount(owner, agrees, len(number)).astype(np.int64)
        return np.asarray(votes >= 0)

    def _placed(self, index: Index, columns: Array) -> Assignment:
        """What the rows of the placements say of [n] columns of theirs."""
        *axes, orders = self._placements.rows
        dims = np.zeros((len(index), len(axes)), dtype=self._placements.dtype)
        for axis, rows in enumerate(axes):
            dims[:, axis] = rows.array[index[:, axis], columns]
        return Assignment(dims, orders.array[index[:, -1], columns])

    def _tables(self) -> _Tables:
        if self._padded is None:
            self._padded = _Tables.of(list(self._numbers), self._max_rank, self._placements.dtype)
        return self._padded


def look_up(table: NDArray[Any], dims: Dims) -> NDArray[Any]:
    """[n, mesh axes] entries of [n, width] tables; -1 looks up the last, which is that of none."""
    return np.take_along_axis(table, dims.astype(np.int64), axis=1)


def dims_over(factors_of_dims: Narrow, factors: Dims) -> Dims:
    """[n, mesh axes] the first dimension that runs over the factor of each mesh axis, -1 for none.

    Args:
        factors_of_dims: [n, dimensions] factor of each; `factor_rows` makes them.
        factors: [n, mesh axes] factors that mesh axes split.
    """
    dims = np.full_like(factors, ABSENT)
    for dim in reversed(range(factors_of_dims.shape[1])):  # the first is written last
        np.copyto(dims, factors.dtype.type(dim), where=factors_of_dims[:, dim, None] == factors)
    return dims


def factor_rows(rows: Sequence[Sequence[int]], dtype: NarrowType) -> Narrow:
    """[rows, dimensions] the factor of each dimension, padded with one that nobody splits."""
    rank = max(map(len, rows), default=0)
    table = np.full((len(rows), rank), _NO_FACTOR, dtype=dtype)
    for number, factors in enumerate(rows):
        table[number, : len(factors)] = narrowed(factors, dtype)
    return table


def unsplit(dims: Dims, where: Mask) -> Dims:
    """[n, mesh axes] dimensions, none where a mesh axis does not split after all."""
    kept = dims.copy()
    kept[where] = ABSENT
    return kept


@dataclass(frozen=True, eq=False, slots=True)
class _Tables:
    """Applied columns as arrays, padded with -1; the last entry of an axis `+ 1` is that of none.

    Attributes:
        fallback: [columns] column of the placements.
        value: [columns] column of the value.
        constraint: [columns, anchors] column of the anchor's factors.
        factors: [columns, anchors, dimensions] the anchor's factor of each dimension.
        shifted_by_anchor: [columns, anchors, dimensions + 1] True where the anchor shifts it.
        shifted_by_producer: [columns, dimensions + 1] True where the producer shifts it.
        sizes: [columns, dimensions] sizes of the value, 0 beyond its rank.
        targets: [columns, dimensions + 1] dimension or factor that is split.
        voters_of: Operands that vote, of each column.
        voter: [operands] column of the operand.
        voter_factors: [operands, dimensions + 1] factor of each dimension.
        constants: [columns] number of constant operands.
    """

    fallback: Array
    value: Array
    constraint: Array
    factors: Narrow
    shifted_by_anchor: Mask
    shifted_by_producer: Mask
    sizes: Array
    targets: Narrow
    voters_of: Ragged
    voter: Array
    voter_factors: Narrow
    constants: Array

    @classmethod
    def of(cls, columns: Sequence[_AppliedColumn], max_rank: int, dtype: NarrowType) -> _Tables:
        """The arrays of columns, in order."""
        count = len(columns)
        anchors = max(len(column.constraints) for column in columns)
        voters = [voter for column in columns for voter in column.voters]
        tables = cls(
            fallback=np.array([column.fallback for column in columns], dtype=np.int64),
            value=np.array([column.value for column in columns], dtype=np.int64),
            constraint=np.full((count, anchors), -1, dtype=np.int64),
            factors=np.full((count, anchors, max_rank), _NO_FACTOR, dtype=dtype),
            shifted_by_anchor=np.zeros((count, anchors, max_rank + 1), dtype=bool),
            shifted_by_producer=np.zeros((count, max_rank + 1), dtype=bool),
            sizes=np.zeros((count, max_rank), dtype=np.int64),
            targets=np.full((count, max_rank + 1), -1, dtype=dtype),
            voters_of=Ragged([len(column.voters) for column in columns]),
            voter=np.array([voter.column for voter in voters], dtype=np.int64),
            voter_factors=np.full((len(voters), max_rank + 1), -1, dtype=dtype),
            constants=np.array([column.constants for column in columns], dtype=np.int64),
        )
        for number, column in enumerate(columns):
            tables._fill(number, column)
        for entry, voter in enumerate(voters):
            factors = narrowed(voter.factors, dtype)
            tables.voter_factors[entry, : len(factors)] = factors
        return tables

    def _fill(self, number: int, column: _AppliedColumn) -> None:
        dtype = self.targets.dtype
        self.targets[number, : len(column.targets)] = narrowed(column.targets, dtype)
        self.sizes[number, : len(column.sizes)] = column.sizes
        self.shifted_by_producer[number, sorted(column.shifted)] = True
        for position, constraint in enumerate(column.constraints):
            self.constraint[number, position] = constraint.column
            factors = narrowed(constraint.factors, dtype)
            self.factors[number, position, : len(factors)] = factors
            self.shifted_by_anchor[number, position, sorted(constraint.shifted)] = True
