"""What a device's memory is for at the peak: parameters, gradients, optimizer state, activations,
other.

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


def purposes(problem: Problem) -> tuple[Purpose, ...]:
    """The purpose of each value, by `Value.index`."""
    program, axes, groups = problem.program, problem.logical_axes.classes, problem.groups
    of_input = dict(zip((v.index for v in program.body.inputs), groups.of_input, strict=True))
    data = [v for v in program.body.inputs if of_input[v.index] is Group.DATA]
    on_data = computed_from(program, data)
    shapes = {
        tuple(sorted(zip(axes.of_value[v.index][cut:], v.shape[cut:], strict=True)))
        for v in program.body.inputs
        if of_input[v.index] is Group.PARAMETER
        for cut in range(min(2, len(v.shape)))
    }
    outputs = {v.index for v in program.body.outputs}

    def purpose(value: Value) -> Purpose:
        group = of_input.get(value.index)
        if group is not None:
            return {Group.PARAMETER: Purpose.PARAMETERS, Group.OPTIMIZER: Purpose.OPTIMIZER}.get(
                group, Purpose.OTHER
            )
        if value.index in groups.optimizer_values:
            return Purpose.OPTIMIZER
        like = (
            bool(value.shape)
            and tuple(sorted(zip(axes.of_value[value.index], value.shape, strict=True))) in shapes
        )
        if like and (value.index in outputs or value.index not in on_data):
            return Purpose.PARAMETERS
        if value.index not in on_data:
            return Purpose.OTHER
        return Purpose.GRADIENTS if like else Purpose.ACTIVATIONS

    return tuple(map(purpose, program.values))


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
    problem = layout.problem
    if not problem.program.eqns:
        return dict.fromkeys(Purpose, 0)
    predictor = Predictor(problem, hardware, donated, backend)
    at_peak = predictor.holdings(layout)
    purpose = purposes(problem)
    number: dict[tuple[Purpose, float], int] = {}
    columns = [
        number.setdefault((purpose[v.index], at_peak.share[v.index]), len(number))
        for v in problem.program.values
    ]
    table = memory_table(problem.program, donated, len(number), lambda v: columns[v.index], backend)
    found = dict.fromkeys(Purpose, 0.0)
    for ((what, share), _), held in zip(
        number.items(), table.alive_bytes[at_peak.point].tolist(), strict=True
    ):
        found[what] += held * share
    found[Purpose.OTHER] += at_peak.beside_bytes
    return {what: round(held) for what, held in found.items()}
