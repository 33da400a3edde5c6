"""The signatures of a problem as arrays, and a fit as one small integer per mesh axis.

`placements` describes the arrays that are made of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.axes.axis_classes import NO_AXIS
from autoshard.layout.narrow import Narrow, NarrowType, narrow_dtype, narrowed
from autoshard.layout.problem import BoundRule, Fit, Problem, Signature
from autoshard.layout.spec import Spec
from autoshard.tracing.program import Eqn, Value

ABSENT = -1
"""Entry of a mesh axis that splits no dimension."""

OPEN = -2
"""Entry of a mesh axis that divides no dimension of a logical axis that a rule sends to it (see
`layout`)."""

Entries = Narrow
"""Dimensions, `ABSENT` or `OPEN`, or numbers of orders; of `SignatureTable.dtype`."""

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]


class MeshOrders:
    """The mesh axes with more than one device, and every order in which they may share a dimension.

    Attributes:
        axes: Names of the mesh axes, in mesh order.
        sizes: Their sizes.
        orders: Every order of the mesh axes, as positions in `axes`; the first is mesh order.
    """

    def __init__(self, problem: Problem) -> None:
        self.axes = tuple(name for name, size in problem.mesh_axes.items() if size > 1)
        self.sizes = tuple(problem.mesh_axes[name] for name in self.axes)
        self.orders = tuple(itertools.permutations(range(len(self.axes))))

    def entries(self, fit: Fit) -> list[int]:
        """For each mesh axis the dimension that it splits, then the number of an order."""
        dim_of = {name: dim for dim, axes in enumerate(fit.spec) for name in axes}
        unsplit = OPEN if fit.open_dims else ABSENT
        return [*(dim_of.get(name, unsplit) for name in self.axes), self._order_in(fit.spec)]

    def _order_in(self, spec: Spec) -> int:
        """The first order with the mesh axes of every dimension, major ones first."""
        if all(len(axes) <= 1 for axes in spec):
            return 0
        place_of = {name: place for axes in spec for place, name in enumerate(axes)}
        places = [place_of.get(name, 0) for name in self.axes]
        order = sorted(range(len(places)), key=lambda a: (places[a], a))
        return self.orders.index(tuple(order))

    def order_of(self, rules: Iterable[BoundRule]) -> int | None:
        """The first order in which all logical axes take the mesh axes; None if there is none."""
        axes_of: dict[int, list[str]] = {}
        for rule in rules:
            axes_of.setdefault(rule.logical_axis, []).append(rule.mesh_axis)
        before: set[tuple[int, int]] = set()
        for axes in axes_of.values():
            if len(axes) > 1:
                pairs = self._pairs_before(axes)
                if pairs is None:
                    return None
                before |= pairs
        if not before:
            return 0
        for number, order in enumerate(self.orders):
            if all(order.index(a) < order.index(b) for a, b in before):
                return number
        return None

    def _pairs_before(self, axes: Sequence[str]) -> set[tuple[int, int]] | None:
        """Pairs of mesh axes of which all rules of the first come before those of the second.

        None where the rules of two mesh axes alternate.
        """
        pairs = set()
        for a, b in itertools.combinations(dict.fromkeys(axes), 2):
            last_of_a = len(axes) - 1 - axes[::-1].index(a)
            if last_of_a > axes.index(b):
                return None
            pairs.add((self.axes.index(a), self.axes.index(b)))
        return pairs


@dataclass(frozen=True, eq=False)
class _SignatureArrays:
    """What first-fit looks at: every dimension or factor of every signature, one after the other.

    They are flat, because one equation may have thousands of factors where others have three.

    Attributes:
        start: int64 [signatures + 1], the first place of each signature; then the end.
        column: int64 [places], its signature.
        dim: narrow [places], which dimension or factor of the signature it is.
        logical_axes: int64 [places], its logical axis, else `NO_AXIS`.
        sizes: int64 [places], its size.
        disallowed: bool [mesh axes, places], True where the user keeps a mesh axis from it.
    """

    start: Ints
    column: Ints
    dim: Entries
    logical_axes: Ints
    sizes: Ints
    disallowed: Mask

    @classmethod
    def of(
        cls, signatures: Sequence[Signature], mesh_axes: Sequence[str], dtype: NarrowType
    ) -> _SignatureArrays:
        """The arrays of signatures, whose dimensions a dtype holds."""
        ranks = [len(signature.sizes) for signature in signatures]
        start = np.concatenate([[0], np.cumsum(ranks)]).astype(np.int64)
        column = np.repeat(np.arange(len(signatures)), ranks)
        arrays = cls(
            start=start,
            column=column,
            dim=narrowed(np.arange(start[-1]) - start[column], dtype),
            logical_axes=np.array([a for s in signatures for a in s.logical_axes], np.int64),
            sizes=np.array([size for s in signatures for size in s.sizes], np.int64),
            disallowed=np.zeros((len(mesh_axes), start[-1]), dtype=bool),
        )
        for first, signature in zip(start[:-1].tolist(), signatures, strict=True):
            for dim, names in enumerate(signature.disallowed):
                for axis, name in enumerate(mesh_axes):
                    arrays.disallowed[axis, first + dim] = name in names
        return arrays

    def places_of(self, columns: Ints) -> Ints:
        """The places of some signatures, one after the other."""
        ranges = [np.arange(self.start[column], self.start[column + 1]) for column in columns]
        return np.concatenate(ranges) if ranges else np.zeros(0, dtype=np.int64)


class SignatureTable:
    """The columns of a problem, as arrays, and what one axis rule does in all of them at once.

    Attributes:
        columns: Number of columns: the signatures, the pinned values, and one for everything that
            has no logical axis.
        dtype: Of entries: as narrow as the factors of equations, the dimensions of values and the
            orders of mesh axes allow. One byte, but for an equation of more than 128 factors.
        free: bool [columns], True where rules decide: in the signatures.
        fixed: narrow [mesh axes + 1, columns], the entries of pins (of the order in the last row),
            and those of nothing elsewhere.
        tight: int64 [tight columns], columns with a dimension that some mesh axes divide one by
            one, but not all of those together.
    """

    def __init__(self, problem: Problem, mesh: MeshOrders) -> None:
        self._problem = problem
        self._mesh = mesh
        signatures = problem.signatures
        self._column = {signature: i for i, signature in enumerate(signatures)}
        self._pinned = {value: len(signatures) + i for i, value in enumerate(sorted(problem.pins))}
        self.columns = len(self._column) + len(self._pinned) + 1
        self.free = np.arange(self.columns) < len(self._column)
        self.dtype = _dtype_of_entries(problem, mesh)
        self._arrays = _SignatureArrays.of(signatures, mesh.axes, self.dtype)
        self._optimizer = self._with_signature(np.array([s.optimizer for s in signatures], bool))
        self.fixed = self._fixed_entries()
        self.tight = self._tight_columns()
        self._by_axis: Ints = np.argsort(self._arrays.logical_axes, kind="stable")
        self._sorted_axes = self._arrays.logical_axes[self._by_axis]
        self._having: dict[int, Mask] = {}
        self._fitting: dict[tuple[int, int, bool], Entries] = {}

    def _fixed_entries(self) -> Entries:
        fixed = np.full((len(self._mesh.axes) + 1, self.columns), ABSENT, dtype=self.dtype)
        fixed[-1] = 0
        for value, column in self._pinned.items():
            pin = Fit(self._problem.pins[value], open_dims=frozenset())
            fixed[:, column] = narrowed(self._mesh.entries(pin), self.dtype)
        return fixed

    def _tight_columns(self) -> Ints:
        sizes = self._arrays.sizes
        # [places]: product of the mesh axes that divide the dimension, one by one.
        together = np.ones_like(sizes)
        for axis_size in self._mesh.sizes:
            together *= np.where(sizes % axis_size == 0, axis_size, 1)
        return np.unique(self._arrays.column[(sizes > 1) & (sizes % together != 0)])

    def _with_signature(self, mask: Mask) -> Mask:
        """[columns] what [signatures] say; False for columns that are none."""
        return np.concatenate([mask, np.zeros(self.columns - len(mask), dtype=bool)])

    # Columns --------------------------------------------------------------------------------------

    def of_value(self, value: Value) -> int:
        """Column of a value."""
        pinned = self._pinned.get(value.index)
        if pinned is not None:
            return pinned
        return self._column.get(self._problem.value_signature(value), self.columns - 1)

    def of_pin(self, value_index: int) -> int:
        """Column of a pinned value."""
        return self._pinned[value_index]

    def of_factors(self, eqn: Eqn) -> int:
        """Column of an equation's factors."""
        return self._column.get(self._problem.factor_signature(eqn), self.columns - 1)

    def sizes_left(self, columns: Ints) -> tuple[Ints, Ints]:
        """Sizes of the dimensions of some signatures, flat, and where those of each begin."""
        sizes: Ints = self._arrays.sizes[self._arrays.places_of(columns)]
        ranks = self._arrays.start[columns + 1] - self._arrays.start[columns]
        return sizes, np.concatenate([[0], np.cumsum(ranks)]).astype(np.int64)

    def split_sizes(self, column: int) -> list[int]:
        """Sizes of the dimensions (or factors) of a column that rules may split."""
        if not self.free[column]:
            return []
        arrays = self._arrays
        own = slice(arrays.start[column], arrays.start[column + 1])
        splittable = (arrays.logical_axes[own] != NO_AXIS) & (arrays.sizes[own] > 1)
        return [int(size) for size in arrays.sizes[own][splittable]]

    def alike(self, one: tuple[int, int], other: tuple[int, int]) -> bool:
        """Whether rules say the same of two (column, dimension), but for the other dimensions."""
        return self._key_of(*one) == self._key_of(*other)

    def _key_of(self, column: int, dim: int) -> tuple[bool, int, int, bool]:
        """Equal for dimensions of which rules say the same."""
        if not self.free[column]:
            return False, NO_AXIS, 1, False
        place, arrays = self._arrays.start[column] + dim, self._arrays
        optimizer = bool(self._optimizer[column])
        return True, int(arrays.logical_axes[place]), int(arrays.sizes[place]), optimizer

    # Rules ----------------------------------------------------------------------------------------

    def in_scope(self, rule: BoundRule) -> Mask:
        """[columns] True where a rule holds."""
        scope = self._with_logical_axis(rule.logical_axis)
        if rule.optimizer:
            scope = scope & self._optimizer
        if rule.needs is not None:
            scope = scope & self._with_logical_axis(rule.needs)
        if rule.forbids is not None:
            scope = scope & ~self._with_logical_axis(rule.forbids)
        return scope

    def _with_logical_axis(self, logical_axis: int) -> Mask:
        if logical_axis not in self._having:
            having = np.zeros(self.columns, dtype=bool)
            having[self._arrays.column[self._places_with(logical_axis)]] = True
            self._having[logical_axis] = having
        return self._having[logical_axis]

    def _places_with(self, logical_axis: int) -> Ints:
        """The dimensions and factors of a logical axis, ascending."""
        first, end = np.searchsorted(self._sorted_axes, [logical_axis, logical_axis + 1])
        places: Ints = self._by_axis[first:end]
        return places

    def fitting_dims(self, logical_axis: int, axis: int, last: bool) -> Entries:
        """[columns] the first or last dimension of a logical axis that a mesh axis divides.

        `OPEN` where it divides none of them, `ABSENT` where there is none.
        """
        key = (logical_axis, axis, last)
        if key not in self._fitting:
            arrays = self._arrays
            places = self._places_with(logical_axis)
            # Those that the mesh axis may split, and those that it divides.
            own = places[(arrays.sizes[places] > 1) & ~arrays.disallowed[axis, places]]
            fits = own[arrays.sizes[own] % self._mesh.sizes[axis] == 0]
            dims = np.full(self.columns, ABSENT, dtype=self.dtype)
            dims[arrays.column[own]] = OPEN
            # The one that is written last wins.
            order = fits if last else fits[::-1]
            dims[arrays.column[order]] = arrays.dim[order]
            self._fitting[key] = dims
        return self._fitting[key]

    def open_shard_counts(self, axis: int, rows: Entries) -> Ints:
        """[rows, columns] shard count that the partitioner gives to what a mesh axis leaves open.

        A dimension that the mesh axis does not divide is cut as far as it goes where another
        dimension of its logical axis is split: 4 heads on 8 devices in 4, if columns of their
        projection are split in 8. Alone it stays whole.
        """
        arrays, axis_size = self._arrays, self._mesh.sizes[axis]
        # [places]: how far each dimension can be cut that the mesh axis does not divide.
        uneven = (arrays.logical_axes != NO_AXIS) & (arrays.sizes % axis_size != 0)
        divisor = np.where(uneven, np.gcd(arrays.sizes, axis_size), 1)
        counts = np.ones(rows.shape, dtype=np.int64)
        for n in np.flatnonzero((rows == OPEN).any(axis=1)).tolist():
            split = np.flatnonzero((rows[n] >= 0) & self.free)
            split_logical_axes = arrays.logical_axes[arrays.start[split] + rows[n, split]]
            # [places]: True for dimensions whose logical axis is split in some column.
            cut = np.isin(arrays.logical_axes, split_logical_axes)
            signatures = len(arrays.start) - 1  # each has a dimension
            counts[n, :signatures] = np.maximum.reduceat(
                np.where(cut, divisor, 1), arrays.start[:-1]
            )
        return np.where(rows == OPEN, counts, 1)


def _dtype_of_entries(problem: Problem, mesh: MeshOrders) -> NarrowType:
    """The dtype that holds every dimension, factor and order of a problem."""
    rules = problem.logical_axes.classes.rules
    ranks = [len(rules[eqn.index].kinds) for eqn in problem.program.eqns if not eqn.bodies]
    ranks += [len(value.shape) for value in problem.program.values]
    ranks += [len(signature.sizes) for signature in problem.signatures]
    return narrow_dtype(OPEN, max(*ranks, len(mesh.orders), 1) - 1)


def shared_dims(rows: Iterable[Entries], shape: tuple[int, ...]) -> Mask:
    """Where two mesh axes split the same dimension, so that their order counts.

    Args:
        rows: The entries of each mesh axis.
        shape: Of each of `rows`, and of the answer.
    """
    shared = np.zeros(shape, dtype=bool)
    for one, other in itertools.combinations(rows, 2):
        shared |= (one == other) & (one >= 0)
    return shared
