"""The same step at smaller sizes: where the unsharded function does not fit on one device, its
small sister does.

Every axis class of the arguments is divided, at all its sizes alike, as far as the layout's mesh
axes still divide it. The small program must be the same program: the same primitives in the same
order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax

from autoshard.axes.axis_classes import NO_AXIS
from autoshard.errors import AutoshardError
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared, prepare
from autoshard.text import first_line
from autoshard.tracing.signature import Call

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
    divisors = _divisors(layout)
    factor = max(divisors.values(), default=1)
    if factor == 1:
        return "no dimension can be divided"
    try:
        small = prepare(prepared.request, _divided(prepared, divisors))
        names = {logical_axis.name for logical_axis in small.problem.logical_axes.axes}
        rules = tuple(rule for rule in layout.rules if rule.logical_axis in names)
        small_layout = Layout(small.problem, rules, layout.inside)
        specs = small_layout.input_specs()
    except AutoshardError as error:
        return f"it cannot be traced at smaller sizes ({first_line(str(error))[:120]})"
    if _primitives(small) != _primitives(prepared):
        return "it is another program at smaller sizes"
    if specs != layout.input_specs():
        return "its specs differ at smaller sizes"
    return Shrunk(small, small_layout, factor)


def _divided(prepared: Prepared, divisors: Mapping[int, int]) -> Call:
    """The call with every dimension divided by the divisor of its axis class."""
    classes, call = prepared.problem.logical_axes.classes, prepared.traced.call
    avals = []
    for value, aval in zip(classes.program.body.inputs, call.avals, strict=True):
        shape = []
        for axis, size in zip(classes.of_value[value.index], aval.shape, strict=True):
            shape.append(size // divisors.get(axis, 1))
        avals.append(jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=bool(aval.weak_type)))
    return replace(call, leaves=tuple(avals), avals=tuple(avals))


def _primitives(prepared: Prepared) -> list[str]:
    return [eqn.primitive for eqn in prepared.traced.program.eqns]


def _divisors(layout: Layout) -> dict[int, int]:
    """By axis class, what all its sizes are divided by; those of pinned values stay as they are."""
    logical_axes, mesh_axes = layout.problem.logical_axes, layout.problem.mesh_axes
    shards: dict[str, int] = defaultdict(lambda: 1)
    for rule in layout.rules:
        shards[rule.logical_axis] *= mesh_axes[rule.mesh_axis]

    sizes: dict[int, set[int]] = defaultdict(set)
    pinned: set[int] = set()
    classes = logical_axes.classes
    for value in classes.program.values:
        for axis, size in zip(classes.of_value[value.index], value.shape, strict=True):
            if axis == NO_AXIS:
                continue
            sizes[axis].add(size)
            if value.index in layout.problem.pins:
                pinned.add(axis)

    divisors = {}
    for axis, all_sizes in sizes.items():
        name = logical_axes.axes[logical_axes.of_class[axis]].name
        common = math.gcd(*all_sizes)
        keep = shards[name] * -(-SMALLEST // shards[name])  # the least multiple that is enough
        if axis not in pinned and common % keep == 0:
            divisors[axis] = common // keep
    return divisors
