"""Explanations: what a plan moves and from which source line and rule, what each device stores, and why not otherwise.

Every number says whose word it is: predicted (the model), compiled (read from the compiled program), measured.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec
from rich.table import Table

from autoshard.compile import Compiled, build, compile_built
from autoshard.cost_model.backend import backend_for
from autoshard.cost_model.collectives import joint
from autoshard.cost_model.hardware import Hardware, hardware_for
from autoshard.cost_model.predict import Prediction, Predictor
from autoshard.dims import NO_AXIS
from autoshard.errors import PathError
from autoshard.evidence import Collective, CollectiveOp
from autoshard.hlo import read_collectives
from autoshard.layout import AxisRule, Layout, Problem, Spec, shard_count, to_partition_spec
from autoshard.pins import resolve_pins
from autoshard.program import Value
from autoshard.report import bytes_text, render, seconds_text
from autoshard.trace import name_stack_of, source_line
from autoshard.trial import Trial

if TYPE_CHECKING:
    from autoshard.plan import Plan

MOST_ALTERNATIVES = 64


@dataclass(frozen=True, slots=True)
class Moved:
    """The collectives of one kind over one set of mesh axes that one source line needs.

    Attributes:
        source: `file.py:line`, "" where the compiled program does not say.
        kind: Kind of collective.
        axes: Mesh axes.
        count: Executions per call, by operand of combined collectives.
        bytes: Bytes one device sends per call.
        seconds: Alpha-beta seconds; a combined collective's latency is shared by its operands.
        rules: The plan's rules that split the line's work over these axes.
    """

    source: str
    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    seconds: float
    rules: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Explanation:
    """A plan explained.

    Attributes:
        moved: Compiled collectives by source line, most bytes first; () if nothing can be compiled here.
        attributed: Share of the compiled collective bytes whose source line is known.
        stored_bytes: What one device stores, by what it is for; `whose` says whose word each is.
        whose: `predicted` or `compiled`, by the same names.
        prediction: Of the plan.
        alone_s: Predicted seconds of the step on one device.
        compiled_s: Predicted compute with the compiled collectives; None if nothing can be compiled here.
        measured_s: Median of the search's rounds; None if it was not measured.
        reasons: For each preset of the search that is not the plan, the one reason that decides.
    """

    moved: tuple[Moved, ...]
    attributed: float
    stored_bytes: Mapping[str, int]
    whose: Mapping[str, str]
    prediction: Prediction
    alone_s: float
    compiled_s: float | None
    measured_s: float | None
    reasons: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        parts: list[object] = [_moved_table(self), _memory_table(self), _throughput_table(self)]
        if self.reasons:
            parts.append("why not a preset:\n" + "\n".join(f"  {name}: {reason}" for name, reason in self.reasons))
        return render(*parts).rstrip()


@dataclass(frozen=True, eq=False)
class WhatIf:
    """A plan with other pins, predicted; `compile()` asks the compiler.

    Attributes:
        pins: What is pinned.
        layout: The plan's rules with these pins.
        before: Prediction of the plan.
        after: Prediction with the pins.
    """

    plan: Plan
    pins: Mapping[Any, PartitionSpec]
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
    """One spec that a leaf could have, its optimizer state with it: predicted for the whole step."""

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


def explain(plan: Plan, hardware: Hardware | str | None = None) -> Explanation:
    """Explains a plan; compiles it if nobody did yet and its devices are here.

    Args:
        plan: The plan.
        hardware: What seconds are predicted for; by default the mesh's devices.
    """
    predictor = _predictor(plan, hardware)
    prediction = predictor.predict(plan.layout)
    alone = predictor.predict(replace(plan.layout, rules=()))
    winner = next((t for t in plan.trials if t.status == "winner"), None)
    ops: tuple[CollectiveOp, ...] = ()
    compiled_s: float | None = None
    stored = {name: count for name, count in prediction.argument_bytes.items() if count}
    whose = dict.fromkeys(stored, "predicted")
    gradients = _gradient_bytes(plan)
    if plan.mesh.target is None:
        compiled = plan.compile()
        text = compiled.executable.as_text() or ""
        ops = read_collectives(text, plan.mesh.axes, by_operand=True)
        comm_s = sum(op.trips * _seconds(predictor, op) for op in read_collectives(text, plan.mesh.axes))
        overlapped = predictor.hardware.overlap * min(prediction.compute_s, comm_s)
        compiled_s = prediction.compute_s + comm_s - overlapped
        found = compiled.evidence
        rest = {
            "gradients": gradients,
            "activations and other temporaries": max(found.temp_bytes - gradients, 0),
            "outputs that are no donated argument": found.output_bytes - found.alias_bytes,
            "peak": found.peak_bytes,
        }
        whose |= dict.fromkeys(rest, "compiled") | {"gradients": "predicted"}
    else:
        kept = prediction.peak_bytes - sum(stored.values()) - gradients
        rest = {"gradients": gradients, "activations and other temporaries": max(kept, 0),
                "peak": prediction.peak_bytes}  # fmt: skip
        whose |= dict.fromkeys(rest, "predicted")
    total = sum(op.total_bytes for op in ops)
    known = sum(op.total_bytes for op in ops if op.source)
    return Explanation(
        moved=_by_line(plan, predictor, ops),
        attributed=known / total if total else 1.0,
        stored_bytes=stored | rest,
        whose=whose,
        prediction=prediction,
        alone_s=alone.compute_s,
        compiled_s=compiled_s,
        measured_s=winner.measured.median_s if winner is not None and winner.measured is not None else None,
        reasons=tuple(_reasons(plan, predictor, winner)),
    )


def what_if(plan: Plan, pins: Mapping[Any, PartitionSpec], hardware: Hardware | str | None = None) -> WhatIf:
    """Predicts a plan with other pins: its rules stay, the pinned leaves (and what they are carried in) change.

    Args:
        plan: The plan.
        pins: As for `optimize`: leaf path or compiled pattern to PartitionSpec.
        hardware: As for `explain`.

    Raises:
        PathError: If a path names no leaf.
        SpecError: If a spec does not fit its leaf.
    """
    problem = plan.layout.problem
    found = resolve_pins(pins, plan.traced.program, problem.mesh_axes, plan.carry)
    layout = _pinned(plan, found)
    before = _predictor(plan, hardware).predict(plan.layout)
    return WhatIf(plan, pins, layout, before, _predictor(plan, hardware, layout.problem).predict(layout))


def explain_leaf(plan: Plan, path: str, hardware: Hardware | str | None = None) -> LeafExplanation:
    """The spec of an argument leaf, and what every other one would cost; optimizer state of the leaf goes with it.

    Raises:
        PathError: If there is no such leaf.
    """
    program, layout = plan.traced.program, plan.layout
    if path not in program.input_paths:
        raise PathError(
            f"explain({path!r}): no such argument leaf. There are {', '.join(program.input_paths[:8])}"
            f"{', ...' if len(program.input_paths) > 8 else ''}."
        )
    value = program.body.inputs[program.input_paths.index(path)]
    own = layout.fit(value).spec
    now = Alternative(to_partition_spec(own), _predictor(plan, hardware).predict(layout))
    others = []
    for spec in itertools.islice(_specs(value, layout.problem.mesh_axes), MOST_ALTERNATIVES):
        if spec != own:
            other = _pinned(plan, {v.index: spec for v in _alike(plan, value)})
            prediction = _predictor(plan, hardware, other.problem).predict(other)
            others.append(Alternative(to_partition_spec(spec), prediction))
    others.sort(key=lambda a: (a.prediction.time_s, a.prediction.peak_bytes, str(a.spec)))
    roles = {role for role in layout.problem.roles.of_value[value.index] if role != NO_AXIS}
    used = {axis for axes in own for axis in axes}
    rules = tuple(str(r) for r in layout.rules if r.mesh_axis in used and _role(layout, r) in roles)
    return LeafExplanation(path, now, rules, tuple(others))


# Predictions --------------------------------------------------------------------------------------------------------


def _predictor(plan: Plan, hardware: Hardware | str | None, problem: Problem | None = None) -> Predictor:
    if isinstance(hardware, str):
        hardware = Hardware.load(hardware) if hardware.endswith(".json") else hardware_for(hardware)
    machine = hardware or hardware_for(plan.mesh.device_kind)
    return Predictor(problem or plan.layout.problem, machine, plan.traced.call.donated, backend_for(plan.mesh.platform))


def _pinned(plan: Plan, pins: Mapping[int, Spec]) -> Layout:
    problem = plan.layout.problem
    return replace(plan.layout, problem=replace(problem, pins={**problem.pins, **pins}))


def _alike(plan: Plan, value: Value) -> Iterator[Value]:
    """A leaf, the optimizer state of the same shape and axes, and the outputs that they are carried in."""
    program, axes = plan.traced.program, plan.layout.problem.roles.axes
    inside = plan.layout.problem.groups.optimizer_values
    key = value.shape, axes.of_value[value.index]
    state = {v.index for v in program.body.inputs if v.index in inside and (v.shape, axes.of_value[v.index]) == key}
    alike = state | {value.index}
    yield from (program.values[i] for i in sorted(alike))
    yield from (program.body.outputs[out] for leaf, out in plan.carry if program.body.inputs[leaf].index in alike)


def _specs(value: Value, mesh_axes: Mapping[str, int]) -> Iterator[Spec]:
    """Every spec that puts each mesh axis on one dimension or on none, where they divide."""
    names = [name for name, size in mesh_axes.items() if size > 1]
    for places in itertools.product(range(-1, len(value.shape)), repeat=len(names)):
        spec = tuple(
            tuple(n for n, place in zip(names, places, strict=True) if place == d) for d in range(len(value.shape))
        )
        if all(size % shard_count((axes,), mesh_axes) == 0 for size, axes in zip(value.shape, spec, strict=True)):
            yield spec


def _seconds(predictor: Predictor, op: CollectiveOp) -> float:
    return predictor.collective_s(op.kind, op.axes, op.full_bytes, op.group_size)


def _gradient_bytes(plan: Plan) -> int:
    """Bytes of the parameters' gradients on one device, all at once: the last value of each that is differentiated."""
    program, layout = plan.traced.program, plan.layout
    axes = layout.problem.roles.axes
    last: dict[object, Value] = {}
    for eqn in program.body.eqns:
        if "transpose(" in name_stack_of(eqn):
            for value in eqn.outputs:
                last[value.shape, axes.of_value[value.index]] = value
    groups = zip(program.body.inputs, layout.problem.groups.of_input, strict=True)
    total = 0
    for leaf, group in groups:
        gradient = last.get((leaf.shape, axes.of_value[leaf.index]))
        if group.value == "parameters" and gradient is not None:
            total += gradient.bytes // shard_count(layout.fit(gradient).spec, layout.problem.mesh_axes)
    return total


# Where and why ------------------------------------------------------------------------------------------------------


def _by_line(plan: Plan, predictor: Predictor, ops: Sequence[CollectiveOp]) -> tuple[Moved, ...]:
    groups: dict[tuple[str, str, tuple[str, ...]], list[CollectiveOp]] = defaultdict(list)
    for op in ops:
        groups[op.source, op.kind, op.axes].append(op)
    rules = _rules_by_line(plan.layout)
    moved = [
        Moved(
            source,
            kind,
            axes,
            sum(op.trips for op in own),
            sum(op.total_bytes for op in own),
            sum(op.trips * _seconds(predictor, op) for op in own),
            tuple(str(r) for r in rules.get(source, ()) if r.mesh_axis in axes),
        )
        for (source, kind, axes), own in groups.items()
    ]
    return tuple(sorted(moved, key=lambda m: (-m.bytes, m.source, m.kind, m.axes)))


def _rules_by_line(layout: Layout) -> Mapping[str, tuple[AxisRule, ...]]:
    """By source line, the rules whose role its equations loop over."""
    roles: dict[str, set[int]] = defaultdict(set)
    of_value = layout.problem.roles.of_value
    for eqn in layout.problem.program.eqns:
        found = {role for role, _ in layout.problem.roles.loops(eqn)} if not eqn.bodies else set()
        values = eqn.inputs if eqn.bodies else ()  # a loop gathers what it is given
        roles[source_line(eqn)] |= found.union(*(of_value[v.index] for v in values))
    return {line: tuple(rule for rule in layout.rules if _role(layout, rule) in found) for line, found in roles.items()}


def _role(layout: Layout, rule: AxisRule) -> int:
    role = layout.problem.roles.by_name(rule.role)
    return NO_AXIS - 1 if role is None else role.index


def _reasons(plan: Plan, predictor: Predictor, winner: Trial | None) -> Iterator[tuple[str, str]]:
    """For each preset that is not the plan, why: rejected and for what, or slower by which collective."""
    if winner is None:
        return
    for trial in plan.trials:
        if trial.origin.startswith("preset") and trial is not winner:
            reason = trial.reason.splitlines()[0] if trial.reason else ""
            yield trial.name, reason if trial.status == "rejected" else _slower(plan, predictor, trial, winner)


def _slower(plan: Plan, predictor: Predictor, trial: Trial, winner: Trial) -> str:
    """The reason why a candidate that would work lost."""
    if trial.measured is not None and winner.measured is not None:
        mine, best, word = trial.measured.median_s, winner.measured.median_s, "measured"
    elif trial.compiled is not None and winner.compiled is not None:
        mine, best, word = trial.compiled.time_s, winner.compiled.time_s, "compiled"
    elif trial.predicted is not None and winner.predicted is not None:
        mine, best, word = trial.predicted.time_s, winner.predicted.time_s, "predicted"
    else:
        return "nothing is known of it"
    times = f"{seconds_text(mine)} against {seconds_text(best)} ({word})"
    if trial.compiled is not None and winner.compiled is not None:
        theirs, ours = trial.compiled.collectives, winner.compiled.collectives
    else:
        theirs, ours = (
            predictor.predict(Layout(plan.layout.problem, tuple(map(AxisRule.parse, t.rules)))).collectives
            for t in (trial, winner)
        )
    extra: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    sent: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
    for sign, collectives in ((1, theirs), (-1, ours)):
        for c in collectives:
            extra[c.kind, c.axes] += sign * _summary_s(predictor, c)
            sent[c.kind, c.axes] += sign * c.bytes
    worst = max(extra, key=lambda key: extra[key], default=None)
    if mine <= best or worst is None or extra[worst] <= 0:
        same = "as fast within noise" if mine <= 1.05 * best else "slower by its compute, not its collectives"
        return f"{same}: {times}"
    kind, axes = worst
    return (
        f"slower because of {kind} over {','.join(axes)}, {bytes_text(sent[worst])} more, about "
        f"{seconds_text(extra[worst])}: {times}"
    )


def _summary_s(predictor: Predictor, collective: Collective) -> float:
    """Alpha-beta seconds of a summary: all its bytes over the slowest link, a ring's steps for each one."""
    link, size = joint(predictor.hardware, predictor.problem.mesh_axes, collective.axes)
    steps = {"all_reduce": 2 * (size - 1), "collective_permute": 1}.get(collective.kind, size - 1)
    return collective.count * steps * link.alpha_s + collective.bytes / link.bytes_per_s


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


# Tables -------------------------------------------------------------------------------------------------------------


def _moved_table(found: Explanation) -> Table:
    share = f"{found.attributed:.1%} of the bytes have a source line"
    table = Table(title=f"communication, compiled: bytes one device sends a call; {share}", title_justify="left")
    for name in ("source", "collective", "mesh axes"):
        table.add_column(name, no_wrap=True)
    for name in ("count", "bytes", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("rules")
    for m in found.moved:
        table.add_row(
            m.source or "unknown", m.kind, ",".join(m.axes), str(m.count), bytes_text(m.bytes), seconds_text(m.seconds),
            ", ".join(m.rules),
        )  # fmt: skip
    return table


def _memory_table(found: Explanation) -> Table:
    table = Table(title="memory: what one device stores", title_justify="left")
    for name in ("what", "bytes", "by"):
        table.add_column(name, no_wrap=True, justify="right" if name == "bytes" else "left")
    for name, count in found.stored_bytes.items():
        table.add_row(name, bytes_text(count), found.whose[name])
    return table


def _throughput_table(found: Explanation) -> Table:
    p = found.prediction
    table = Table(title="throughput: one step", title_justify="left")
    for name in ("what", "value", "by"):
        table.add_column(name, no_wrap=True, justify="right" if name == "value" else "left")
    rows = [
        ("compute", seconds_text(p.compute_s), "predicted"),
        ("communication", seconds_text(p.comm_s), "predicted"),
        ("step", seconds_text(p.time_s), "predicted"),
        ("efficiency, compute / (compute + communication)", f"{p.compute_s / max(p.compute_s + p.comm_s, 1e-30):.0%}",
         "predicted"),
        ("speed-up over one device", f"{found.alone_s / max(p.time_s, 1e-30):.1f}", "predicted"),
        ("steps a second", f"{1 / max(p.time_s, 1e-30):.3g}", "predicted"),
    ]  # fmt: skip
    if found.compiled_s is not None:
        rows.append(("step", seconds_text(found.compiled_s), "compiled collectives, predicted compute"))
    if found.measured_s is not None:
        rows.append(("step", seconds_text(found.measured_s), "measured"))
    for row in rows:
        table.add_row(*row)
    return table
