"""Peak memory of many layouts at once: a maximum over few program points of sums of table look-ups.

Points at which equations of one class run differ only in what is alive around them; of these only
those can be the peak that stand out between their like in the layers before and after (of 32
unrolled layers the first and the last).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from autoshard.cost_model.memory.all_reduce_combining import AllReduces
from autoshard.cost_model.memory.liveness import MemoryTable
from autoshard.cost_model.program.applied_constraints import Array
from autoshard.cost_model.program.equation_classes import ProgramClasses, ValueClass
from autoshard.cost_model.program.propagation import Propagated
from autoshard.cost_model.step_time.temporaries import CopyColumns
from autoshard.layout.placements import Placements

WINDOW = 8
"""Equations on each side that make up the surroundings of a point."""


class MemoryColumn(NamedTuple):
    """Values that are always cut into equally many pieces.

    Attributes:
        placement: Their column of the placements.
        propagated: What they inherit.
        shut: Arguments and outputs: where a mesh axis does not divide them they are whole; others
            are left open there.
    """

    placement: int
    propagated: Propagated
    shut: bool


class Peak:
    """The points that matter, and what is alive there."""

    def __init__(
        self,
        table: MemoryTable,
        classes: ProgramClasses,
        columns: Sequence[MemoryColumn],
        placements: Placements,
        copies: CopyColumns,
        sums: AllReduces,
    ) -> None:
        """Prunes the points.

        Args:
            table: What is alive where.
            classes: The classes, whose readers tell where copies are alive.
            columns: The columns of the table.
            placements: The placements.
            copies: Columns of copies; grows.
            sums: Where partial sums are added up.
        """
        self._classes = classes
        self._copies = copies
        self._placements = placements
        self._columns = np.array([c.placement for c in columns], dtype=np.int64)
        self._shut = np.array([c.shut for c in columns], dtype=bool)
        lent = [(n, *entry) for n, c in enumerate(columns) for entry in c.propagated]
        self._lent = np.array(lent, dtype=np.int64).reshape(-1, 4)
        work = classes.of_eqn[table.point_eqn]
        self._spans = [_points(table, uses) for uses in classes.value_classes]
        self._works = len(classes.equation_classes)
        kept = _vertices(np.concatenate([table.alive_bytes, self._states(len(work))], axis=1), work)
        kept = np.union1d(kept, sums.points)  # no other points are like these
        self._points = kept
        self._alive = np.ascontiguousarray(table.alive_bytes[kept])
        self._work = work[kept]
        self._sums = np.concatenate(
            [sums.reduced[kept].toarray(), sums.outlived[kept].toarray()], axis=1
        )
        self._counts = csr_array((len(kept), 3 * self._works))
        self._known_copies = -1
        self._share: list[NDArray[np.float64]] = [
            np.ones((0, len(columns))) for _ in placements.axes
        ]

    def _states(self, points: int) -> NDArray[np.float64]:
        """[points, states] how many values of a class are in each state: which readers are yet to
        come or done.

        Whatever readers share copies, the number of copies alive is a sum of these.
        """
        rng = np.random.default_rng(0)
        blocks = []
        for span in self._spans:  # [kinds of reader, values, 2]
            ends = np.concatenate([span[:, :, 0], span[:, :, 1] + 1])  # [2 kinds, values]
            keys = rng.integers(1, 1 << 62, size=len(ends), dtype=np.uint64)
            order = np.argsort(ends, axis=0, kind="stable")
            at = np.take_along_axis(ends, order, axis=0)
            hashes, state = np.unique(
                np.cumsum(keys[order], axis=0, dtype=np.uint64)[:-1], return_inverse=True
            )
            state = state.reshape(
                at[:-1].shape
            )  # of a value from `at` to the next of them; nothing is left at the end
            change = np.zeros((points + 1, len(hashes)))
            np.add.at(change, (at[:-1], state), 1.0)
            np.add.at(change, (at[1:], state), -1.0)
            blocks.append(np.cumsum(change, axis=0)[:points])
        return np.concatenate([np.zeros((points, 0)), *blocks], axis=1)

    @property
    def points(self) -> int:
        """How many are left."""
        return len(self._points)

    def at_peak(
        self, index: NDArray[np.int32], held: tuple[Array, Array, Array]
    ) -> tuple[int, float]:
        """The point at which one layout peaks, and the bytes that it holds there beside the values.

        Args:
            index: [1, mesh axes + 1] from `Placements`.
            held: From `CostTables.temporaries`.
        """
        share = self.shares(index)
        _, column, beside = held
        extra = (
            np.bincount(column, beside, self._counts.shape[1])
            if len(column)
            else np.zeros(self._counts.shape[1])
        )
        at_points = (self._alive @ share.T)[:, 0] + self._counts @ extra
        peak = int(at_points.argmax())
        return int(self._points[peak]), float((self._counts[[peak]] @ extra)[0])

    def bytes(
        self, index: NDArray[np.int32], held: tuple[Array, Array, Array]
    ) -> NDArray[np.float64]:
        """[layouts] peak bytes.

        Args:
            index: [layouts, mesh axes + 1] from `Placements`.
            held: (layout, column, bytes) from `CostTables.temporaries`.
        """
        if not len(self._points):
            return np.zeros(len(index))
        share = self.shares(index)
        layout, column, beside = held
        width = self._counts.shape[1]
        extra = csr_array((beside.astype(np.float64), (column, layout)), shape=(width, len(index)))
        at_points = self._alive @ share.T
        at_points += (self._counts @ extra).toarray()
        return np.asarray(at_points.max(axis=0))

    def shares(self, index: NDArray[np.int32]) -> NDArray[np.float64]:
        """[layouts, columns] the share of each column's bytes that a device holds."""
        self._learn()
        found = np.ones((len(index), len(self._columns)))
        for axis in range(len(self._share)):
            found *= self._share[axis][index[:, axis]]
        return found

    def _learn(self) -> None:
        """Takes in new rows of placements and new columns of copies."""
        for axis, size in enumerate(self._placements.sizes):
            known, rows = len(self._share[axis]), self._placements.rows[axis].array
            if known < len(rows):
                factors = self._placements.open_shard_counts(axis, rows[known:])[:, self._columns]
                share = np.where(self._shut, 1.0, 1.0 / factors)
                share = np.where(self._split(rows[known:]), 1.0 / size, share)
                self._share[axis] = np.concatenate([self._share[axis], share])
        total = len(self._copies.value_class)
        if self._known_copies < total:
            self._known_copies = max(self._known_copies, 0)
            blocks = (
                [self._counts_of_works()] if not self._known_copies else [self._counts.toarray()]
            )
            for number in range(self._known_copies, total):
                blocks.append(
                    self._alive_copies(self._copies.value_class[number], self._copies.readers[number])[
                        :, None
                    ]
                )
            self._counts = csr_array(np.concatenate(blocks, axis=1))
            self._known_copies = total

    def _split(self, rows: NDArray[np.int8]) -> NDArray[np.bool_]:
        """[rows, columns] True where the mesh axis of these rows splits a column's values."""
        split: NDArray[np.bool_] = rows[:, self._columns] >= 0
        if len(self._lent):
            taker, column, dim, _ = self._lent.T
            starts = np.flatnonzero(np.diff(taker, prepend=-1))
            split[:, taker[starts]] |= np.logical_or.reduceat(
                rows[:, column] == dim, starts, axis=1
            )
        return split

    def _counts_of_works(self) -> NDArray[np.float64]:
        counts = np.zeros((len(self._points), self._works))
        some = np.flatnonzero(self._work >= 0)
        counts[some, self._work[some]] = 1.0
        return np.concatenate([counts, self._sums], axis=1)

    def _alive_copies(self, uses: int, readers: int) -> NDArray[np.float64]:
        """[points] how many copies of a class are alive that these readers share."""
        span = self._spans[uses]
        mine = [k for k in range(len(span)) if readers >> (k % 62) & 1]
        first, last = span[mine, :, 0].min(axis=0), span[mine, :, 1].max(axis=0)
        begun = np.searchsorted(np.sort(first), self._points, side="right")
        ended = np.searchsorted(np.sort(last), self._points, side="left")
        return (begun - ended).astype(np.float64)


def _points(table: MemoryTable, uses: ValueClass) -> NDArray[np.int64]:
    """[kinds of reader, values, 2]: the first and the last point at which a copy for such readers
    is alive.
    """
    points = np.sort(table.point_of[uses.spans], axis=2)
    points[:, :, 0] = np.minimum(points[:, :, 0], table.copied_at[uses.members])
    return points


def _vertices(rows: NDArray[np.float64], work: Array) -> Array:
    """Rows that may be the largest under some non-negative weights.

    A row at or below the mean of the rows before and after it *in like surroundings* (the same
    equation one layer earlier and later) is never the only maximum: along a sequence that is convex
    the ends are. Surroundings only guide where to look; what is dropped is dropped by the
    inequality.
    """
    if not len(rows):
        return np.zeros(0, dtype=np.int64)
    padded = np.concatenate([np.full(WINDOW, -2), work, np.full(WINDOW, -3)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * WINDOW + 1)
    weights = np.random.default_rng(0).integers(
        1 << 62, size=windows.shape[1]
    )  # equal hashes: like surroundings
    _, like = np.unique(windows @ weights, return_inverse=True)
    order = np.argsort(like.ravel(), kind="stable")
    alike = like.ravel()[order]
    inner = np.flatnonzero((alike[2:] == alike[1:-1]) & (alike[1:-1] == alike[:-2])) + 1
    before, middle, after = rows[order[inner - 1]], rows[order[inner]], rows[order[inner + 1]]
    dropped = order[inner[(2 * middle <= before + after).all(axis=1)]]
    return np.setdiff1d(np.arange(len(rows)), dropped)
