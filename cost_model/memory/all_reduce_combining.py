"""Which partial sums a backend adds up over devices together: those that no other contraction waits
for.

XLA's AllReduceCombiner makes one operation of all_reduces that do not depend on each other. The
gradients of a body's weights are such: only the optimizer reads them. What Megatron's layers add up
is none: the next layer needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from autoshard.axes.axis_classes import AxisClasses
from autoshard.axes.sharding_rules import FactorKind
from autoshard.cost_model.memory.liveness import END, MemoryTable
from autoshard.cost_model.program.equation_classes import ProgramClasses
from autoshard.tracing.primitives import ANCHORS, CUT_KERNELS
from autoshard.tracing.program import Body


@dataclass(frozen=True, eq=False, slots=True)
class Sums:
    """Where results are added up, if they are partial sums.

    Attributes:
        added: [points, works] how many results of a class are added up at a point.
        done: [points, works] how many of them nobody would need any more there if they had been
            added up at once.
        points: Where several are added up together.
    """

    added: csr_array
    done: csr_array
    points: NDArray[np.int64]


def find_sums(
    table: MemoryTable, classes: ProgramClasses, axes: AxisClasses, *, combined: bool
) -> Sums:
    """Where partial sums are added up.

    Args:
        table: What is alive where.
        classes: The classes.
        axes: The axis classes.
        combined: True if the last sums of a body are one operation, where the last of them is made.
    """
    eqns = np.flatnonzero(classes.of_eqn >= 0)
    at, needed = table.point_of.copy(), np.full(len(table.point_of), END, dtype=np.int64)
    points = []
    for last in _last_sums(axes.program.body, axes) if combined else ():
        group = list(last)
        together = at[group].max()
        at[group] = together
        needed[group] = [
            max((table.point_of[reader] for reader in last[eqn]), default=END) for eqn in group
        ]
        points.append(together)
    shape = (len(table.point_eqn), len(classes.equation_classes))
    over = eqns[needed[eqns] < at[eqns]]
    added, done = (
        csr_array((np.ones(len(found)), (at[found], classes.of_eqn[found])), shape=shape)
        for found in (eqns, over)
    )
    return Sums(added, done, np.unique(np.array(points, dtype=np.int64)))


def _last_sums(body: Body, axes: AxisClasses) -> Iterator[dict[int, list[int]]]:
    """For each body, its equations with a reduced loop whose results reach no contraction there,
    and their readers.

    Both by `Eqn.index`; no readers where a result leaves the body.
    """
    needed: set[int] = set()
    readers: dict[int, list[int]] = {}
    outputs = {v.index for v in body.outputs}
    found: dict[int, list[int]] = {}
    for eqn in reversed(body.eqns):
        for inner in eqn.bodies:
            yield from _last_sums(inner, axes)
        waited_for = any(v.index in needed for v in eqn.outputs)
        if not waited_for and FactorKind.REDUCTION in axes.rules[eqn.index].kinds:
            leaves = any(v.index in outputs for v in eqn.outputs)
            found[eqn.index] = (
                [] if leaves else [r for v in eqn.outputs for r in readers.get(v.index, ())]
            )
        if waited_for or eqn.bodies or eqn.primitive in ANCHORS | CUT_KERNELS:
            needed.update(v.index for v in eqn.inputs)
        for value in eqn.inputs:
            readers.setdefault(value.index, []).append(eqn.index)
    if found:
        yield found
