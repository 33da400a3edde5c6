"""Costs of classes of equations under many layouts at once.

The computation is split as first-fit over its factors says. A reduced factor that is split leaves a
partial sum: an all_reduce, or a reduce_scatter where the result's own spec takes the mesh axis up.
Then the result is brought to its own spec. Seconds of compute are a roofline: the longer of
arithmetic and memory traffic, on one device's shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.axes.sharding_rules import ARG_REDUCTION, FactorKind
from autoshard.cost_model.hardware.backend import Backend
from autoshard.cost_model.hardware.hardware import Hardware
from autoshard.cost_model.program.applied_constraints import (
    Array,
    Assignment,
    Dims,
    Index,
    Mask,
    Reader,
    look_up,
)
from autoshard.cost_model.program.equation_classes import EquationClass, Operand
from autoshard.cost_model.step_time.collective_tables import ClassCosts, CollectiveBatch
from autoshard.cost_model.step_time.halo_tables import TransposedExchanges
from autoshard.cost_model.step_time.operand_tables import (
    Context,
    OperandTable,
    Ragged,
    result_spec,
)
from autoshard.cost_model.step_time.temporaries import Temporaries
from autoshard.layout.placements import Placements
from autoshard.tracing.primitives import ANCHORS, COPIES

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True)
class _Results:
    """The m results of n classes under their layouts.

    Attributes:
        owner: [m] position among the n.
        number: [m] the class.
        entry: [m] the entry in the table of results.
        value_bytes: [m] bytes of the whole value.
        factors: [m, mesh axes] factors that the equation splits.
        computed: The specs in which the equation leaves them.
        target: Those in which they are stored.
        local: [m] bytes that the equation computes on one device.
        partial: [m, mesh axes] whether a mesh axis splits a reduced factor.
        partial_over: [m] the mesh axes that do, as a set.
    """

    owner: Array
    number: Array
    entry: Array
    value_bytes: Array
    factors: Dims
    computed: Assignment
    target: Assignment
    local: Array
    partial: Mask
    partial_over: Array


class EquationCosts:
    """Classes of equations as arrays, and what they cost."""

    def __init__(
        self,
        context: Context,
        hardware: Hardware,
        backend: Backend,
        classes: Sequence[EquationClass],
    ) -> None:
        self._context = context
        self._hardware = hardware
        self._classes = classes
        self._has_reduce_scatter = backend.has_reduce_scatter
        eqns = [c.eqn for c in classes]
        # [classes] each
        self._runs = np.array([c.runs_per_call for c in classes])
        self._flops = np.array([c.flops for c in classes])
        self._flops_per_s = np.array([hardware.flops_per_s(_dtype(c)) for c in classes])
        self._op_s = np.array([c.unfused_share * hardware.op_s for c in classes])
        self._factors_column = np.array([context.columns.of_eqn(e) for e in eqns], dtype=np.int64)
        self._copies = np.array([e.primitive in COPIES for e in eqns], dtype=bool)
        combines = [context.rules[e.index].combine for e in eqns]
        self._arg_reduces = np.array([c == ARG_REDUCTION for c in combines], dtype=bool)
        # whether partial sums over different factors are added up one by one
        anchors = [e.primitive in ANCHORS for e in eqns]
        self._sums_by_factor = np.array(anchors, dtype=bool) & (not backend.folds_all_reduces)
        # [classes, factors + 1]: whether a factor is reduced; the last is no factor
        self._reduced = _reduced_factors(classes, context.max_factors)

        self._operands_of = Ragged([len(c.operands) for c in classes])
        self._results_of = Ragged([len(c.results) for c in classes])
        operands = [(c, operand) for c in classes for operand in c.operands]
        results = [(c, result) for c in classes for result in c.results]
        self._operands = _table(context, operands)
        self._results = _table(context, results)
        # [operands], [results]: how often their bytes go to or from memory
        self._loads = np.array([operand.transfers for _, operand in operands])
        self._writes = np.array([result.transfers for _, result in results])
        self._transposed = TransposedExchanges(context, eqns)

    # Costs ----------------------------------------------------------------------------------------

    def costs(self, number: Array, index: Index) -> ClassCosts:
        """What classes cost.

        Args:
            number: [n] the classes.
            index: [n, mesh axes + 1] a layout for each, as rows of `Placements`.
        """
        computation = self._context.columns.assignment(index, self._factors_column[number])
        read = self._read_bytes(number, index, computation)
        results = self._results_under(number, index, computation)
        compute_s = self._compute_s(number, computation, read, results)
        collectives = CollectiveBatch(self._context.specs)
        scattered = self._add_sums(collectives, results)
        before, after = self._add_reshards(collectives, results)
        temporaries = self._temporaries(number, results, scattered, before != after)
        return ClassCosts(compute_s, self._runs[number], collectives, temporaries)

    def _read_bytes(self, number: Array, index: Index, computation: Assignment) -> Floats:
        """[n] bytes that one device reads from memory."""
        owner, entry = self._operands_of.of(number)
        current = self._operands.current(entry, index[owner])
        wanted = self._operands.operand_spec(entry, _at(computation, owner), current)
        local = self._local_bytes(self._operands.bytes[entry], wanted.dims)
        return _sum_by(owner, local * self._loads[entry], len(number))

    def _results_under(self, number: Array, index: Index, computation: Assignment) -> _Results:
        owner, entry = self._results_of.of(number)
        value_bytes = self._results.bytes[entry]
        factors, order = _at(computation, owner)
        computed = Assignment(self._results.dims_of_factors(entry, factors), order)
        target = result_spec(computed, self._results.current(entry, index[owner]))
        partial = look_up(self._reduced[number[owner]], np.maximum(factors, -1))
        return _Results(
            owner=owner,
            number=number[owner],
            entry=entry,
            value_bytes=value_bytes,
            factors=factors,
            computed=computed,
            target=target,
            local=self._local_bytes(value_bytes, computed.dims),
            partial=partial,
            partial_over=partial @ (1 << np.arange(partial.shape[1])),
        )

    def _compute_s(
        self, number: Array, computation: Assignment, read: Floats, results: _Results
    ) -> Floats:
        """[n] seconds of compute, of all runs: a roofline."""
        specs = self._context.specs
        split = specs.axis_set(results.computed.dims) | specs.axis_set(results.target.dims)
        part = results.value_bytes // specs.shard_count[split]
        # a copy is fused with what is cut from its result, and writes that only
        written = np.where(self._copies[results.number], part, results.local)
        traffic = _sum_by(results.owner, written * self._writes[results.entry], len(number))
        traffic += self._read_for(number, read, _sum_by(results.owner, part, len(number)))
        devices = specs.shard_count[specs.axis_set(computation.dims)]
        arithmetic_s = self._flops[number] / devices / self._flops_per_s[number]
        traffic_s = traffic / self._hardware.memory_bytes_per_s
        run_s = self._op_s[number] + np.maximum(arithmetic_s, traffic_s)
        compute_s: Floats = self._runs[number] * run_s
        return compute_s

    def _read_for(self, number: Array, read: Floats, result: Floats) -> Floats:
        """[n] bytes that classes read for results of so many: a copy reads only what is cut from
        it.
        """
        return np.where(self._copies[number], np.minimum(read, result), read)

    def _local_bytes(self, value_bytes: Array, dims: Dims) -> Array:
        specs = self._context.specs
        local: Array = value_bytes // specs.shard_count[specs.axis_set(dims)]
        return local

    # Partial sums ---------------------------------------------------------------------------------

    def _add_sums(self, collectives: CollectiveBatch, results: _Results) -> Array:
        """Adds the collectives of partial results; returns [m] the mesh axes of reduce_scatters."""
        shard_count = self._context.specs.shard_count
        local, owner = results.local, results.owner
        by_index = np.where(self._arg_reduces[results.number], results.partial_over, 0)
        for bytes_ in (local, self._picked_bytes(results)):  # where each shard's best is, and what
            collectives.add("all_gather", owner, by_index, bytes_ * shard_count[by_index])

        added = results.partial_over & ~by_index
        scattered = np.zeros_like(added)
        if self._has_reduce_scatter:
            scattered = added & self._context.specs.axis_set(results.target.dims)
        for together in self._summed_together(results):
            collectives.add("all_reduce", owner, added & ~scattered & together, local)
            collectives.add("reduce_scatter", owner, scattered & together, local)
        return scattered

    def _picked_bytes(self, results: _Results) -> Array:
        """[m] local bytes of the values that an arg-reduction picks by the indices that it returns."""
        picked = np.zeros_like(results.local)
        for n in np.unique(results.number[self._arg_reduces[results.number]]).tolist():
            eqn, same = self._classes[n].eqn, results.number == n
            elements = results.local[same] // eqn.outputs[0].itemsize
            picked[same] = elements * eqn.inputs[0].itemsize
        return picked

    def _summed_together(self, results: _Results) -> list[Array]:
        """[m] sets of mesh axes, of each of which partial sums are added up by one collective."""
        factors = results.factors
        axes = factors.shape[1]
        every = np.full(len(factors), (1 << axes) - 1, dtype=np.int64)
        by_factor = self._sums_by_factor[results.number]
        if not by_factor.any():
            return [every]
        sets = []
        for axis in range(axes):
            # [m, mesh axes]: those that split the same factor as this one
            same = (factors == factors[:, axis : axis + 1]) & (factors >= 0)
            first = ~same[:, :axis].any(axis=1) & same.any(axis=1)
            own_set = np.where(first, same @ (1 << np.arange(axes)), 0)
            sets.append(np.where(by_factor, own_set, every if axis == 0 else 0))
        return sets

    # Results --------------------------------------------------------------------------------------

    def _add_reshards(self, collectives: CollectiveBatch, results: _Results) -> tuple[Array, Array]:
        """Adds what brings results to their own spec; returns [m] numbers of both specs."""
        specs = self._context.specs
        before, after = specs.number(results.computed), specs.number(results.target)
        # a sum is sliced by the mesh axes that it went over, which is free
        dims = np.where(results.partial, np.int8(-1), results.target.dims)
        wanted = specs.number(Assignment(dims, results.target.order))
        collectives.add_reshards(results.owner, results.value_bytes, before, wanted)
        self._transposed.add(
            collectives, results.number, results.owner, results.factors, results.local
        )
        return before, after

    def _temporaries(
        self, number: Array, results: _Results, scattered: Array, moved: Mask
    ) -> Temporaries:
        """Results before the reshard, partial sums, and complete sums (see `temporaries`).

        Args:
            number: [n] the classes.
            results: Their m results.
            scattered: [m] mesh axes of reduce_scatters.
            moved: [m] whether the result is brought to another spec.
        """
        partial = results.partial_over != 0
        target = self._context.specs.axis_set(results.target.dims)
        # summed whole, then sliced: the whole sum is there beside the partial one
        sliced = partial & ((results.partial_over & target & ~scattered) != 0)
        bytes_of_kind = (  # in the order of the memory columns
            np.where(~partial & moved, results.local, 0),
            np.where(partial, results.local * (1 + sliced), 0),
            np.where(partial & ~sliced, results.local, 0),
        )
        parts = []
        for kind, local in enumerate(bytes_of_kind):
            held = _sum_by(results.owner, local, len(number))
            some = np.flatnonzero(held)
            column = number[some] + kind * len(self._classes)
            parts.append(Temporaries(some, column, held[some].astype(np.int64)))
        return Temporaries.joined(parts)

    # The bound ------------------------------------------------------------------------------------

    def least_s(self) -> float:
        """Seconds of compute that no layout goes below.

        Every class is split over every mesh axis that divides one of its factors.
        """
        placements = self._context.placements
        devices = int(self._context.specs.shard_count[-1])
        every = np.arange(len(self._classes))
        shard_counts = []
        for equation_class in self._classes:
            column = placements.factor_column(equation_class.eqn)
            shard_counts.append(_most_shards(placements, column))
        arithmetic_s = self._flops / np.array(shard_counts) / self._flops_per_s

        owner, entry = self._operands_of.of(every)
        local = self._operands.bytes[entry] // devices
        read = _sum_by(owner, local * self._loads[entry], len(every))
        owner, entry = self._results_of.of(every)
        local = self._results.bytes[entry] // devices
        traffic = _sum_by(owner, local * self._writes[entry], len(every))
        traffic += self._read_for(every, read, _sum_by(owner, local, len(every)))
        traffic_s = traffic / self._hardware.memory_bytes_per_s
        return float((self._runs * np.maximum(arithmetic_s, traffic_s)).sum())


def _most_shards(placements: Placements, column: int) -> int:
    """Into how many shards a column can be cut at most: by each mesh axis that divides one of its
    sizes.
    """
    sizes = placements.split_sizes(column)
    shards = 1
    for axis in placements.sizes:
        if any(size % axis == 0 for size in sizes):
            shards *= axis
    return shards


def _table(context: Context, operands: Sequence[tuple[EquationClass, Operand]]) -> OperandTable:
    entries = []
    for equation_class, operand in operands:
        entries.append((operand.value, Reader(equation_class.eqn, operand.factors)))
    return OperandTable(context, entries)


def _dtype(equation_class: EquationClass) -> str:
    """The dtype whose rate an equation computes at."""
    results = equation_class.results
    return results[0].value.dtype if results else "float32"


def _reduced_factors(classes: Sequence[EquationClass], max_factors: int) -> Mask:
    """[classes, factors + 1] True where a factor is reduced; the last column is no factor."""
    reduced = np.zeros((len(classes), max_factors + 1), dtype=bool)
    for number, equation_class in enumerate(classes):
        for factor, kind in enumerate(equation_class.kinds):
            reduced[number, factor] = kind is FactorKind.REDUCTION
    return reduced


def _at(assignment: Assignment, positions: Array) -> Assignment:
    """[m] entries of an assignment, by their positions."""
    return Assignment(assignment.dims[positions], assignment.order[positions])


def _sum_by(owner: Array, amounts: NDArray[Any], count: int) -> Floats:
    """[count] sums of the amounts of each owner."""
    return np.bincount(owner, amounts, count).astype(np.float64)
