"""What a device holds besides the values themselves: partial sums, copies, results to be resharded.

Each temporary has a *memory column*, which says where in the program it is alive. With n classes of
equations, the columns are

    0 to n - 1      results of a class before they are brought to their own spec
    n to 2n - 1     partial sums of a class
    2n to 3n - 1    those sums once they are complete, where they are what is stored
    from 3n on      copies of values in the spec in which they are read (`CopyColumns`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoshard.cost_model.program.applied_constraints import Array

_READER_BITS = 62
"""Kinds of readers that have a bit of their own: an int64 has 63 and a sign. No test has a value
that is read in so many ways."""


def reader_bit(kind: int) -> int:
    """The bit that stands for one kind of reader of a class of values.

    Kinds beyond the first 62 share bits, so that their copies live as long as those of the kinds
    that they share with.
    """
    return 1 << (kind % _READER_BITS)


class Temporaries(NamedTuple):
    """Temporaries as arrays, one entry each.

    Attributes:
        owner: [n] the cost, row or layout that holds it.
        column: [n] its memory column.
        bytes: [n] bytes on one device.
    """

    owner: Array
    column: Array
    bytes: Array

    @classmethod
    def joined(cls, parts: Sequence[Temporaries]) -> Temporaries:
        """Those of all parts."""
        return cls(
            np.concatenate([part.owner for part in parts]),
            np.concatenate([part.column for part in parts]),
            np.concatenate([part.bytes for part in parts]),
        )


class CopyColumns:
    """Memory columns of copies: the readers of a class of values that share one; grows.

    Attributes:
        value_class: By column, the class of values.
        readers: By column, the kinds of readers that share the copy (see `reader_bit`).
    """

    def __init__(self, equation_classes: int) -> None:
        """No columns yet.

        Args:
            equation_classes: How many classes of equations there are.
        """
        self.value_class: list[int] = []
        self.readers: list[int] = []
        self._first = 3 * equation_classes
        self._numbers: dict[tuple[int, int], int] = {}

    def of(self, value_class: Array, readers: Array) -> Array:
        """[n] memory columns of copies of these classes that these readers share."""
        columns = np.empty(len(value_class), dtype=np.int64)
        for i, key in enumerate(zip(value_class.tolist(), readers.tolist(), strict=True)):
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = len(self._numbers)
                self.value_class.append(key[0])
                self.readers.append(key[1])
            columns[i] = self._first + number
        return columns


class TemporariesByRow:
    """Temporaries of rows, listed by row; grows."""

    def __init__(self) -> None:
        self._start = np.zeros(1, dtype=np.int64)  # [rows + 1]: first entry of each row
        self._column = np.zeros(0, dtype=np.int64)  # [entries]
        self._bytes = np.zeros(0, dtype=np.int64)  # [entries]

    def add(self, rows: int, temporaries: Temporaries) -> None:
        """Adds those of new rows.

        Args:
            rows: How many rows there are then.
            temporaries: By row.
        """
        order = np.argsort(temporaries.owner, kind="stable")
        known = len(self._start) - 1
        counts = np.bincount(temporaries.owner - known, minlength=rows - known)
        self._start = np.concatenate([self._start, self._start[-1] + np.cumsum(counts)])
        self._column = np.concatenate([self._column, temporaries.column[order]])
        self._bytes = np.concatenate([self._bytes, temporaries.bytes[order]])

    def of(self, rows: Array) -> Temporaries:
        """Those of [groups, layouts] rows, by layout."""
        row = rows.ravel()  # [groups * layouts]
        counts = self._start[row + 1] - self._start[row]
        some = np.flatnonzero(counts)
        counts = counts[some]
        owner = np.repeat(some, counts)  # [entries of these rows]: position in `row`
        first = np.cumsum(counts) - counts
        entry = np.arange(len(owner)) - np.repeat(first, counts) + self._start[row[owner]]
        return Temporaries(owner % rows.shape[1], self._column[entry], self._bytes[entry])
