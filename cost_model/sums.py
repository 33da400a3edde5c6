"""Which partial sums a backend adds up over devices together: those that no other contraction waits for.

XLA's AllReduceCombiner makes one operation of all_reduces that do not depend on each other. The gradients of a body's
weights are such: only the optimizer reads them. What Megatron's layers add up is none: the next layer needs it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.sparse import csr_array

from autoshard.constrain import ANCHORS, CUT_KERNELS
from autoshard.cost_model.classes import Classes
from autoshard.cost_model.memory import MemoryTable
from autoshard.dim_rules import LoopKind
from autoshard.dims import LogicalAxes
from autoshard.program import Body


def sums_at_points(table: MemoryTable, classes: Classes, axes: LogicalAxes, *, combined: bool) -> csr_array:
    """[points, works] how many results of a class are added up at a point, if they are partial sums.

    Args:
        table: What is alive where.
        classes: The classes.
        axes: The logical axes.
        combined: True if the last sums of a body are one operation, where the last of them is made.
    """
    eqns = np.flatnonzero(classes.of_eqn >= 0)
    at = table.point_of.copy()
    for group in _last_sums(axes.program.body, axes) if combined else ():
        at[group] = at[group].max()
    place = (at[eqns], classes.of_eqn[eqns])
    return csr_array((np.ones(len(eqns)), place), shape=(len(table.point_eqn), len(classes.works)))


def _last_sums(body: Body, axes: LogicalAxes) -> Iterator[list[int]]:
    """For each body, its equations (`Eqn.index`) with a reduced loop whose results reach no contraction there."""
    needed: set[int] = set()
    found: list[int] = []
    for eqn in reversed(body.eqns):
        for inner in eqn.bodies:
            yield from _last_sums(inner, axes)
        waited_for = any(v.index in needed for v in eqn.outputs)
        if not waited_for and LoopKind.REDUCED in axes.rules[eqn.index].kinds:
            found.append(eqn.index)
        if waited_for or eqn.bodies or eqn.primitive in ANCHORS | CUT_KERNELS:
            needed.update(v.index for v in eqn.inputs)
    if found:
        yield found
