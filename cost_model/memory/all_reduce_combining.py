"""When a backend all_reduces partial sums: some it combines, and so holds them until the last.

XLA's AllReduceCombiner makes one operation of all_reduces that do not depend on each other. The
gradients of a body's weights are such: only the optimizer reads them. What Megatron's layers add up
is none: the next layer needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from autoshard.axes.axis_classes import AxisClasses
from autoshard.axes.sharding_rules import FactorKind, ShardingRule
from autoshard.cost_model.memory.liveness import END, MemoryTable
from autoshard.cost_model.program.equation_classes import ProgramClasses
from autoshard.tracing.primitives import ANCHORS, CUT_KERNELS
from autoshard.tracing.program import Body, Eqn, Value


@dataclass(frozen=True, eq=False, slots=True)
class AllReduces:
    """Where results are all_reduced, if they are partial sums.

    Attributes:
        reduced: [points, equation classes] how many results of a class are all_reduced at a point.
        outlived: [points, equation classes] how many of them nobody would need any more there if
            they had been all_reduced at once.
        points: Where several are combined.
    """

    reduced: csr_array
    outlived: csr_array
    points: NDArray[np.int64]


CombinableSums = dict[int, list[int]]
"""By `Eqn.index` of what leaves partial sums, the `Eqn.index` of the readers of its results; none
where a result leaves the body."""


def find_all_reduces(
    table: MemoryTable, classes: ProgramClasses, axis_classes: AxisClasses, *, combined: bool
) -> AllReduces:
    """Where partial sums are all_reduced.

    Args:
        table: What is alive where.
        classes: The classes of the program.
        axis_classes: Its axis classes.
        combined: True if those of a body that do not depend on each other are one operation, where
            the last of them is computed.
    """
    reduced_at = table.point_of.copy()  # [equations]: points
    last_read_at = np.full(len(table.point_of), END, dtype=np.int64)  # [equations]: points
    combined_points = []
    for sums in _combinable_sums(axis_classes) if combined else ():
        eqns = list(sums)
        point = reduced_at[eqns].max()
        reduced_at[eqns] = point
        for eqn, readers in sums.items():
            last_read_at[eqn] = max((table.point_of[reader] for reader in readers), default=END)
        combined_points.append(point)

    eqns_of_classes = np.flatnonzero(classes.of_eqn >= 0)
    outlived = eqns_of_classes[last_read_at[eqns_of_classes] < reduced_at[eqns_of_classes]]
    shape = (len(table.point_eqn), len(classes.equation_classes))

    def count(eqns: NDArray[np.int64]) -> csr_array:
        """[points, equation classes] how many of these equations are all_reduced at a point."""
        ones = np.ones(len(eqns))
        return csr_array((ones, (reduced_at[eqns], classes.of_eqn[eqns])), shape=shape)

    points = np.unique(np.array(combined_points, dtype=np.int64))
    return AllReduces(count(eqns_of_classes), count(outlived), points)


def _combinable_sums(axis_classes: AxisClasses) -> Iterator[CombinableSums]:
    """What each body combines, if anything."""
    program = axis_classes.program
    bodies = [program.body, *(body for eqn in program.eqns for body in eqn.bodies)]
    for body in bodies:
        sums = _combinable_sums_of(body, axis_classes.rules)
        if sums:
            yield sums


def _combinable_sums_of(body: Body, rules: Sequence[ShardingRule]) -> CombinableSums:
    """Equations of a body with a REDUCTION factor whose results reach no contraction of it."""
    needed: set[Value] = set()  # what a contraction waits for
    readers: dict[Value, list[int]] = {}
    sums: CombinableSums = {}
    for eqn in reversed(body.eqns):
        waited_for = not needed.isdisjoint(eqn.outputs)
        if not waited_for and FactorKind.REDUCTION in rules[eqn.index].kinds:
            sums[eqn.index] = _readers_inside(eqn, readers, body)
        if waited_for or eqn.bodies or eqn.primitive in ANCHORS | CUT_KERNELS:
            needed.update(eqn.inputs)
        for value in eqn.inputs:
            readers.setdefault(value, []).append(eqn.index)
    return sums


def _readers_inside(eqn: Eqn, readers: dict[Value, list[int]], body: Body) -> list[int]:
    """`Eqn.index` of the readers of an equation's results; none where one leaves the body."""
    inside: list[int] = []
    for value in eqn.outputs:
        if value in body.outputs:
            return []
        inside += readers.get(value, ())
    return inside
