"""How large logical axes are: the larger, the more their sharding decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from autoshard.layout.problem import Problem
from autoshard.tracing.program import Value


def dividing_mesh_axes(problem: Problem, logical_axis: int) -> list[str]:
    """Mesh axes of several devices that divide some dimension of a logical axis."""
    sizes = problem.logical_axes.axes[logical_axis].sizes
    return [
        name
        for name, devices in problem.mesh_axes.items()
        if devices > 1 and any(size % devices == 0 for size in sizes)
    ]


def activation_bytes(problem: Problem) -> Counter[int]:
    """By logical axis, bytes of all results of a step that have it, loop trips counted."""
    total: Counter[int] = Counter()
    for eqn, trip_count in problem.program.walk():
        _add(total, problem, eqn.outputs, trip_count)
    return total


def argument_bytes(problem: Problem) -> Counter[int]:
    """By logical axis, bytes of all argument leaves that have it."""
    total: Counter[int] = Counter()
    _add(total, problem, problem.program.body.inputs, 1)
    return total


def _add(total: Counter[int], problem: Problem, values: Iterable[Value], times: int) -> None:
    for value in values:
        # Once a value: attention scores have the sequence twice.
        for logical_axis in set(problem.logical_axes.of_value[value.index]):
            total[logical_axis] += times * value.bytes
