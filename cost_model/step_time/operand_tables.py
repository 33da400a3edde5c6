"""Operands, results and readers of classes as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.axes.sharding_rules import ShardingRule
from autoshard.cost_model.program.applied_constraints import AppliedColumns
from autoshard.cost_model.program.equation_classes import Operand
from autoshard.cost_model.step_time.reshard import Array
from autoshard.layout.constraints import closed_dims
from autoshard.layout.placements import Placements
from autoshard.tracing.program import Eqn


class Reads:
    """Operands, results or readers as arrays: which value, which work, and the dimension of each
    loop.
    """

    def __init__(
        self,
        placements: Placements,
        columns: AppliedColumns,
        rules: Sequence[ShardingRule],
        items: Sequence[tuple[Eqn, Operand]],
        max_factors: int,
    ) -> None:
        count = len(items)
        rank = max((len(o.factors) for _, o in items), default=0)
        self.work = np.array([columns.of_eqn(eqn) for eqn, _ in items], dtype=np.int64)
        self.value = np.array([columns.of_value(o.value) for _, o in items], dtype=np.int64)
        self.bytes = np.array([o.value.bytes for _, o in items], dtype=np.int64)
        self.dim_of_factor = np.full((count, max_factors + 1), -1, dtype=np.int8)
        self.sizes = np.ones((count, rank + 1), dtype=np.int64)
        self.closed = np.zeros((count, rank + 1), dtype=bool)
        for i, (eqn, operand) in enumerate(items):
            self.closed[
                i, sorted(closed_dims(eqn.primitive, rules[eqn.index], operand.factors))
            ] = True
            for dim in reversed(range(len(operand.factors))):
                self.dim_of_factor[i, operand.factors[dim]] = dim
            self.sizes[i, : len(operand.factors)] = operand.value.shape
        every = int(np.prod(placements.sizes, dtype=np.int64))
        self.uneven = (self.sizes % every != 0).any(axis=1)


class Ragged:
    """Entries of classes, `starts[c]` to `starts[c + 1]`."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = np.array(counts, dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    def of(self, classes: Array) -> tuple[Array, Array]:
        """(position in `classes`, entry) of every entry of these classes."""
        counts = self.counts[classes]
        owner = np.repeat(np.arange(len(classes)), counts)
        first = np.cumsum(counts) - counts
        return owner, np.arange(len(owner)) - first[owner] + self.starts[classes][owner]
