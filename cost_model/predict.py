"""Stage 5: predicts time, collectives and peak memory of layouts, without compiling anything.

Every equation's work is split as first-fit over its loops says; each operand is resharded from its
own spec to what the work needs, and a reduced loop that is split leaves a partial sum (DESIGN:
all_reduce, or reduce_scatter where the result's own spec takes the axis up). A value brought to a
given spec is paid once per body. Several mesh axes in one move are one collective.

A layout is a few small numbers (see `placements`), a class's cost a row of a table (see `costs`),
the peak a maximum over few points (see `peak`); so thousands of layouts are predicted at once.
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
from autoshard.cost_model.memory.peak_memory import MemoryColumn, Peak
from autoshard.cost_model.program.applied_constraints import find_applied_constraints
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


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says of a layout, per device and per call.

    Attributes:
        time_s: Step time: compute + communication - overlap.
        compute_s: Roofline time of the work.
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
    """What the model says of many layouts, [layouts] each; see `Prediction`."""

    time_s: NDArray[np.float64]
    compute_s: NDArray[np.float64]
    comm_s: NDArray[np.float64]
    peak_bytes: NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Holdings:
    """What a device holds at the peak of a layout.

    Attributes:
        point: The point of the memory table.
        share: By `Value.index`, which share of a value it holds.
        beside_bytes: What it holds beside the values: copies in other specs, partial sums.
    """

    point: int
    share: NDArray[np.float64]
    beside_bytes: float


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
        self.problem = problem
        self.hardware = hardware
        self.placements = Placements(problem)
        plans = schedules(problem.program.body, backend)
        applied = find_applied_constraints(problem)
        classes = find_classes(problem, plans, applied)
        self._costs = CostTables(problem, hardware, classes, self.placements, applied, backend)
        propagated_to = propagated(problem, self.placements)
        body = problem.program.body
        shut = {v.index for v in (*body.inputs, *body.outputs)}
        columns: dict[MemoryColumn, int] = {}
        self._column_of = of_value = [
            columns.setdefault(
                MemoryColumn(
                    self.placements.value_column(v), propagated_to[v.index], v.index in shut
                ),
                len(columns),
            )
            for v in problem.program.values
        ]
        self._arguments: Counter[tuple[int, Group]] = Counter()
        for value, group in zip(problem.program.body.inputs, problem.groups.of_input, strict=True):
            self._arguments[of_value[value.index], group] += value.bytes
        table = memory_table(
            problem.program, donated, len(columns), lambda v: of_value[v.index], backend, plans
        )
        sums = find_all_reduces(
            table, classes, problem.logical_axes.classes, combined=backend.combines_all_reduces
        )
        self._peak = Peak(
            table, classes, list(columns), self.placements, self._costs.copy_columns, sums
        )

    @property
    def points(self) -> int:
        """Program points at which the peak may be."""
        return self._peak.points

    def predict(self, layout: Layout) -> Prediction:
        """The prediction of one layout (as if its constraints are stated inside; see
        `Layout.inside`).
        """
        return self.predict_each(self.placements.of_layout(layout)[None])[0]

    def holdings(self, layout: Layout) -> Holdings:
        """What a device holds at a layout's peak."""
        index = self.placements.of_layout(layout)[None]
        point, beside_bytes = self._peak.at_peak(index, self._costs.temporaries(self._costs.rows(index)))
        return Holdings(point, self._peak.shares(index)[0][self._column_of], beside_bytes)

    def throughput(self, layout: Layout, samples_per_step: float | None = None) -> Throughput:
        """How well a layout uses the devices, by the model."""
        found, alone = self.predict(layout), self.predict(Layout(self.problem, ()))
        return Throughput(
            found.time_s, found.compute_s, found.comm_s, alone.compute_s, samples_per_step
        )

    def predict_each(self, index: NDArray[np.int32]) -> list[Prediction]:
        """Whole predictions of a few layouts; see `predict_many`."""
        rows = self._costs.rows(index)
        found = self._sum(index, rows)
        calls, sent = (
            table[rows].sum(axis=0) for table in (self._costs.calls, self._costs.sent_bytes)
        )
        shares = self._peak.shares(index)
        predictions = []
        for n in range(len(index)):
            collectives = self._collectives(calls[n], sent[n])
            predictions.append(
                Prediction(
                    time_s=float(found.time_s[n]),
                    compute_s=float(found.compute_s[n]),
                    comm_s=float(found.comm_s[n]),
                    peak_bytes=int(found.peak_bytes[n]),
                    argument_bytes=self._argument_bytes(shares[n]),
                    collectives=collectives,
                    collective_bytes=sum(c.bytes for c in collectives),
                )
            )
        return predictions

    def _collectives(
        self, calls: NDArray[np.float64], sent: NDArray[np.float64]
    ) -> tuple[Collective, ...]:
        axes = self._costs.slots.axes
        named = sorted(
            (KINDS[slot % len(KINDS)], axes[slot], slot) for slot in np.flatnonzero(calls).tolist()
        )
        return tuple(
            Collective(kind, over, round(float(calls[slot])), round(float(sent[slot])))
            for kind, over, slot in named
        )

    def predict_many(self, index: NDArray[np.int32]) -> Predictions:
        """The predictions of many layouts.

        Args:
            index: [layouts, mesh axes + 1] from `placements`.
        """
        parts = [self._chunk(index[i : i + CHUNK]) for i in range(0, max(len(index), 1), CHUNK)]
        return Predictions(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in Predictions.__slots__
            )
        )

    def least_s(self) -> float:
        """A lower bound on the predicted time of any layout: compute, every class split as far as
        it can be.

        Certified: overlap hides communication behind compute at most, so the time is never less
        than that of compute; and no rule list splits a class further than by each mesh axis that
        divides one of its loops.
        """
        return self._costs.least_compute_s()

    def sent_bytes(self, rules: tuple[AxisRule, ...]) -> int:
        """Predicted collective bytes of a rule list."""
        return self.predict(Layout(self.problem, rules)).collective_bytes

    def collective_s(
        self, kind: str, axes: Sequence[str], full_bytes: int, group_size: int
    ) -> float:
        """Seconds of one collective over these mesh axes (all links where they are unknown)."""
        link, _ = joint(
            self.hardware, self.problem.mesh_axes, axes or tuple(self.problem.mesh_axes)
        )
        return collective_s(kind, full_bytes, link, group_size)

    def _chunk(self, index: NDArray[np.int32]) -> Predictions:
        return self._sum(index, self._costs.rows(index))

    def _sum(self, index: NDArray[np.int32], rows: NDArray[np.int64]) -> Predictions:
        compute_s = self._costs.compute_s[rows].sum(axis=0)
        comm_s = self._costs.comm_s[rows].sum(axis=0)
        peak = self._peak.bytes(index, self._costs.temporaries(rows))
        return Predictions(
            step_s(compute_s, comm_s, self.hardware.overlap),
            compute_s,
            comm_s,
            np.ceil(peak).astype(np.int64),
        )

    def _argument_bytes(self, share: NDArray[np.float64]) -> dict[str, int]:
        total = dict.fromkeys((g.value for g in Group), 0)
        for (column, group), whole in self._arguments.items():
            total[group.value] += math.floor(whole * share[column])
        return total
