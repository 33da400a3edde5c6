"""First-fit of many layouts at once: where each mesh axis goes in every signature, as rows of small
integers.

Mesh axes are independent but for divisibility, so a layout is one row per mesh axis (the
*placement* of that axis in every signature) and an order of the mesh axes, which says who is major
where two share a dimension. Rows are kept once per content: two rule lists with the same rows and
order are the same effective layout. Where two mesh axes meet in a dimension that both divide but
their product does not, the later one is fitted again (`Placements.combine`).

A row holds for each column (a signature, or a pinned value) the dimension that the mesh axis
splits, `ABSENT`, or `OPEN` where a rule's logical axis is present but the mesh axis divides none of its
dimensions (see `layout`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.problem import BoundRule, Fit, Problem, bind, first_fit
from autoshard.layout.spec import Spec
from autoshard.tracing.program import Eqn, Value

ABSENT = -1
OPEN = -2
Row = NDArray[np.int8]


class Rows:
    """Distinct rows, numbered in the order in which they come."""

    def __init__(self, columns: int) -> None:
        self._numbers: dict[bytes, int] = {}
        self._array = np.zeros((64, columns), dtype=np.int8)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def array(self) -> NDArray[np.int8]:
        """[rows, columns]."""
        return self._array[: len(self._numbers)]

    def add(self, row: Row) -> int:
        """The number of a row."""
        count = len(self._numbers)
        number = self._numbers.setdefault(row.tobytes(), count)
        if number == count:
            if count == len(self._array):
                self._array = np.concatenate([self._array, np.zeros_like(self._array)])
            self._array[number] = row
        return number


class Placements:
    """The rows of one problem; grows with the layouts that are asked for.

    Attributes:
        problem: The problem.
        axes: Names of the mesh axes with more than one device, in mesh order.
        sizes: Their sizes.
        orders: Every order of the mesh axes, as positions in `axes`; the first is mesh order.
        rows: For each mesh axis its rows, then the rows of orders (for each column a position in
            `orders`).
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.axes = tuple(name for name, size in problem.mesh_axes.items() if size > 1)
        self.sizes = tuple(problem.mesh_axes[name] for name in self.axes)
        self.orders = tuple(itertools.permutations(range(len(self.axes))))
        self._column = {signature: i for i, signature in enumerate(problem.signatures)}
        self._pinned = {
            index: len(self._column) + i for i, index in enumerate(sorted(problem.pins))
        }
        self.columns = len(self._column) + len(self._pinned) + 1
        self.rows = tuple(Rows(self.columns) for _ in range(len(self.axes) + 1))
        width = max((len(s[0]) for s in problem.signatures), default=0)
        self._logical_axes = np.full((self.columns, width), -1, dtype=np.int64)
        self._dim_sizes = np.ones((self.columns, width), dtype=np.int64)
        self._optimizer = np.zeros(self.columns, dtype=bool)
        self._disallowed = [np.zeros((self.columns, width), dtype=bool) for _ in self.axes]
        for signature, column in self._column.items():
            logical_axes, sizes, optimizer, disallowed = signature
            for mine, name in zip(self._disallowed, self.axes, strict=True):
                mine[column, : len(disallowed)] = [name in names for names in disallowed]
            self._logical_axes[column, : len(logical_axes)] = logical_axes
            self._dim_sizes[column, : len(sizes)] = sizes
            self._optimizer[column] = optimizer
        self._fixed = [np.full(self.columns, ABSENT, dtype=np.int8) for _ in self.axes]
        self._fixed.append(np.zeros(self.columns, dtype=np.int8))
        for index, column in self._pinned.items():
            for fixed, placed in zip(
                self._fixed, self._placed(Fit(problem.pins[index], frozenset())), strict=True
            ):
                fixed[column] = placed
        self._free = np.array([c < len(self._column) for c in range(self.columns)])
        self._tight = self._find_tight()
        self._first: dict[tuple[int, int, bool], Row] = {}
        self._has: dict[int, NDArray[np.bool_]] = {}
        self._lists: tuple[dict[tuple[BoundRule, ...], int], ...] = tuple({} for _ in self.axes)
        self._row_of_list: tuple[list[int], ...] = tuple([] for _ in self.axes)
        self._rules_of_list: tuple[list[tuple[BoundRule, ...]], ...] = tuple([] for _ in self.axes)
        self._bound: dict[AxisRule, BoundRule] = {}
        self._refitted: dict[tuple[int, int, bytes, bytes], int] = {}
        self._order_rows = tuple(
            self.rows[-1].add(self._order_row(i)) for i in range(len(self.orders))
        )

    # Columns --------------------------------------------------------------------------------------

    def value_column(self, value: Value) -> int:
        """Column of a value: a pinned one has its own, one without logical axes the last, where nothing is
        ever split.
        """
        pinned = self._pinned.get(value.index)
        if pinned is not None:
            return pinned
        return self._column.get(self.problem.value_signature(value), self.columns - 1)

    def factor_column(self, eqn: Eqn) -> int:
        """Column of an equation's loops."""
        return self._column.get(self.problem.factor_signature(eqn), self.columns - 1)

    def split_sizes(self, column: int) -> list[int]:
        """Sizes of the dimensions (or loops) of a column that rules may split."""
        able = (self._logical_axes[column] >= 0) & (self._dim_sizes[column] > 1)
        return [int(size) for size in self._dim_sizes[column][able]]

    def open_shard_counts(self, axis: int, rows: NDArray[np.int8]) -> NDArray[np.int64]:
        """[rows, columns] into how many pieces the partitioner cuts what a mesh axis leaves OPEN.

        A dimension that the mesh axis does not divide is cut as far as it goes where another
        dimension of its logical axis is split: 4 heads on 8 devices in 4, if columns of their projection
        are split in 8. Alone it stays whole.
        """
        size = self.sizes[axis]
        cut = np.where(
            (self._logical_axes >= 0) & (self._dim_sizes % size != 0),
            np.gcd(self._dim_sizes, size),
            1,
        )
        found = np.ones(rows.shape, dtype=np.int64)
        for n in np.flatnonzero((rows == OPEN).any(axis=1)).tolist():
            split = np.flatnonzero(rows[n] >= 0)
            also = np.isin(self._logical_axes, self._logical_axes[split, rows[n, split]])
            found[n] = np.where(also, cut, 1).max(axis=1, initial=1)
        return np.where(rows == OPEN, found, 1)

    def alike(self, column: int, dim: int, other: int, other_dim: int) -> bool:
        """True if rules say the same of dimensions of two columns, but for what their other
        dimensions have to do.
        """
        one, two = (column, dim), (other, other_dim)
        return bool(
            self._logical_axes[one] == self._logical_axes[two]
            and self._dim_sizes[one] == self._dim_sizes[two]
            and self._optimizer[column] == self._optimizer[other]
            and self._free[column] == self._free[other]
        )

    # Rows -----------------------------------------------------------------------------------------

    def of_list(self, axis: int, rules: tuple[BoundRule, ...]) -> int:
        """The number of a rule list of one mesh axis; its row is first-fit as if the mesh axis were
        alone.

        Args:
            axis: Position in `axes`.
            rules: Rules of that mesh axis, in order.
        """
        number = self._lists[axis].get(rules)
        if number is None:
            number = self._lists[axis][rules] = len(self._row_of_list[axis])
            row = self._fixed[axis].copy()
            undecided = self._free.copy()
            misfit = np.zeros(self.columns, dtype=bool)
            for rule in rules:
                able = undecided & self._having(rule.logical_axis)
                if rule.optimizer:
                    able &= self._optimizer
                if rule.needs is not None:
                    able &= self._having(rule.needs)
                if rule.forbids is not None:
                    able &= ~self._having(rule.forbids)
                dims = self._fitting(rule.logical_axis, axis, rule.last)
                hit = able & (dims >= 0)
                row[hit] = dims[hit]
                undecided &= ~hit
                misfit |= able & (dims == OPEN)
            row[undecided & misfit] = OPEN
            self._row_of_list[axis].append(self.rows[axis].add(row))
            self._rules_of_list[axis].append(rules)
        return number

    def _having(self, logical_axis: int) -> NDArray[np.bool_]:
        if logical_axis not in self._has:
            self._has[logical_axis] = (self._logical_axes == logical_axis).any(axis=1)
        return self._has[logical_axis]

    def _fitting(self, logical_axis: int, axis: int, last: bool) -> Row:
        """By column, the first or last dimension of a logical axis that the mesh axis divides; OPEN where
        it divides none.
        """
        key = (logical_axis, axis, last)
        if key not in self._first:
            mine = (
                (self._logical_axes == logical_axis)
                & (self._dim_sizes > 1)
                & ~self._disallowed[axis]
            )
            fits = mine & (self._dim_sizes % self.sizes[axis] == 0)
            dims = np.where(mine.any(axis=1), OPEN, ABSENT).astype(np.int8)
            order = range(self._logical_axes.shape[1])
            for dim in order if last else reversed(order):
                dims[fits[:, dim]] = dim
            self._first[key] = dims
        return self._first[key]

    def _order_row(self, order: int) -> Row:
        row = self._fixed[-1].copy()
        row[self._free] = order
        return row

    # Layouts --------------------------------------------------------------------------------------

    def of_layout(self, layout: Layout) -> NDArray[np.int32]:
        """[mesh axes + 1] the rows of one layout, whatever the order of its rules."""
        rows = [fixed.copy() for fixed in self._fixed]
        for signature, column in self._column.items():
            for row, placed in zip(
                rows, self._placed(layout.fit_signature(signature)), strict=True
            ):
                row[column] = placed
        return np.array(
            [kept.add(row) for kept, row in zip(self.rows, rows, strict=True)], dtype=np.int32
        )

    def repinned(self, index: NDArray[np.int32], pins: Mapping[int, Spec]) -> NDArray[np.int32]:
        """[mesh axes + 1] the rows of a layout with other specs of pinned values, by
        `Value.index`.
        """
        rows = [kept.array[number].copy() for kept, number in zip(self.rows, index, strict=True)]
        for value, spec in pins.items():
            for row, placed in zip(rows, self._placed(Fit(spec, frozenset())), strict=True):
                row[self._pinned[value]] = placed
        return np.array(
            [kept.add(row) for kept, row in zip(self.rows, rows, strict=True)], dtype=np.int32
        )

    def _placed(self, fit: Fit) -> list[int]:
        """Entries of each mesh axis and of the order for one signature."""
        opened = OPEN if fit.open_dims else ABSENT
        at = {axis: dim for dim, axes in enumerate(fit.spec) for axis in axes}
        before = {axis: i for axes in fit.spec for i, axis in enumerate(axes)}
        order = 0
        if any(len(axes) > 1 for axes in fit.spec):
            wanted = sorted(range(len(self.axes)), key=lambda a: (before.get(self.axes[a], 0), a))
            order = self.orders.index(tuple(wanted))
        return [*(at.get(axis, opened) for axis in self.axes), order]

    def of_rules(self, batch: Sequence[tuple[AxisRule, ...]]) -> NDArray[np.int32]:
        """[rule lists, mesh axes + 1] the rows of many rule lists."""
        index = np.empty((len(batch), len(self.axes) + 1), dtype=np.int32)
        by_order: dict[int, list[int]] = {}
        lists = np.empty((len(batch), len(self.axes)), dtype=np.int32)
        for n, rules in enumerate(batch):
            bound = [b for rule in rules if (b := self._bind(rule)).size > 1]
            for axis, name in enumerate(self.axes):
                lists[n, axis] = self.of_list(
                    axis, tuple(rule for rule in bound if rule.mesh_axis == name)
                )
            order = self._order_of(bound)
            if order is None:
                index[n] = self._in_no_order(bound, lists[n])
            else:
                by_order.setdefault(order, []).append(n)
        for order, members in by_order.items():
            index[members] = self.combine(lists[members], order)
        return index

    def _bind(self, rule: AxisRule) -> BoundRule:
        if rule not in self._bound:
            self._bound[rule] = bind(self.problem, rule)
        return self._bound[rule]

    def _order_of(self, rules: Sequence[BoundRule]) -> int | None:
        """The first order of the mesh axes in which every logical axis takes them; None where logical axes
        disagree.
        """
        axes_of: dict[int, list[str]] = {}
        for rule in rules:
            axes_of.setdefault(rule.logical_axis, []).append(rule.mesh_axis)
        before = set()
        for axes in axes_of.values():
            for a, b in itertools.combinations(dict.fromkeys(axes), 2) if len(axes) > 1 else ():
                if len(axes) - 1 - axes[::-1].index(a) > axes.index(b):
                    return None
                before.add((self.axes.index(a), self.axes.index(b)))
        if not before:
            return 0
        fits = (
            i
            for i, order in enumerate(self.orders)
            if all(order.index(a) < order.index(b) for a, b in before)
        )
        return next(fits, None)

    def _in_no_order(self, rules: Sequence[BoundRule], lists: NDArray[np.int32]) -> list[int]:
        """The rows of rules that no order of the mesh axes gives: columns in which two meet are
        fitted one by one.
        """
        rows = [
            self.rows[axis].array[self._row_of_list[axis][lists[axis]]].copy()
            for axis in range(len(self.axes))
        ]
        rows.append(self._fixed[-1].copy())
        meet = np.zeros(self.columns, dtype=bool)
        for a in range(len(self.axes)):
            for b in range(a):
                meet |= (rows[a] == rows[b]) & (rows[a] >= 0) & self._free
        for column in np.flatnonzero(meet).tolist():
            placed = self._placed(first_fit(self.problem.signatures[column], rules))
            for row, dim in zip(rows, placed, strict=True):
                row[column] = dim
        return [kept.add(row) for kept, row in zip(self.rows, rows, strict=True)]

    def combine(self, lists: NDArray[np.int32], order: int) -> NDArray[np.int32]:
        """[layouts, mesh axes + 1] the rows of layouts made of one list per mesh axis.

        Args:
            lists: [layouts, mesh axes] numbers from `of_list`.
            order: Which mesh axis takes a dimension first, as a position in `orders`: as if the
                rules of the first one came first, then those of the second, and so on.
        """
        index = np.empty((len(lists), len(self.axes) + 1), dtype=np.int32)
        for axis in range(len(self.axes)):
            index[:, axis] = np.array(self._row_of_list[axis], dtype=np.int32)[lists[:, axis]]
        index[:, -1] = self._order_rows[order]
        meet = np.flatnonzero(self._meet(index))
        if len(meet):
            index[meet] = self._refit(index[meet], lists[meet], self.orders[order])
        return index

    def _meet(self, index: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[layouts] True where two mesh axes meet in a dimension that they may not divide
        together.
        """
        found = np.zeros(len(index), dtype=bool)
        for a in range(len(self.axes)):
            for b in range(a):
                one, other = (self.rows[c].array[:, self._tight][index[:, c]] for c in (a, b))
                found |= ((one == other) & (one >= 0)).any(axis=1)
        return found

    def _find_tight(self) -> NDArray[np.int64]:
        """Columns with a dimension that two mesh axes divide one by one, but not all of those
        together.
        """
        found = []
        for column in range(len(self._column)):
            for size in self._dim_sizes[column].tolist():
                able = [axis for axis in self.sizes if size % axis == 0]
                if size > 1 and size % int(np.prod(able, dtype=np.int64)):
                    found.append(column)
                    break
        return np.array(found, dtype=np.int64)

    def _refit(
        self, index: NDArray[np.int32], lists: NDArray[np.int32], order: Sequence[int]
    ) -> NDArray[np.int32]:
        """Mends rows where mesh axes meet in a dimension that their product does not divide."""
        tight = self._tight
        left = np.repeat(self._dim_sizes[tight][None], len(index), axis=0)
        candidate, place = np.arange(len(index))[:, None], np.arange(len(tight))[None]
        for axis in order:
            codes = self.rows[axis].array[index[:, axis]][:, tight]
            dims = np.maximum(codes, 0).astype(np.int64)
            clash = (codes >= 0) & (left[candidate, place, dims] % self.sizes[axis] != 0)
            for n in np.flatnonzero(clash.any(axis=1)).tolist():
                found = np.flatnonzero(clash[n])
                index[n, axis] = self._refit_list(
                    axis, int(lists[n, axis]), tight[found], left[n, found]
                )
            codes = self.rows[axis].array[index[:, axis]][:, tight]
            dims = np.maximum(codes, 0).astype(np.int64)
            left[candidate, place, dims] //= np.where(codes >= 0, self.sizes[axis], 1)
        return index

    def _refit_list(
        self, axis: int, number: int, columns: NDArray[np.int64], left: NDArray[np.int64]
    ) -> int:
        """The row of a list where these columns have only so much left of their sizes."""
        key = (axis, number, columns.tobytes(), left.tobytes())
        if key not in self._refitted:
            rules = self._rules_of_list[axis][number]
            row = self.rows[axis].array[self._row_of_list[axis][number]].copy()
            for column, shard_sizes in zip(columns.tolist(), left.tolist(), strict=True):
                fit = first_fit(self.problem.signatures[column], rules, shard_sizes)
                row[column] = self._placed(fit)[axis]
            self._refitted[key] = self.rows[axis].add(row)
        return self._refitted[key]

    def keys(self, index: NDArray[np.int32]) -> list[tuple[int, ...]]:
        """One hashable key per layout, equal where the effective layouts are."""
        shared = np.zeros(len(index), dtype=bool)
        for a in range(len(self.axes)):
            for b in range(a):
                mine, other = self.rows[a].array[index[:, a]], self.rows[b].array[index[:, b]]
                shared |= ((mine == other) & (mine >= 0) & self._free).any(axis=1)
        kept = index.copy()
        kept[:, -1] = np.where(shared, index[:, -1], 0)
        return [tuple(row) for row in kept.tolist()]
