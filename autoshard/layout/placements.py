"""Batched first-fit: the dimension that each mesh axis splits, for many layouts at once.

Mesh axes are independent but for divisibility. So a layout is one *row* for each mesh axis, which
says where that axis is placed in everything that first-fit decides (DTensor calls that the
placement of a mesh axis), and one more row for the order in which mesh axes split a dimension that
they share. Distinct rows are kept once: rule lists with the same rows are the same effective
layout. Where two mesh axes meet in a dimension that both divide but their product does not, the
later one is fitted again (`_combine`).

The arrays:

- a *column* is a signature (values, or factors of equations, that rules cannot tell apart), a
  pinned value, or, the last one, everything without a logical axis;
- `rows[a].array`, narrow [rows of mesh axis a, columns]: the dimension (or factor) that mesh axis a
  splits; `ABSENT` for none; `OPEN` where a rule's logical axis is present, but the mesh axis
  divides none of its dimensions;
- `rows[-1].array`, narrow [rows of orders, columns]: a position in `orders`;
- `index`, int32 [layouts, mesh axes + 1]: which row of each of `rows` a layout has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.narrow import NarrowType, narrowed
from autoshard.layout.problem import BoundRule, Fit, Problem, bind, first_fit
from autoshard.layout.signature_table import ABSENT as ABSENT
from autoshard.layout.signature_table import OPEN as OPEN
from autoshard.layout.signature_table import (
    Entries,
    Ints,
    Mask,
    MeshOrders,
    SignatureTable,
    shared_dims,
)
from autoshard.layout.spec import Spec
from autoshard.tracing.program import Eqn, Value

Index = NDArray[np.int32]
"""Numbers of rows, see above."""


class Rows:
    """Distinct rows, numbered in the order in which they come."""

    def __init__(self, columns: int, dtype: NarrowType) -> None:
        self._numbers: dict[bytes, int] = {}
        # It doubles when it is full, so a row is copied once or twice on average.
        self._array = np.zeros((64, columns), dtype=dtype)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def array(self) -> Entries:
        """[rows, columns]."""
        return self._array[: len(self._numbers)]

    def add(self, row: Entries) -> int:
        """The number of a row."""
        count = len(self._numbers)
        number = self._numbers.setdefault(row.tobytes(), count)
        if number == count:
            if count == len(self._array):
                self._array = np.concatenate([self._array, np.zeros_like(self._array)])
            self._array[number] = row
        return number


class _RuleLists:
    """Distinct rule lists of one mesh axis, numbered in the order in which they come.

    Attributes:
        rules: The rules of each list.
        rows: The number of the row of each, as if the mesh axis were alone.
    """

    def __init__(self) -> None:
        self.rules: list[tuple[BoundRule, ...]] = []
        self.rows: list[int] = []
        self._numbers: dict[tuple[BoundRule, ...], int] = {}

    def number(self, rules: tuple[BoundRule, ...]) -> int | None:
        """The number of a list; None for a new one."""
        return self._numbers.get(rules)

    def add(self, rules: tuple[BoundRule, ...], row: int) -> int:
        """The number of a new list, which has this row."""
        number = self._numbers[rules] = len(self.rules)
        self.rules.append(rules)
        self.rows.append(row)
        return number


class Placements:
    """The rows of one problem; grows with the layouts that are asked for.

    Attributes:
        problem: The problem.
        axes: Names of the mesh axes with more than one device, in mesh order.
        sizes: Their sizes.
        orders: Every order of the mesh axes, as positions in `axes`; the first is mesh order.
        columns: Number of columns.
        dtype: Of the entries of rows.
        rows: For each mesh axis its rows, then the rows of orders.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._mesh = MeshOrders(problem)
        self._table = SignatureTable(problem, self._mesh)
        self.axes = self._mesh.axes
        self.sizes = self._mesh.sizes
        self.orders = self._mesh.orders
        self.columns = self._table.columns
        self.dtype = self._table.dtype
        self.rows = tuple(Rows(self.columns, self.dtype) for _ in range(len(self.axes) + 1))
        self._lists = tuple(_RuleLists() for _ in self.axes)
        self._bound: dict[AxisRule, BoundRule] = {}
        self._refitted: dict[tuple[int, int, bytes, tuple[tuple[int, ...], ...]], int] = {}
        # The row of each order, where all free columns have the same.
        self._order_rows = tuple(
            self.rows[-1].add(self._order_row(order)) for order in range(len(self.orders))
        )

    # Columns --------------------------------------------------------------------------------------

    def value_column(self, value: Value) -> int:
        """Column of a value."""
        return self._table.of_value(value)

    def factor_column(self, eqn: Eqn) -> int:
        """Column of an equation's factors."""
        return self._table.of_factors(eqn)

    def split_sizes(self, column: int) -> list[int]:
        """Sizes of the dimensions (or factors) of a column that rules may split."""
        return self._table.split_sizes(column)

    def open_shard_counts(self, axis: int, rows: Entries) -> Ints:
        """[rows, columns] shard count that the partitioner gives where a mesh axis is `OPEN`."""
        return self._table.open_shard_counts(axis, rows)

    def alike(self, column: int, dim: int, other: int, other_dim: int) -> bool:
        """Whether rules say the same of two dimensions, but for the others of their columns."""
        return self._table.alike((column, dim), (other, other_dim))

    # One layout -----------------------------------------------------------------------------------

    def of_layout(self, layout: Layout) -> Index:
        """[mesh axes + 1] the rows of one layout, whatever the order of its rules."""
        rows = self._table.fixed.copy()
        for column, signature in enumerate(self.problem.signatures):
            entries = self._mesh.entries(layout.fit_signature(signature))
            rows[:, column] = narrowed(entries, self.dtype)
        return self._add(rows)

    def repinned(self, index: Index, pins: Mapping[int, Spec]) -> Index:
        """[mesh axes + 1] the rows of a layout with other specs of pinned values.

        Args:
            index: The rows of the layout.
            pins: By `Value.index` of values that are pinned in the problem.
        """
        rows = np.stack([own.array[n] for own, n in zip(self.rows, index, strict=True)])
        for value_index, spec in pins.items():
            column = self._table.of_pin(value_index)
            rows[:, column] = narrowed(self._mesh.entries(Fit(spec, frozenset())), self.dtype)
        return self._add(rows)

    def _add(self, rows: Entries) -> Index:
        """[mesh axes + 1] the numbers of one layout's [mesh axes + 1, columns] rows."""
        numbers = [own.add(row) for own, row in zip(self.rows, rows, strict=True)]
        return np.array(numbers, dtype=np.int32)

    def _order_row(self, order: int) -> Entries:
        """[columns]."""
        return narrowed(np.where(self._table.free, order, self._table.fixed[-1]), self.dtype)

    # Many layouts ---------------------------------------------------------------------------------

    def of_rules(self, batch: Sequence[tuple[AxisRule, ...]]) -> Index:
        """[rule lists, mesh axes + 1] the rows of many rule lists."""
        index = np.empty((len(batch), len(self.rows)), dtype=np.int32)
        # [rule lists, mesh axes]: number of the rules of each mesh axis.
        lists = np.empty((len(batch), len(self.axes)), dtype=np.int32)
        by_order: dict[int, list[int]] = {}
        for n, rules in enumerate(batch):
            bound = [rule for rule in map(self._bind, rules) if rule.size > 1]
            for axis, name in enumerate(self.axes):
                own_rules = tuple(rule for rule in bound if rule.mesh_axis == name)
                lists[n, axis] = self._number_of_list(axis, own_rules)
            order = self._mesh.order_of(bound)
            if order is None:
                index[n] = self._fit_where_they_meet(bound, lists[n])
            else:
                by_order.setdefault(order, []).append(n)
        for order, members in by_order.items():
            index[members] = self._combine(lists[members], order)
        return index

    def _bind(self, rule: AxisRule) -> BoundRule:
        if rule not in self._bound:
            self._bound[rule] = bind(self.problem, rule)
        return self._bound[rule]

    def _number_of_list(self, axis: int, rules: tuple[BoundRule, ...]) -> int:
        lists = self._lists[axis]
        number = lists.number(rules)
        if number is None:
            row = self._row_of_rules(axis, rules)
            number = lists.add(rules, self.rows[axis].add(row))
        return number

    def _row_of_rules(self, axis: int, rules: Sequence[BoundRule]) -> Entries:
        """[columns] first-fit of the rules of one mesh axis, as if it were alone."""
        row: Entries = self._table.fixed[axis].copy()
        # [columns]: True where no rule has placed the mesh axis yet; True where one did not fit.
        undecided = self._table.free.copy()
        misfit = np.zeros(self.columns, dtype=bool)
        for rule in rules:
            tried = undecided & self._table.in_scope(rule)
            dims = self._table.fitting_dims(rule.logical_axis, axis, rule.last)
            fits = tried & (dims >= 0)
            row[fits] = dims[fits]
            undecided &= ~fits
            misfit |= tried & (dims == OPEN)
        row[undecided & misfit] = OPEN
        return row

    def _fit_where_they_meet(self, rules: Sequence[BoundRule], lists: Index) -> Index:
        """[mesh axes + 1] the rows of rules that no order of the mesh axes gives.

        Columns in which two mesh axes meet are fitted one by one.

        Args:
            rules: Of all mesh axes, in order.
            lists: [mesh axes] number of the rules of each.
        """
        rows = self._table.fixed.copy()
        for axis, number in enumerate(lists.tolist()):
            alone = self._lists[axis].rows[number]
            rows[axis] = self.rows[axis].array[alone]
        meet = shared_dims(rows[:-1], rows[-1].shape) & self._table.free
        for column in np.flatnonzero(meet).tolist():
            fit = first_fit(self.problem.signatures[column], rules)
            rows[:, column] = narrowed(self._mesh.entries(fit), self.dtype)
        return self._add(rows)

    def _combine(self, lists: Index, order: int) -> Index:
        """[layouts, mesh axes + 1] the rows of layouts made of one list per mesh axis.

        Args:
            lists: [layouts, mesh axes] numbers of rule lists.
            order: Which mesh axis takes a dimension first, as a position in `orders`: as if the
                rules of the first one came first, then those of the second, and so on.
        """
        index = np.empty((len(lists), len(self.rows)), dtype=np.int32)
        for axis, own_lists in enumerate(self._lists):
            # [rule lists]: the row of each list of this mesh axis.
            rows = np.array(own_lists.rows, dtype=np.int32)
            index[:, axis] = rows[lists[:, axis]]
        index[:, -1] = self._order_rows[order]

        tight = self._table.tight
        # For each mesh axis [layouts, tight]: its entries where it may not divide what is left.
        entries = [own.array[:, tight][index[:, a]] for a, own in enumerate(self.rows[:-1])]
        shared = shared_dims(entries, (len(index), len(tight)))
        meet = np.flatnonzero(shared.any(axis=1))
        if len(meet):
            columns = tight[shared.any(axis=0)]
            index[meet] = self._refit(index[meet], lists[meet], self.orders[order], columns)
        return index

    def _refit(self, index: Index, lists: Index, order: Sequence[int], columns: Ints) -> Index:
        """[layouts, mesh axes + 1] the rows, mended where a mesh axis does not divide what is left.

        Args:
            index: [layouts, mesh axes + 1] the rows as if each mesh axis were alone.
            lists: [layouts, mesh axes] numbers of rule lists.
            order: The mesh axes, those that take a dimension first coming first.
            columns: [columns] signatures in which mesh axes meet.
        """
        sizes, start = self._table.sizes_left(columns)
        # [layouts, dims of all columns]: what earlier mesh axes leave of each size.
        left = np.repeat(sizes[None], len(index), axis=0)
        layouts = np.arange(len(index))[:, None]
        for axis in order:
            axis_size = self.sizes[axis]
            splits, dims = self._splits_at(axis, index, columns)
            clash = splits & (left[layouts, start[:-1] + dims] % axis_size != 0)
            for n in np.flatnonzero(clash.any(axis=1)).tolist():
                clashing = np.flatnonzero(clash[n])
                sizes_left = [tuple(left[n, start[c] : start[c + 1]].tolist()) for c in clashing]
                number = int(lists[n, axis])
                index[n, axis] = self._refit_list(axis, number, columns[clashing], sizes_left)
            splits, dims = self._splits_at(axis, index, columns)
            left[layouts, start[:-1] + dims] //= np.where(splits, axis_size, 1)
        return index

    def _splits_at(self, axis: int, index: Index, columns: Ints) -> tuple[Mask, Ints]:
        """[layouts, columns] whether a mesh axis splits a column, and which dimension (else 0)."""
        entries = self.rows[axis].array[index[:, axis]][:, columns]
        return entries >= 0, np.maximum(entries, 0).astype(np.int64)

    def _refit_list(
        self, axis: int, number: int, columns: Ints, left: Sequence[tuple[int, ...]]
    ) -> int:
        """The row of a rule list where columns have only so much left of their sizes.

        Args:
            axis: The mesh axis.
            number: Of its rule list.
            columns: [n] the columns.
            left: [n] what is left of the sizes of each.
        """
        key = (axis, number, columns.tobytes(), tuple(left))
        if key not in self._refitted:
            lists = self._lists[axis]
            row = self.rows[axis].array[lists.rows[number]].copy()
            for column, sizes in zip(columns.tolist(), left, strict=True):
                fit = first_fit(self.problem.signatures[column], lists.rules[number], sizes)
                row[column] = self._mesh.entries(fit)[axis]
            self._refitted[key] = self.rows[axis].add(row)
        return self._refitted[key]

    def keys(self, index: Index) -> list[tuple[int, ...]]:
        """One hashable key per layout, equal where the effective layouts are."""
        # For each mesh axis [layouts, columns]: its entries.
        entries = [own.array[index[:, a]] for a, own in enumerate(self.rows[:-1])]
        shared = shared_dims(entries, (len(index), self.columns)) & self._table.free
        effective = index.copy()
        # The order counts only where some column has two mesh axes on one dimension.
        effective[:, -1] = np.where(shared.any(axis=1), index[:, -1], 0)
        return [tuple(row) for row in effective.tolist()]
