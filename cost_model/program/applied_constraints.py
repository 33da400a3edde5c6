"""Values that are made as their anchors read them, instead of in their own spec.

Where all constraints on a value say the same, every dimension of it, and nothing else states its
spec, the partitioner takes the constraint for the value itself. What makes it is split as most of
its operands and the result are (constants are whole): `where(mask, x, 0)` of two split arrays that
a contraction reads whole is made of two gathers, `x * y` of one.

Reference:
    Shardy, `sdy-apply-sharding-constraints`: the sharding of a constraint goes to its input if the
    input has none, the constraint is fully closed, and no other constraint on that input differs;
    `sdy-insert-explicit-reshards`: a majority vote of the operands and results where they disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.axes.sharding_rules import FactorKind
from autoshard.layout.constraints import closed_dims, leaves_open
from autoshard.layout.placements import OPEN, Placements
from autoshard.layout.problem import Problem
from autoshard.tracing.primitives import ANCHORS, CUT_KERNELS, SHIFTS
from autoshard.tracing.program import Eqn, Value

Array = NDArray[np.int64]
Placed = NDArray[np.int8]
Readers = tuple[tuple[Eqn, tuple[int, ...]], ...]
AppliedConstraints = Mapping[int, Readers]


def find_applied_constraints(problem: Problem) -> AppliedConstraints:
    """By `Value.index`, the anchors that read it (one of each kind) with the loops of its
    dimensions.
    """
    axes = problem.logical_axes.classes
    stated: set[int] = set(problem.pins)
    made: set[int] = set()
    readers: dict[int, dict[object, tuple[Eqn, tuple[int, ...]]]] = {}
    for eqn in problem.program.eqns:
        stated |= {out.index for _, out in eqn.carries}
        if not eqn.bodies and eqn.primitive not in ANCHORS | CUT_KERNELS:
            made |= {out.index for out in eqn.outputs if not axes.constant[out.index]}
        if eqn.primitive not in ANCHORS:
            continue
        rule = axes.rules[eqn.index]
        for value, factors in zip(eqn.inputs, rule.operands, strict=True):
            if leaves_open(eqn.primitive, rule, factors):
                stated.add(value.index)
            elif value.shape and not value.literal and value.bytes:
                key = (problem.factor_signature(eqn), factors)
                readers.setdefault(value.index, {}).setdefault(key, (eqn, factors))
    return {
        index: tuple(found[key] for key in sorted(found, key=repr))
        for index, found in readers.items()
        if index in made and index not in stated
    }


def makers(problem: Problem, applied: AppliedConstraints) -> Mapping[int, Value]:
    """By `Eqn.index`, the result of it that is born, where the work can be split as the result
    is.
    """
    rules = problem.logical_axes.classes.rules
    return {
        eqn.index: eqn.outputs[0]
        for eqn in problem.program.eqns
        if len(eqn.outputs) == 1
        and eqn.outputs[0].index in applied
        and not {FactorKind.REDUCTION, FactorKind.NEED_REPLICATION} & {*rules[eqn.index].kinds}
    }


@dataclass(frozen=True, slots=True)
class _Alias:
    """A column that follows others.

    Attributes:
        own: Its column of the placements, where the readers disagree.
        value: The column of the value.
        readers: For each reader the column of its work, the dimension of each loop, and the
            dimensions that it shifts: where its work splits those otherwise than the value is, the
            value itself is stated.
        sizes: Of the dimensions of the value.
        then: By dimension of the value, what is split then: itself, or the loop of the equation
            that makes it.
        voters: For the equation that makes it: for each operand its column, and the loop of each
            dimension.
        whole: How many of its operands are constants.
        cut: Dimensions that what makes the value shifts: where the value is split there, it is
            stated itself.
    """

    own: int
    value: int
    readers: tuple[tuple[int, tuple[int, ...], frozenset[int]], ...]
    sizes: tuple[int, ...]
    then: tuple[int, ...]
    voters: tuple[tuple[int, tuple[int, ...]], ...] = ()
    whole: int = 0
    cut: frozenset[int] = frozenset()


class AppliedColumns:
    """Columns of values and works; those of born values and their makers are numbered on after the
    placements' own.
    """

    def __init__(
        self,
        problem: Problem,
        placements: Placements,
        applied: AppliedConstraints,
        max_factors: int,
    ) -> None:
        self._placements = placements
        self._applied, self._makers = applied, makers(problem, applied)
        self._rules = problem.logical_axes.classes.rules
        self._constant = problem.logical_axes.classes.constant
        self._cut = {
            value.index: closed_dims(eqn.primitive, self._rules[eqn.index], factors)
            for eqn in problem.program.eqns
            if eqn.primitive in SHIFTS
            for value, factors in zip(eqn.outputs, self._rules[eqn.index].results, strict=True)
        }
        self._max_factors = max_factors
        self._max_rank = max((len(v.shape) for v in problem.program.values), default=0)
        self._numbers: dict[_Alias, int] = {}
        self._arrays: _Tables | None = None

    def of_value(self, value: Value) -> int:
        """Column of a value."""
        own = self._placements.value_column(value)
        readers = self._applied.get(value.index)
        return (
            own
            if readers is None
            else self._number(own, readers, value, tuple(range(len(value.shape))))
        )

    def of_eqn(self, eqn: Eqn) -> int:
        """Column of an equation's loops."""
        own = self._placements.factor_column(eqn)
        value = self._makers.get(eqn.index)
        if value is None:
            return own
        rule, voters, whole = self._rules[eqn.index], [], 0
        for operand, factors in zip(eqn.inputs, rule.operands, strict=True):
            if self._constant[operand.index]:
                whole += 1
            elif operand.shape:
                voters.append((self._placements.value_column(operand), factors))
        return self._number(
            own, self._applied[value.index], value, rule.results[0], tuple(voters), whole
        )

    def _number(
        self,
        own: int,
        readers: Readers,
        value: Value,
        then: tuple[int, ...],
        voters: tuple[tuple[int, tuple[int, ...]], ...] = (),
        whole: int = 0,
    ) -> int:
        found = []
        for eqn, factors in readers:
            dim_of_factor = [-1] * (self._max_factors + 1)
            for dim in reversed(range(len(factors))):
                dim_of_factor[factors[dim]] = dim
            shifted = closed_dims(eqn.primitive, self._rules[eqn.index], factors)
            found.append((self._placements.factor_column(eqn), tuple(dim_of_factor), shifted))
        column, cut = self._placements.value_column(value), self._cut.get(value.index, frozenset())
        alias = _Alias(own, column, tuple(found), value.shape, then, voters, whole, cut)
        self._arrays = None
        return self._numbers.setdefault(alias, self._placements.columns + len(self._numbers))

    def bases(self, column: int) -> tuple[int, ...]:
        """The columns of the placements on which one depends."""
        if column < self._placements.columns:
            return (column,)
        alias = list(self._numbers)[column - self._placements.columns]
        return (
            alias.own,
            *(work for work, _, _ in alias.readers),
            *(operand for operand, _ in alias.voters),
        )

    def assignment(self, at: NDArray[np.int32], columns: Array) -> tuple[Placed, NDArray[np.int8]]:
        """[n, axes] dimensions, and [n] orders, of one column for each entry."""
        alias = columns - self._placements.columns
        following = np.flatnonzero(alias >= 0)
        if not len(following):
            return self._base(at, columns)
        tables = self._tables()
        columns = columns.copy()
        columns[following] = tables.own[alias[following]]
        placed, order = self._base(at, columns)
        alias, at = alias[following], at[following]
        target, target_order, agreed = self._agreed(tables, alias, at, tables.value[alias])
        split = np.take_along_axis(
            tables.then[alias], target.astype(np.int64), axis=1
        )  # the last is that of -1
        agreed &= self._won(tables, alias, at, split, placed[following])
        placed[following] = np.where(agreed[:, None], split, placed[following])
        order[following] = np.where(agreed, target_order, order[following])
        return placed, order

    def _agreed(
        self, tables: _Tables, alias: Array, at: NDArray[np.int32], value: Array
    ) -> tuple[Placed, Placed, NDArray[np.bool_]]:
        """The spec that the first reader wants, its order, and whether all want it, closed, and it
        fits.
        """
        agreed = np.ones(len(alias), dtype=bool)
        target, target_order = np.zeros((0, 0), dtype=np.int8), np.zeros(0, dtype=np.int8)
        own, own_order = self._base(at, value)
        cut = np.take_along_axis(tables.cut[alias], own.astype(np.int64), axis=1)
        for r in range(tables.works.shape[1]):
            there = tables.works[alias, r] >= 0
            work, work_order = self._base(at, np.maximum(tables.works[alias, r], 0))
            factors = np.where(work >= 0, work, -1).astype(np.int64)
            spec = np.take_along_axis(tables.dims[alias, r], factors, axis=1)
            shifted = [
                np.take_along_axis(tables.shifted[alias, r], s.astype(np.int64), axis=1)
                for s in (spec, own)
            ]
            stated = ((spec != own) & (shifted[0] | shifted[1] | cut)).any(axis=1)
            spec = np.where(stated[:, None], own, spec)
            work_order = np.where(stated, own_order, work_order)
            if r == 0:
                target, target_order = spec, work_order
            same = (
                (spec == target).all(axis=1)
                & (work_order == target_order)
                & (work != OPEN).all(axis=1)
            )
            agreed &= ~there | same
        pieces = np.ones((len(alias), tables.sizes.shape[1]), dtype=np.int64)
        for axis, size in enumerate(self._placements.sizes):
            some = np.flatnonzero(target[:, axis] >= 0)
            pieces[some, target[some, axis]] *= size
        agreed &= (tables.sizes[alias] % pieces == 0).all(axis=1)
        return target, target_order, agreed

    def _won(
        self, tables: _Tables, alias: Array, at: NDArray[np.int32], split: Placed, work: Placed
    ) -> NDArray[np.bool_]:
        """Whether at least as many operands and results are split as the born result is as are
        split as the work is.
        """
        votes = 1 + tables.whole[alias]
        for v in range(tables.voters.shape[1]):
            there = tables.voters[alias, v] >= 0
            spec, _ = self._base(at, np.maximum(tables.voters[alias, v], 0))
            factors = tables.factors[alias, v]
            spec = np.take_along_axis(
                factors, np.where(spec >= 0, spec, -1).astype(np.int64), axis=1
            )
            for born, sign in ((split, 1), (work, -1)):
                mine = (factors[:, None, :] == born[:, :, None]).any(axis=2) & (
                    born >= 0
                )  # of its own dimensions
                votes += sign * (there & (np.where(mine, born, -1) == spec).all(axis=1))
        return votes >= 0

    def _base(self, at: NDArray[np.int32], columns: Array) -> tuple[Placed, NDArray[np.int8]]:
        rows = self._placements.rows
        dims = [rows[a].array[at[:, a], columns] for a in range(len(rows) - 1)]
        placed = np.stack(dims, axis=1) if dims else np.zeros((len(at), 0), dtype=np.int8)
        return placed, rows[-1].array[at[:, -1], columns]

    def _tables(self) -> _Tables:
        if self._arrays is None:
            self._arrays = _Tables.of(list(self._numbers), self._max_factors, self._max_rank)
        return self._arrays


@dataclass(frozen=True, eq=False, slots=True)
class _Tables:
    """Aliases as arrays, one row each, padded with -1; the last loop or dimension is that of
    nothing.
    """

    own: Array
    value: Array
    works: Array
    dims: Placed
    shifted: NDArray[np.bool_]
    sizes: Array
    then: Placed
    voters: Array
    factors: Placed
    whole: Array
    cut: NDArray[np.bool_]

    @classmethod
    def of(cls, aliases: Sequence[_Alias], max_factors: int, max_rank: int) -> _Tables:
        """The arrays of aliases, in order."""
        count = len(aliases)
        readers = max(len(alias.readers) for alias in aliases)
        voters = max(len(alias.voters) for alias in aliases)
        tables = cls(
            own=np.array([alias.own for alias in aliases], dtype=np.int64),
            value=np.array([alias.value for alias in aliases], dtype=np.int64),
            works=np.full((count, readers), -1, dtype=np.int64),
            dims=np.full((count, readers, max_factors + 1), -1, dtype=np.int8),
            shifted=np.zeros((count, readers, max_rank + 1), dtype=bool),
            sizes=np.zeros((count, max_rank), dtype=np.int64),
            then=np.full((count, max_rank + 1), -1, dtype=np.int8),
            voters=np.full((count, voters), -1, dtype=np.int64),
            factors=np.full((count, voters, max_rank + 1), -1, dtype=np.int8),
            whole=np.array([alias.whole for alias in aliases], dtype=np.int64),
            cut=np.zeros((count, max_rank + 1), dtype=bool),
        )
        for i, alias in enumerate(aliases):
            tables.then[i, : len(alias.then)] = alias.then
            tables.sizes[i, : len(alias.sizes)] = alias.sizes
            tables.cut[i, sorted(alias.cut)] = True
            for r, (work, dim_of_factor, shifted) in enumerate(alias.readers):
                tables.works[i, r], tables.dims[i, r] = work, dim_of_factor
                tables.shifted[i, r, sorted(shifted)] = True
            for v, (operand, factors) in enumerate(alias.voters):
                tables.voters[i, v] = operand
                tables.factors[i, v, : len(factors)] = factors
        return tables
