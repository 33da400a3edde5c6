"""Exchanges of operations that shift a dimension where they split it, for many at once (`halo`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.cost_model.program.applied_constraints import Array, Dims, Reader
from autoshard.cost_model.program.halo import GATHERED, TRANSPOSED, exchanges, shards_sent
from autoshard.cost_model.program.ragged import Ragged
from autoshard.cost_model.step_time.collective_tables import CollectiveBatch
from autoshard.cost_model.step_time.operand_tables import Context
from autoshard.layout.placements import Placements
from autoshard.tracing.program import Eqn, Value


class TransposedExchanges:
    """Results of equations that run with another dimension split than the one that they shift.

    The results are brought back by an all_to_all (see `Exchange.TRANSPOSED`).
    """

    def __init__(self, context: Context, eqns: Sequence[Eqn]) -> None:
        shard_counts = _shard_counts(context.placements)
        # [classes]: the factor that is shifted, -1 for none
        self._factor = np.full(len(eqns), -1, dtype=np.int64)
        # [classes, sets of mesh axes]: whether a split over them is exchanged for another one
        self._transposes = np.zeros((len(eqns), len(shard_counts)), dtype=bool)
        for number, eqn in enumerate(eqns):
            rule = context.rules[eqn.index]
            for operand, dim, requirement in exchanges(eqn, rule)[
                :1
            ]:  # each shifts the same factor
                sent = [shards_sent(eqn, requirement, count) for count in shard_counts]
                transposes = [shards == TRANSPOSED for shards in sent]
                if any(transposes):
                    self._factor[number] = rule.operands[operand][dim]
                    self._transposes[number] = transposes

    def add(
        self, batch: CollectiveBatch, number: Array, owner: Array, factors: Dims, local: Array
    ) -> None:
        """Adds what brings results back.

        Args:
            batch: Is added to.
            number: [n] the class that each result is of.
            owner: [n] which cost it belongs to.
            factors: [n, mesh axes] factors that the equation splits.
            local: [n] bytes of the result on one device.
        """
        factor = self._factor[number]
        split = (factors == factor[:, None]) & (factor >= 0)[:, None]
        axis_set = np.asarray(split @ (1 << np.arange(factors.shape[1])), dtype=np.int64)
        transposed = np.where(self._transposes[number, axis_set], axis_set, 0)
        batch.add("all_to_all", owner, transposed, local * batch.specs.shard_count[axis_set])


@dataclass(frozen=True, eq=False, slots=True)
class Operands:
    """Operands of n readers, as the equations want them.

    Attributes:
        owner: [n] which cost each belongs to.
        entry: [n] the reader.
        value_bytes: [n] bytes of the whole value.
    """

    owner: Array
    entry: Array
    value_bytes: Array


class HaloExchanges:
    """Halos of readers, tabulated by the mesh axes that split the shifted dimension."""

    def __init__(self, context: Context, readers: Sequence[tuple[Value, Reader]]) -> None:
        shard_counts = _shard_counts(context.placements)
        factors: list[int] = []
        shards: list[list[float]] = []
        counts = []
        for value, reader in readers:
            before = len(factors)
            for dim, sent in _shifted_dims(context, value, reader, shard_counts):
                factors.append(reader.factors[dim])
                shards.append(sent)
            counts.append(len(factors) - before)
        # of each reader, its shifted dimensions
        self._shifted_of = Ragged(counts)
        # [shifted dimensions]: the factor that runs over it
        self._factor = np.array(factors, dtype=np.int64)
        # [shifted dimensions, sets of mesh axes]: shards that one device sends (see `shards_sent`)
        self._shards = np.array(shards, dtype=np.float64).reshape(-1, len(shard_counts))

    def add(self, batch: CollectiveBatch, operands: Operands, factors: Dims, wanted: Dims) -> Dims:
        """Adds the halos of readers; returns the dimensions of their operands that stay split.

        Args:
            batch: Is added to.
            operands: What is read.
            factors: [n, mesh axes] factors that the readers split.
            wanted: [n, mesh axes] dimensions that would split the operands likewise.
        """
        # [shifted dimensions of the n readers]: position among the n; which shifted dimension
        position, shifted = self._shifted_of.of(operands.entry)
        if not len(position):
            return wanted
        wanted = wanted.copy()
        # [shifted, mesh axes]: those that split it; from here on only where there are some
        split = factors[position] == self._factor[shifted][:, None]
        axis_set = np.asarray(split @ (1 << np.arange(factors.shape[1])), dtype=np.int64)
        some = np.flatnonzero(axis_set)
        position, shifted, split, axis_set = (
            position[some],
            shifted[some],
            split[some],
            axis_set[some],
        )
        shards = self._shards[shifted, axis_set]
        transposed, gathered = shards == TRANSPOSED, shards == GATHERED

        row, axis = np.nonzero(split & gathered[:, None])
        wanted[position[row], axis] = -1  # gathered along it: the reshard pays
        specs = batch.specs
        cut = specs.axis_set(wanted[position]) | np.where(gathered, 0, axis_set)
        local = operands.value_bytes[position] // specs.shard_count[cut]
        owner = operands.owner[position]

        transposed_over = np.where(transposed, axis_set, 0)
        batch.add("all_to_all", owner, transposed_over, local * specs.shard_count[transposed_over])
        halo_bytes = (local * np.maximum(shards, 0.0)).astype(np.int64)
        batch.add("collective_permute", owner, np.where(shards > 0, axis_set, 0), halo_bytes)
        return wanted


def _shifted_dims(
    context: Context, value: Value, reader: Reader, shard_counts: Sequence[int]
) -> list[tuple[int, list[float]]]:
    """The dimensions of a value that a reader shifts.

    For each, [sets of mesh axes] the shards that one device sends where they split it.
    """
    eqn, factors = reader
    rule = context.rules[eqn.index]
    shifted = []
    for operand, dim, requirement in exchanges(eqn, rule):
        if eqn.inputs[operand].index == value.index and rule.operands[operand] == factors:
            sent = [0.0, *(shards_sent(eqn, requirement, n) for n in shard_counts[1:])]
            shifted.append((dim, sent))
    return shifted


def _shard_counts(placements: Placements) -> list[int]:
    """By set of mesh axes (bits), into how many shards they cut."""
    axes = list(enumerate(placements.sizes))
    counts = []
    for axis_set in range(1 << len(axes)):
        counts.append(math.prod(size for a, size in axes if axis_set >> a & 1))
    return counts
