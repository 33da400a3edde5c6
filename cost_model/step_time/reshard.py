"""Which mesh axes take part in bringing a value from one spec to another, for many values at once.

The collectives of a reshard on a mesh with axes a and b:

    P(a, b) -> P(a, None)       b leaves: all_gather over b
    P(a, None) -> P(None, a)    a changes its dimension: all_to_all over a
    P(a, None) -> P(b, a)       all_to_all over a, and a slice along b, which is free
    P(None, a) -> P((b, a))     a slice along b, then all_to_all over a
    P(None, a, b) -> P((a, b))  all_gather over a and b: XLA exchanges one dimension for another
    P((a, b)) -> P(b)           all_gather over a, and a collective_permute: the first axis of a
                                dimension counts slowest, so that device (a, b) held shard a * |b| +
                                b and is to hold shard b

A spec is a small number here (`Specs.number`): which dimension each mesh axis splits, and their
order where they share one. A set of mesh axes is a number too, one bit each. What takes part in a
reshard does not depend on the value, so it is determined once per pair of specs; bytes and seconds
follow from arrays (`collective_tables`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoshard.cost_model.program.applied_constraints import Array, Assignment, Dims
from autoshard.layout.placements import ABSENT, Placements

SpecAxes = tuple[tuple[int, ...], ...]
"""The mesh axes of each dimension, major first."""


class Reshards(NamedTuple):
    """What takes part in reshards: [n] sets of mesh axes.

    Attributes:
        all_to_all: They change dimensions.
        all_gather: They leave.
        kept: They split the value before and after.
        sliced_first: They come, and the value is sliced along them before the all_gather, because
            their dimension takes no part in it.
        collective_permute: Shards along these lie on other devices afterwards.
        sliced_before_exchange: They come, and the value is sliced along them before the all_to_all,
            because that does not leave their dimension.
    """

    all_to_all: Array
    all_gather: Array
    kept: Array
    sliced_first: Array
    collective_permute: Array
    sliced_before_exchange: Array


class Specs:
    """Numbers the specs that occur, and tells what it takes from any to any other.

    Attributes:
        shard_count: [sets of mesh axes] the devices that each spans.
    """

    def __init__(self, placements: Placements, max_rank: int) -> None:
        """Knows no specs yet.

        Args:
            placements: Names, sizes and orders of the mesh axes.
            max_rank: Most dimensions that any value has.
        """
        self._axes = len(placements.axes)
        self._orders = placements.orders
        self._dims = max_rank + 1  # with one for a mesh axis that splits none
        codes = self._dims**self._axes * len(self._orders)
        # [codes]: number of the spec, -1 where it did not occur
        self._number_of_code = np.full(codes, -1, dtype=np.int64)
        self._specs: list[SpecAxes] = []

        # [specs, specs]: number of the reshard, -1 where it did not occur
        self._reshard_of_pair = np.full((32, 32), -1, dtype=np.int64)
        self._reshards: list[tuple[int, ...]] = []
        # [reshards, fields of `Reshards`]
        self._fields = np.zeros((0, len(Reshards._fields)), dtype=np.int64)

        sizes = np.array(placements.sizes, dtype=np.int64)
        # [sets of mesh axes, mesh axes]
        contains = (np.arange(1 << self._axes)[:, None] >> np.arange(self._axes)) & 1 == 1
        self.shard_count: Array = np.where(contains, sizes, 1).prod(axis=1, dtype=np.int64)

    def axis_set(self, dims: Dims) -> Array:
        """[n] the mesh axes that split any dimension."""
        return np.asarray((dims >= 0) @ (1 << np.arange(self._axes)), dtype=np.int64)

    def number(self, assignment: Assignment) -> Array:
        """[n] numbers of specs."""
        code = self._code(assignment)
        number = self._number_of_code[code]
        if len(number) and number.min() < 0:
            for new in np.unique(code[number < 0]).tolist():
                self._number_of_code[new] = len(self._specs)
                self._specs.append(self._decode(new))
            number = self._number_of_code[code]
        return number

    def _code(self, assignment: Assignment) -> Array:
        """[n] specs as numbers: a digit for the dimension of each mesh axis, then the order.

        The order counts only where mesh axes share a dimension.
        """
        dims, order = assignment
        code = np.zeros(len(dims), dtype=np.int64)
        shared = np.zeros(len(dims), dtype=bool)
        for axis in range(self._axes):
            digit = np.maximum(dims[:, axis], ABSENT) + 1
            code = code * self._dims + digit
            for other in range(axis):
                shared |= (dims[:, axis] == dims[:, other]) & (dims[:, axis] >= 0)
        return code * len(self._orders) + np.where(shared, order, 0)

    def _decode(self, code: int) -> SpecAxes:
        code, order = divmod(code, len(self._orders))
        dims = []
        for _ in range(self._axes):
            code, digit = divmod(code, self._dims)
            dims.append(digit - 1)
        dims.reverse()

        axes_of_dim: list[tuple[int, ...]] = [()] * (self._dims - 1)
        for axis in self._orders[order]:
            if dims[axis] >= 0:
                axes_of_dim[dims[axis]] += (axis,)
        return tuple(axes_of_dim)

    def reshards(self, have: Array, want: Array) -> Reshards:
        """What takes part in bringing values from specs to others.

        Args:
            have: [n] numbers of the specs that they have.
            want: [n] numbers of those that are wanted.
        """
        self._make_room()
        number = self._reshard_of_pair[have, want]
        if len(number) and number.min() < 0:
            self._add_reshards(have[number < 0], want[number < 0])
            number = self._reshard_of_pair[have, want]
        return Reshards(*self._fields[number].T)

    def _make_room(self) -> None:
        size = len(self._reshard_of_pair)
        if size < len(self._specs):
            grown = np.full((2 * len(self._specs),) * 2, -1, dtype=np.int64)
            grown[:size, :size] = self._reshard_of_pair
            self._reshard_of_pair = grown

    def _add_reshards(self, have: Array, want: Array) -> None:
        count = len(self._specs)
        for pair in np.unique(have * count + want).tolist():
            source, target = divmod(pair, count)
            self._reshard_of_pair[source, target] = len(self._reshards)
            self._reshards.append(_reshard(self._specs[source], self._specs[target]))
        self._fields = np.array(self._reshards, dtype=np.int64)


def _reshard(have: SpecAxes, want: SpecAxes) -> tuple[int, ...]:
    """What takes part in one reshard, in the order of the fields of `Reshards`."""
    dim_before, dim_after = _dim_of_axis(have), _dim_of_axis(want)
    before, after = set(dim_before), set(dim_after)
    kept = before & after
    moved = {axis for axis in kept if dim_before[axis] != dim_after[axis]}
    if not _can_be_exchanged([(dim_before[axis], dim_after[axis]) for axis in moved]):
        kept -= moved
        moved = set()
    gathered, new = before - kept, after - before

    left_dims = {dim_before[axis] for axis in moved}
    sliced_before_exchange = {axis for axis in new if dim_after[axis] not in left_dims}
    gathered_dims = {dim_before[axis] for axis in gathered}
    sliced_first = {axis for axis in new if dim_after[axis] not in gathered_dims}
    return (
        _as_bits(moved),
        _as_bits(gathered),
        _as_bits(kept),
        _as_bits(sliced_first),
        _as_bits(permuted_axes(have, want)),
        _as_bits(sliced_before_exchange),
    )


def _can_be_exchanged(moves: Sequence[tuple[int, int]]) -> bool:
    """Whether all_to_alls do such moves (from a dimension, to a dimension).

    XLA has one for each pair of dimensions, and else replicates: "involuntary full
    rematerialization".

    >>> _can_be_exchanged([(0, 1), (1, 0)]), _can_be_exchanged([(1, 0), (2, 0)])
    (True, False)
    """
    pairs = set(moves)
    sources, targets = {source for source, _ in pairs}, {target for _, target in pairs}
    return len(sources) == len(targets) == len(pairs)


def _dim_of_axis(spec: SpecAxes) -> dict[int, int]:
    dim_of_axis = {}
    for dim, axes in enumerate(spec):
        for axis in axes:
            dim_of_axis[axis] = dim
    return dim_of_axis


def _as_bits(axes: set[int]) -> int:
    return sum(1 << axis for axis in axes)


def permuted_axes(have: SpecAxes, want: SpecAxes) -> set[int]:
    """Mesh axes of the dimensions whose shards lie on other devices afterwards.

    That is so where an axis stays but not as the first, or axes change places: every device then
    holds another one's shard. `tests/cost_model/test_order_of_mesh_axes.py` compares with XLA.

    >>> permuted_axes(((0, 1),), ((1,),)), permuted_axes(((0, 1),), ((0,),))
    ({0, 1}, set())
    """
    permuted: set[int] = set()
    for old_dim, old in enumerate(have):
        for new_dim, new in enumerate(want):
            if not _shards_stay(old, new, same_dim=old_dim == new_dim):
                permuted.update(old, new)
    return permuted


def _shards_stay(old: tuple[int, ...], new: tuple[int, ...], *, same_dim: bool) -> bool:
    """True where the mesh axes that two dimensions have in common give every device its shard."""
    common = [axis for axis in old if axis in new]
    if common != [axis for axis in new if axis in old]:
        return False
    if not same_dim:
        return True
    return common == list(old[: len(common)]) == list(new[: len(common)])
