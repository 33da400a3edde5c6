"""What readers that shift a dimension ask for where their work splits it, for many at once (see
`halo`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.axes.sharding_rules import ShardingRule
from autoshard.cost_model.program.halo import GATHERED, TRANSPOSED, exchanges, shards_sent
from autoshard.cost_model.step_time.reshard import Array, Moves, Specs
from autoshard.layout.placements import Placements
from autoshard.tracing.program import Eqn, Value

Placed = NDArray[np.int8]


class Turned:
    """Results of works that run with another dimension split than the one that they shift (see
    `TRANSPOSED`).
    """

    def __init__(
        self, placements: Placements, rules: Sequence[ShardingRule], eqns: Sequence[Eqn]
    ) -> None:
        sizes = _pieces(placements)
        self._factor = np.full(len(eqns), -1, dtype=np.int64)
        self._able = np.zeros((len(eqns), len(sizes)), dtype=bool)
        for number, eqn in enumerate(eqns):
            for operand, dim, asked in exchanges(eqn, rules[eqn.index])[:1]:
                able = [shards_sent(eqn, asked, pieces) == TRANSPOSED for pieces in sizes]
                if any(able):
                    self._factor[number] = rules[eqn.index].operands[operand][dim]
                    self._able[number] = able

    def add(
        self, moves: Moves, specs: Specs, number: Array, owner: Array, work: Placed, local: Array
    ) -> None:
        """Adds what brings results back.

        Args:
            moves: Is added to.
            specs: Numbers of the specs.
            number: [n] the work of each result.
            owner: [n] which cost it belongs to.
            work: [n, axes] loops that the work splits.
            local: [n] bytes of the result on one device.
        """
        factor = self._factor[number]
        split = (work == factor[:, None]) & (factor >= 0)[:, None]
        mask = np.asarray(split @ (1 << np.arange(work.shape[1])), dtype=np.int64)
        moves.add(
            "all_to_all",
            owner,
            np.where(self._able[number, mask], mask, 0),
            local * specs.devices[mask],
        )


def _pieces(placements: Placements) -> list[int]:
    """By set of mesh axes (bits), into how many pieces they cut."""
    axes = list(enumerate(placements.sizes))
    return [math.prod(size for a, size in axes if mask >> a & 1) for mask in range(1 << len(axes))]


class Shifts:
    """Halos of readers, tabulated by the mesh axes that split the shifted dimension."""

    def __init__(
        self,
        placements: Placements,
        rules: Sequence[ShardingRule],
        readers: Sequence[tuple[Value, Eqn, tuple[int, ...]]],
    ) -> None:
        sizes = _pieces(placements)
        found: list[tuple[int, int, list[float]]] = []
        for entry, (value, eqn, factors) in enumerate(readers):
            rule = rules[eqn.index]
            for operand, dim, asked in exchanges(eqn, rule):
                if eqn.inputs[operand].index == value.index and rule.operands[operand] == factors:
                    sent = [0.0, *(shards_sent(eqn, asked, pieces) for pieces in sizes[1:])]
                    found.append((entry, factors[dim], sent))
        self._shifting = np.zeros(len(readers), dtype=bool)
        self._shifting[[entry for entry, *_ in found]] = True
        self._first = np.searchsorted([entry for entry, *_ in found], np.arange(len(readers) + 1))
        self._factor = np.array([factor for _, factor, _ in found], dtype=np.int64)
        self._sent = np.array([sent for *_, sent in found], dtype=np.float64).reshape(
            -1, len(sizes)
        )

    def add(
        self,
        moves: Moves,
        specs: Specs,
        owner: Array,
        entry: Array,
        work: Placed,
        want: Placed,
        value_bytes: Array,
    ) -> Placed:
        """Adds the halos of readers, and returns the specs in which they want their operands then.

        Args:
            moves: Is added to.
            specs: Numbers of the specs.
            owner: [n] which cost each reader belongs to.
            entry: [n] the reader.
            work: [n, axes] loops that its work splits.
            want: [n, axes] dimensions that would split it as the work is.
            value_bytes: [n] bytes of the whole value.
        """
        reading = np.flatnonzero(self._shifting[entry])
        if not len(reading):
            return want
        want = want.copy()
        counts = self._first[entry[reading] + 1] - self._first[entry[reading]]
        at = np.repeat(reading, counts)
        shift = (
            np.arange(len(at))
            - np.repeat(np.cumsum(counts) - counts, counts)
            + self._first[entry[at]]
        )
        split = work[at] == self._factor[shift][:, None]
        mask = np.asarray(split @ (1 << np.arange(work.shape[1])), dtype=np.int64)
        some = np.flatnonzero(mask)
        at, shift, split, mask = at[some], shift[some], split[some], mask[some]
        sent = self._sent[shift, mask]
        aside, gathered = (
            sent == TRANSPOSED,
            sent == GATHERED,
        )  # along another dimension, or not at all
        row, axis = np.nonzero(split & gathered[:, None])
        want[at[row], axis] = -1
        held = value_bytes[at] // specs.devices[specs.mask(want[at]) | np.where(gathered, 0, mask)]
        turned = np.where(aside, mask, 0)
        moves.add("all_to_all", owner[at], turned, held * specs.devices[turned])
        halo = np.where(sent > 0, mask, 0)
        moves.add(
            "collective_permute", owner[at], halo, (held * np.maximum(sent, 0.0)).astype(np.int64)
        )
        return want
