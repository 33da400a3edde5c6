"""Explanations: what a plan moves and from which source line and rule, what each device stores, and
why not otherwise.

Every number says whose word it is: predicted (the model), compiled (read from the compiled
program), measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from autoshard.compiler.bound_plan import BoundPlan
from autoshard.compiler.hlo_collectives import read_collectives
from autoshard.cost_model.hardware.hardware import Hardware
from autoshard.cost_model.hardware.refit import summary_s
from autoshard.cost_model.memory_breakdown import Purpose, purposes
from autoshard.cost_model.predict import Predictor
from autoshard.evidence.candidate import Candidate, winner_of
from autoshard.evidence.collectives import CollectiveOp
from autoshard.evidence.throughput import Throughput
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.spec import shard_count
from autoshard.report.what_if import logical_axis_of, predictor_for
from autoshard.report.text_table import render
from autoshard.text import bytes_text, seconds_text
from autoshard.tracing.program import Value
from autoshard.tracing.source_lines import source_line


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
        moved: Compiled collectives by source line, most bytes first; () if nothing can be compiled
            here.
        attributed: Share of the compiled collective bytes whose source line is known.
        stored_bytes: What one device stores, by what it is for; `whose` says whose word each is.
        whose: `predicted` or `compiled`, by the same names.
        throughput: Of the plan, predicted.
        compiled_s: Predicted compute with the compiled collectives; None if nothing can be compiled
            here.
        measured_s: Median of the search's rounds; None if it was not measured.
        reasons: For each preset of the search that is not the plan, the one reason that decides.
        pareto: Candidates of the search that no other one beats in both predicted time and peak,
            fastest first.
    """

    moved: tuple[Moved, ...]
    attributed: float
    stored_bytes: Mapping[str, int]
    whose: Mapping[str, str]
    throughput: Throughput
    compiled_s: float | None
    measured_s: float | None
    reasons: tuple[tuple[str, str], ...]
    pareto: tuple[Candidate, ...] = ()

    def __str__(self) -> str:
        parts: list[object] = [_moved_table(self), _memory_table(self), _throughput_table(self)]
        if self.pareto:
            parts.append(_pareto_table(self))
        if self.reasons:
            parts.append(
                "why not a preset:\n"
                + "\n".join(f"  {name}: {reason}" for name, reason in self.reasons)
            )
        return render(*parts).rstrip()


def explain(plan: BoundPlan, hardware: Hardware | str | None = None) -> Explanation:
    """Explains a plan; compiles it if nobody did yet and its devices are here.

    Args:
        plan: The plan.
        hardware: What seconds are predicted for; by default the mesh's devices.
    """
    predictor = predictor_for(plan, hardware)
    prediction = predictor.predict(plan.layout)
    winner = winner_of(plan.candidates)
    ops: tuple[CollectiveOp, ...] = ()
    compiled_s: float | None = None
    stored = {name: count for name, count in prediction.argument_bytes.items() if count}
    whose = dict.fromkeys(stored, "predicted")
    gradients = _gradient_bytes(plan)
    if plan.mesh.target is None:
        compiled = plan.compile()
        text = compiled.executable.as_text() or ""
        ops = read_collectives(text, plan.mesh.axes, by_operand=True)
        comm_s = sum(
            op.trip_count * _seconds(predictor, op) for op in read_collectives(text, plan.mesh.axes)
        )
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
        throughput=predictor.throughput(plan.layout, plan.samples_per_step),
        compiled_s=compiled_s,
        measured_s=winner.measured.median_s
        if winner is not None and winner.measured is not None
        else None,
        reasons=tuple(_reasons(plan, predictor, winner)),
        pareto=pareto(plan.candidates),
    )


def pareto(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Trials that no other one beats in both predicted time and predicted peak memory, fastest
    first.
    """
    kept: list[Candidate] = []
    least_bytes: int | None = None
    known = [
        (t.predicted, t)
        for t in candidates
        if t.predicted is not None and t.constraints == "anchors"
    ]
    for found, candidate in sorted(
        known, key=lambda item: (item[0].time_s, item[0].peak_bytes, item[1].key)
    ):
        if least_bytes is None or found.peak_bytes < least_bytes:
            kept.append(candidate)
            least_bytes = found.peak_bytes
    return tuple(kept)


def _seconds(predictor: Predictor, op: CollectiveOp) -> float:
    return predictor.collective_s(op.kind, op.axes, op.full_bytes, op.group_size)


def _gradient_bytes(plan: BoundPlan) -> int:
    """Bytes of the parameters' gradients on one device, all at once: the last value of each, by the
    data flow.
    """
    program, layout = plan.traced.program, plan.layout
    axes = layout.problem.logical_axes.classes
    last: dict[object, Value] = {}
    purpose = purposes(layout.problem)
    for eqn in program.body.eqns:
        for value in eqn.outputs:
            if purpose[value.index] is Purpose.GRADIENTS:
                last[value.shape, axes.of_value[value.index]] = value
    groups = zip(program.body.inputs, layout.problem.groups.of_input, strict=True)
    total = 0
    for leaf, group in groups:
        gradient = last.get((leaf.shape, axes.of_value[leaf.index]))
        if group.value == "parameters" and gradient is not None:
            total += gradient.bytes // shard_count(
                layout.fit(gradient).spec, layout.problem.mesh_axes
            )
    return total


# Where and why ------------------------------------------------------------------------------------


def _by_line(
    plan: BoundPlan, predictor: Predictor, ops: Sequence[CollectiveOp]
) -> tuple[Moved, ...]:
    groups: dict[tuple[str, str, tuple[str, ...]], list[CollectiveOp]] = defaultdict(list)
    for op in ops:
        groups[op.source, op.kind, op.axes].append(op)
    rules = _rules_by_line(plan.layout)
    moved = [
        Moved(
            source,
            kind,
            axes,
            sum(op.trip_count for op in own),
            sum(op.total_bytes for op in own),
            sum(op.trip_count * _seconds(predictor, op) for op in own),
            tuple(str(r) for r in rules.get(source, ()) if r.mesh_axis in axes),
        )
        for (source, kind, axes), own in groups.items()
    ]
    return tuple(sorted(moved, key=lambda m: (-m.bytes, m.source, m.kind, m.axes)))


def _rules_by_line(layout: Layout) -> Mapping[str, tuple[AxisRule, ...]]:
    """By source line, the rules whose logical axis its equations loop over."""
    logical_axes: dict[str, set[int]] = defaultdict(set)
    of_value = layout.problem.logical_axes.of_value
    for eqn in layout.problem.program.eqns:
        found = (
            {logical_axis for logical_axis, _ in layout.problem.logical_axes.factors(eqn)}
            if not eqn.bodies
            else set()
        )
        values = eqn.inputs if eqn.bodies else ()  # a loop gathers what it is given
        logical_axes[source_line(eqn)] |= found.union(*(of_value[v.index] for v in values))
    return {
        line: tuple(rule for rule in layout.rules if logical_axis_of(layout, rule) in found)
        for line, found in logical_axes.items()
    }


def _reasons(
    plan: BoundPlan, predictor: Predictor, winner: Candidate | None
) -> Iterator[tuple[str, str]]:
    """For each preset that is not the plan, why: rejected and for what, or slower by which
    collective.
    """
    if winner is None:
        return
    for candidate in plan.candidates:
        if candidate.is_preset and candidate is not winner:
            reason = candidate.reason.splitlines()[0] if candidate.reason else ""
            yield (
                candidate.name,
                reason if candidate.rejected else _slower(plan, predictor, candidate, winner),
            )


def _slower(plan: BoundPlan, predictor: Predictor, candidate: Candidate, winner: Candidate) -> str:
    """The reason why a candidate that would work lost."""
    if candidate.measured is not None and winner.measured is not None:
        mine, best, word = candidate.measured.median_s, winner.measured.median_s, "measured"
    elif candidate.compiled is not None and winner.compiled is not None:
        mine, best, word = candidate.compiled.time_s, winner.compiled.time_s, "compiled"
    elif candidate.predicted is not None and winner.predicted is not None:
        mine, best, word = candidate.predicted.time_s, winner.predicted.time_s, "predicted"
    else:
        return "nothing is known of it"
    times = f"{seconds_text(mine)} against {seconds_text(best)} ({word})"
    if candidate.compiled is not None and winner.compiled is not None:
        theirs, ours = candidate.compiled.collectives, winner.compiled.collectives
    else:
        theirs, ours = (
            predictor.predict(
                Layout(plan.layout.problem, tuple(map(AxisRule.parse, t.rules)))
            ).collectives
            for t in (candidate, winner)
        )
    extra: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    sent: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
    for sign, collectives in ((1, theirs), (-1, ours)):
        for c in collectives:
            extra[c.kind, c.axes] += sign * summary_s(
                predictor.hardware, predictor.problem.mesh_axes, c
            )
            sent[c.kind, c.axes] += sign * c.bytes
    worst = max(extra, key=lambda key: extra[key], default=None)
    if mine <= best or worst is None or extra[worst] <= 0:
        same = (
            "as fast within noise"
            if mine <= 1.05 * best
            else "slower by its compute, not its collectives"
        )
        return f"{same}: {times}"
    kind, axes = worst
    return (
        f"slower because of {kind} over {','.join(axes)}, {bytes_text(sent[worst])} more, about "
        f"{seconds_text(extra[worst])}: {times}"
    )


# Tables -------------------------------------------------------------------------------------------


def _moved_table(found: Explanation) -> Table:
    share = f"{found.attributed:.1%} of the bytes have a source line"
    table = Table(
        title=f"communication, compiled: bytes one device sends a call; {share}",
        title_justify="left",
    )
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
    t = found.throughput
    table = Table(title="throughput: one step", title_justify="left")
    for name in ("what", "value", "by"):
        table.add_column(name, no_wrap=True, justify="right" if name == "value" else "left")
    rows = [
        ("compute", seconds_text(t.compute_s), "predicted"),
        ("communication", seconds_text(t.comm_s), "predicted"),
        ("efficiency, compute / (compute + communication)", f"{t.efficiency:.0%}", "predicted"),
        ("speed-up over one device", f"{t.speed_up:.1f}", "predicted"),
    ]
    words = ((t.step_s, "predicted"), (found.compiled_s, "compiled collectives, predicted compute"),
             (found.measured_s, "measured"))  # fmt: skip
    for step_s, word in words:
        if step_s is not None:
            rows.append(("step", seconds_text(step_s), word))
            rows += [(f"{what} a second", f"{rate:.3g}", word) for what, rate in t.per_s(step_s)]
    for row in rows:
        table.add_row(*row)
    return table


def _pareto_table(found: Explanation) -> Table:
    """Time against memory; what the compiler said stands beside the prediction where it was
    asked.
    """
    title = "time against memory: no candidate is predicted to be better in both"
    table = Table(title=title, title_justify="left")
    table.add_column("candidate", no_wrap=True)
    for name in ("step", "peak", "step, compiled", "peak, compiled"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("rules")
    for candidate in found.pareto:
        assert candidate.predicted is not None
        seen = candidate.compiled
        compiled = (
            ("", "") if seen is None else (seconds_text(seen.time_s), bytes_text(seen.peak_bytes))
        )
        predicted = (
            seconds_text(candidate.predicted.time_s),
            bytes_text(candidate.predicted.peak_bytes),
        )
        table.add_row(candidate.name, *predicted, *compiled, ", ".join(candidate.rules))
    return table
