"""Explanations: what a plan moves and from which source line and rule, what each device stores, and
why no preset is better.

Every number comes with its provenance: predicted (by the model), compiled (read from the compiled
program) or measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.axes.argument_groups import Group
from autoshard.compiler.bound_plan import BoundPlan
from autoshard.compiler.hlo_collectives import read_collectives
from autoshard.cost_model.hardware.hardware import Hardware
from autoshard.cost_model.hardware.step_components import step_s, summary_s
from autoshard.cost_model.memory_breakdown import Purpose, purposes
from autoshard.cost_model.predict import Prediction, Predictor
from autoshard.evidence.candidate import Candidate, CompiledEvidence, winner_of
from autoshard.evidence.collectives import Collective, CollectiveOp
from autoshard.evidence.pareto import pareto
from autoshard.evidence.throughput import Throughput
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.spec import shard_count
from autoshard.report.text_table import TextTable, columns, render
from autoshard.report.what_if import logical_axis_of, predictor_for
from autoshard.text import bytes_text, first_line, seconds_text
from autoshard.tracing.program import Eqn, Value
from autoshard.tracing.source_lines import source_line

NOISE = 1.05
"""Ratio of two step times up to which they count as equal. Chosen by hand, as the spread of medians
on a busy machine; no test depends on it."""

_KindAndAxes = tuple[str, tuple[str, ...]]
"""Kind of collective and mesh axes."""


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
        rules: The plan's rules that split the line's factors over these axes.
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
        moved: Compiled collectives by source line, most bytes first; () if nothing can be compiled
            here.
        attributed: Share of the compiled collective bytes whose source line is known.
        stored_bytes: What one device stores, by what it is for.
        provenance: `predicted` or `compiled`, by the names of `stored_bytes`.
        throughput: Of the plan, predicted.
        compiled_s: Predicted compute with the compiled collectives; None if nothing can be compiled
            here.
        measured_s: Median of the search's rounds; None if it was not measured.
        reasons: For each preset of the search that is not the plan, the one reason that decides.
        pareto: Candidates of the search that no other one beats in both predicted time and peak,
            fastest first.
        inside: Whether the layout is stated inside the function too; where it is not, what moves
            is not predicted.
    """

    moved: tuple[Moved, ...]
    attributed: float
    stored_bytes: Mapping[str, int]
    provenance: Mapping[str, str]
    throughput: Throughput
    compiled_s: float | None
    measured_s: float | None
    reasons: tuple[tuple[str, str], ...]
    pareto: tuple[Candidate, ...] = ()
    inside: bool = True

    def __str__(self) -> str:
        parts = [_moved_table(self), _memory_table(self), _throughput_table(self)]
        if self.pareto:
            parts.append(_pareto_table(self))
        reasons = [f"  {name}: {reason}" for name, reason in self.reasons]
        return render(*parts, "\n".join(["why not a preset:", *reasons] if reasons else []))


def explain(plan: BoundPlan, hardware: Hardware | str | None = None) -> Explanation:
    """Explains a plan; compiles it if nobody did yet and its devices are here.

    Args:
        plan: The plan.
        hardware: What seconds are predicted for; by default the mesh's devices.
    """
    predictor = predictor_for(plan, hardware)
    prediction = predictor.predict(plan.layout)
    gradient_bytes = _gradient_bytes(plan)
    ops: tuple[CollectiveOp, ...] = ()
    compiled_s: float | None = None

    if plan.mesh.target is None:  # a target's devices are not here, so it is predicted alone
        compiled = plan.compile()
        text = compiled.executable.as_text() or ""
        ops = read_collectives(text, plan.mesh.axes, by_operand=True)
        comm_s = _seconds(predictor, read_collectives(text, plan.mesh.axes))
        compiled_s = step_s(prediction.compute_s, comm_s, predictor.hardware.overlap)
        rest, provenance = _compiled_memory(compiled.evidence, gradient_bytes), "compiled"
    else:
        rest, provenance = _predicted_memory(prediction, gradient_bytes), "predicted"

    arguments = _argument_memory(prediction)
    predicted_too = dict.fromkeys([*arguments, "gradients"], "predicted")
    winner = winner_of(plan.candidates)

    return Explanation(
        moved=_by_line(plan, predictor, ops),
        attributed=_attributed(ops),
        stored_bytes=arguments | rest,
        provenance=dict.fromkeys(rest, provenance) | predicted_too,
        throughput=predictor.throughput(plan.layout, plan.samples_per_step),
        compiled_s=compiled_s,
        measured_s=None if winner is None or winner.measured is None else winner.measured.median_s,
        reasons=tuple(_reasons(plan, predictor, winner)),
        pareto=pareto_candidates(plan.candidates),
        inside=plan.layout.inside,
    )


def pareto_candidates(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that no other one beats in both predicted time and peak memory, fastest first."""
    anchored = [
        (candidate.predicted, candidate)
        for candidate in candidates
        if candidate.predicted is not None and candidate.constraints == "anchors"
    ]
    front = pareto(anchored, lambda item: (item[0].time_s, item[0].peak_bytes, item[1].key))
    return tuple(candidate for _, candidate in front)


def _seconds(predictor: Predictor, ops: Iterable[CollectiveOp]) -> float:
    """Alpha-beta seconds of compiled collectives in one call."""
    return sum(
        op.trip_count * predictor.collective_s(op.kind, op.axes, op.full_bytes, op.group_size)
        for op in ops
    )


# Memory -------------------------------------------------------------------------------------------


def _argument_memory(prediction: Prediction) -> dict[str, int]:
    return {group: count for group, count in prediction.argument_bytes.items() if count}


def _compiled_memory(evidence: CompiledEvidence, gradient_bytes: int) -> dict[str, int]:
    """Bytes on one device beside the arguments; the compiler does not tell gradients apart."""
    return {
        "gradients": gradient_bytes,
        # Not all gradients need be alive at once, so they may be more than all temporaries.
        "activations and other temporaries": max(evidence.temp_bytes - gradient_bytes, 0),
        "outputs that are no donated argument": evidence.output_bytes - evidence.alias_bytes,
        "peak": evidence.peak_bytes,
    }


def _predicted_memory(prediction: Prediction, gradient_bytes: int) -> dict[str, int]:
    """Bytes on one device beside the arguments."""
    argument_bytes = sum(_argument_memory(prediction).values())
    temporary_bytes = prediction.peak_bytes - argument_bytes - gradient_bytes
    return {
        "gradients": gradient_bytes,
        "activations and other temporaries": max(temporary_bytes, 0),
        "peak": prediction.peak_bytes,
    }


def _gradient_bytes(plan: BoundPlan) -> int:
    """Bytes of the parameters' gradients on one device, all at once: the last value of each, by the
    data flow.
    """
    program, layout = plan.traced.program, plan.layout
    purpose, axes_of = purposes(layout.problem), layout.problem.logical_axes.classes.of_value
    last: dict[object, Value] = {}
    for eqn in program.body.eqns:
        for value in eqn.outputs:
            if purpose[value.index] is Purpose.GRADIENTS:
                # Parameters of one shape and one set of axes have gradients of as many bytes.
                last[value.shape, axes_of[value.index]] = value
    total = 0
    for leaf, group in zip(program.body.inputs, layout.problem.groups.of_input, strict=True):
        gradient = last.get((leaf.shape, axes_of[leaf.index]))
        if group is Group.PARAMETER and gradient is not None:
            spec = layout.fit(gradient).spec
            total += gradient.bytes // shard_count(spec, layout.problem.mesh_axes)
    return total


# Communication by source line ---------------------------------------------------------------------


def _attributed(ops: Sequence[CollectiveOp]) -> float:
    total_bytes = sum(op.total_bytes for op in ops)
    attributed_bytes = sum(op.total_bytes for op in ops if op.source)
    return attributed_bytes / total_bytes if total_bytes else 1.0


def _by_line(
    plan: BoundPlan, predictor: Predictor, ops: Sequence[CollectiveOp]
) -> tuple[Moved, ...]:
    groups: dict[tuple[str, str, tuple[str, ...]], list[CollectiveOp]] = defaultdict(list)
    for op in ops:
        groups[op.source, op.kind, op.axes].append(op)
    rules = _rules_by_line(plan.layout)
    moved = [
        Moved(
            source=source,
            kind=kind,
            axes=axes,
            count=sum(op.trip_count for op in group),
            bytes=sum(op.total_bytes for op in group),
            seconds=_seconds(predictor, group),
            rules=tuple(str(rule) for rule in rules.get(source, ()) if rule.mesh_axis in axes),
        )
        for (source, kind, axes), group in groups.items()
    ]
    return tuple(sorted(moved, key=lambda m: (-m.bytes, m.source, m.kind, m.axes)))


def _rules_by_line(layout: Layout) -> Mapping[str, tuple[AxisRule, ...]]:
    """By source line, the rules on a logical axis of its equations."""
    logical_axes: dict[str, set[int]] = defaultdict(set)
    for eqn in layout.problem.program.eqns:
        logical_axes[source_line(eqn)] |= _logical_axes_of(layout, eqn)
    return {
        line: tuple(rule for rule in layout.rules if logical_axis_of(layout, rule) in of_line)
        for line, of_line in logical_axes.items()
    }


def _logical_axes_of(layout: Layout, eqn: Eqn) -> set[int]:
    """Logical axes of an equation's factors; of a loop's operands, which it gathers first."""
    logical_axes = layout.problem.logical_axes
    if not eqn.bodies:
        return {logical_axis for logical_axis, _ in logical_axes.factors(eqn)}
    return {axis for value in eqn.inputs for axis in logical_axes.of_value[value.index]}


# Why not a preset ---------------------------------------------------------------------------------


def _reasons(
    plan: BoundPlan, predictor: Predictor, winner: Candidate | None
) -> Iterator[tuple[str, str]]:
    """For each preset that is not the plan, why: rejected and for what, or slower by which
    collective.
    """
    if winner is None:
        return
    for candidate in plan.candidates:
        if not candidate.is_preset or candidate is winner:
            continue
        if candidate.rejected:
            yield candidate.name, first_line(candidate.reason)
        else:
            yield candidate.name, _slower(plan, predictor, candidate, winner)


def _slower(plan: BoundPlan, predictor: Predictor, candidate: Candidate, winner: Candidate) -> str:
    """The reason why a candidate that would work lost."""
    compared = _times(candidate, winner)
    if compared is None:
        return "not compiled, and layouts at arguments only are not predicted"
    candidate_s, winner_s, provenance = compared
    times = f"{seconds_text(candidate_s)} against {seconds_text(winner_s)} ({provenance})"
    more_s, more_bytes = _more_communication(plan, predictor, candidate, winner)
    worst = max(more_s, key=lambda key: more_s[key], default=None)
    if worst is not None and candidate_s > winner_s and more_s[worst] > 0:
        kind, axes = worst
        return (
            f"slower because of {kind} over {','.join(axes)}, {bytes_text(more_bytes[worst])} more,"
            f" about {seconds_text(more_s[worst])}: {times}"
        )
    if candidate_s <= NOISE * winner_s:
        return f"as fast within noise: {times}"
    return f"slower by its compute, not its collectives: {times}"


def _times(candidate: Candidate, winner: Candidate) -> tuple[float, float, str] | None:
    """(seconds of the candidate, of the winner, provenance): the best that both have."""
    if candidate.measured and winner.measured:
        return candidate.measured.median_s, winner.measured.median_s, "measured"
    if candidate.compiled and winner.compiled:
        return candidate.compiled.time_s, winner.compiled.time_s, "compiled"
    if candidate.predicted and winner.predicted:
        return candidate.predicted.time_s, winner.predicted.time_s, "predicted"
    return None


def _more_communication(
    plan: BoundPlan, predictor: Predictor, candidate: Candidate, winner: Candidate
) -> tuple[dict[_KindAndAxes, float], dict[_KindAndAxes, int]]:
    """By kind and mesh axes, the seconds and the bytes that a candidate's collectives take more."""
    # Both of one provenance: else the difference would be that of the model and the compiler.
    collectives: list[Sequence[Collective]]
    if candidate.compiled is not None and winner.compiled is not None:
        collectives = [candidate.compiled.collectives, winner.compiled.collectives]
    else:
        collectives = [
            predictor.predict(_layout_of(plan, who)).collectives for who in (candidate, winner)
        ]
    more_s: dict[_KindAndAxes, float] = defaultdict(float)
    more_bytes: dict[_KindAndAxes, int] = defaultdict(int)
    for sign, of_one in zip((1, -1), collectives, strict=True):
        for collective in of_one:
            key = collective.kind, collective.axes
            seconds = summary_s(predictor.hardware, predictor.problem.mesh_axes, collective)
            more_s[key] += sign * seconds
            more_bytes[key] += sign * collective.bytes
    return more_s, more_bytes


def _layout_of(plan: BoundPlan, candidate: Candidate) -> Layout:
    """The layout of a candidate that is predicted: stated inside."""
    return Layout(plan.layout.problem, tuple(map(AxisRule.parse, candidate.rules)))


# Tables -------------------------------------------------------------------------------------------


def _moved_table(explanation: Explanation) -> TextTable:
    share = f"{explanation.attributed:.1%} of the bytes have a source line"
    table = TextTable(
        f"communication, compiled: bytes one device sends a call; {share}",
        columns(
            *("source", "collective", "mesh axes", "count", "bytes", "seconds", "rules"),
            right=("count", "bytes", "seconds"),
            wraps=("rules",),
        ),
    )
    for moved in explanation.moved:
        table.add(
            moved.source or "unknown",
            moved.kind,
            ",".join(moved.axes),
            str(moved.count),
            bytes_text(moved.bytes),
            seconds_text(moved.seconds),
            ", ".join(moved.rules),
        )
    return table


def _memory_table(explanation: Explanation) -> TextTable:
    table = TextTable(
        "memory: what one device stores", columns("what", "bytes", "by", right=["bytes"])
    )
    for name, count in explanation.stored_bytes.items():
        table.add(name, bytes_text(count), explanation.provenance[name])
    return table


def _throughput_table(explanation: Explanation) -> TextTable:
    predicted = explanation.throughput
    table = TextTable("throughput: one step", columns("what", "value", "by", right=["value"]))
    efficiency = f"{predicted.efficiency:.0%}"
    table.add("compute", seconds_text(predicted.compute_s), "predicted")
    if explanation.inside:
        table.add("communication", seconds_text(predicted.comm_s), "predicted")
        table.add("efficiency, compute / (compute + communication)", efficiency, "predicted")
        table.add("speed-up over one device", f"{predicted.speed_up:.1f}", "predicted")
    for seconds, provenance in (
        (predicted.step_s if explanation.inside else None, "predicted"),
        (explanation.compiled_s, "compiled collectives, predicted compute"),
        (explanation.measured_s, "measured"),
    ):
        if seconds is not None:
            table.add("step", seconds_text(seconds), provenance)
            for what, rate in predicted.per_s(seconds):
                table.add(f"{what} a second", f"{rate:.3g}", provenance)
    return table


def _pareto_table(explanation: Explanation) -> TextTable:
    """Time against memory, predicted; beside it what was compiled."""
    numbers = ("step", "peak", "step, compiled", "peak, compiled")
    table = TextTable(
        "time against memory: no candidate is predicted to be better in both",
        columns("candidate", *numbers, "rules", right=numbers, wraps=["rules"]),
    )
    for candidate in explanation.pareto:
        predicted, compiled = candidate.predicted, candidate.compiled
        assert predicted is not None
        table.add(
            candidate.name,
            seconds_text(predicted.time_s),
            bytes_text(predicted.peak_bytes),
            seconds_text(compiled.time_s) if compiled else "",
            bytes_text(compiled.peak_bytes) if compiled else "",
            ", ".join(candidate.rules),
        )
    return table
