"""Rows of a group of classes: every way in which its columns are split that any layout asked for,
numbered.

What the rows of each mesh axis say of the group's columns is numbered first (`_Outcomes`), then
pairs of those numbers, mesh axis by mesh axis (`_Fold`): a layout's row is a few look-ups.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_model.step_time.reshard import Array
from autoshard.layout.placements import Placements


class Group:
    """Classes with the same columns."""

    def __init__(self, columns: tuple[int, ...], members: Array, placements: Placements) -> None:
        self.columns = np.array(columns, dtype=np.int64)
        self.members = members
        self._placements = placements
        self._outcomes = [_Outcomes() for _ in placements.rows]
        self._folds = [_Fold() for _ in placements.rows]
        self._shares, self._ordered = np.zeros(0, dtype=bool), False
        self._rows = np.zeros(0, dtype=np.int64)

    def rows(self, index: NDArray[np.int32], total: int) -> tuple[Array, Array]:
        """[layouts] rows, and for those that are new (numbered from `total` on) the first layout
        that has them.
        """
        number = np.zeros(len(index), dtype=np.int64)
        *axes, order = range(len(self._outcomes))
        for a in axes:
            mine = self._outcomes[a].of(self._placements.rows[a].array, self.columns)[index[:, a]]
            number = self._folds[a].of(number, mine) if a else mine
        fresh = np.flatnonzero(number >= len(self._shares))
        if len(fresh):
            self._learn_shares(index[fresh], number[fresh])
        if self._ordered:
            mine = self._outcomes[order].of(self._placements.rows[order].array, self.columns)[
                index[:, order]
            ]
            mine = np.where(self._shares[number], mine, 0)
        else:
            mine = np.zeros(1, dtype=np.int64)
        number = self._folds[order].of(number, mine)
        known = len(self._rows)
        fresh = np.flatnonzero(number >= known)
        if not len(fresh):
            return self._rows[number], fresh
        new, first = np.unique(number[fresh], return_index=True)
        self._rows = np.concatenate([self._rows, total + np.arange(len(new))])
        return self._rows[number], fresh[first]

    def _learn_shares(self, index: NDArray[np.int32], number: Array) -> None:
        """For new outcomes of all mesh axes: True where two of them share a dimension, so that
        their order counts.
        """
        new, first = np.unique(number, return_index=True)
        shares = np.zeros(len(new), dtype=bool)
        rows = self._placements.rows[:-1]
        for a in range(len(rows)):
            for b in range(a):
                one = rows[a].array[index[first, a]][:, self.columns]
                other = rows[b].array[index[first, b]][:, self.columns]
                shares |= ((one == other) & (one >= 0)).any(axis=1)
        self._shares = np.concatenate([self._shares, shares])
        self._ordered = self._ordered or bool(shares.any())


class _Outcomes:
    """Numbers what the rows of one mesh axis say of a few columns."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._of_row = np.zeros(0, dtype=np.int64)

    def of(self, rows: NDArray[np.int8], columns: Array) -> Array:
        """[rows] outcome of each row."""
        known = len(self._of_row)
        if known < len(rows):
            width, numbers = len(columns), self._numbers
            text = rows[known:, columns].tobytes()
            new = [
                numbers.setdefault(text[i * width : (i + 1) * width], len(numbers))
                for i in range(len(rows) - known)
            ]
            self._of_row = np.concatenate([self._of_row, np.array(new, dtype=np.int64)])
        return self._of_row


class _Fold:
    """Numbers pairs of numbers."""

    def __init__(self) -> None:
        self._table = np.full((64, 64), -1, dtype=np.int64)
        self._count = 0

    def of(self, left: Array, right: Array) -> Array:
        """[n] numbers of the pairs; new ones are numbered on."""
        height, width = int(left.max(initial=-1)) + 1, int(right.max(initial=-1)) + 1
        if height > self._table.shape[0] or width > self._table.shape[1]:
            shape = (max(2 * height, self._table.shape[0]), max(2 * width, self._table.shape[1]))
            grown = np.full(shape, -1, dtype=np.int64)
            grown[: self._table.shape[0], : self._table.shape[1]] = self._table
            self._table = grown
        found = self._table[left, right]
        if len(found) and found.min() < 0:
            width = self._table.shape[1]
            missing = np.unique((left * width + right)[found < 0])
            self._table.ravel()[missing] = self._count + np.arange(len(missing))
            self._count += len(missing)
            found = self._table[left, right]
        return found


class Held:
    """(row, memory column, bytes), listed by row."""

    def __init__(self) -> None:
        self._start = np.zeros(1, dtype=np.int64)
        self._column, self._bytes = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)

    def add(self, rows: int, row: Array, column: Array, held: Array) -> None:
        """Adds what new rows hold; `rows` is the number of rows there are then."""
        order = np.argsort(row, kind="stable")
        first = len(self._start) - 1
        counts = np.bincount(row - first, minlength=rows - first)
        self._start = np.concatenate([self._start, self._start[-1] + np.cumsum(counts)])
        self._column = np.concatenate([self._column, column[order]])
        self._bytes = np.concatenate([self._bytes, held[order]])

    def of(self, rows: Array) -> tuple[Array, Array, Array]:
        """(layout, column, bytes) of [groups, layouts] rows."""
        flat = rows.ravel()
        counts = self._start[flat + 1] - self._start[flat]
        some = np.flatnonzero(counts)
        counts = counts[some]
        owner = np.repeat(some, counts)
        first = np.cumsum(counts) - counts
        entry = np.arange(len(owner)) - np.repeat(first, counts) + self._start[flat[owner]]
        return owner % rows.shape[1], self._column[entry], self._bytes[entry]
