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
from autoshard.cost_model.program.ragged import Ragged
from autoshard.cost_model.step_time.collective_tables import ClassCosts, CollectiveBatch
from autoshard.cost_model.step_time.halo_tables import HaloExchanges, Operands
from autoshard.cost_model.step_time.operand_tables import Context, OperandTable
from autoshard.cost_model.step_time.temporaries import CopyColumns, Temporaries, reader_bit


class ValueCosts:
    """Classes of values as arrays, and what they cost."""

    def __init__(
        self, context: Context, classes: Sequence[ValueClass], copy_columns: CopyColumns
    ) -> None:
        """Prepares the arrays.

        Args:
            context: The problem.
            classes: The classes, in the order of their numbers.
            copy_columns: Memory columns of copies; grows.
        """
        self._context = context
        self._copy_columns = copy_columns
        readers = []
        reader_bits: list[int] = []
        for value_class in classes:
            for kind, reader in enumerate(value_class.readers):
                readers.append((value_class.value, reader))
                reader_bits.append(reader_bit(kind))
        self._readers_of = Ragged([len(c.readers) for c in classes])
        self._readers = OperandTable(context, readers)
        self._halos = HaloExchanges(context, readers)
        self._reader_bits = np.array(reader_bits, dtype=np.int64)  # [readers]
        self._moves_per_call = np.array([c.moves_per_call for c in classes])  # [classes]

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
        collectives = CollectiveBatch(specs)
        wanted = self._wanted(collectives, operands, index, current)
        before, after = specs.number(current), specs.number(wanted)

        # [readers that want a copy], those of one copy together; [copies]: where each begins
        reading, start = _by_copy(owner, before, after)
        # [copies]: one of the readers, whom it costs; it is there for the others too
        first = reading[start]
        value_bytes = operands.value_bytes[first]
        collectives.add_reshards(owner[first], value_bytes, before[first], after[first])

        sharing = np.bitwise_or.reduceat(self._reader_bits[entry[reading]], start)
        column = self._copy_columns.of(number[owner[first]], sharing)
        local = value_bytes // specs.shard_count[specs.axis_set(wanted.dims[first])]
        copies = Temporaries(owner[first], column, local)
        return ClassCosts(np.zeros(len(number)), self._moves_per_call[number], collectives, copies)

    def _wanted(
        self, collectives: CollectiveBatch, operands: Operands, index: Index, current: Assignment
    ) -> Assignment:
        """The specs in which readers want their operands, once halos are exchanged."""
        computation = self._readers.computation(operands.entry, index[operands.owner])
        wanted = self._readers.operand_spec(operands.entry, computation, current)
        dims = self._halos.add(collectives, operands, computation.dims, wanted.dims)
        return Assignment(dims, wanted.order)


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
