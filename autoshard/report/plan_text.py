"""What people read: the candidates table and the summary of a plan. Bytes and seconds get their
units here only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from autoshard.compiler.bound_plan import BoundPlan
from autoshard.evidence.candidate import Candidate, Skipped, Status, winner_of
from autoshard.evidence.collectives import Collective
from autoshard.evidence.throughput import Throughput
from autoshard.table.leaf_patterns import Each, fold
from autoshard.table.spec_table import SpecTable, candidates_of, spec_text
from autoshard.report.text_table import render
from autoshard.text import bytes_text, seconds_text

_COMPUTE = {"compiler": "the compiler's own estimate", "predicted": "predicted"}


def candidates_table(candidates: Iterable[Candidate], limit: int = 30) -> Table:
    """The candidates, best first: predicted, partitioned, compiled and measured side by side."""
    table = Table(title="candidates", title_justify="left")
    for name in ("candidate", "stated at", "status"):
        table.add_column(name, no_wrap=True)
    for name in (
        "predicted\ntime", "predicted\npeak", "predicted\nbytes", "partitioned\nbytes", "compiled\nbytes",
        "compiled\npeak", "compiled\ntemporaries", "measured\nmedian",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reason")
    ordered = sorted(
        (t for t in candidates if t.status is not Status.PREDICTED or t.is_preset or t.reason),
        key=lambda t: (t.status.rank, t.measured.median_s if t.measured else 0.0, _time(t)),
    )
    for t in ordered[:limit]:
        predicted, compiled = t.predicted, t.compiled
        table.add_row(
            t.name,
            t.constraints,
            t.status,
            seconds_text(predicted.time_s) if predicted else "",
            bytes_text(predicted.peak_bytes) if predicted else "",
            bytes_text(predicted.collective_bytes) if predicted else "",
            bytes_text(t.partitioned.collective_bytes) if t.partitioned else "",
            bytes_text(compiled.collective_bytes) if compiled else "",
            bytes_text(compiled.peak_bytes) if compiled else "",
            bytes_text(compiled.temp_bytes) if compiled else "",
            f"{seconds_text(t.measured.median_s)} ({t.measured.rounds})" if t.measured else "",
            t.reason.splitlines()[0][:70] if t.reason else "",
        )
    return table


def _time(candidate: Candidate) -> float:
    if candidate.compiled is not None:
        return candidate.compiled.time_s
    return candidate.predicted.time_s if candidate.predicted else float("inf")


def collectives_text(collectives: Sequence[Collective]) -> str:
    """Collectives on one line each."""
    if not collectives:
        return "  none"
    return "\n".join(
        f"  {c.kind} over {','.join(c.axes) or 'a group of no mesh axes'}: {c.count} of "
        f"{bytes_text(c.bytes)} in all"
        for c in collectives
    )


def plan_text(plan: BoundPlan, table: SpecTable) -> str:
    """The summary that `print(plan)` shows."""
    mesh = ", ".join(f"{name}={size}" for name, size in plan.mesh.axes.items())
    winner = winner_of(plan.candidates)
    lines = [
        f"plan of {plan.traced.program.name} on {mesh} ({plan.mesh.device_kind})",
        f"rules "
        f"({'stated inside the function too' if plan.layout.inside else 'arguments and outputs only'}):",
        *(f"  {rule}" for rule in plan.rules),
    ]
    if not plan.rules:
        lines.append("  none: everything is replicated")
    lines.append(f"verified: {plan.verified}")
    if winner is not None and winner.compiled is not None:
        lines += [
            f"compiled: {bytes_text(winner.compiled.peak_bytes)} per device; step "
            f"{seconds_text(winner.compiled.time_s)}, of it compute "
            f"{seconds_text(winner.compiled.compute_s)} "
            f"({_COMPUTE[winner.compiled.compute_from]}), not measured; one call's collectives, "
            f"bytes a device sends:"
            if plan.mesh.target is not None
            else f"compiled: {bytes_text(winner.compiled.peak_bytes)} per device; one call's collectives, "
            f"bytes a device sends:",
            collectives_text(winner.compiled.collectives),
        ]
    if plan.throughput is not None:
        lines.append(throughput_text(plan.throughput))
    if winner is not None and winner.measured is not None:
        lines.append(
            f"measured: median {seconds_text(winner.measured.median_s)} of "
            f"{winner.measured.rounds} rounds"
        )
    lines += [plan.bound] if plan.bound else []
    lines += [f"note: {note}" for note in plan.notes]
    specs = _specs_table(table)
    parts = [specs]
    if plan.candidates:
        parts.append(candidates_table(plan.candidates))
    return render("\n".join(lines), *parts, skipped_text(plan.skipped)).rstrip()


def throughput_text(found: Throughput) -> str:
    """Predicted throughput on one line.

    >>> print(throughput_text(Throughput(0.4, 0.3, 0.1, 1.2, samples_per_step=64)))
    predicted: step 400 ms, 2.5 steps a second, 160 samples a second; efficiency 75%, 3.0 times as fast as one device
    """
    rates = ", ".join(f"{rate:.3g} {what} a second" for what, rate in found.per_s())
    return (
        f"predicted: step {seconds_text(found.step_s)}, {rates}; efficiency "
        f"{found.efficiency:.0%}, "
        f"{found.speed_up:.1f} times as fast as one device"
    )


def skipped_text(skipped: Iterable[Skipped]) -> str:
    """Presets that make no sense, with the reason."""
    return "\n".join(f"preset {s.name} skipped: {s.reason}" for s in skipped)


def table_text(table: SpecTable) -> str:
    """A spec table for people."""
    mesh = ", ".join(f"{name}={size}" for name, size in table.mesh.axes.items())
    where = (
        "stated inside the function too"
        if table.constraints == "anchors"
        else "arguments and outputs only"
    )
    found = table.evidence
    lines = [
        f"plan of {table.function} on {mesh}, written with jax {table.versions.get('jax')}",
        f"rules ({where}):",
        *(f"  {rule}" for rule in table.rules or ["none: everything is replicated"]),
        f"verified: {table.verified}",
    ]
    if found.when:
        hardware = f"{found.hardware.get('devices', '?')} x {found.hardware.get('kind', '?')}"
        lines.append(
            f"searched: {found.when} for {seconds_text(found.search_s or 0.0)}, {hardware}"
        )
    if table.edited:
        lines.append(
            "STALE: specs or rules were edited after the search; the numbers below are of the plan "
            "before"
        )
    candidates = candidates_of(table)
    return render(
        "\n".join(lines),
        _specs_table(table),
        *([candidates_table(candidates)] if candidates else []),
    ).rstrip()


def _specs_table(table: SpecTable) -> Table:
    """The argument leaves, regular ones folded."""
    specs = Table(title="specs", title_justify="left")
    for name in ("leaf", "shape", "spec", "*"):
        specs.add_column(name, no_wrap=True)
    rows = {
        p: (f"{leaf.dtype}{leaf.shape}", spec_text(leaf.spec)) for p, leaf in table.inputs.items()
    }
    folded: dict[str, tuple[Each, tuple[str, str]]] = fold(rows)
    for path, (each, (shape, spec)) in folded.items():
        specs.add_row(path, shape, spec, "; ".join(each))
    return specs
