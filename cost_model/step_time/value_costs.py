"""Costs of classes of values under many layouts at once: what brings them to where they are read.

Each reader wants a value in a spec of its own. A spec that is wanted is paid once, for all readers
that want it, and the copy is alive until the last of them ran. Readers that shift a dimension get
halos instead (`halo_tables`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.cost_model.program.applied_constraints import Array, Assignment, Index
from autoshard.cost_model.program.equation_classes import ValueClass
from autoshard.cost_model.step_time.collective_tables import ClassCosts, CollectiveBatch
from autoshard.cost_model.step_time.halo_tables import HaloExchanges, Operands
from autoshard.cost_model.step_time.operand_tables import Context, OperandTable, Ragged
from autoshard.cost_model.step_time.temporaries import CopyColumns, Temporaries

READER_BITS = 62
"""Kinds of readers that are told apart by one bit each in an int64; those beyond share bits, so that
their copies live as long as those of the kinds that they share with."""


class ValueCosts:
    """Classes of values as arrays, and what they cost."""

    def __init__(
        self, context: Context, classes: Sequence[ValueClass], copy_columns: CopyColumns
    ) -> None:
        self._context = context
        self._copy_columns = copy_columns
        readers = [(c.value, reader) for c in classes for reader in c.readers]
        self._moves = np.array([c.moves_per_call for c in classes])  # [classes]
        self._readers_of = Ragged([len(c.readers) for c in classes])
        self._readers = OperandTable(context, readers)
        self._halos = HaloExchanges(context, readers)
        # [readers]: the bit of a reader among those of its class
        kinds = np.array([k for c in classes for k in range(len(c.readers))], dtype=np.int64)
        self._reader_bit = 1 << (kinds % READER_BITS)

    def costs(self, number: Array, index: Index) -> ClassCosts:
        """What classes cost.

        Args:
            number: [n] the classes.
            index: [n, mesh axes + 1] a layout for each, as rows of `Placements`.
        """
        specs = self._context.specs
        owner, entry = self._readers_of.of(number)
        operands = Operands(owner, entry, self._readers.bytes[entry])
        current = self._readers.current(entry, index[owner])
        computation = self._readers.computation(entry, index[owner])
        wanted = self._readers.operand_spec(entry, computation, current)
        collectives = CollectiveBatch(specs)
        dims = self._halos.add(collectives, operands, computation.dims, wanted.dims)
        before, after = specs.number(current), specs.number(Assignment(dims, wanted.order))

        # [readers that want a copy], by owner and spec; [copies]: the first reader of each
        reading, start = _by_copy(owner, before, after)
        first = reading[start]
        collectives.add_reshards(
            owner[first], operands.value_bytes[first], before[first], after[first]
        )
        temporaries = Temporaries.none()
        if len(first):
            readers = np.bitwise_or.reduceat(self._reader_bit[entry[reading]], start)
            column = self._copy_columns.of(number[owner[first]], readers)
            shards = specs.shard_count[specs.axis_set(dims[first])]
            temporaries = Temporaries(owner[first], column, operands.value_bytes[first] // shards)
        return ClassCosts(np.zeros(len(number)), self._moves[number], collectives, temporaries)


def _by_copy(owner: Array, before: Array, after: Array) -> tuple[Array, Array]:
    """Readers that want another spec, those of one copy together, and where each copy begins.

    Args:
        owner: [readers] which cost each belongs to.
        before: [readers] number of the spec that its operand has.
        after: [readers] number of the spec that it wants.
    """
    reading = np.flatnonzero(before != after)
    reading = reading[np.lexsort((after[reading], owner[reading]))]
    copy = np.stack([owner[reading], after[reading]])  # [2, readers that want a copy]
    begins = np.ones(len(reading), dtype=bool)
    begins[1:] = (copy[:, 1:] != copy[:, :-1]).any(axis=0)
    return reading, np.flatnonzero(begins)
