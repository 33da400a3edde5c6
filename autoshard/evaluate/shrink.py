"""The same step at smaller sizes: where the unsharded function does not fit on one device, its
small sister does.

Every axis class of the arguments is divided, at all its sizes alike, as far as the layout's mesh
axes still divide it. The small program must be the same program: the same primitives in the same
order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import jax

from autoshard.axes.axis_classes import NO_AXIS
from autoshard.errors import AutoshardError
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared, prepare

SMALLEST = 4
"""No dimension becomes smaller: below, jax writes another program (dimensions of size 1 are
broadcast)."""


@dataclass(frozen=True, eq=False)
class Shrunk:
    """A layout at smaller sizes.

    Attributes:
        prepared: The small program.
        layout: The same rules on it.
        factor: The largest divisor of any dimension.
    """

    prepared: Prepared
    layout: Layout
    factor: int


def shrink(prepared: Prepared, layout: Layout) -> Shrunk | str:
    """The layout at smaller sizes, or why there is none."""
    axes, call = prepared.problem.logical_axes.classes, prepared.traced.call
    divisors = _divisors(layout)
    factor = max(divisors.values(), default=1)
    if factor == 1:
        return "no dimension can be divided"
    avals = []
    for value, aval in zip(axes.program.body.inputs, call.avals, strict=True):
        dims = axes.of_value[value.index]
        shape = tuple(
            size // divisors.get(axis, 1) for axis, size in zip(dims, aval.shape, strict=True)
        )
        avals.append(jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=bool(aval.weak_type)))
    try:
        small = prepare(prepared.request, replace(call, leaves=tuple(avals), avals=tuple(avals)))
        known = {logical_axis.name for logical_axis in small.problem.logical_axes.axes}
        rules = tuple(rule for rule in layout.rules if rule.logical_axis in known)
        derived = Layout(small.problem, rules, layout.inside)
        specs = derived.input_specs()
    except AutoshardError as error:
        return f"it cannot be traced at smaller sizes ({str(error).splitlines()[0][:120]})"
    if [e.primitive for e in small.traced.program.eqns] != [e.primitive for e in axes.program.eqns]:
        return "it is another program at smaller sizes"
    if specs != layout.input_specs():
        return "its specs differ at smaller sizes"
    return Shrunk(small, derived, factor)


def _divisors(layout: Layout) -> dict[int, int]:
    """By axis class, what all its sizes are divided by."""
    logical_axes, mesh_axes = layout.problem.logical_axes, layout.problem.mesh_axes
    pieces: dict[str, int] = defaultdict(lambda: 1)
    for rule in layout.rules:
        pieces[rule.logical_axis] *= mesh_axes[rule.mesh_axis]
    sizes: dict[int, set[int]] = defaultdict(set)
    pinned: set[int] = set()
    for value in logical_axes.classes.program.values:
        for axis, size in zip(logical_axes.classes.of_value[value.index], value.shape, strict=True):
            if axis != NO_AXIS:
                sizes[axis].add(size)
                if value.index in layout.problem.pins:
                    pinned.add(axis)
    divisors = {}
    for axis, all_sizes in sizes.items():
        need = pieces[logical_axes.axes[logical_axes.of_class[axis]].name]
        common = math.gcd(*all_sizes)
        keep = need * -(-SMALLEST // need)
        if axis not in pinned and common % keep == 0:
            divisors[axis] = common // keep
    return divisors
