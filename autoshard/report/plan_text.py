"""The candidates table, the summary of a plan and of a table, as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autoshard.compiler.bound_plan import BoundPlan
from autoshard.evidence.candidate import Candidate, CompiledEvidence, Skipped, Status, winner_of
from autoshard.evidence.collectives import Collective
from autoshard.evidence.throughput import Throughput
from autoshard.evidence.timings import Timings
from autoshard.report.candidate_texts import candidate_texts
from autoshard.report.text_table import TextTable, columns, render
from autoshard.table.leaf_patterns import Each, fold
from autoshard.table.spec_entry import spec_text
from autoshard.table.spec_table import SpecTable, candidates_of
from autoshard.text import bytes_text, seconds_text

MOST_CANDIDATES = 30
"""Rows of the candidates table: what a terminal shows. Chosen by hand, no test depends on it."""

REASON_LENGTH = 70
"""Characters of a reason in the candidates table; with more its rows would wrap."""

_COMPUTE = {"compiler": "the compiler's own estimate", "predicted": "predicted"}

_CANDIDATE_TEXTS = ("candidate", "stated at", "status")
_CANDIDATE_NUMBERS = (
    "predicted\ntime",
    "predicted\npeak",
    "predicted\nbytes",
    "partitioned\nbytes",
    "compiled\nbytes",
    "compiled\npeak",
    "compiled\ntemporaries",
    "measured\nmedian",
)


def candidates_table(candidates: Iterable[Candidate], limit: int = MOST_CANDIDATES) -> TextTable:
    """The candidates, best first: predicted, partitioned, compiled and measured side by side.

    Searched ones that are predicted and nothing more are left out.
    """
    table = TextTable(
        "candidates",
        columns(
            *_CANDIDATE_TEXTS,
            *_CANDIDATE_NUMBERS,
            "reason",
            right=_CANDIDATE_NUMBERS,
            wraps=["reason"],
        ),
    )
    shown = [c for c in candidates if c.status is not Status.PREDICTED or c.is_preset or c.reason]
    for candidate in sorted(shown, key=_best_first)[:limit]:
        texts = candidate_texts(candidate)
        rounds = f" ({candidate.measured.rounds})" if candidate.measured else ""
        table.add(
            candidate.name,
            candidate.constraints,
            candidate.status,
            texts.predicted_time,
            texts.predicted_peak,
            texts.predicted_sent,
            texts.partitioned_sent,
            texts.compiled_sent,
            texts.compiled_peak,
            texts.compiled_temporaries,
            texts.measured_time + rounds,
            texts.reason[:REASON_LENGTH],
        )
    return table


def _best_first(candidate: Candidate) -> tuple[int, float, float]:
    measured_s = candidate.measured.median_s if candidate.measured else 0.0
    return candidate.status.rank, measured_s, _compiled_or_predicted_s(candidate)


def _compiled_or_predicted_s(candidate: Candidate) -> float:
    if candidate.compiled is not None:
        return candidate.compiled.time_s
    return candidate.predicted.time_s if candidate.predicted else float("inf")


def plan_text(plan: BoundPlan, table: SpecTable) -> str:
    """The summary that `print(plan)` shows."""
    mesh = _mesh_text(plan.mesh.axes)
    lines = [f"plan of {plan.traced.program.name} on {mesh} ({plan.mesh.device_kind})"]
    lines += _rule_lines(list(map(str, plan.rules)), plan.layout.inside)
    lines.append(f"verified: {plan.verified}")
    lines += _number_lines(plan)
    if plan.bound:
        lines.append(plan.bound)
    if plan.timings is not None:
        lines.append(timings_text(plan.timings))
    lines += [f"note: {note}" for note in plan.notes]
    tables = [_specs_table(table)]
    if plan.candidates:
        tables.append(candidates_table(plan.candidates))
    return render("\n".join(lines), *tables, skipped_text(plan.skipped))


def table_text(table: SpecTable) -> str:
    """A spec table for people."""
    mesh = _mesh_text(table.mesh.axes)
    jax_version = table.versions.get("jax")
    lines = [f"plan of {table.function} on {mesh}, written with jax {jax_version}"]
    lines += _rule_lines(table.rules, table.constraints == "anchors")
    lines.append(f"verified: {table.verified}")
    evidence = table.evidence
    if evidence.when:
        hardware = f"{evidence.hardware.get('devices', '?')} x {evidence.hardware.get('kind', '?')}"
        duration = seconds_text(evidence.search_s or 0.0)
        lines.append(f"searched: {evidence.when} for {duration}, {hardware}")
    if table.edited:
        lines.append(
            "STALE: specs or rules were edited after the search; the numbers below are of the plan "
            "before"
        )
    tables = [_specs_table(table)]
    candidates = candidates_of(table)
    if candidates:
        tables.append(candidates_table(candidates))
    return render("\n".join(lines), *tables)


def _mesh_text(axes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def _rule_lines(rules: Sequence[str], inside: bool) -> list[str]:
    where = "stated inside the function too" if inside else "arguments and outputs only"
    lines = [f"  {rule}" for rule in rules]
    return [f"rules ({where}):", *(lines or ["  none: everything is replicated"])]


def _number_lines(plan: BoundPlan) -> list[str]:
    """What is known of the winner, each number with its provenance."""
    winner = winner_of(plan.candidates)
    lines = []
    if winner is not None and winner.compiled is not None:
        lines.append(_compiled_line(winner.compiled, runs_here=plan.mesh.target is None))
        lines.append(collectives_text(winner.compiled.collectives))
    if plan.throughput is not None and plan.layout.inside:
        lines.append(throughput_text(plan.throughput))
    if winner is not None and winner.measured is not None:
        median = seconds_text(winner.measured.median_s)
        lines.append(f"measured: median {median} of {winner.measured.rounds} rounds")
    return lines


def _compiled_line(compiled: CompiledEvidence, runs_here: bool) -> str:
    parts = [f"{bytes_text(compiled.peak_bytes)} per device"]
    if not runs_here:  # then nothing is measured, and this is the best that is known of its time
        compute = f"{seconds_text(compiled.compute_s)} ({_COMPUTE[compiled.compute_from]})"
        step = seconds_text(compiled.time_s)
        parts.append(f"step {step}, of it compute {compute}, not measured")
    parts.append("one call's collectives, bytes a device sends:")
    return f"compiled: {'; '.join(parts)}"


def collectives_text(collectives: Sequence[Collective]) -> str:
    """Collectives on one line each."""
    if not collectives:
        return "  none"
    return "\n".join(
        f"  {c.kind} over {','.join(c.axes) or 'a group of no mesh axes'}: {c.count} of "
        f"{bytes_text(c.bytes)} in all"
        for c in collectives
    )


def throughput_text(throughput: Throughput) -> str:
    """Predicted throughput on one line.

    >>> print(throughput_text(Throughput(0.4, 0.3, 0.1, 1.2)))
    predicted: step 400 ms, 2.5 steps a second; efficiency 75%, 3.0 times as fast as one device
    """
    rates = ", ".join(f"{rate:.3g} {what} a second" for what, rate in throughput.per_s())
    return (
        f"predicted: step {seconds_text(throughput.step_s)}, {rates}; efficiency "
        f"{throughput.efficiency:.0%}, {throughput.speed_up:.1f} times as fast as one device"
    )


def timings_text(timings: Timings) -> str:
    """Where the time of a search went on one line, what took longest first.

    >>> counts = {"trace": 1, "compile": 12}
    >>> print(timings_text(Timings({"trace": 1.0, "compile": 7.5}, counts, 10.0)))
    searched for 10.0 s: compile 7.50 s (75%, 12 times), trace 1.00 s (10%), other 1.50 s (15%)
    """
    parts = []
    for stage in sorted(timings, key=lambda stage: -timings[stage]):
        times = f", {timings.counts[stage]} times" if timings.counts[stage] > 1 else ""
        parts.append(f"{stage} {seconds_text(timings[stage])} ({timings.share(stage):.0%}{times})")
    other_s = timings.total_s - sum(timings.seconds.values())
    if timings.total_s:
        parts.append(f"other {seconds_text(other_s)} ({other_s / timings.total_s:.0%})")
    return f"searched for {seconds_text(timings.total_s)}: {', '.join(parts)}"


def skipped_text(skipped: Iterable[Skipped]) -> str:
    """Presets that make no sense, with the reason."""
    return "\n".join(f"preset {s.name} skipped: {s.reason}" for s in skipped)


def _specs_table(table: SpecTable) -> TextTable:
    """The argument leaves, regular ones folded."""
    specs = TextTable("specs", columns("leaf", "shape", "spec", "*"))
    rows = {
        path: (f"{leaf.dtype}{leaf.shape}", spec_text(leaf.spec))
        for path, leaf in table.inputs.items()
    }
    folded: dict[str, tuple[Each, tuple[str, str]]] = fold(rows)
    for path, (each, (shape, spec)) in folded.items():
        specs.add(path, shape, spec, "; ".join(each))
    return specs
