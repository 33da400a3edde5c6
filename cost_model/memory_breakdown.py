"""What a device's memory is for at the peak: parameters, gradients, optimizer state, activations.

Told from the data flow, never from names. Parameters and optimizer state are the argument leaves of
these groups, what they become, and what is computed from them alone (casts). A gradient has the
axis classes of a parameter (or of one layer of a stacked one), in whatever order, and depends on
the data. Everything else that depends on the data is an activation; the rest, the data themselves,
and what a layout gathers or leaves pending, is other.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from autoshard.axes.argument_groups import Group
from autoshard.axes.axis_classes import AxisClasses
from autoshard.cost_model.hardware.backend import ACCELERATOR, Backend
from autoshard.cost_model.hardware.hardware import Hardware
from autoshard.cost_model.memory.liveness import memory_table
from autoshard.cost_model.predict import Predictor
from autoshard.layout.layout import Layout
from autoshard.layout.problem import Problem
from autoshard.tracing.dataflow import computed_from
from autoshard.tracing.program import Value


class Purpose(enum.Enum):
    """What a value is for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    OTHER = "other"


_OF_GROUP = {
    Group.PARAMETER: Purpose.PARAMETERS,
    Group.OPTIMIZER: Purpose.OPTIMIZER,
    Group.DATA: Purpose.OTHER,
}

Dims = tuple[tuple[int, int], ...]
"""(axis class, size) of the dimensions of a value, sorted: equal whatever their order."""


def purposes(problem: Problem) -> tuple[Purpose, ...]:
    """The purpose of each value, by `Value.index`."""
    program, groups = problem.program, problem.groups
    classes = problem.logical_axes.classes
    group_of = dict(zip(program.body.inputs, groups.of_input, strict=True))
    data = [value for value, group in group_of.items() if group is Group.DATA]
    from_data = computed_from(program, data)
    parameter_dims = _parameter_dims(problem)
    outputs = set(program.body.outputs)

    def purpose(value: Value) -> Purpose:
        if value in group_of:
            return _OF_GROUP[group_of[value]]
        if value.index in groups.optimizer_values:
            return Purpose.OPTIMIZER
        like_parameter = bool(value.shape) and _dims(classes, value) in parameter_dims
        if value.index not in from_data:
            return Purpose.PARAMETERS if like_parameter else Purpose.OTHER
        if not like_parameter:
            return Purpose.ACTIVATIONS
        return Purpose.PARAMETERS if value in outputs else Purpose.GRADIENTS

    return tuple(map(purpose, program.values))


def _parameter_dims(problem: Problem) -> set[Dims]:
    """Dimensions of the parameters, and of one layer of those that may be stacked."""
    inputs, classes = problem.program.body.inputs, problem.logical_axes.classes
    parameter_dims = set()
    for value, group in zip(inputs, problem.groups.of_input, strict=True):
        if group is Group.PARAMETER and value.shape:
            parameter_dims.add(_dims(classes, value))
            if len(value.shape) > 1:
                parameter_dims.add(_dims(classes, value, first=1))
    return parameter_dims


def _dims(classes: AxisClasses, value: Value, first: int = 0) -> Dims:
    """The dimensions of a value, from the first on."""
    axis_classes = classes.of_value[value.index]
    return tuple(sorted(zip(axis_classes[first:], value.shape[first:], strict=True)))


def breakdown(
    layout: Layout, hardware: Hardware, donated: Sequence[bool], backend: Backend = ACCELERATOR
) -> Mapping[Purpose, int]:
    """Bytes per device at the peak, by purpose; they sum to the predicted peak.

    Args:
        layout: The layout.
        hardware: Whatever it is predicted for; memory does not depend on it.
        donated: For each argument leaf, whether it is donated.
        backend: What fuses, and in which order things run.
    """
    program = layout.problem.program
    if not program.eqns:
        return dict.fromkeys(Purpose, 0)
    predictor = Predictor(layout.problem, hardware, donated, backend)
    at_peak = predictor.at_peak(layout)
    # A memory table of its own, with one column for each purpose and share.
    by_value = zip(purposes(layout.problem), at_peak.share.tolist(), strict=True)
    numbers: dict[tuple[Purpose, float], int] = {}
    column_of = [numbers.setdefault(column, len(numbers)) for column in by_value]
    table = memory_table(program, donated, len(numbers), lambda v: column_of[v.index], backend)

    by_purpose = dict.fromkeys(Purpose, 0.0)
    alive_bytes = table.alive_bytes[at_peak.point].tolist()  # [columns]
    for (purpose, share), whole in zip(numbers, alive_bytes, strict=True):
        by_purpose[purpose] += whole * share
    by_purpose[Purpose.OTHER] += at_peak.temporary_bytes
    return {purpose: round(count) for purpose, count in by_purpose.items()}
