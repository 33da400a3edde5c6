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
    unsplit,
)
from autoshard.cost_model.program.equation_classes import EquationClass
from autoshard.cost_model.program.propagation import STATED
from autoshard.cost_model.program.ragged import Ragged
from autoshard.cost_model.step_time.collective_tables import ClassCosts, CollectiveBatch
from autoshard.cost_model.step_time.halo_tables import TransposedExchanges
from autoshard.cost_model.step_time.operand_tables import (
    Context,
    OperandTable,
    is_among,
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
        """Prepares the arrays.

        Args:
            context: The problem.
            hardware: Rates of compute and memory.
            backend: Whether there is a reduce_scatter, and how partial sums are added up.
            classes: The classes, in the order of their numbers.
        """
        self._context = context
        self._classes = classes
        self._memory_bytes_per_s = hardware.memory_bytes_per_s
        self._has_reduce_scatter = backend.has_reduce_scatter
        self._prepare_classes(hardware, backend)
        self._prepare_operands()
        eqns = [c.eqn for c in classes]
        self._transposed = TransposedExchanges(context, eqns)
        self._gathered = context.gathered(eqns)
        # [classes]: whether some are gathered though the layout states that they are split
        stated = np.array([eqn.primitive in STATED for eqn in eqns], dtype=bool)
        self._gathers_slices = stated & (self._gathered >= 0).any(axis=1)

    def _prepare_classes(self, hardware: Hardware, backend: Backend) -> None:
        context, count = self._context, len(self._classes)
        # [classes] each: runs per call, flops, their rate, seconds besides arithmetic and traffic
        self._runs = np.zeros(count)
        self._flops = np.zeros(count)
        self._flops_per_s = np.zeros(count)
        self._op_s = np.zeros(count)
        # [classes] each: column of its factors, and what makes it special
        self._factors_column = np.zeros(count, dtype=np.int64)
        self._copies = np.zeros(count, dtype=bool)
        self._arg_reduces = np.zeros(count, dtype=bool)
        self._sums_by_factor = np.zeros(count, dtype=bool)
        # [factors of all classes]: whether it is reduced; no factor comes first
        self._factors_of = Ragged([len(c.kinds) for c in self._classes])
        kinds = [kind for c in self._classes for kind in c.kinds]
        self._reduced = np.array([False, *(kind is FactorKind.REDUCTION for kind in kinds)])

        for i, equation_class in enumerate(self._classes):
            eqn = equation_class.eqn
            self._runs[i] = equation_class.runs_per_call
            self._flops[i] = equation_class.flops
            self._flops_per_s[i] = hardware.flops_per_s(_dtype(equation_class))
            self._op_s[i] = equation_class.unfused_share * hardware.op_s
            self._factors_column[i] = context.columns.of_eqn(eqn)
            self._copies[i] = eqn.primitive in COPIES
            takes_best = context.rules[eqn.index].combine == ARG_REDUCTION
            # the partitioner does the same with a reduction of several operands
            self._arg_reduces[i] = takes_best or (
                eqn.primitive == "reduce" and len(eqn.outputs) > 1
            )
            # the partitioner adds the partial results of a contraction factor by factor
            self._sums_by_factor[i] = eqn.primitive in ANCHORS and not backend.folds_all_reduces

    def _prepare_operands(self) -> None:
        operands, results = [], []
        loads, writes = [], []
        for equation_class in self._classes:
            eqn = equation_class.eqn
            for operand in equation_class.operands:
                operands.append((operand.value, Reader(eqn, operand.factors)))
                loads.append(operand.transfers)
            for result in equation_class.results:
                results.append((result.value, Reader(eqn, result.factors)))
                writes.append(result.transfers)
        self._operands_of = Ragged([len(c.operands) for c in self._classes])
        self._results_of = Ragged([len(c.results) for c in self._classes])
        self._operands = OperandTable(self._context, operands)
        self._results = OperandTable(self._context, results)
        # [operands], [results]: how often their bytes go to or from memory in a run
        self._loads, self._writes = np.array(loads), np.array(writes)

    # Costs ----------------------------------------------------------------------------------------

    def costs(self, number: Array, index: Index) -> ClassCosts:
        """What classes cost.

        Args:
            number: [n] the classes.
            index: [n, mesh axes + 1] a layout for each, as rows of `Placements`.
        """
        computation = self._context.computation(
            index, self._factors_column[number], self._gathered[number]
        )
        read = self._read_bytes(number, index, computation)
        results = self._results_under(number, index, computation)
        compute_s = self._compute_s(number, computation, read, results)

        collectives = CollectiveBatch(self._context.specs)
        self._add_gathers_of_slices(collectives, number, index)
        scattered = self._add_sums(collectives, results)
        resharded = self._add_reshards(collectives, results)
        temporaries = self._temporaries(number, results, scattered, resharded)
        return ClassCosts(compute_s, self._runs[number], collectives, temporaries)

    def _add_gathers_of_slices(
        self, collectives: CollectiveBatch, number: Array, index: Index
    ) -> None:
        """Adds what brings together operands that are whole, but stated as the layout splits them.

        Where they are split before, the gather is that of the value.
        """
        specs = self._context.specs
        some = np.flatnonzero(self._gathers_slices[number])
        position, entry = self._operands_of.of(number[some])
        if not len(entry):
            return
        owner = some[position]
        stated = self._operands.stated(entry, index[owner])
        dims = self._operands.dims_of_factors(entry, stated)
        gathered = is_among(self._gathered[number[owner]], stated) & (dims >= 0)
        sliced = gathered & (self._operands.current(entry, index[owner]).dims < 0)
        axis_set = np.asarray(sliced @ (1 << np.arange(sliced.shape[1])), dtype=np.int64)
        kept = specs.axis_set(unsplit(dims, gathered))
        full_bytes = self._operands.bytes[entry] // specs.shard_count[kept]
        collectives.add("all_gather", owner, axis_set, full_bytes)

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
        first_factor = self._factors_of.starts[number[owner]] + 1  # [m]: in `_reduced`
        partial = self._reduced[np.where(factors >= 0, first_factor[:, None] + factors, 0)]
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
        devices = specs.shard_count[specs.axis_set(computation.dims)]
        arithmetic_s = self._flops[number] / devices / self._flops_per_s[number]
        traffic_s = self._traffic_bytes(number, read, results) / self._memory_bytes_per_s
        run_s = self._op_s[number] + np.maximum(arithmetic_s, traffic_s)
        compute_s: Floats = self._runs[number] * run_s
        return compute_s

    def _traffic_bytes(self, number: Array, read: Floats, results: _Results) -> Floats:
        """[n] bytes that go to or from the memory of one device."""
        specs = self._context.specs
        computed_over = specs.axis_set(results.computed.dims)
        stored_over = specs.axis_set(results.target.dims)
        # [m]: bytes of the result that are left once it is sliced to its own spec
        sliced = results.value_bytes // specs.shard_count[computed_over | stored_over]
        # a copy is fused with the slice of its result: it writes, and reads, no more than that
        written = np.where(self._copies[results.number], sliced, results.local)
        written = written * self._writes[results.entry]
        needed = _sum_by(results.owner, sliced, len(number))
        traffic = _sum_by(results.owner, written, len(number))
        traffic += self._read_for(number, read, needed)
        return traffic

    def _read_for(self, number: Array, read: Floats, needed: Floats) -> Floats:
        """[n] bytes that classes read, of so many: a copy only those that its result needs."""
        return np.where(self._copies[number], np.minimum(read, needed), read)

    def _local_bytes(self, value_bytes: Array, dims: Dims) -> Array:
        specs = self._context.specs
        local: Array = value_bytes // specs.shard_count[specs.axis_set(dims)]
        return local

    # Partial sums ---------------------------------------------------------------------------------

    def _add_sums(self, collectives: CollectiveBatch, results: _Results) -> Array:
        """Adds the collectives of partial results; returns [m] the mesh axes of reduce_scatters."""
        specs = self._context.specs
        local, owner = results.local, results.owner

        # an arg-reduction gathers the best of each shard: where it is, and what it is; so does a
        # reduction of several operands
        picked_over = np.where(self._arg_reduces[results.number], results.partial_over, 0)
        shards = specs.shard_count[picked_over]
        collectives.add("all_gather", owner, picked_over, local * shards)
        collectives.add("all_gather", owner, picked_over, self._picked_bytes(results) * shards)

        summed_over = results.partial_over & ~picked_over
        scattered = np.zeros_like(summed_over)
        if self._has_reduce_scatter:
            scattered = summed_over & specs.axis_set(results.target.dims)
        reduced = summed_over & ~scattered
        for together in self._summed_together(results):
            collectives.add("all_reduce", owner, reduced & together, local)
            collectives.add("reduce_scatter", owner, scattered & together, local)
        return scattered

    def _picked_bytes(self, results: _Results) -> Array:
        """[m] local bytes of the values whose indices an arg-reduction returns; 0 for others."""
        picked = np.zeros_like(results.local)
        arg_reductions = results.number[self._arg_reduces[results.number]]
        for number in np.unique(arg_reductions).tolist():
            eqn = self._classes[number].eqn
            if eqn.primitive == "reduce":
                continue  # what its results stand for is a result itself
            same = results.number == number
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
            # [m]: whether this one is the first of them, for which the set stands
            first = same.any(axis=1) & ~same[:, :axis].any(axis=1)
            own_set = np.where(first, same @ (1 << np.arange(axes)), 0)
            sets.append(np.where(by_factor, own_set, every if axis == 0 else 0))
        return sets

    # Results --------------------------------------------------------------------------------------

    def _add_reshards(self, collectives: CollectiveBatch, results: _Results) -> Mask:
        """Adds what brings results to their own spec; returns [m] whether that is another one."""
        specs = self._context.specs
        before, after = specs.number(results.computed), specs.number(results.target)
        # along mesh axes that it was summed over, a result is whole: slicing it there is free
        unsliced = unsplit(results.target.dims, results.partial)
        wanted = specs.number(Assignment(unsliced, results.target.order))
        collectives.add_reshards(results.owner, results.value_bytes, before, wanted)
        self._transposed.add(
            collectives, results.number, results.owner, results.factors, results.local
        )
        return np.asarray(before != after)

    def _temporaries(
        self, number: Array, results: _Results, scattered: Array, resharded: Mask
    ) -> Temporaries:
        """Results before the reshard, partial sums, and complete sums (see `temporaries`).

        Args:
            number: [n] the classes.
            results: Their m results.
            scattered: [m] mesh axes of reduce_scatters.
            resharded: [m] whether the result is brought to another spec.
        """
        local = results.local
        partial = results.partial_over != 0
        stored_over = self._context.specs.axis_set(results.target.dims)
        # summed whole, then sliced: the whole sum is there besides the partial one
        sliced = partial & ((results.partial_over & stored_over & ~scattered) != 0)

        before_reshard = np.where(~partial & resharded, local, 0)
        partial_sums = np.where(partial, local * (1 + sliced), 0)
        complete_sums = np.where(partial & ~sliced, local, 0)
        parts = []
        # in the order of the memory columns
        for kind, local_bytes in enumerate((before_reshard, partial_sums, complete_sums)):
            total = _sum_by(results.owner, local_bytes, len(number))  # [n]
            some = np.flatnonzero(total)
            column = number[some] + kind * len(self._classes)
            parts.append(Temporaries(some, column, total[some].astype(np.int64)))
        return Temporaries.joined(parts)

    # The bound ------------------------------------------------------------------------------------

    def least_s(self) -> float:
        """Seconds of compute that no layout goes below.

        Every class is split over every mesh axis that divides one of its factors.
        """
        placements = self._context.placements
        every = np.arange(len(self._classes))
        shard_counts = []
        for equation_class in self._classes:
            column = placements.factor_column(equation_class.eqn)
            shard_counts.append(_most_shards(placements, column))
        arithmetic_s = self._flops / np.array(shard_counts) / self._flops_per_s

        devices = int(self._context.specs.shard_count[-1])
        owner, entry = self._operands_of.of(every)
        local = self._operands.bytes[entry] // devices
        read = _sum_by(owner, local * self._loads[entry], len(every))

        owner, entry = self._results_of.of(every)
        local = self._results.bytes[entry] // devices
        traffic = _sum_by(owner, local * self._writes[entry], len(every))
        traffic += self._read_for(every, read, _sum_by(owner, local, len(every)))
        traffic_s = traffic / self._memory_bytes_per_s
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


def _dtype(equation_class: EquationClass) -> str:
    """The dtype whose rate an equation computes at."""
    results = equation_class.results
    return results[0].value.dtype if results else "float32"


def _at(assignment: Assignment, positions: Array) -> Assignment:
    """[m] entries of an assignment, by their positions."""
    return Assignment(assignment.dims[positions], assignment.order[positions])


def _sum_by(owner: Array, amounts: NDArray[Any], count: int) -> Floats:
    """[count] sums of the amounts of each owner."""
    return np.bincount(owner, amounts, count).astype(np.float64)
