"""Operands, results and readers of classes as flat arrays, and the specs that they are wanted in.

An equation's factors are split as first-fit says (its *computation sharding*). Each operand is
wanted split as the factors that run over its dimensions, and each result comes out so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.axes.sharding_rules import ShardingRule
from autoshard.cost_model.hardware.backend import Backend
from autoshard.cost_model.program.applied_constraints import (
    AppliedColumns,
    AppliedConstraints,
    Array,
    Assignment,
    Dims,
    Index,
    Mask,
    Reader,
    dims_over,
    factor_rows,
    look_up,
    unsplit,
)
from autoshard.cost_model.program.gathered_factors import gathered_factors
from autoshard.cost_model.step_time.reshard import Specs
from autoshard.layout.constraints import closed_dims
from autoshard.layout.narrow import Narrow
from autoshard.layout.placements import OPEN, Placements
from autoshard.layout.problem import Problem
from autoshard.tracing.program import Eqn, Value


@dataclass(frozen=True, eq=False, slots=True)
class Context:
    """What the tables of one problem have in common.

    Attributes:
        placements: Where each mesh axis goes, by column.
        columns: Columns of values and of factors under applied constraints.
        specs: Numbers of specs.
        rules: By `Eqn.index`, the sharding rule.
        backend: Whose partitioner it is.
    """

    placements: Placements
    columns: AppliedColumns
    specs: Specs
    rules: Sequence[ShardingRule]
    backend: Backend

    @classmethod
    def of(
        cls,
        problem: Problem,
        placements: Placements,
        applied: AppliedConstraints,
        backend: Backend,
    ) -> Context:
        """The context of a problem."""
        rules = problem.logical_axes.classes.rules
        max_rank = max((len(v.shape) for v in problem.program.values), default=0)
        columns = AppliedColumns(problem, placements, applied)
        return cls(placements, columns, Specs(placements, max_rank), rules, backend)

    def gathered(self, eqns: Sequence[Eqn]) -> Narrow:
        """[equations, gathered factors] those that the partitioner gathers if they are split."""
        rules, backend = self.rules, self.backend
        gathered = [sorted(gathered_factors(eqn, rules[eqn.index], backend)) for eqn in eqns]
        return factor_rows(gathered, self.placements.dtype)

    def computation(self, index: Index, columns: Array, gathered: Narrow) -> Assignment:
        """How equations are computed: the factor of each mesh axis.

        Args:
            index: [n, mesh axes + 1] rows of `Placements`.
            columns: [n] columns of the factors.
            gathered: [n, gathered factors] from `gathered`.
        """
        dims, order = self.columns.assignment(index, columns)
        return Assignment(unsplit(dims, is_among(gathered, dims)), order)


def is_among(factors: Narrow, split: Dims) -> Mask:
    """[n, mesh axes] whether a mesh axis splits one of these factors.

    Args:
        factors: [n, factors] from `factor_rows`.
        split: [n, mesh axes] factors that mesh axes split.
    """
    return np.asarray((factors[:, None, :] == split[:, :, None]).any(axis=2))


class OperandTable:
    """Operands, results or readers: which value, and the factors that run over its dimensions.

    Attributes:
        bytes: [entries] bytes of the whole value.
    """

    def __init__(self, context: Context, entries: Sequence[tuple[Value, Reader]]) -> None:
        """Fills the table.

        Args:
            context: The problem.
            entries: For each a value, and the equation that reads or computes it.
        """
        self._context = context
        count = len(entries)
        rank = max((len(reader.factors) for _, reader in entries), default=0)
        # [entries]: columns of the equation's factors, and of the value
        self._factors_column = np.zeros(count, dtype=np.int64)
        self._value_column = np.zeros(count, dtype=np.int64)
        self.bytes = np.zeros(count, dtype=np.int64)
        # [entries, dimensions]: factor that runs over each
        factors_of_entries = [reader.factors for _, reader in entries]
        self._factors = factor_rows(factors_of_entries, context.placements.dtype)
        # [entries, dimensions + 1]: sizes of the dimensions; which of them the equation shifts, so
        # that they are never left open (see `closed_dims`)
        self._sizes = np.ones((count, rank + 1), dtype=np.int64)
        self._closed = np.zeros((count, rank + 1), dtype=bool)
        for i, (value, (eqn, factors)) in enumerate(entries):
            self._factors_column[i] = context.columns.of_eqn(eqn)
            self._value_column[i] = context.columns.of_value(value)
            self.bytes[i] = value.bytes
            closed = closed_dims(eqn, context.rules[eqn.index], factors)
            self._closed[i, sorted(closed)] = True
            self._sizes[i, : len(factors)] = value.shape
        devices = int(np.prod(context.placements.sizes, dtype=np.int64))
        # [entries]: whether some mesh axes do not divide some dimension
        self._uneven = (self._sizes % devices != 0).any(axis=1)
        self._gathered = context.gathered([reader.eqn for _, reader in entries])

    def current(self, entry: Array, index: Index) -> Assignment:
        """The specs of entries' values in layouts, as rows of `Placements`."""
        return self._context.columns.assignment(index, self._value_column[entry])

    def stated(self, entry: Array, index: Index) -> Dims:
        """[n, mesh axes] the factors that layouts split, gathered ones too."""
        return self._context.columns.assignment(index, self._factors_column[entry]).dims

    def computation(self, entry: Array, index: Index) -> Assignment:
        """How the equations of entries are split in layouts: the factor of each mesh axis."""
        return self._context.computation(index, self._factors_column[entry], self._gathered[entry])

    def dims_of_factors(self, entry: Array, factors: Dims) -> Dims:
        """[n, mesh axes] the dimensions over which those factors run that mesh axes split."""
        return dims_over(self._factors[entry], factors)

    def operand_spec(
        self, entry: Array, computation: Assignment, current: Assignment
    ) -> Assignment:
        """The specs in which equations read their operands; open factors read them as they are.

        Args:
            entry: [n] which operand.
            computation: How the equation is split.
            current: The spec of the operand.
        """
        dims = self.dims_of_factors(entry, computation.dims)
        spec = Assignment(dims, computation.order)
        opened = np.flatnonzero((computation.dims == OPEN).any(axis=1))
        if len(opened):
            # [opened, mesh axes]: whether the equation shifts the dimension that it splits now
            closed = look_up(self._closed[entry[opened]], np.maximum(current.dims[opened], 0))
            spec = _inherit(spec, current, opened, ~closed)

        # where a dimension has another size than the factor that runs over it (in a slice, a pad),
        # mesh axes that divide the factor need not divide it
        uneven = np.flatnonzero(self._uneven[entry])
        if len(uneven):
            dims = spec.dims.copy()
            dims[uneven] = self._divided(dims[uneven], self._sizes[entry[uneven]])
            spec = Assignment(dims, spec.order)
        return spec

    def _divided(self, dims: Dims, sizes: Array) -> Dims:
        """Without the mesh axes of dimensions that they do not divide together."""
        shard_counts = np.ones_like(sizes)  # [n, dimensions + 1]
        for axis, size in enumerate(self._context.placements.sizes):
            split = np.flatnonzero(dims[:, axis] >= 0)
            shard_counts[split, dims[split, axis]] *= size
        uneven = look_up(sizes % shard_counts != 0, np.maximum(dims, 0))
        return unsplit(dims, (dims >= 0) & uneven)


def result_spec(computed: Assignment, stated: Assignment) -> Assignment:
    """The spec of results after the reshard: dimensions left open keep what the computation gives.

    Args:
        computed: The spec in which the equation leaves them.
        stated: Their own spec.
    """
    opened = np.flatnonzero((stated.dims == OPEN).any(axis=1))
    if not len(opened):
        return stated
    everywhere = np.ones((len(opened), stated.dims.shape[1]), dtype=bool)
    return _inherit(stated, computed, opened, everywhere)


def _inherit(spec: Assignment, other: Assignment, opened: Array, allowed: Mask) -> Assignment:
    """A spec in which mesh axes that split nothing split what they do in another one.

    Args:
        spec: [n, mesh axes] the spec.
        other: [n, mesh axes] the one that it inherits from.
        opened: [m] the entries that inherit.
        allowed: [m, mesh axes] False for mesh axes of the other one that are not inherited.
    """
    dims, order = spec.dims.copy(), spec.order.copy()
    own, others = dims[opened], other.dims[opened]  # [m, mesh axes]
    # [m, mesh axes]: whether the dimension of the other one is split here already
    taken = (own[:, :, None] == others[:, None, :]).any(axis=1)
    inherited = (own < 0) & (others >= 0) & ~taken & allowed
    dims[opened] = np.where(inherited, others, own)
    changed = opened[inherited.any(axis=1)]
    order[changed] = other.order[changed]
    return Assignment(dims, order)
