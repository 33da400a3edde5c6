"""Seconds and collectives of many layouts at once, as sums of rows of NumPy tables.

A class's cost depends only on how its few columns (signatures) are split. Classes with the same
columns, or some of them, are one *group*; every way in which a group's columns are split that any
layout asked for is one *row*. A layout is then one row per group, and its time a sum of table
look-ups; a row is computed once, with all others that are new.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_model.hardware.backend import Backend
from autoshard.cost_model.hardware.hardware import Hardware
from autoshard.cost_model.program.applied_constraints import (
    AppliedColumns,
    AppliedConstraints,
    Array,
    Index,
)
from autoshard.cost_model.program.equation_classes import ProgramClasses
from autoshard.cost_model.step_time.collective_tables import ClassCosts, CollectiveSlots
from autoshard.cost_model.step_time.equation_costs import EquationCosts
from autoshard.cost_model.step_time.operand_tables import Context
from autoshard.cost_model.step_time.row_index import ClassGroup
from autoshard.cost_model.step_time.temporaries import (
    CopyColumns,
    Temporaries,
    TemporariesByRow,
)
from autoshard.cost_model.step_time.value_costs import ValueCosts
from autoshard.layout.placements import Placements
from autoshard.layout.problem import Problem

Floats = NDArray[np.float64]


class CostTables:
    """Rows of class costs of one problem on one hardware.

    Attributes:
        slots: What a collective costs, by kind and mesh axes.
        copy_columns: Memory columns of copies.
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
        """Builds the tables, without rows.

        Args:
            problem: The problem.
            hardware: Rates and links.
            classes: Of the problem's program.
            placements: Of the problem.
            applied: Constraints that are applied to producers.
            backend: Which collectives there are.
        """
        context = Context.of(problem, placements, applied, backend)
        self.slots = CollectiveSlots(hardware, placements, problem.mesh_axes)
        self.copy_columns = CopyColumns(len(classes.equation_classes))
        self._equations = EquationCosts(context, hardware, backend, classes.equation_classes)
        self._values = ValueCosts(context, classes.value_classes, self.copy_columns)
        self._equation_classes = len(classes.equation_classes)
        self._groups = _groups(classes, context.columns, placements)
        self._count = 0
        # with room for more rows: [rows] seconds
        self._compute_s = np.zeros(0)
        self._comm_s = np.zeros(0)
        # likewise: [rows, slots] collectives, their bytes, and those that one device sends
        self._calls = np.zeros((0, self.slots.count))
        self._full_bytes = np.zeros((0, self.slots.count))
        self._sent_bytes = np.zeros((0, self.slots.count))
        self._temporaries = TemporariesByRow()

    def rows(self, index: Index) -> Array:
        """[groups, layouts] the row of each group, computed where it is new.

        Args:
            index: [layouts, mesh axes + 1] from `Placements`.
        """
        rows = np.empty((len(self._groups), len(index)), dtype=np.int64)
        total = self._count
        new: list[tuple[ClassGroup, Array]] = []  # groups with the layouts that have new rows
        for number, group in enumerate(self._groups):
            rows[number], first = group.rows(index, total)
            if len(first):
                new.append((group, first))
                total += len(first)
        if new:
            self._compute(index, new)
        return rows

    @property
    def compute_s(self) -> Floats:
        """[rows] seconds of compute, times how often each class runs."""
        return self._compute_s[: self._count]

    @property
    def comm_s(self) -> Floats:
        """[rows] seconds of collectives, likewise."""
        return self._comm_s[: self._count]

    @property
    def calls(self) -> Floats:
        """[rows, slots] collectives by slot, likewise."""
        return self._calls[: self._count]

    @property
    def sent_bytes(self) -> Floats:
        """[rows, slots] bytes that one device sends, likewise."""
        return self._sent_bytes[: self._count]

    def temporaries(self, rows: Array) -> Temporaries:
        """What layouts hold besides the values themselves, by layout.

        Args:
            rows: [groups, layouts] from `rows`.
        """
        return self._temporaries.of(rows)

    def least_compute_s(self) -> float:
        """Seconds of compute that no layout goes below."""
        return self._equations.least_s()

    def _compute(self, index: Index, new: Sequence[tuple[ClassGroup, Array]]) -> None:
        """Computes new rows: all classes of their groups at once."""
        known = self._count
        number, row, layout = _classes_of_rows(new, known)  # [n] each
        self._count += sum(len(first) for _, first in new)
        self._make_room()

        temporaries = []
        equations = np.flatnonzero(number < self._equation_classes)
        if len(equations):
            costs = self._equations.costs(number[equations], index[layout[equations]])
            temporaries.append(self._add(costs, row[equations]))
        values = np.flatnonzero(number >= self._equation_classes)
        if len(values):
            value_class = number[values] - self._equation_classes
            costs = self._values.costs(value_class, index[layout[values]])
            temporaries.append(self._add(costs, row[values]))

        added = slice(known, self._count)
        latency_s = self._calls[added] @ self.slots.latency_s
        self._comm_s[added] = latency_s + self._full_bytes[added] @ self.slots.s_per_byte
        self._temporaries.add(self._count, Temporaries.joined(temporaries))

    def _add(self, costs: ClassCosts, row: Array) -> Temporaries:
        """Adds costs of [n] classes to their rows, and returns their temporaries by row."""
        # np.add.at: several classes share a row
        np.add.at(self._compute_s, row, costs.compute_s)
        owner, slot, full_bytes = costs.collectives.arrays()
        if len(owner):
            entry, runs = (row[owner], slot), costs.runs[owner]
            np.add.at(self._calls, entry, runs)
            np.add.at(self._full_bytes, entry, runs * full_bytes)
            np.add.at(self._sent_bytes, entry, runs * self.slots.sent_bytes(slot, full_bytes))
        return costs.temporaries._replace(owner=row[costs.temporaries.owner])

    def _make_room(self) -> None:
        """Doubles the tables where the rows no longer fit."""
        if self._count <= len(self._compute_s):
            return
        room = max(self._count, 2 * len(self._compute_s), 256)
        self._compute_s = _grown(self._compute_s, room)
        self._comm_s = _grown(self._comm_s, room)
        self._calls = _grown(self._calls, room)
        self._full_bytes = _grown(self._full_bytes, room)
        self._sent_bytes = _grown(self._sent_bytes, room)


def _classes_of_rows(
    new: Sequence[tuple[ClassGroup, Array]], first_row: int
) -> tuple[Array, Array, Array]:
    """For each class of each new row: [n] the class, the row, and a layout that has it."""
    numbers, rows, layouts = [], [], []
    for group, layout in new:
        row = np.arange(first_row, first_row + len(layout))
        first_row += len(layout)
        numbers.append(np.tile(group.members, len(layout)))
        rows.append(np.repeat(row, len(group.members)))
        layouts.append(np.repeat(layout, len(group.members)))
    return np.concatenate(numbers), np.concatenate(rows), np.concatenate(layouts)


def _groups(
    classes: ProgramClasses, columns: AppliedColumns, placements: Placements
) -> list[ClassGroup]:
    """Groups of classes by the columns that they need, most columns first.

    Classes of equations are numbered first, then those of values. A class whose columns another
    group has joins that.
    """
    never_split = placements.columns - 1
    members: dict[frozenset[int], list[int]] = {}
    for number, needed in enumerate(_needed_columns(classes, columns)):
        members.setdefault(needed - {never_split}, []).append(number)

    merged: dict[frozenset[int], list[int]] = {}
    for needed in sorted(members, key=lambda key: (-len(key), sorted(key))):
        home = next((larger for larger in merged if needed <= larger), needed)
        merged.setdefault(home, []).extend(members[needed])

    groups = []
    for needed, numbers in merged.items():
        group = ClassGroup(sorted(needed), np.array(numbers, dtype=np.int64), placements)
        groups.append(group)
    return groups


def _needed_columns(classes: ProgramClasses, columns: AppliedColumns) -> list[frozenset[int]]:
    """By class, the columns of the placements on which its cost depends."""
    needed = []
    for equation_class in classes.equation_classes:
        own = [columns.of_eqn(equation_class.eqn)]
        for operand in (*equation_class.operands, *equation_class.results):
            own.append(columns.of_value(operand.value))
        needed.append(_bases(columns, own))
    for value_class in classes.value_classes:
        own = [columns.of_value(value_class.value)]
        own += [columns.of_eqn(reader.eqn) for reader in value_class.readers]
        needed.append(_bases(columns, own))
    return needed


def _bases(columns: AppliedColumns, dependent: Sequence[int]) -> frozenset[int]:
    return frozenset(base for column in dependent for base in columns.bases(column))


def _grown(table: Floats, rows: int) -> Floats:
    """The same table with room for so many rows."""
    grown = np.zeros((rows, *table.shape[1:]))
    grown[: len(table)] = table
    return grown
