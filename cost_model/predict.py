"""Predicts time, collectives and peak memory of layouts, without compiling anything.

The factors of every equation are split as first-fit over them says; each operand is resharded from
its own spec to what that needs, and a REDUCTION factor that is split leaves a partial sum
(all_reduce, or reduce_scatter where the result's own spec splits over the same mesh axis). A value
brought to a given spec is paid once per body. Several mesh axes in one reshard are one collective.

A layout is a few small numbers (see `layout.placements`), a class's cost a row of a table (see
`step_time.cost_tables`), the peak a maximum over few points (see `memory.peak_memory`); so
thousands of layouts are predicted at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.axes.argument_groups import Group
from autoshard.cost_model.hardware.backend import ACCELERATOR, Backend
from autoshard.cost_model.hardware.collectives import collective_s, joint
from autoshard.cost_model.hardware.hardware import Hardware
from autoshard.cost_model.hardware.step_components import step_s
from autoshard.cost_model.memory.all_reduce_combining import find_all_reduces
from autoshard.cost_model.memory.liveness import memory_table
from autoshard.cost_model.memory.peak_memory import MemoryColumn, PeakMemory
from autoshard.cost_model.program.applied_constraints import Array, Index, find_applied_constraints
from autoshard.cost_model.program.equation_classes import find_classes
from autoshard.cost_model.program.fusion_schedule import schedules
from autoshard.cost_model.program.propagation import propagated
from autoshard.cost_model.step_time.cost_tables import CostTables
from autoshard.evidence.collectives import KINDS, Collective
from autoshard.evidence.throughput import Throughput
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.placements import Placements
from autoshard.layout.problem import Problem

CHUNK = 2048
"""Layouts that are predicted at once: bounds the intermediate [points, layouts] arrays.

Chosen by hand; it changes no prediction, only the speed (`tests.benchmarks.depth`).
"""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model predicts of a layout, per device and per call.

    Attributes:
        time_s: Step time: compute + communication - overlap.
        compute_s: Roofline time of the computation.
        comm_s: Alpha-beta time of the collectives.
        peak_bytes: Peak memory.
        argument_bytes: Bytes of the arguments, by what they are for.
        collectives: Collectives by kind and mesh axes.
        collective_bytes: Bytes one device sends.
    """

    time_s: float
    compute_s: float
    comm_s: float
    peak_bytes: int
    argument_bytes: Mapping[str, int]
    collectives: tuple[Collective, ...]
    collective_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class Predictions:
    """What the model predicts of many layouts, [layouts] each; see `Prediction`."""

    time_s: NDArray[np.float64]
    compute_s: NDArray[np.float64]
    comm_s: NDArray[np.float64]
    peak_bytes: NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class PeakContents:
    """What a device holds at the peak of a layout.

    Attributes:
        point: The point of the memory table.
        share: By `Value.index`, which share of a value it holds.
        temporary_bytes: What it holds besides the values: copies in other specs, partial sums.
    """

    point: int
    share: NDArray[np.float64]
    temporary_bytes: float


class Predictor:
    """Predicts layouts of one problem on one hardware.

    Attributes:
        problem: The problem.
        hardware: Rates and links.
        placements: Where layouts become the numbers that `predict_many` takes.
    """

    def __init__(
        self,
        problem: Problem,
        hardware: Hardware,
        donated: Sequence[bool],
        backend: Backend = ACCELERATOR,
    ) -> None:
        """Builds the classes and the memory table.

        Args:
            problem: The problem.
            hardware: Rates and links.
            donated: For each argument leaf, whether it is donated.
            backend: What fuses, in which order things run, which collectives there are.
        """
        program, axis_classes = problem.program, problem.logical_axes.classes
        self.problem = problem
        self.hardware = hardware
        self.placements = Placements(problem)

        by_body = schedules(program.body, backend)
        applied = find_applied_constraints(problem)
        classes = find_classes(problem, by_body, applied)
        self._costs = CostTables(problem, hardware, classes, self.placements, applied, backend)

        columns, column_of = _memory_columns(problem, self.placements)
        self._column_of = column_of  # by `Value.index`
        table = memory_table(
            program, donated, len(columns), lambda v: column_of[v.index], backend, by_body
        )
        all_reduces = find_all_reduces(
            table, classes, axis_classes, combined=backend.combines_all_reduces
        )
        self._peak = PeakMemory(
            table, classes, columns, self.placements, self._costs.copy_columns, all_reduces
        )
        self._arguments: Counter[tuple[int, Group]] = Counter()  # global bytes by column and group
        for value, group in zip(program.body.inputs, problem.groups.of_input, strict=True):
            if backend.shares_host_memory or not value.on_host:
                self._arguments[column_of[value.index], group] += value.bytes

    @property
    def points(self) -> int:
        """Program points at which the peak may be."""
        return self._peak.points

    def predict(self, layout: Layout) -> Prediction:
        """The prediction of one layout, as if it stated its constraints inside the function too."""
        return self.predict_each(self.placements.of_layout(layout)[None])[0]

    def predict_each(self, index: Index) -> list[Prediction]:
        """Whole predictions of a few layouts; see `predict_many`."""
        rows = self._costs.rows(index)
        summed = self._predict_rows(index, rows)
        calls = self._costs.calls[rows].sum(axis=0)  # [layouts, slots]
        sent_bytes = self._costs.sent_bytes[rows].sum(axis=0)  # [layouts, slots]
        shares = self._peak.shares(index)  # [layouts, memory columns]
        predictions = []
        for number in range(len(index)):
            collectives = self._collectives(calls[number], sent_bytes[number])
            prediction = Prediction(
                time_s=float(summed.time_s[number]),
                compute_s=float(summed.compute_s[number]),
                comm_s=float(summed.comm_s[number]),
                peak_bytes=int(summed.peak_bytes[number]),
                argument_bytes=self._argument_bytes(shares[number]),
                collectives=collectives,
                collective_bytes=sum(c.bytes for c in collectives),
            )
            predictions.append(prediction)
        return predictions

    def predict_many(self, index: Index) -> Predictions:
        """The predictions of many layouts.

        Args:
            index: [layouts, mesh axes + 1] from `placements`.
        """
        chunks = []
        for start in range(0, max(len(index), 1), CHUNK):
            chunk = index[start : start + CHUNK]
            chunks.append(self._predict_rows(chunk, self._costs.rows(chunk)))
        return Predictions(
            np.concatenate([chunk.time_s for chunk in chunks]),
            np.concatenate([chunk.compute_s for chunk in chunks]),
            np.concatenate([chunk.comm_s for chunk in chunks]),
            np.concatenate([chunk.peak_bytes for chunk in chunks]),
        )

    def at_peak(self, layout: Layout) -> PeakContents:
        """What a device holds at a layout's peak."""
        index = self.placements.of_layout(layout)[None]
        temporaries = self._costs.temporaries(self._costs.rows(index))
        point, temporary_bytes = self._peak.at_peak(index, temporaries)
        return PeakContents(point, self._peak.shares(index)[0][self._column_of], temporary_bytes)

    def throughput(self, layout: Layout, samples_per_step: float | None = None) -> Throughput:
        """How well a layout uses the devices, as predicted."""
        sharded, one_device = self.predict(layout), self.predict(Layout(self.problem, ()))
        return Throughput(
            sharded.time_s,
            sharded.compute_s,
            sharded.comm_s,
            one_device.compute_s,
            samples_per_step,
        )

    def least_s(self) -> float:
        """A lower bound on the predicted seconds of any layout: compute, split as far as can be.

        Certified: overlap hides communication behind compute at most, so the time is never less
        than that of compute; and no rule list splits a class further than by each mesh axis that
        divides one of its factors.
        """
        return self._costs.least_compute_s()

    def sent_bytes(self, rules: tuple[AxisRule, ...]) -> int:
        """Predicted collective bytes of a rule list."""
        return self.predict(Layout(self.problem, rules)).collective_bytes

    def collective_s(
        self, kind: str, axes: Sequence[str], full_bytes: int, group_size: int
    ) -> float:
        """Seconds of one collective over these mesh axes (all links where they are unknown)."""
        axes = axes or tuple(self.problem.mesh_axes)
        link, _ = joint(self.hardware, self.problem.mesh_axes, axes)
        return collective_s(kind, full_bytes, link, group_size)

    def _predict_rows(self, index: Index, rows: Array) -> Predictions:
        """Predictions of layouts of which the rows of the cost tables are known.

        Args:
            index: [layouts, mesh axes + 1] from `placements`.
            rows: [groups, layouts] from `CostTables.rows`.
        """
        compute_s = self._costs.compute_s[rows].sum(axis=0)  # [layouts]
        comm_s = self._costs.comm_s[rows].sum(axis=0)
        peak_bytes = self._peak.bytes(index, self._costs.temporaries(rows))
        return Predictions(
            step_s(compute_s, comm_s, self.hardware.overlap),
            compute_s,
            comm_s,
            np.ceil(peak_bytes).astype(np.int64),
        )

    def _collectives(
        self, calls: NDArray[np.float64], sent_bytes: NDArray[np.float64]
    ) -> tuple[Collective, ...]:
        """The collectives of a layout, by kind and mesh axes, from [slots] calls and bytes."""
        collectives = []
        for slot in np.flatnonzero(calls).tolist():
            kind, axes = KINDS[slot % len(KINDS)], self._costs.slots.axes[slot]
            count, sent = round(float(calls[slot])), round(float(sent_bytes[slot]))
            collectives.append(Collective(kind, axes, count, sent))
        return tuple(sorted(collectives, key=lambda c: (c.kind, c.axes)))

    def _argument_bytes(self, share: NDArray[np.float64]) -> dict[str, int]:
        """Bytes of the arguments on one device by group, from [memory columns] shares."""
        by_group = dict.fromkeys((group.value for group in Group), 0)
        for (column, group), whole in self._arguments.items():
            by_group[group.value] += math.floor(whole * share[column])
        return by_group


def _memory_columns(
    problem: Problem, placements: Placements
) -> tuple[list[MemoryColumn], list[int]]:
    """The columns of the memory table, and by `Value.index` the column of a value."""
    body = problem.program.body
    closed = {v.index for v in (*body.inputs, *body.outputs)}
    sources = propagated(problem, placements)
    numbers: dict[MemoryColumn, int] = {}
    column_of = []
    for value in problem.program.values:
        placement = placements.value_column(value)
        column = MemoryColumn(placement, sources[value.index], value.index in closed)
        column_of.append(numbers.setdefault(column, len(numbers)))
    return list(numbers), column_of
