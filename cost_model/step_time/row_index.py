"""Numbers the ways in which the columns of a group of classes are split, as layouts ask for them.

A layout names one row of `Placements` for each mesh axis, and one for their order. A group needs
only a few columns of those, so many layouts are the same to it. What the rows of each mesh axis say
of the group's columns is numbered first (`_RowContents`), then pairs of those numbers, mesh axis by
mesh axis (`_PairNumbers`): a layout's row in the cost tables is a few look-ups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.cost_model.program.applied_constraints import Array, Index, Mask
from autoshard.layout.narrow import Narrow
from autoshard.layout.placements import Placements


class ClassGroup:
    """Classes whose costs depend on the same columns.

    Attributes:
        members: [classes] their numbers.
    """

    def __init__(self, columns: Sequence[int], members: Array, placements: Placements) -> None:
        """Knows no rows yet.

        Args:
            columns: Of the placements.
            members: [classes] numbers of the classes.
            placements: The placements; they grow.
        """
        self.members = members
        self._columns = np.array(columns, dtype=np.int64)
        self._placements = placements
        # for each mesh axis, then for the order of the mesh axes
        self._contents = [_RowContents() for _ in placements.rows]
        self._pairs = [_PairNumbers() for _ in placements.rows]
        # [combinations]: whether two mesh axes share a dimension
        self._shares_dim = np.zeros(0, dtype=bool)
        # [combinations with an order]: their row in the cost tables
        self._rows = np.zeros(0, dtype=np.int64)

    def rows(self, index: Index, total: int) -> tuple[Array, Array]:
        """[layouts] rows, and for those that are new the first layout that has them.

        Args:
            index: [layouts, mesh axes + 1] rows of `Placements`.
            total: Number of the first new row.
        """
        combination = self._with_order(self._combinations(index), index)
        new = np.flatnonzero(combination >= len(self._rows))
        if not len(new):
            return self._rows[combination], new

        numbers, first = np.unique(combination[new], return_index=True)
        added = total + np.arange(len(numbers))
        self._rows = np.concatenate([self._rows, added])
        return self._rows[combination], new[first]

    def _combinations(self, index: Index) -> Array:
        """[layouts] numbers of what all mesh axes say together, whatever their order."""
        combination = np.zeros(len(index), dtype=np.int64)
        mesh_axes = len(self._contents) - 1
        if mesh_axes:
            combination = self._contents_of(0, index)
        for axis in range(1, mesh_axes):
            contents = self._contents_of(axis, index)
            combination = self._pairs[axis].of(combination, contents)

        new = np.flatnonzero(combination >= len(self._shares_dim))
        if len(new):
            _, first = np.unique(combination[new], return_index=True)
            shares_dim = self._axes_share_dim(index[new[first]])
            self._shares_dim = np.concatenate([self._shares_dim, shares_dim])
        return combination

    def _with_order(self, combination: Array, index: Index) -> Array:
        """[layouts] numbers that tell orders of the mesh axes apart, where those matter."""
        order = np.zeros(1, dtype=np.int64)
        if self._shares_dim.any():
            order = np.where(self._shares_dim[combination], self._contents_of(-1, index), 0)
        return self._pairs[-1].of(combination, order)

    def _contents_of(self, axis: int, index: Index) -> Array:
        """[layouts] numbers of what the rows of a mesh axis say; of their order, if it is -1."""
        rows = self._placements.rows[axis].array
        numbers = self._contents[axis].of(rows, self._columns)
        return numbers[index[:, axis]]

    def _axes_share_dim(self, index: Index) -> Mask:
        """[layouts] True where two mesh axes share a dimension, so that their order counts."""
        shares = np.zeros(len(index), dtype=bool)
        rows = self._placements.rows[:-1]
        for axis in range(len(rows)):
            # [layouts, columns]: the dimension that it splits
            dims = rows[axis].array[index[:, axis]][:, self._columns]
            for other in range(axis):
                other_dims = rows[other].array[index[:, other]][:, self._columns]
                shares |= ((dims == other_dims) & (dims >= 0)).any(axis=1)
        return shares


class _RowContents:
    """Numbers what the rows of one mesh axis say of a few columns."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._of_row = np.zeros(0, dtype=np.int64)

    def of(self, rows: Narrow, columns: Array) -> Array:
        """[rows] their numbers.

        Args:
            rows: [rows, all columns] all rows; those seen before come first and are not looked at.
            columns: The columns that count.
        """
        known = len(self._of_row)
        if known < len(rows):
            numbers = self._numbers
            width = len(columns) * rows.itemsize
            contents = rows[known:, columns].tobytes()  # a slice a row: far quicker than tuples
            new = []
            for row in range(len(rows) - known):
                content = contents[row * width : (row + 1) * width]
                new.append(numbers.setdefault(content, len(numbers)))
            self._of_row = np.concatenate([self._of_row, np.array(new, dtype=np.int64)])
        return self._of_row


class _PairNumbers:
    """Numbers pairs of numbers, in a table with a row and a column for each.

    >>> numbers = _PairNumbers()
    >>> numbers.of(np.array([0, 5, 0]), np.array([7, 0, 7])).tolist()
    [0, 1, 0]
    """

    def __init__(self) -> None:
        self._table = np.full((64, 64), -1, dtype=np.int64)  # -1: not numbered yet
        self._count = 0

    def of(self, left: Array, right: Array) -> Array:
        """[n] numbers of the pairs; new ones are numbered on."""
        self._grow(int(left.max(initial=-1)) + 1, int(right.max(initial=-1)) + 1)
        number = self._table[left, right]
        if len(number) and number.min() < 0:
            place = left * self._table.shape[1] + right
            new = np.unique(place[number < 0])
            self._table.ravel()[new] = self._count + np.arange(len(new))
            self._count += len(new)
            number = self._table[left, right]
        return number

    def _grow(self, height: int, width: int) -> None:
        """Makes room for so many left and right numbers, with as much to spare."""
        rows, columns = self._table.shape
        if height > rows or width > columns:
            grown = np.full((max(2 * height, rows), max(2 * width, columns)), -1, dtype=np.int64)
            grown[:rows, :columns] = self._table
            self._table = grown
