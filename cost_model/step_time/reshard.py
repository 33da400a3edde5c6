"""Which mesh axes take part in bringing a value from one spec to another, for many values at once.

A spec is a small number here (`Specs.number`): which dimension each mesh axis splits, and their
order where they share one. A set of mesh axes is a number too, one bit each. What a reshard takes
does not depend on the value, so it is found once per pair of specs; bytes and seconds follow from
arrays.
"""

from __future__ import annotations

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
    """

    all_to_all: Array
    all_gather: Array
    kept: Array
    sliced_first: Array
    collective_permute: Array


class Specs:
    """Numbers the specs that occur, and knows what it takes from any to any other.

    Attributes:
        shard_count: [sets of mesh axes] the devices that each spans.
    """

    def __init__(self, placements: Placements, max_rank: int) -> None:
        self._axes = len(placements.axes)
        self._orders = placements.orders
        self._base = max_rank + 1
        codes = self._base**self._axes * len(self._orders)
        # [codes]: number of a spec, -1 where it did not occur; a code is its dims and its order
        self._number_of_code = np.full(codes, -1, dtype=np.int64)
        self._specs: list[SpecAxes] = []
        # [specs, specs]: number of the reshard, -1 where it did not occur
        self._reshard_of_pair = np.full((32, 32), -1, dtype=np.int64)
        self._reshards: list[tuple[int, ...]] = []
        self._fields = np.zeros((0, len(Reshards._fields)), dtype=np.int64)  # [reshards, fields]

        sizes = np.array(placements.sizes, dtype=np.int64)
        bits = (np.arange(1 << self._axes)[:, None] >> np.arange(self._axes)) & 1
        self.shard_count: Array = np.where(bits == 1, sizes, 1).prod(axis=1, dtype=np.int64)

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
        """[n] dims and order as one number; the order counts only where mesh axes share a dim."""
        dims, order = assignment
        code = np.zeros(len(dims), dtype=np.int64)
        shared = np.zeros(len(dims), dtype=bool)
        for a in range(self._axes):
            code = code * self._base + np.maximum(dims[:, a], ABSENT) + 1
            for b in range(a):
                shared |= (dims[:, a] == dims[:, b]) & (dims[:, a] >= 0)
        return code * len(self._orders) + np.where(shared, order, 0)

    def _decode(self, code: int) -> SpecAxes:
        code, order = divmod(code, len(self._orders))
        dims = []
        for _ in range(self._axes):
            code, dim = divmod(code, self._base)
            dims.append(dim - 1)
        dims.reverse()
        axes_of_dim: list[tuple[int, ...]] = [()] * (self._base - 1)
        for axis in self._orders[order]:
            if dims[axis] >= 0:
                axes_of_dim[dims[axis]] += (axis,)
        return tuple(axes_of_dim)

    def reshards(self, have: Array, want: Array) -> Reshards:
        """What it takes to bring values from [n] specs to [n] others, by their numbers."""
        if len(self._reshard_of_pair) < len(self._specs):
            size = len(self._reshard_of_pair)
            grown = np.full((2 * len(self._specs),) * 2, -1, dtype=np.int64)
            grown[:size, :size] = self._reshard_of_pair
            self._reshard_of_pair = grown
        number = self._reshard_of_pair[have, want]
        if len(number) and number.min() < 0:
            self._add_reshards(have[number < 0], want[number < 0])
            number = self._reshard_of_pair[have, want]
        return Reshards(*self._fields[number].T)

    def _add_reshards(self, have: Array, want: Array) -> None:
        count = len(self._specs)
        for pair in np.unique(have * count + want).tolist():
            source, target = divmod(pair, count)
            self._reshard_of_pair[source, target] = len(self._reshards)
            self._reshards.append(_reshard(self._specs[source], self._specs[target]))
        self._fields = np.array(self._reshards, dtype=np.int64)


def _reshard(have: SpecAxes, want: SpecAxes) -> tuple[int, ...]:
    """What a reshard takes, in the order of the fields of `Reshards`."""
    dim_before, dim_after = _dim_of_axis(have), _dim_of_axis(want)
    before, after = set(dim_before), set(dim_after)
    kept = before & after
    gathered_dims = {dim_before[axis] for axis in before - after}
    moved = {axis for axis in kept if dim_before[axis] != dim_after[axis]}
    sliced_first = {axis for axis in after - before if dim_after[axis] not in gathered_dims}
    fields = (moved, before - after, kept, sliced_first, permuted_axes(have, want))
    return tuple(sum(1 << axis for axis in axes) for axes in fields)


def _dim_of_axis(spec: SpecAxes) -> dict[int, int]:
    dim_of_axis = {}
    for dim, axes in enumerate(spec):
        for axis in axes:
            dim_of_axis[axis] = dim
    return dim_of_axis


def permuted_axes(have: SpecAxes, want: SpecAxes) -> set[int]:
    """Mesh axes of the dimensions whose shards lie on other devices afterwards.

    Along a dimension the first mesh axis counts slowest. Where an axis stays but not first, or axes
    change places, every device holds another one's shard: a collective_permute of it.
    """
    permuted: set[int] = set()
    for old_dim, old in enumerate(have):
        for new_dim, new in enumerate(want):
            common = [axis for axis in old if axis in new]
            same_order = common == [axis for axis in new if axis in old]
            first = (common, common) == (list(old[: len(common)]), list(new[: len(common)]))
            if not same_order or (old_dim == new_dim and not first):
                permuted.update(old, new)
    return permuted
