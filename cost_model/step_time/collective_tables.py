"""Collectives of many class costs at once, and what each costs by its kind and mesh axes.

A *slot* is a kind of collective over a set of mesh axes: the set (a bit for each) times the number
of kinds, plus the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_model.hardware.collectives import collective_s, joint
from autoshard.cost_model.hardware.hardware import Hardware
from autoshard.cost_model.program.applied_constraints import Array
from autoshard.cost_model.step_time.reshard import Specs
from autoshard.cost_model.step_time.temporaries import Temporaries
from autoshard.evidence.collectives import KINDS, ring_bytes
from autoshard.layout.placements import Placements

_LARGE_BYTES = 1 << 40
"""Bytes from which seconds a byte are computed: so many that subtracting the latency costs no
digits. No test depends on it."""

_ring_bytes = cast("Callable[[str, Array, int], Array]", ring_bytes)
"""Integer arithmetic is the same for arrays."""


class Collectives(NamedTuple):
    """Collectives as arrays, one entry each.

    Attributes:
        owner: [n] which cost it belongs to.
        slot: [n] its kind and mesh axes.
        full_bytes: [n] bytes of the full value, as in `ring_bytes`.
    """

    owner: Array
    slot: Array
    full_bytes: Array


class CollectiveBatch:
    """Collectives of many class costs; grows as they are added."""

    def __init__(self, specs: Specs) -> None:
        self.specs = specs
        self._parts: list[Collectives] = []

    def add(self, kind: str, owner: Array, axis_set: Array, full_bytes: Array) -> None:
        """Adds one collective for each entry whose set of mesh axes is not empty.

        Args:
            kind: One of `KINDS`.
            owner: [n] which cost it belongs to.
            axis_set: [n] mesh axes that it spans, as bits.
            full_bytes: [n] bytes of the full value.
        """
        some = np.flatnonzero(axis_set)
        if len(some):
            slot = axis_set[some] * len(KINDS) + KINDS.index(kind)
            self._parts.append(Collectives(owner[some], slot, full_bytes[some]))

    def add_reshards(self, owner: Array, value_bytes: Array, have: Array, want: Array) -> None:
        """Adds what brings values from one spec to another; slicing is free.

        Args:
            owner: [n] which cost it belongs to.
            value_bytes: [n] bytes of the whole value.
            have: [n] numbers of the specs that the values have.
            want: [n] numbers of those that are wanted.
        """
        differ = np.flatnonzero(have != want)
        if not len(differ):
            return
        owner, value_bytes = owner[differ], value_bytes[differ]
        have, want = have[differ], want[differ]
        axes, shard_count = self.specs.reshards(have, want), self.specs.shard_count

        split_before = axes.kept | axes.all_gather
        exchanged = value_bytes // shard_count[split_before | axes.sliced_before_exchange]
        exchanged = exchanged * shard_count[axes.all_to_all]
        self.add("all_to_all", owner, axes.all_to_all, exchanged)
        gathered = value_bytes // shard_count[axes.kept] // shard_count[axes.sliced_first]
        self.add("all_gather", owner, axes.all_gather, gathered)
        if axes.collective_permute.any():
            back = self.specs.reshards(want, have)
            split_after = back.kept | back.all_gather
            most = np.maximum(shard_count[split_before], shard_count[split_after])
            self.add("collective_permute", owner, axes.collective_permute, value_bytes // most)

    def arrays(self) -> Collectives:
        """All of them."""
        if not self._parts:
            empty = np.zeros(0, dtype=np.int64)
            return Collectives(empty, empty, empty)
        owners, slots, full_bytes = zip(*self._parts, strict=True)
        return Collectives(
            np.concatenate(owners), np.concatenate(slots), np.concatenate(full_bytes)
        )


class CollectiveSlots:
    """What a collective costs, by slot.

    Attributes:
        axes: Names of the mesh axes of each slot.
        group_size: [slots] devices in a group.
        latency_s: [slots] seconds of one collective of no bytes.
        s_per_byte: [slots] seconds for each byte of the full value.
    """

    def __init__(
        self, hardware: Hardware, placements: Placements, mesh_axes: Mapping[str, int]
    ) -> None:
        self.count = len(KINDS) << len(placements.axes)
        self.axes: list[tuple[str, ...]] = []
        self.group_size: Array = np.ones(self.count, dtype=np.int64)
        self.latency_s = np.zeros(self.count)
        self.s_per_byte = np.zeros(self.count)
        for slot in range(self.count):
            axis_set, kind_number = divmod(slot, len(KINDS))
            kind = KINDS[kind_number]
            axes = tuple(name for a, name in enumerate(placements.axes) if axis_set >> a & 1)
            self.axes.append(axes)
            if axes:
                link, group_size = joint(hardware, mesh_axes, axes)
                latency_s = collective_s(kind, 0, link, group_size)
                large_s = collective_s(kind, _LARGE_BYTES, link, group_size)
                self.group_size[slot] = group_size
                self.latency_s[slot] = latency_s
                self.s_per_byte[slot] = (large_s - latency_s) / _LARGE_BYTES

    def sent_bytes(self, slot: Array, full_bytes: Array) -> Array:
        """[n] bytes that one device sends on a ring, rounded down."""
        kind = slot % len(KINDS)
        group_size = self.group_size[slot]
        sent = np.zeros(len(slot), dtype=np.int64)
        for k in np.unique(kind).tolist():
            for devices in np.unique(group_size).tolist():
                same = (kind == k) & (group_size == devices)
                sent[same] = _ring_bytes(KINDS[k], full_bytes[same], devices)
        return sent


@dataclass(frozen=True, eq=False, slots=True)
class ClassCosts:
    """Costs of n classes, each under its own layout.

    Attributes:
        compute_s: [n] seconds of compute, of all runs.
        runs: [n] how often the collectives run per call.
        collectives: Of one run.
        temporaries: By position among the n.
    """

    compute_s: NDArray[np.float64]
    runs: NDArray[np.float64]
    collectives: CollectiveBatch
    temporaries: Temporaries
