"""What-ifs: a plan with other pins, or with another spec of one leaf; predicted, compiled if asked.

The tables of a plan's predictor are built at the first question (`Leaves`), with a column of its
own for every leaf; each later one changes a few entries of a row of theirs, which takes
milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
from jax.sharding import PartitionSpec

from autoshard.axes.axis_classes import NO_AXIS
from autoshard.compiler.bound_plan import BoundPlan
from autoshard.compiler.compile import Compiled, build, compile_built
from autoshard.cost_model.hardware.backend import backend_for
from autoshard.cost_model.hardware.hardware import Hardware, check_hardware, hardware_for
from autoshard.cost_model.predict import Prediction, Predictor
from autoshard.errors import PathError
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.pins import PinMap, check_pin_map, resolve_pins
from autoshard.layout.problem import Problem, first_fit
from autoshard.layout.spec import Spec, shard_count, to_partition_spec
from autoshard.report.text_table import TextTable, columns, render
from autoshard.text import bytes_text, seconds_text
from autoshard.tracing.program import Value

MOST_ALTERNATIVES = 64
"""Specs of one leaf that are predicted at most: every one of a matrix on a mesh of three axes (27),
of larger ones the first. Chosen by hand, no test depends on it."""

SAME = 5e-4
"""Relative difference below which two numbers are called the same: what rounds to 0.0 %."""

_tables: WeakKeyDictionary[BoundPlan, dict[str | None, Leaves]] = WeakKeyDictionary()
"""Built tables, by plan and hardware; they go with their plan."""


@dataclass(frozen=True, eq=False)
class WhatIf:
    """A plan with other pins, predicted; `compile()` asks the compiler.

    Attributes:
        plan: The plan.
        pins: What is pinned.
        layout: The plan's rules with these pins.
        before: Prediction of the plan.
        after: Prediction with the pins.
    """

    plan: BoundPlan
    pins: PinMap
    layout: Layout
    before: Prediction
    after: Prediction

    def compile(self) -> Compiled:
        """Compiles the plan with these pins."""
        built = build(self.plan.traced, self.layout, self.plan.mesh)
        return compile_built(built, self.plan.mesh, compiler_options=self.plan.compiler_options)

    def __str__(self) -> str:
        return f"{_comparison(self.after, self.before)} ({_predicted_how(self.layout)})"


@dataclass(frozen=True, slots=True)
class Alternative:
    """One spec that a leaf could have, its optimizer state with it, and the step's prediction."""

    spec: PartitionSpec
    prediction: Prediction


@dataclass(frozen=True, eq=False)
class LeafExplanation:
    """A leaf's spec and its runners-up.

    Attributes:
        path: Leaf path.
        chosen: Its spec and the plan's prediction.
        rules: The rules that split it.
        others: Other specs, fastest first.
        how: What the numbers are.
    """

    path: str
    chosen: Alternative
    rules: tuple[str, ...]
    others: tuple[Alternative, ...]
    how: str = "predicted"

    def __str__(self) -> str:
        why = ", ".join(self.rules) or "no rule splits it"
        table = TextTable(
            f"{self.path}: {self.chosen.spec} ({why})",
            columns("spec", "step", "peak", "bytes sent", f"against the plan, {self.how}"),
        )
        self._add(table, self.chosen, "the plan")
        for other in self.others:
            self._add(table, other, _comparison(other.prediction, self.chosen.prediction))
        return render(table)

    @staticmethod
    def _add(table: TextTable, alternative: Alternative, comparison: str) -> None:
        prediction = alternative.prediction
        table.add(
            str(alternative.spec),
            seconds_text(prediction.time_s),
            bytes_text(prediction.peak_bytes),
            bytes_text(prediction.collective_bytes),
            comparison,
        )


def what_if(plan: BoundPlan, pins: PinMap, hardware: Hardware | str | None = None) -> WhatIf:
    """Predicts a plan with other pins.

    Its rules stay; the pinned leaves change, and the outputs that they are carried in.

    Args:
        plan: The plan.
        pins: As for `optimize`: leaf path or compiled pattern to PartitionSpec or `Only` (the
            plan's rules then split what they may).
        hardware: As for `explain`.

    Raises:
        PathError: If a path names no leaf.
        SpecError: If a spec does not fit its leaf.
    """
    layout, program = plan.layout, plan.traced.program
    check_pin_map(pins)
    pinned = resolve_pins(pins, program, layout.problem.mesh_axes, plan.carry)
    specs = dict(pinned.specs)
    for index, disallowed in pinned.disallowed.items():
        signature = layout.problem.value_signature(program.values[index])
        specs[index] = first_fit(signature._replace(disallowed=disallowed), layout.bound).spec
    before, after = _leaves(plan, hardware).predict([{}, specs])  # without change: the plan
    problem = replace(layout.problem, pins={**layout.problem.pins, **specs})
    return WhatIf(plan, pins, replace(layout, problem=problem), before, after)


def explain_leaf(
    plan: BoundPlan, path: str, hardware: Hardware | str | None = None
) -> LeafExplanation:
    """The spec of an argument leaf, and what every other one would cost.

    Optimizer state of the leaf gets the same spec.

    Raises:
        PathError: If there is no such leaf.
    """
    value = _argument_leaf(plan, path)
    chosen_spec = plan.layout.fit(value).spec
    specs = _other_specs(value, plan.layout.problem.mesh_axes, chosen_spec)

    alike = [leaf.index for leaf in _alike(plan, value)]
    changes = [dict.fromkeys(alike, spec) for spec in specs]
    plan_prediction, *predictions = _leaves(plan, hardware).predict([{}, *changes])
    others = [
        Alternative(to_partition_spec(spec), prediction)
        for spec, prediction in zip(specs, predictions, strict=True)
    ]

    others.sort(key=lambda a: (a.prediction.time_s, a.prediction.peak_bytes, str(a.spec)))
    chosen = Alternative(to_partition_spec(chosen_spec), plan_prediction)
    rules = _splitting_rules(plan.layout, value, chosen_spec)
    return LeafExplanation(path, chosen, rules, tuple(others), _predicted_how(plan.layout))


def _predicted_how(layout: Layout) -> str:
    """What a prediction is of: the layout, as if it were stated inside the function too."""
    return "predicted" if layout.inside else "predicted as if stated inside the function too"


def _argument_leaf(plan: BoundPlan, path: str) -> Value:
    program = plan.traced.program
    paths = program.input_paths
    if path not in paths:
        more = ", ..." if len(paths) > 8 else ""
        raise PathError(
            f"explain({path!r}): no such argument leaf. There are {', '.join(paths[:8])}{more}."
        )
    return program.body.inputs[paths.index(path)]


def _other_specs(value: Value, mesh_axes: Mapping[str, int], chosen: Spec) -> list[Spec]:
    first = itertools.islice(_specs(value, mesh_axes), MOST_ALTERNATIVES)
    return [spec for spec in first if spec != chosen]


def _splitting_rules(layout: Layout, value: Value, spec: Spec) -> tuple[str, ...]:
    """The rules that split a value, as text."""
    logical_axes = set(layout.problem.logical_axes.of_value[value.index]) - {NO_AXIS}
    mesh_axes = {axis for axes in spec for axis in axes}
    return tuple(
        str(rule)
        for rule in layout.rules
        if rule.mesh_axis in mesh_axes and logical_axis_of(layout, rule) in logical_axes
    )


class Leaves:
    """A plan's predictor in which every argument and output leaf has a column of its own."""

    def __init__(self, plan: BoundPlan, hardware: Hardware | str | None) -> None:
        """Builds the tables.

        Args:
            plan: The plan.
            hardware: As for `explain`.
        """
        layout, body = plan.layout, plan.traced.program.body
        # Pinned to the spec that it has anyway, since pinned values have columns of their own.
        specs = {leaf.index: layout.fit(leaf).spec for leaf in (*body.inputs, *body.outputs)}
        problem = replace(layout.problem, pins={**specs, **layout.problem.pins}, disallowed={})
        self._predictor = predictor_for(plan, hardware, problem)
        self._index = self._predictor.placements.of_layout(replace(layout, problem=problem))

    def predict(self, changes: Sequence[Mapping[int, Spec]]) -> list[Prediction]:
        """Predictions of the plan, each with other specs of some leaves, by `Value.index`."""
        repinned = self._predictor.placements.repinned
        indices = [repinned(self._index, pins) for pins in changes]
        return self._predictor.predict_each(np.array(indices))  # [changes, mesh axes + 1]


def _leaves(plan: BoundPlan, hardware: Hardware | str | None) -> Leaves:
    """The tables of a plan for a hardware, built once."""
    by_hardware = _tables.setdefault(plan, {})
    key = hardware.to_json() if isinstance(hardware, Hardware) else hardware
    if key not in by_hardware:
        by_hardware[key] = Leaves(plan, hardware)
    return by_hardware[key]


def predictor_for(
    plan: BoundPlan, hardware: Hardware | str | None, problem: Problem | None = None
) -> Predictor:
    """A predictor of a plan's problem, or of one with other pins.

    Args:
        plan: The plan.
        hardware: What is predicted for, a preset or file; by default the mesh's devices.
        problem: The problem; by default the plan's.
    """
    if hardware is not None:
        check_hardware(hardware)
    if isinstance(hardware, str):
        hardware = Hardware.load(hardware) if hardware.endswith(".json") else hardware_for(hardware)
    return Predictor(
        problem or plan.layout.problem,
        hardware or hardware_for(plan.mesh.device_kind),
        plan.traced.call.donated,
        backend_for(plan.mesh.platform),
    )


def _alike(plan: BoundPlan, value: Value) -> Iterator[Value]:
    """A leaf, its optimizer state (same shape and axes), and the outputs they are carried in.

    State that is laid out differently is resharded at each update; that would be counted as a cost
    of the leaf's spec.
    """
    program, problem = plan.traced.program, plan.layout.problem
    axes_of = problem.logical_axes.classes.of_value
    alike = {value.index}
    for leaf in program.body.inputs:
        same = (leaf.shape, axes_of[leaf.index]) == (value.shape, axes_of[value.index])
        if same and leaf.index in problem.groups.optimizer_values:
            alike.add(leaf.index)
    for index in sorted(alike):
        yield program.values[index]
    for leaf_number, output_number in plan.carry:
        if program.body.inputs[leaf_number].index in alike:
            yield program.body.outputs[output_number]


def _specs(value: Value, mesh_axes: Mapping[str, int]) -> Iterator[Spec]:
    """Every spec that puts each mesh axis on one dimension or on none, where they divide."""
    names = [name for name, size in mesh_axes.items() if size > 1]
    rank = len(value.shape)
    for dims in itertools.product(range(-1, rank), repeat=len(names)):  # -1: on none
        spec: list[tuple[str, ...]] = [()] * rank
        for name, dim in zip(names, dims, strict=True):
            if dim >= 0:
                spec[dim] += (name,)
        if _divides(spec, value.shape, mesh_axes):
            yield tuple(spec)


def _divides(
    spec: Sequence[tuple[str, ...]], shape: tuple[int, ...], mesh_axes: Mapping[str, int]
) -> bool:
    return all(
        size % shard_count((axes,), mesh_axes) == 0 for axes, size in zip(spec, shape, strict=True)
    )


def logical_axis_of(layout: Layout, rule: AxisRule) -> int:
    """Index of a rule's logical axis; where the program lacks it, a number that none has."""
    logical_axis = layout.problem.logical_axes.by_name(rule.logical_axis)
    return NO_AXIS - 1 if logical_axis is None else logical_axis.index


def _comparison(after: Prediction, before: Prediction) -> str:
    """Time, peak memory and bytes sent against those of the plan."""
    time = _change(after.time_s, before.time_s, seconds_text)
    peak = _change(after.peak_bytes, before.peak_bytes, bytes_text)
    sent = _change(after.collective_bytes, before.collective_bytes, bytes_text)
    return f"time {time}, peak {peak}, sent {sent}"


def _change(new: float, old: float, text: Callable[[float], str]) -> str:
    """`+3.1 %`, `the same`, or the new number where there was none before."""
    if new == old or abs(new - old) < SAME * old:
        return "the same"
    return f"{100 * (new / old - 1):+.1f} %" if old else text(new)
