"""What a plan would cost otherwise: with other pins, or with another spec of one leaf. Predicted,
compiled if asked.

The tables of a plan's predictor are built at the first question (`Leaves`), with a column of its
own for every leaf; each later one changes a few entries of a row of theirs, which takes
milliseconds.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec
from rich.table import Table

from autoshard.axes.axis_classes import NO_AXIS
from autoshard.compiler.bound_plan import BoundPlan
from autoshard.compiler.compile import Compiled, build, compile_built
from autoshard.cost_model.hardware.backend import backend_for
from autoshard.cost_model.hardware.hardware import Hardware, hardware_for
from autoshard.cost_model.predict import Prediction, Predictor
from autoshard.errors import PathError
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.pins import PinMap, resolve_pins
from autoshard.layout.problem import Problem, first_fit
from autoshard.layout.spec import Spec, shard_count, to_partition_spec
from autoshard.report.text_table import render
from autoshard.text import bytes_text, seconds_text
from autoshard.tracing.program import Value

MOST_ALTERNATIVES = 64

_tables: weakref.WeakKeyDictionary[BoundPlan, dict[str | None, Leaves]]
_tables = weakref.WeakKeyDictionary()
"""Built tables, by plan and hardware; they go with their plan."""


@dataclass(frozen=True, eq=False)
class WhatIf:
    """A plan with other pins, predicted; `compile()` asks the compiler.

    Attributes:
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
        return f"{_against(self.after, self.before)} (predicted)"


@dataclass(frozen=True, slots=True)
class Alternative:
    """One spec that a leaf could have, its optimizer state with it: predicted for the whole
    step.
    """

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
    """

    path: str
    chosen: Alternative
    rules: tuple[str, ...]
    others: tuple[Alternative, ...]

    def __str__(self) -> str:
        why = ", ".join(self.rules) or "no rule splits it"
        table = Table(title=f"{self.path}: {self.chosen.spec} ({why})", title_justify="left")
        for name in ("spec", "predicted step", "peak", "bytes sent", "against the plan"):
            table.add_column(name, no_wrap=True)
        for other in (self.chosen, *self.others):
            p = other.prediction
            against = "the plan" if other is self.chosen else _against(p, self.chosen.prediction)
            table.add_row(
                str(other.spec),
                seconds_text(p.time_s),
                bytes_text(p.peak_bytes),
                bytes_text(p.collective_bytes),
                against,
            )
        return render(table).rstrip()


def what_if(plan: BoundPlan, pins: PinMap, hardware: Hardware | str | None = None) -> WhatIf:
    """Predicts a plan with other pins: its rules stay, the pinned leaves (and what they are carried
    in) change.

    Args:
        plan: The plan.
        pins: As for `optimize`: leaf path or compiled pattern to PartitionSpec or `Only` (the
            plan's rules then split what they may).
        hardware: As for `explain`.

    Raises:
        PathError: If a path names no leaf.
        SpecError: If a spec does not fit its leaf.
    """
    layout = plan.layout
    found = resolve_pins(pins, plan.traced.program, layout.problem.mesh_axes, plan.carry)
    specs = dict(found.specs)
    for index, disallowed in found.disallowed.items():
        logical_axes, sizes, optimizer, _ = layout.problem.value_signature(
            plan.traced.program.values[index]
        )
        specs[index] = first_fit(
            logical_axes, sizes, layout.bound, optimizer, disallowed=disallowed
        ).spec
    before, after = _leaves(plan, hardware).predict([{}, specs])
    return WhatIf(plan, pins, _pinned(plan, specs), before, after)


def explain_leaf(
    plan: BoundPlan, path: str, hardware: Hardware | str | None = None
) -> LeafExplanation:
    """The spec of an argument leaf, and what every other one would cost; optimizer state of the
    leaf goes with it.

    Raises:
        PathError: If there is no such leaf.
    """
    program, layout = plan.traced.program, plan.layout
    if path not in program.input_paths:
        raise PathError(
            f"explain({path!r}): no such argument leaf. There are "
            f"{', '.join(program.input_paths[:8])}"
            f"{', ...' if len(program.input_paths) > 8 else ''}."
        )
    value = program.body.inputs[program.input_paths.index(path)]
    own = layout.fit(value).spec
    alike = [v.index for v in _alike(plan, value)]
    specs = [
        s
        for s in itertools.islice(_specs(value, layout.problem.mesh_axes), MOST_ALTERNATIVES)
        if s != own
    ]
    first, *rest = _leaves(plan, hardware).predict(
        [{}, *(dict.fromkeys(alike, spec) for spec in specs)]
    )
    now = Alternative(to_partition_spec(own), first)
    others = [
        Alternative(to_partition_spec(spec), found) for spec, found in zip(specs, rest, strict=True)
    ]
    others.sort(key=lambda a: (a.prediction.time_s, a.prediction.peak_bytes, str(a.spec)))
    logical_axes = {
        logical_axis
        for logical_axis in layout.problem.logical_axes.of_value[value.index]
        if logical_axis != NO_AXIS
    }
    used = {axis for axes in own for axis in axes}
    rules = tuple(
        str(r)
        for r in layout.rules
        if r.mesh_axis in used and logical_axis_of(layout, r) in logical_axes
    )
    return LeafExplanation(path, now, rules, tuple(others))


class Leaves:
    """A plan's predictor in which every argument and output leaf has a column of its own."""

    def __init__(self, plan: BoundPlan, hardware: Hardware | str | None) -> None:
        """Builds the tables.

        Args:
            plan: The plan.
            hardware: As for `explain`.
        """
        layout, body = plan.layout, plan.traced.program.body
        edges = {v.index: layout.fit(v).spec for v in (*body.inputs, *body.outputs)}
        problem = replace(layout.problem, pins={**edges, **layout.problem.pins}, disallowed={})
        self._predictor = predictor_for(plan, hardware, problem)
        self._index = self._predictor.placements.of_layout(replace(layout, problem=problem))

    def predict(self, changes: Sequence[Mapping[int, Spec]]) -> list[Prediction]:
        """Predictions of the plan, each with the specs of a few leaves changed (`Value.index` to
        spec).
        """
        repinned = self._predictor.placements.repinned
        return self._predictor.predict_each(
            np.array([repinned(self._index, pins) for pins in changes])
        )


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
    """A predictor of a plan's problem, or of one with other pins; for the mesh's devices where none
    are named.
    """
    if isinstance(hardware, str):
        hardware = Hardware.load(hardware) if hardware.endswith(".json") else hardware_for(hardware)
    machine = hardware or hardware_for(plan.mesh.device_kind)
    return Predictor(
        problem or plan.layout.problem,
        machine,
        plan.traced.call.donated,
        backend_for(plan.mesh.platform),
    )


def _pinned(plan: BoundPlan, pins: Mapping[int, Spec]) -> Layout:
    problem = plan.layout.problem
    return replace(plan.layout, problem=replace(problem, pins={**problem.pins, **pins}))


def _alike(plan: BoundPlan, value: Value) -> Iterator[Value]:
    """A leaf, the optimizer state of the same shape and axes, and the outputs that they are carried
    in.
    """
    program, axes = plan.traced.program, plan.layout.problem.logical_axes.classes
    inside = plan.layout.problem.groups.optimizer_values
    key = value.shape, axes.of_value[value.index]
    state = {
        v.index
        for v in program.body.inputs
        if v.index in inside and (v.shape, axes.of_value[v.index]) == key
    }
    alike = state | {value.index}
    yield from (program.values[i] for i in sorted(alike))
    yield from (
        program.body.outputs[out]
        for leaf, out in plan.carry
        if program.body.inputs[leaf].index in alike
    )


def _specs(value: Value, mesh_axes: Mapping[str, int]) -> Iterator[Spec]:
    """Every spec that puts each mesh axis on one dimension or on none, where they divide."""
    names = [name for name, size in mesh_axes.items() if size > 1]
    for places in itertools.product(range(-1, len(value.shape)), repeat=len(names)):
        spec = tuple(
            tuple(n for n, place in zip(names, places, strict=True) if place == d)
            for d in range(len(value.shape))
        )
        if all(
            size % shard_count((axes,), mesh_axes) == 0
            for size, axes in zip(value.shape, spec, strict=True)
        ):
            yield spec


def logical_axis_of(layout: Layout, rule: AxisRule) -> int:
    """Index of a rule's logical axis; of one that the program does not have, a number that no logical axis has."""
    logical_axis = layout.problem.logical_axes.by_name(rule.logical_axis)
    return NO_AXIS - 1 if logical_axis is None else logical_axis.index


def _against(after: Prediction, before: Prediction) -> str:
    def change(new: float, old: float, text: Any) -> str:
        if not old:
            return text(new) if new else "the same"
        return "the same" if abs(new - old) < 5e-4 * old else f"{100 * (new / old - 1):+.1f} %"

    return (
        f"time {change(after.time_s, before.time_s, seconds_text)}, "
        f"peak {change(after.peak_bytes, before.peak_bytes, bytes_text)}, "
        f"sent {change(after.collective_bytes, before.collective_bytes, bytes_text)}"
    )
