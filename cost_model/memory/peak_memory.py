"""Peak memory of many layouts at once: a maximum over few points of sums of table look-ups.

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
from autoshard.cost_model.program.applied_constraints import Array, Index
from autoshard.cost_model.program.equation_classes import ProgramClasses, ValueClass
from autoshard.cost_model.program.propagation import Propagated
from autoshard.cost_model.step_time.temporaries import CopyColumns, Temporaries, reader_bit
from autoshard.layout.narrow import Narrow
from autoshard.layout.placements import Placements

Table = NDArray[np.float64]

NEIGHBOURS = 8
"""Equations on each side that make up the surroundings of a point.

Chosen by hand. It only says which points are compared; what is dropped is dropped by an inequality.
With 16, too few points of a model of 12 layers have their like:
`test_points_of_like_layers_are_dropped_and_the_peak_stays` fails.
"""


class MemoryColumn(NamedTuple):
    """Values that always have the same shard count.

    Attributes:
        placement: Their column of the placements.
        propagated: What they inherit.
        closed: True for arguments and outputs: where a mesh axis does not divide them they are
            whole; others are left open there.
    """

    placement: int
    propagated: Propagated
    closed: bool


class PeakMemory:
    """The points that matter, and what is alive there.

    A device holds a share of each column of values, and temporaries (see `step_time.temporaries`
    for their memory columns).
    """

    def __init__(
        self,
        table: MemoryTable,
        classes: ProgramClasses,
        columns: Sequence[MemoryColumn],
        placements: Placements,
        copies: CopyColumns,
        all_reduces: AllReduces,
    ) -> None:
        """Prunes the points.

        Args:
            table: What is alive where.
            classes: The classes, whose readers tell where copies are alive.
            columns: The columns of the table.
            placements: The placements.
            copies: Columns of copies; grows.
            all_reduces: Where partial sums are all_reduced.
        """
        self._copies = copies
        self._placements = placements
        self._columns = np.array([c.placement for c in columns], dtype=np.int64)  # [columns]
        self._closed = np.array([c.closed for c in columns], dtype=bool)  # [columns]
        sources = [(n, *source) for n, c in enumerate(columns) for source in c.propagated]
        # [sources, 4]: the column that inherits, then `Source`
        self._sources = np.array(sources, dtype=np.int64).reshape(-1, 4)
        # By class of values, [kinds of reader, values, 2]: first and last point.
        self._spans = [_points_of_readers(table, values) for values in classes.value_classes]

        eqn_class = classes.of_eqn[table.point_eqn]  # [points]
        states = _reader_states(self._spans, len(eqn_class))
        rows = np.concatenate([table.alive_bytes, states], axis=1)
        # No other points are like those at which all_reduces are combined.
        self._points = np.union1d(_possible_maxima(rows, eqn_class), all_reduces.points)
        self._alive_bytes = np.ascontiguousarray(table.alive_bytes[self._points])
        self._temporaries = csr_array(  # [points, memory columns] how many are alive
            np.concatenate(
                [
                    _one_hot(eqn_class[self._points], len(classes.equation_classes)),
                    all_reduces.reduced[self._points].toarray(),
                    all_reduces.outlived[self._points].toarray(),
                ],
                axis=1,
            )
        )
        self._counted_copies = 0
        # By mesh axis, [rows, columns] the share that a device holds under a row of the placements.
        self._shares: list[Table] = [np.ones((0, len(columns))) for _ in placements.axes]

    @property
    def points(self) -> int:
        """How many points are left."""
        return len(self._points)

    def at_peak(self, index: Index, temporaries: Temporaries) -> tuple[int, float]:
        """The point at which one layout peaks, and the bytes of temporaries that it holds there.

        Args:
            index: [1, mesh axes + 1] from `Placements`.
            temporaries: Those of the layout (`CostTables.temporaries`).
        """
        self._count_copies()
        column_bytes = np.zeros(self._temporaries.shape[1])  # [memory columns]
        np.add.at(column_bytes, temporaries.column, temporaries.bytes)
        temporary_bytes = self._temporaries @ column_bytes  # [points]
        value_bytes = (self._alive_bytes @ self.shares(index).T)[:, 0]  # [points]
        peak = int((value_bytes + temporary_bytes).argmax())
        return int(self._points[peak]), float(temporary_bytes[peak])

    def bytes(self, index: Index, temporaries: Temporaries) -> Table:
        """[layouts] peak bytes.

        Args:
            index: [layouts, mesh axes + 1] from `Placements`.
            temporaries: Those of the layouts (`CostTables.temporaries`).
        """
        if not len(self._points):
            return np.zeros(len(index))
        self._count_copies()
        layout, column, temporary_bytes = temporaries
        entries = (temporary_bytes.astype(np.float64), (column, layout))
        shape = (self._temporaries.shape[1], len(index))
        column_bytes = csr_array(entries, shape=shape)  # [memory columns, layouts]
        at_points = self._alive_bytes @ self.shares(index).T  # [points, layouts]
        at_points += (self._temporaries @ column_bytes).toarray()
        return np.asarray(at_points.max(axis=0))

    def shares(self, index: Index) -> Table:
        """[layouts, columns] the share of each column's bytes that a device holds."""
        shares = np.ones((len(index), len(self._columns)))
        for axis in range(len(self._shares)):
            self._take_in_rows(axis)
            shares *= self._shares[axis][index[:, axis]]
        return shares

    def _take_in_rows(self, axis: int) -> None:
        """Computes the shares under rows of the placements that are new."""
        first_new = len(self._shares[axis])
        rows = self._placements.rows[axis].array[
            first_new:
        ]  # [new rows, columns of the placements]
        if len(rows):
            counts = self._placements.open_shard_counts(axis, rows)[:, self._columns]
            share = np.where(self._closed, 1.0, 1.0 / counts)
            share = np.where(self._is_split(rows), 1.0 / self._placements.sizes[axis], share)
            self._shares[axis] = np.concatenate([self._shares[axis], share])

    def _is_split(self, rows: Narrow) -> NDArray[np.bool_]:
        """[rows, columns] True where the mesh axis of these rows splits a column's values."""
        split: NDArray[np.bool_] = rows[:, self._columns] >= 0
        if len(self._sources):
            heir, column, place, _ = self._sources.T
            first = np.flatnonzero(np.diff(heir, prepend=-1))  # [heirs]: their first source
            inherited = np.logical_or.reduceat(rows[:, column] == place, first, axis=1)
            split[:, heir[first]] |= inherited
        return split

    def _count_copies(self) -> None:
        """Adds memory columns for the copies that are new."""
        first_new, total = self._counted_copies, len(self._copies.value_class)
        if first_new < total:
            blocks = [self._temporaries.toarray()]
            for number in range(first_new, total):
                values, readers = self._copies.value_class[number], self._copies.readers[number]
                blocks.append(self._alive_copies(values, readers)[:, None])
            self._temporaries = csr_array(np.concatenate(blocks, axis=1))
            self._counted_copies = total

    def _alive_copies(self, value_class: int, readers: int) -> Table:
        """[points] how many copies of a class are alive that these readers (bits) share."""
        spans = self._spans[value_class]
        kinds = [kind for kind in range(len(spans)) if readers & reader_bit(kind)]
        first, last = spans[kinds, :, 0].min(axis=0), spans[kinds, :, 1].max(axis=0)  # [values]
        begun = np.searchsorted(np.sort(first), self._points, side="right")
        ended = np.searchsorted(np.sort(last), self._points, side="left")
        return (begun - ended).astype(np.float64)


def _one_hot(classes: Array, count: int) -> Table:
    """[n, count] 1 at the class of each of n points; all 0 where it has none (-1)."""
    one_hot = np.zeros((len(classes), count))
    some = np.flatnonzero(classes >= 0)
    one_hot[some, classes[some]] = 1.0
    return one_hot


def _points_of_readers(table: MemoryTable, values: ValueClass) -> Array:
    """[kinds of reader, values, 2] first and last point at which a copy for them is alive."""
    points = np.sort(table.point_of[values.spans], axis=2)
    points[:, :, 0] = np.minimum(points[:, :, 0], table.copied_at[values.members])
    return points


def _reader_states(spans: Sequence[Array], points: int) -> Table:
    """[points, states] how many values of a class are in each state.

    A state says which kinds of readers are yet to come, are there or are done. Whatever readers
    share copies, the number of copies alive is a sum over states.

    Args:
        spans: By class of values, [kinds of reader, values, 2] points.
        points: How many points there are.
    """
    rng = np.random.default_rng(0)
    states = [np.zeros((points, 0))]
    states += [_states_of_class(span, points, rng) for span in spans]
    return np.concatenate(states, axis=1)


def _states_of_class(spans: Array, points: int, rng: np.random.Generator) -> Table:
    """[points, states] how many values of one class are in each state."""
    # [events, values]: the points at which a kind of readers comes, then those at which one is done
    events = np.concatenate([spans[:, :, 0], spans[:, :, 1] + 1])
    order = np.argsort(events, axis=0, kind="stable")
    at = np.take_along_axis(events, order, axis=0)
    # Which events are over: the sum of their random keys, modulo 2^64, tells sets of them apart.
    keys = rng.integers(1, 1 << 62, size=len(events), dtype=np.uint64)
    # [events - 1, values]; after the last event nothing is left
    over = np.cumsum(keys[order], axis=0, dtype=np.uint64)[:-1]
    hashes, state = np.unique(over, return_inverse=True)
    state = state.reshape(over.shape)  # of a value from `at` to the next one
    change = np.zeros((points + 1, len(hashes)))
    np.add.at(change, (at[:-1], state), 1.0)
    np.add.at(change, (at[1:], state), -1.0)
    return np.cumsum(change, axis=0)[:points]


def _possible_maxima(rows: Table, eqn_class: Array) -> Array:
    """Numbers of the rows that may be the largest under some non-negative weights.

    A row at or below the mean of the rows before and after it *in like surroundings* (the same
    equation one layer earlier and later) is never the only maximum: along a sequence that is convex
    the ends are. Surroundings only guide where to look; what is dropped is dropped by the
    inequality.

    Args:
        rows: [points, n] non-negative amounts.
        eqn_class: [points] class of the equation that runs there.
    """
    if not len(rows):
        return np.zeros(0, dtype=np.int64)
    surroundings = _surroundings(eqn_class)
    order = np.argsort(surroundings, kind="stable")
    alike = surroundings[order]
    same_as_next = alike[1:] == alike[:-1]
    inner = np.flatnonzero(same_as_next[1:] & same_as_next[:-1]) + 1  # positions in `order`
    before, middle, after = rows[order[inner - 1]], rows[order[inner]], rows[order[inner + 1]]
    dropped = order[inner[(2 * middle <= before + after).all(axis=1)]]
    return np.setdiff1d(np.arange(len(rows)), dropped)


def _surroundings(eqn_class: Array) -> Array:
    """[points] equal numbers where the classes of the points around them are the same."""
    # Padding of its own at either end, unlike any class: -1 is that of equations with bodies.
    before, after = np.full(NEIGHBOURS, -2), np.full(NEIGHBOURS, -3)
    padded = np.concatenate([before, eqn_class, after])
    width = 2 * NEIGHBOURS + 1
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)  # [points, width]
    # A random linear hash: unlike windows that collide are compared in vain, nothing worse.
    weights = np.random.default_rng(0).integers(1 << 62, size=windows.shape[1])
    _, number = np.unique(windows @ weights, return_inverse=True)
    return np.asarray(number.ravel())
