"""What it takes to bring a value from one spec to another, for many values at once.

A spec is a small number here (`Specs.number`): which dimension each mesh axis splits, and their
order where they share one. What moves between two specs does not depend on the value
(`Transition`), so it is found once per pair; bytes and seconds follow from arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_model.hardware.collectives import collective_s, joint
from autoshard.cost_model.hardware.hardware import Hardware
from autoshard.evidence.collectives import KINDS, ring_bytes
from autoshard.layout.placements import ABSENT, Placements

Array = NDArray[np.int64]
_ring_bytes = cast("Callable[[str, Array, int], Array]", ring_bytes)
"""Integer arithmetic is the same for arrays."""


@dataclass(frozen=True, slots=True)
class Transition:
    """What moves between two specs: sets of mesh axes as bits.

    Attributes:
        moved: They change dimensions: an all_to_all.
        gone: They leave: an all_gather.
        kept: They split the value before and after.
        early: New ones, sliced before the gather because their dimension takes no part in it.
        shuffled: Pieces along these lie on other devices afterwards: a collective_permute.
    """

    moved: int
    gone: int
    kept: int
    early: int
    shuffled: int


class Specs:
    """Numbers the specs that occur, and knows what moves between any two."""

    def __init__(self, placements: Placements, max_rank: int) -> None:
        self._axes = len(placements.axes)
        self._orders = placements.orders
        self._base = max_rank + 1
        codes = self._base**self._axes * len(self._orders)
        self._number_of_code = np.full(codes, -1, dtype=np.int64)
        self._spec: list[tuple[tuple[int, ...], ...]] = []
        self._pair = np.full((32, 32), -1, dtype=np.int64)
        self._transitions: list[Transition] = []
        self._table = np.zeros((0, 5), dtype=np.int64)
        sizes = np.array(placements.sizes, dtype=np.int64)
        bits = (np.arange(1 << self._axes)[:, None] >> np.arange(self._axes)) & 1
        self.devices: Array = np.where(bits == 1, sizes, 1).prod(axis=1, dtype=np.int64)
        """By set of mesh axes (bits), the devices that they span."""

    def mask(self, placed: NDArray[np.int8]) -> Array:
        """[n] the mesh axes that split anything, as bits, of [n, axes] dimensions."""
        weights = 1 << np.arange(self._axes)
        return np.asarray((placed >= 0) @ weights, dtype=np.int64)

    def number(self, placed: NDArray[np.int8], order: NDArray[np.int8]) -> Array:
        """[n] numbers of specs given as [n, axes] dimensions (negative for none) and [n] orders."""
        code = np.zeros(len(placed), dtype=np.int64)
        shared = np.zeros(len(placed), dtype=bool)
        for a in range(self._axes):
            code = code * self._base + np.maximum(placed[:, a], ABSENT) + 1
            for b in range(a):
                shared |= (placed[:, a] == placed[:, b]) & (placed[:, a] >= 0)
        code = code * len(self._orders) + np.where(shared, order, 0)
        found = self._number_of_code[code]
        if len(found) and found.min() < 0:
            for fresh in np.unique(code[found < 0]).tolist():
                self._number_of_code[fresh] = len(self._spec)
                self._spec.append(self._decode(fresh))
            found = self._number_of_code[code]
        return found

    def _decode(self, code: int) -> tuple[tuple[int, ...], ...]:
        """Mesh axes of each dimension, major first."""
        code, order = divmod(code, len(self._orders))
        dims: list[tuple[int, ...]] = [()] * (self._base - 1)
        at = []
        for _ in range(self._axes):
            code, dim = divmod(code, self._base)
            at.append(dim - 1)
        at.reverse()
        for axis in self._orders[order]:
            if at[axis] >= 0:
                dims[at[axis]] += (axis,)
        return tuple(dims)

    def transitions(self, have: Array, want: Array) -> Array:
        """[n, 5] fields of the `Transition` of each pair."""
        if len(self._pair) < len(self._spec):
            grown = np.full((2 * len(self._spec),) * 2, -1, dtype=np.int64)
            grown[: len(self._pair), : len(self._pair)] = self._pair
            self._pair = grown
        found = self._pair[have, want]
        if len(found) and found.min() < 0:
            missing = found < 0
            width = len(self._spec)
            for pair in np.unique(have[missing] * width + want[missing]).tolist():
                source, target = divmod(pair, width)
                self._pair[source, target] = len(self._transitions)
                self._transitions.append(_transition(self._spec[source], self._spec[target]))
            self._table = np.array(
                [(t.moved, t.gone, t.kept, t.early, t.shuffled) for t in self._transitions],
                dtype=np.int64,
            ).reshape(-1, 5)
            found = self._pair[have, want]
        return self._table[found]


def _transition(have: tuple[tuple[int, ...], ...], want: tuple[tuple[int, ...], ...]) -> Transition:
    """What moves between two specs, given as the mesh axes of each dimension.

    Along a dimension the first mesh axis counts slowest. Where an axis stays but not first, or axes
    change places, every device holds another one's piece: a collective_permute of it.
    """

    def bits(axes: set[int]) -> int:
        return sum(1 << a for a in axes)

    at = {a: d for d, axes in enumerate(have) for a in axes}
    to = {a: d for d, axes in enumerate(want) for a in axes}
    gone = {a for a in at if a not in to}
    already = {d for d, axes in enumerate(have) if any(a in gone for a in axes)}
    return Transition(
        moved=bits({a for a in at if a in to and to[a] != at[a]}),
        gone=bits(gone),
        kept=bits({a for a in at if a in to}),
        early=bits({a for a in to if a not in at and to[a] not in already}),
        shuffled=bits(_shuffled(have, want)),
    )


def _shuffled(have: tuple[tuple[int, ...], ...], want: tuple[tuple[int, ...], ...]) -> set[int]:
    """Mesh axes of the dimensions along which the pieces of one spec lie on other devices than
    those of the other.
    """
    shuffled: set[int] = set()
    for i, old in enumerate(have):
        for j, new in enumerate(want):
            before, after = [a for a in old if a in new], [a for a in new if a in old]
            if before != after or (
                i == j and (before != list(old[: len(before)]) or after != list(new[: len(after)]))
            ):
                shuffled |= {*old, *new}
    return shuffled


class Moves:
    """Collectives of many class costs, as they are found."""

    def __init__(self) -> None:
        self._parts: list[tuple[Array, Array, Array]] = []

    def add(self, kind: str, row: Array, mask: Array, full_bytes: Array) -> None:
        """Adds one collective for each row whose set of mesh axes is not empty.

        Args:
            kind: One of `KINDS`.
            row: [n] which cost it belongs to.
            mask: [n] mesh axes that it spans, as bits.
            full_bytes: [n] bytes of the full value.
        """
        some = np.flatnonzero(mask)
        if len(some):
            self._parts.append(
                (row[some], mask[some] * len(KINDS) + KINDS.index(kind), full_bytes[some])
            )

    def reshard(
        self, specs: Specs, row: Array, value_bytes: Array, have: Array, want: Array
    ) -> None:
        """Adds what brings values from one spec to another; slicing is free.

        Args:
            specs: Numbers of the specs.
            row: [n] which cost it belongs to.
            value_bytes: [n] bytes of the whole value.
            have: [n] numbers of the specs that it has.
            want: [n] of those that are wanted.
        """
        differ = np.flatnonzero(have != want)
        if not len(differ):
            return
        row, value_bytes = row[differ], value_bytes[differ]
        moved, gone, kept, early, shuffled = specs.transitions(have[differ], want[differ]).T
        at = kept | gone
        held = value_bytes // specs.devices[at]
        self.add("all_to_all", row, moved, held * specs.devices[moved])
        self.add(
            "all_gather", row, gone, value_bytes // specs.devices[kept] // specs.devices[early]
        )
        if shuffled.any():
            new = specs.transitions(want[differ], have[differ])
            most = np.maximum(specs.devices[at], specs.devices[new[:, 1] | new[:, 2]])
            self.add("collective_permute", row, shuffled, value_bytes // most)

    def arrays(self) -> tuple[Array, Array, Array]:
        """(cost, set of mesh axes times kinds plus kind, bytes of the full value) of every
        collective.
        """
        if not self._parts:
            empty = np.zeros(0, dtype=np.int64)
            return empty, empty, empty
        row, slot, full_bytes = (
            np.concatenate([part[i] for part in self._parts]) for i in range(3)
        )
        return row, slot, full_bytes


class Links:
    """Seconds and bytes of collectives by slot: set of mesh axes (bits) times the kinds, plus the
    kind.
    """

    LARGE = 1 << 40

    def __init__(
        self, hardware: Hardware, placements: Placements, mesh_axes: Mapping[str, int]
    ) -> None:
        self.axes: list[tuple[str, ...]] = []
        self.slots = len(KINDS) << len(placements.axes)
        self.group: Array = np.ones(self.slots, dtype=np.int64)
        self.latency_s, self.s_per_byte = np.zeros(self.slots), np.zeros(self.slots)
        for slot in range(self.slots):
            bits, kind = divmod(slot, len(KINDS))
            axes = tuple(name for a, name in enumerate(placements.axes) if bits >> a & 1)
            self.axes.append(axes)
            if axes:
                link, devices = joint(hardware, mesh_axes, axes)
                self.group[slot] = devices
                self.latency_s[slot] = collective_s(KINDS[kind], 0, link, devices)
                large = collective_s(KINDS[kind], self.LARGE, link, devices)
                self.s_per_byte[slot] = (large - self.latency_s[slot]) / self.LARGE

    def sent_bytes(self, slot: Array, full_bytes: Array) -> Array:
        """[n] bytes that one device sends on a ring, rounded down."""
        sent = np.zeros(len(slot), dtype=np.int64)
        for kind in np.unique(slot % len(KINDS)).tolist():
            for group in np.unique(self.group[slot]).tolist():
                mine = (slot % len(KINDS) == kind) & (self.group[slot] == group)
                sent[mine] = _ring_bytes(KINDS[kind], full_bytes[mine], group)
        return sent
