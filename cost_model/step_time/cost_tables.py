"""Costs of classes (see `classes`) under many placements at once, as NumPy tables.

A class's cost depends only on how its few columns (signatures) are split. Classes with the same
columns, or some of them, are one *group*; every way in which a group's columns are split that any
layout asked for is one *row*. A layout is then one row per group, and its time a sum of table
look-ups; a row is computed once, with all others that are new.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.axes.sharding_rules import ARG_REDUCTION, FactorKind
from autoshard.cost_model.hardware.backend import Backend
from autoshard.cost_model.hardware.hardware import Hardware
from autoshard.cost_model.program.applied_constraints import AppliedColumns, AppliedConstraints
from autoshard.cost_model.program.equation_classes import (
    EquationClass,
    Operand,
    ProgramClasses,
    ValueClass,
)
from autoshard.cost_model.step_time.halo_tables import Shifts, Turned
from autoshard.cost_model.step_time.operand_tables import Ragged, Reads
from autoshard.cost_model.step_time.reshard import Array, Links, Moves, Specs
from autoshard.cost_model.step_time.row_index import Group, Held
from autoshard.layout.placements import OPEN, Placements
from autoshard.layout.problem import Problem
from autoshard.tracing.primitives import ANCHORS, COPIES

Placed = NDArray[np.int8]


@dataclass(frozen=True, eq=False, slots=True)
class CopyColumns:
    """Copies of values in another spec: which readers share one, by column.

    Attributes:
        uses: The class of values.
        readers: Bits of its kinds of readers.
    """

    uses: list[int]
    readers: list[int]


class Costs:
    """Rows of class costs of one problem on one hardware.

    Attributes:
        links: Seconds and bytes of collectives by slot.
        copy_columns: Which copies there are.
    """

    def __init__(
        self,
        problem: Problem,
        hardware: Hardware,
        classes: ProgramClasses,
        placements: Placements,
        applied: AppliedConstraints,
        backend: Backend,
    ) -> None:
        self._placements = placements
        self._hardware = hardware
        self._reduce_scatter = backend.has_reduce_scatter
        rules = self._rules = problem.logical_axes.classes.rules
        max_factors = max((len(rules[e.index].kinds) for e in problem.program.eqns), default=0)
        max_rank = max((len(v.shape) for v in problem.program.values), default=0)
        self._columns = AppliedColumns(problem, placements, applied, max_factors)
        self.specs = Specs(placements, max_rank)
        self.links = Links(hardware, placements, problem.mesh_axes)
        self._slots = self.links.slots
        self._works, self._uses = classes.equation_classes, classes.value_classes
        self._prepare_works(placements, classes.equation_classes, max_factors, backend)
        self._turned = Turned(placements, rules, [w.eqn for w in classes.equation_classes])
        self._prepare_uses(problem, placements, classes.value_classes, max_factors)
        self._group(classes)
        self._count = 0
        self._compute_s, self._comm_s = np.zeros(0), np.zeros(0)
        self._calls, self._full_bytes, self._sent_bytes = (
            np.zeros((0, self._slots)) for _ in range(3)
        )
        self.copy_columns = CopyColumns([], [])
        self._copy_column: dict[tuple[int, int], int] = {}
        self._held = Held()

    # Classes as arrays ----------------------------------------------------------------------------

    def _prepare_works(
        self,
        placements: Placements,
        works: Sequence[EquationClass],
        max_factors: int,
        backend: Backend,
    ) -> None:
        self._work_times = np.array([w.runs_per_call for w in works])
        self._work_flops = np.array([w.flops for w in works])
        self._work_rate = np.array(
            [
                self._hardware.flops_per_s(w.results[0].value.dtype if w.results else "float32")
                for w in works
            ]
        )
        self._work_column = np.array([self._columns.of_eqn(w.eqn) for w in works], dtype=np.int64)
        self._reduced = _factors_of_kind(
            [w.kinds for w in works], FactorKind.REDUCTION, max_factors
        )
        self._copying = np.array([w.eqn.primitive in COPIES for w in works], dtype=bool)
        self._picked = np.array(
            [self._rules[w.eqn.index].combine == ARG_REDUCTION for w in works], dtype=bool
        )
        self._apart = np.array(
            [not backend.folds_all_reduces and w.eqn.primitive in ANCHORS for w in works],
            dtype=bool,
        )
        self._operands_of = Ragged([len(w.operands) for w in works])
        self._results_of = Ragged([len(w.results) for w in works])
        self._operands = Reads(
            placements,
            self._columns,
            self._rules,
            [(w.eqn, o) for w in works for o in w.operands],
            max_factors,
        )
        self._results = Reads(
            placements,
            self._columns,
            self._rules,
            [(w.eqn, o) for w in works for o in w.results],
            max_factors,
        )
        self._loads = np.array([o.transfers for w in works for o in w.operands])
        self._writes = np.array([o.transfers for w in works for o in w.results])
        self._work_op_s = np.array([w.unfused_share * self._hardware.op_s for w in works])

    def _prepare_uses(
        self, problem: Problem, placements: Placements, uses: Sequence[ValueClass], max_factors: int
    ) -> None:
        self._uses_times = np.array([u.moves_per_call for u in uses])
        self._readers_of = Ragged([len(u.readers) for u in uses])
        self._readers = Reads(
            placements,
            self._columns,
            self._rules,
            [(eqn, Operand(u.value, factors, False)) for u in uses for eqn, factors in u.readers],
            max_factors,
        )
        rules = problem.logical_axes.classes.rules
        self._shifts = Shifts(
            placements, rules, [(u.value, eqn, factors) for u in uses for eqn, factors in u.readers]
        )
        self._reader_bit = 1 << np.concatenate(
            [
                np.zeros(0, dtype=np.int64),
                *(np.arange(len(u.readers), dtype=np.int64) % 62 for u in uses),
            ]
        )

    def _group(self, classes: ProgramClasses) -> None:
        """Groups of classes, first works, then uses, numbered on; one whose columns another group
        has joins that.
        """
        place = self._placements
        nothing = place.columns - 1
        columns: list[frozenset[int]] = []

        def needed(found: Iterable[int]) -> frozenset[int]:
            return frozenset(base for column in found for base in self._columns.bases(column))

        for work in classes.equation_classes:
            values = [o.value for o in (*work.operands, *work.results)]
            columns.append(
                needed([self._columns.of_eqn(work.eqn), *map(self._columns.of_value, values)])
            )
        for use in classes.value_classes:
            works = [self._columns.of_eqn(e) for e, _ in use.readers]
            columns.append(needed([self._columns.of_value(use.value), *works]))
        members: dict[frozenset[int], list[int]] = {}
        for number, found in enumerate(columns):
            members.setdefault(found - {nothing}, []).append(number)
        kept: dict[frozenset[int], list[int]] = {}
        for key in sorted(members, key=lambda k: (-len(k), sorted(k))):
            home = next((larger for larger in kept if key <= larger), key)
            kept.setdefault(home, []).extend(members[key])
        self._groups = [
            Group(tuple(sorted(k)), np.array(found, dtype=np.int64), place)
            for k, found in kept.items()
        ]
        self.groups = len(self._groups)

    # Rows -----------------------------------------------------------------------------------------

    def rows(self, index: NDArray[np.int32]) -> Array:
        """[groups, layouts] the row of each group, computed where it is new.

        Args:
            index: [layouts, mesh axes + 1] from `Placements`.
        """
        found = np.empty((len(self._groups), len(index)), dtype=np.int64)
        total = self._count
        fresh: list[tuple[Group, Array]] = []
        for g, group in enumerate(self._groups):
            found[g], first = group.rows(index, total)
            if len(first):
                fresh.append((group, first))
                total += len(first)
        if fresh:
            self._compute(index, fresh)
        return found

    def _compute(self, index: NDArray[np.int32], fresh: Sequence[tuple[Group, Array]]) -> None:
        """Computes new rows: all classes of their groups, as flat arrays."""
        start = self._count
        row, number, layout = [], [], []
        for group, first in fresh:
            new = np.arange(start, start + len(first))
            start += len(first)
            row.append(np.repeat(new, len(group.members)))
            layout.append(np.repeat(first, len(group.members)))
            number.append(np.tile(group.members, len(first)))
        rows, numbers, at = (
            np.concatenate(row),
            np.concatenate(number),
            index[np.concatenate(layout)],
        )
        known, self._count = self._count, start
        if start > len(self._compute_s):
            room = max(start, 2 * len(self._compute_s), 256)
            self._compute_s, self._comm_s = (
                _grown(self._compute_s, room),
                _grown(self._comm_s, room),
            )
            self._calls, self._full_bytes, self._sent_bytes = (
                _grown(table, room) for table in (self._calls, self._full_bytes, self._sent_bytes)
            )
        is_work: NDArray[np.bool_] = numbers < len(self._works)
        held: list[tuple[Array, Array, Array]] = []
        if is_work.any():
            held.append(self._compute_works(numbers[is_work], rows[is_work], at[is_work]))
        if not is_work.all():
            held.append(
                self._compute_uses(
                    numbers[~is_work] - len(self._works), rows[~is_work], at[~is_work]
                )
            )
        added = slice(known, start)
        latency_s = self._calls[added] @ self.links.latency_s
        self._comm_s[added] = latency_s + self._full_bytes[added] @ self.links.s_per_byte
        self._held.add(start, *(np.concatenate([part[i] for part in held]) for i in range(3)))

    @property
    def compute_s(self) -> NDArray[np.float64]:
        """[rows] seconds of compute, times how often each class runs."""
        return self._compute_s[: self._count]

    @property
    def comm_s(self) -> NDArray[np.float64]:
        """[rows] seconds of collectives, likewise."""
        return self._comm_s[: self._count]

    @property
    def calls(self) -> NDArray[np.float64]:
        """[rows, slots] collectives by slot (see `Links`), likewise."""
        return self._calls[: self._count]

    @property
    def sent_bytes(self) -> NDArray[np.float64]:
        """[rows, slots] bytes that one device sends, likewise."""
        return self._sent_bytes[: self._count]

    def least_compute_s(self) -> float:
        """Seconds of compute that no layout goes below: every class split over every mesh axis that
        divides a loop.
        """
        devices = int(self.specs.devices[-1])
        every = np.arange(len(self._works))
        most = np.array(
            [self._most_pieces(self._placements.factor_column(work.eqn)) for work in self._works]
        )
        owner, entry = self._operands_of.of(every)
        reads = _sum_by(
            owner, self._operands.bytes[entry] // devices * self._loads[entry], len(every)
        )
        owner, entry = self._results_of.of(every)
        made = self._results.bytes[entry] // devices
        traffic = _sum_by(owner, made * self._writes[entry], len(every))
        traffic += self._read_for(every, reads, _sum_by(owner, made, len(every)))
        traffic_s = traffic / self._hardware.memory_bytes_per_s
        arithmetic_s = self._work_flops / most / self._work_rate
        return float((self._work_times * np.maximum(arithmetic_s, traffic_s)).sum())

    def _most_pieces(self, column: int) -> int:
        """Into how many pieces a column can be split at most: by each mesh axis that divides one of
        its sizes.
        """
        sizes = self._placements.split_sizes(column)
        return math.prod(
            axis for axis in self._placements.sizes if any(size % axis == 0 for size in sizes)
        )

    def held(self, rows: Array) -> tuple[Array, Array, Array]:
        """(layout, memory column, bytes) of what the classes hold beside the values themselves.

        Columns: results of the classes of works before they are moved; partial sums of the same;
        those once they are added up, where that is what is stored; then `copy_columns`.
        """
        return self._held.of(rows)

    def _want(
        self,
        reads: Reads,
        entry: Array,
        work: Placed,
        work_order: Placed,
        have: Placed,
        order: Placed,
    ) -> tuple[Placed, Placed]:
        """The spec in which the work reads operands; open loops read them as they are."""
        pad = reads.dim_of_factor.shape[1] - 1
        want = np.take_along_axis(
            reads.dim_of_factor[entry], np.where(work >= 0, work, pad).astype(np.int64), axis=1
        )
        opened = np.flatnonzero((work == OPEN).any(axis=1))
        if len(opened):
            want, work_order = want.copy(), work_order.copy()
            mine, theirs = want[opened], have[opened]
            taken = (mine[:, :, None] == theirs[:, None, :]).any(
                axis=1
            )  # by dimension of each axis of `theirs`
            shut = np.take_along_axis(
                reads.closed[entry[opened]], np.maximum(theirs, 0).astype(np.int64), axis=1
            )
            inherit = (mine < 0) & (theirs >= 0) & ~taken & ~shut
            want[opened] = np.where(inherit, theirs, mine)
            some = inherit.any(axis=1)
            work_order[opened[some]] = order[opened[some]]
        uneven = np.flatnonzero(reads.uneven[entry])
        if len(uneven):
            want = want.copy()
            want[uneven] = self._even(want[uneven], reads.sizes[entry[uneven]])
        return want, work_order

    def _even(self, placed: Placed, sizes: Array) -> Placed:
        """Without the axes of dimensions that they do not divide together."""
        pieces = np.ones_like(sizes)
        for axis, size in enumerate(self._placements.sizes):
            some = np.flatnonzero(placed[:, axis] >= 0)
            pieces[some, placed[some, axis]] *= size
        bad = sizes % pieces != 0
        dims = np.maximum(placed, 0).astype(np.int64)
        return np.where((placed >= 0) & np.take_along_axis(bad, dims, axis=1), np.int8(-1), placed)

    def _compute_works(
        self, number: Array, row: Array, at: NDArray[np.int32]
    ) -> tuple[Array, Array, Array]:
        devices = self.specs.devices
        work, work_order = self._columns.assignment(at, self._work_column[number])
        arithmetic_s = (
            self._work_flops[number] / devices[self.specs.mask(work)] / self._work_rate[number]
        )
        moves = Moves()

        owner, entry = self._operands_of.of(number)
        have, order = self._columns.assignment(at[owner], self._operands.value[entry])
        want, _ = self._want(self._operands, entry, work[owner], work_order[owner], have, order)
        local = self._operands.bytes[entry] // devices[self.specs.mask(want)]
        reads = _sum_by(owner, local * self._loads[entry], len(number))

        owner, entry = self._results_of.of(number)
        results, value_bytes = self._results, self._results.bytes[entry]
        mine = work[owner]
        pad = results.dim_of_factor.shape[1] - 1
        raw = np.take_along_axis(
            results.dim_of_factor[entry], np.where(mine >= 0, mine, pad).astype(np.int64), axis=1
        )
        local = value_bytes // devices[self.specs.mask(raw)]
        stored, order = self._columns.assignment(at[owner], results.value[entry])
        target, order = _left_open(raw, work_order[owner], stored, order)
        part = value_bytes // devices[self.specs.mask(raw) | self.specs.mask(target)]
        written = np.where(self._copying[number[owner]], part, local)
        traffic = _sum_by(owner, written * self._writes[entry], len(number))
        traffic += self._read_for(number, reads, _sum_by(owner, part, len(number)))
        factors = np.where(mine >= 0, mine, pad).astype(np.int64)
        partial = np.take_along_axis(self._reduced[number[owner]], factors, axis=1)
        split: Array = partial @ (1 << np.arange(partial.shape[1]))
        before = self.specs.number(raw, work_order[owner])
        after = self.specs.number(target, order)
        picked = np.where(self._picked[number[owner]], split, 0)
        for best in (local, self._best_bytes(number[owner], local)):  # where it is, and what
            moves.add("all_gather", owner, picked, best * devices[picked])
        summed = split & ~picked
        scattered: Array = (
            summed & self.specs.mask(target) if self._reduce_scatter else np.zeros_like(split)
        )
        for mine_too in self._summed_together(number[owner], mine):
            moves.add("all_reduce", owner, summed & ~scattered & mine_too, local)
            moves.add("reduce_scatter", owner, scattered & mine_too, local)
        sliced = self.specs.number(np.where(partial, np.int8(-1), target), order)
        moves.reshard(self.specs, owner, value_bytes, before, sliced)
        self._turned.add(moves, self.specs, number[owner], owner, mine, local)
        again = (split != 0) & (
            (split & self.specs.mask(target) & ~scattered) != 0
        )  # summed whole, then sliced
        pending = _sum_by(owner, np.where(split != 0, local * (1 + again), 0), len(number))
        moved = _sum_by(owner, np.where((split == 0) & (before != after), local, 0), len(number))

        traffic_s = traffic / self._hardware.memory_bytes_per_s
        times = self._work_times[number]
        np.add.at(
            self._compute_s,
            row,
            times * (self._work_op_s[number] + np.maximum(arithmetic_s, traffic_s)),
        )
        self._add_moves(moves, row, times)
        added = _sum_by(owner, np.where((split != 0) & ~again, local, 0), len(number))
        found = [(np.flatnonzero(held), held, n) for n, held in enumerate((moved, pending, added))]
        return (
            np.concatenate([row[some] for some, _, _ in found]),
            np.concatenate([number[some] + n * len(self._works) for some, _, n in found]),
            np.concatenate([held[some] for some, held, _ in found]).astype(np.int64),
        )

    def _read_for(
        self, number: Array, reads: NDArray[np.float64], made: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """[n] bytes that works read to make so many: a copy is fused with what is cut from it, and
        reads that only.
        """
        return np.where(self._copying[number], np.minimum(reads, made), reads)

    def _best_bytes(self, number: Array, index_bytes: Array) -> Array:
        """[n] bytes of the values that indices of so many bytes stand for, where works pick
        them.
        """
        found = np.zeros_like(index_bytes)
        for n in np.unique(number[self._picked[number]]).tolist():
            eqn, mine = self._works[n].eqn, number == n
            found[mine] = index_bytes[mine] // eqn.outputs[0].itemsize * eqn.inputs[0].itemsize
        return found

    def _summed_together(self, number: Array, work: Placed) -> list[Array]:
        """[n] sets of mesh axes (bits), of each of which partial sums are added at once."""
        count = work.shape[1]
        every = np.full(len(number), (1 << count) - 1, dtype=np.int64)
        apart = self._apart[number]
        if not apart.any():
            return [every]
        sets = []
        for axis in range(count):
            same = (work == work[:, axis : axis + 1]) & (work >= 0)
            first = ~same[:, :axis].any(axis=1)  # of the mesh axes that split its loop
            alone = np.where(first & same.any(axis=1), same @ (1 << np.arange(count)), 0)
            sets.append(np.where(apart, alone, every if axis == 0 else 0))
        return sets

    def _compute_uses(
        self, number: Array, row: Array, at: NDArray[np.int32]
    ) -> tuple[Array, Array, Array]:
        devices = self.specs.devices
        owner, entry = self._readers_of.of(number)
        readers, value_bytes = self._readers, self._readers.bytes[entry]
        have, order = self._columns.assignment(at[owner], readers.value[entry])
        work, work_order = self._columns.assignment(at[owner], readers.work[entry])
        want, want_order = self._want(readers, entry, work, work_order, have, order)
        moves = Moves()
        want = self._shifts.add(moves, self.specs, owner, entry, work, want, value_bytes)
        before, after = self.specs.number(have, order), self.specs.number(want, want_order)

        differ = np.flatnonzero(before != after)  # each spec that is wanted is paid once
        differ = differ[np.lexsort((after[differ], owner[differ]))]
        key = np.stack([owner[differ], after[differ]])
        start = np.flatnonzero(
            np.concatenate([[True], (key[:, 1:] != key[:, :-1]).any(axis=0)])[: len(differ)]
        )
        first = differ[start]
        moves.reshard(self.specs, owner[first], value_bytes[first], before[first], after[first])
        self._add_moves(moves, row, self._uses_times[number])
        if not len(first):
            empty = np.zeros(0, dtype=np.int64)
            return empty, empty, empty
        shared = np.bitwise_or.reduceat(self._reader_bit[entry[differ]], start)
        held = value_bytes[first] // devices[self.specs.mask(want[first])]
        columns = self._copies(number[owner[first]], shared)
        return row[owner[first]], columns, held

    def _copies(self, uses: Array, readers: Array) -> Array:
        """Memory columns of copies."""
        found = np.empty(len(uses), dtype=np.int64)
        for i, key in enumerate(zip(uses.tolist(), readers.tolist(), strict=True)):
            column = self._copy_column.get(key)
            if column is None:
                column = self._copy_column[key] = len(self._copy_column)
                self.copy_columns.uses.append(key[0])
                self.copy_columns.readers.append(key[1])
            found[i] = column
        return found + 3 * len(self._works)

    def _add_moves(self, moves: Moves, row: Array, times: NDArray[np.float64]) -> None:
        owner, slot, full_bytes = moves.arrays()
        if len(owner):
            target, weight = (row[owner], slot), times[owner]
            np.add.at(self._calls, target, weight)
            np.add.at(self._full_bytes, target, weight * full_bytes)
            np.add.at(self._sent_bytes, target, weight * self.links.sent_bytes(slot, full_bytes))


def _left_open(
    raw: Placed, raw_order: Placed, stored: Placed, order: Placed
) -> tuple[Placed, Placed]:
    """The spec in which results are stored; dimensions left open keep what the work gives them."""
    opened = np.flatnonzero((stored == OPEN).any(axis=1))
    if not len(opened):
        return stored, order
    target, order = stored.copy(), order.copy()
    mine, theirs = stored[opened], raw[opened]
    taken = (mine[:, :, None] == theirs[:, None, :]).any(axis=1)
    inherit = (mine < 0) & (theirs >= 0) & ~taken
    target[opened] = np.where(inherit, theirs, mine)
    some = inherit.any(axis=1)
    order[opened[some]] = raw_order[opened[some]]
    return target, order


def _grown(table: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
    """The same table with room for so many rows."""
    grown = np.zeros((rows, *table.shape[1:]))
    grown[: len(table)] = table
    return grown


def _sum_by(owner: Array, amounts: Array, count: int) -> NDArray[np.float64]:
    """[count] sums of the amounts of each owner."""
    return np.bincount(owner, amounts, count).astype(np.float64)


def _factors_of_kind(
    kinds: Iterable[tuple[FactorKind, ...]], kind: FactorKind, max_factors: int
) -> NDArray[np.bool_]:
    """[n, loops + 1] True where a loop is of a kind; the last column is no loop."""
    found = [[k is kind for k in of] + [False] * (max_factors + 1 - len(of)) for of in kinds]
    return np.array(found, dtype=bool).reshape(-1, max_factors + 1)
