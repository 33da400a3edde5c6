"""A spec table as one HTML file that a manager can read and an engineer can search.

No network; light, dark, phone. What the page says is computed here, `templates/` has the markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp

from autoshard.evidence.candidate import Candidate, Status, winner_of
from autoshard.evidence.timings import Timings
from autoshard.report.candidate_texts import CandidateTexts, candidate_texts
from autoshard.report.fill_template import fill, markup
from autoshard.report.plan_text import timings_text
from autoshard.report.svg import AxisName, Point, mesh_svg, scatter_svg
from autoshard.table.leaf_patterns import fold
from autoshard.table.schema import Leaf
from autoshard.table.spec_entry import mesh_axes_by_dim, spec_text
from autoshard.table.spec_table import SpecTable, candidates_of
from autoshard.text import bytes_text, seconds_text

if TYPE_CHECKING:
    from markupsafe import Markup

_GROUPS = ("parameters", "optimizer", "data", "other")

KEY_BYTES = 8
"""Bytes of a typed random key: threefry2x32, jax's default, has two 32-bit words. Without it
test_bytes_of_a_leaf fails."""

NOISE = 0.005
"""Share by which two medians must differ to be called different. Chosen by hand; no test depends on
it."""


def report_html(table: SpecTable) -> str:
    """The page."""
    candidates = candidates_of(table)
    evidence = table.evidence
    when = evidence.when.replace("T", " ").replace("Z", " UTC")
    page = fill(
        "page.html",
        table=table,
        title=f"{table.function} on {_mesh_text(table)}",
        verified=table.verified.startswith("yes"),
        searched=f"searched {when}" if when else "not searched: a known layout",
        sentences=summary(table, candidates),
        cards=_cards(table, winner_of(candidates)),
        mesh=mesh_svg(table.mesh.axes, _bytes_on_device(table), bytes_text),
        memory=_memory_rows(table),
        candidates=_candidate_rows(candidates),
        plots=_plots(candidates),
        leaves=_leaf_rows(table.inputs),
        hardware=", ".join(f"{k} {v}" for k, v in evidence.hardware.items()) or "unknown",
        versions=", ".join(f"{k} {v}" for k, v in evidence.versions.items()),
        search_took=seconds_text(evidence.search_s) if evidence.search_s else "no search",
    )
    return str(page)


def fragment_html(table: SpecTable, timings: Timings | None = None) -> str:
    """The part that a notebook shows: what the plan is in words, its rules and specs.

    Args:
        table: The plan as a file.
        timings: Where the time of its search went.
    """
    sentences: list[str] = list(summary(table, candidates_of(table)))
    if timings is not None:
        sentences.append(timings_text(timings))
    fragment = fill(
        "fragment.html",
        table=table,
        mesh=_mesh_text(table),
        sentences=sentences,
        leaves=_leaf_rows(table.inputs),
    )
    return str(fragment)


def _mesh_text(table: SpecTable) -> str:
    return ", ".join(f"{name}={size}" for name, size in table.mesh.axes.items())


# Memory -------------------------------------------------------------------------------------------


def leaf_bytes(leaf: Leaf) -> int:
    """Bytes of the whole array."""
    try:
        itemsize = jnp.dtype(leaf.dtype).itemsize
    except (TypeError, ValueError):  # a typed random key, or no dtype of this jax
        itemsize = KEY_BYTES
    return itemsize * math.prod(leaf.shape)


def shard_bytes(leaf: Leaf, axes: dict[str, int]) -> int:
    """Bytes of the shard that one device stores."""
    # An edited table may name an axis that its mesh lacks; its page says that it is stale.
    shards = math.prod(axes.get(name, 1) for name in _mesh_axes_of(leaf))
    return leaf_bytes(leaf) // max(1, shards)


def _mesh_axes_of(leaf: Leaf) -> list[str]:
    """Mesh axes over which a leaf is split."""
    return [axis for axes in mesh_axes_by_dim(leaf.spec) for axis in axes]


def _idle_axes(table: SpecTable) -> list[str]:
    """Mesh axes over which no argument is split."""
    used = {axis for leaf in table.inputs.values() for axis in _mesh_axes_of(leaf)}
    return [axis for axis in table.mesh.axes if axis not in used]


def _bytes_on_device(table: SpecTable) -> dict[str, int]:
    """By group of arguments, bytes on one device; without empty groups."""
    return _by_group((leaf, shard_bytes(leaf, table.mesh.axes)) for leaf in table.inputs.values())


def _bytes_in_all(table: SpecTable) -> dict[str, int]:
    """By group of arguments, bytes of the whole arrays; without empty groups."""
    return _by_group((leaf, leaf_bytes(leaf)) for leaf in table.inputs.values())


def _by_group(bytes_of_leaf: Iterable[tuple[Leaf, int]]) -> dict[str, int]:
    total = dict.fromkeys(_GROUPS, 0)
    for leaf, count in bytes_of_leaf:
        total[leaf.group if leaf.group in _GROUPS else "other"] += count
    return {group: count for group, count in total.items() if count}


@dataclass(frozen=True, slots=True)
class _MemoryRow:
    group: str
    whole: str
    on_device: str
    times_less: str


def _memory_rows(table: SpecTable) -> list[_MemoryRow]:
    """A row for each group of arguments, the last one for all."""
    on_device, whole = _bytes_on_device(table), _bytes_in_all(table)
    rows = []
    for group, count in on_device.items():
        times_less = f"{whole[group] / max(1, count):.3g}"
        rows.append(_MemoryRow(group, bytes_text(whole[group]), bytes_text(count), times_less))
    total, total_on_device = sum(whole.values()), sum(on_device.values())
    rows.append(_MemoryRow("all arguments", bytes_text(total), bytes_text(total_on_device), ""))
    return rows


# In words -----------------------------------------------------------------------------------------


def summary(table: SpecTable, candidates: Sequence[Candidate]) -> list[Markup]:
    """The plan in plain words, a sentence each."""
    sentences = [_shared(table)]
    idle = _idle_axes(table)
    if idle:
        sentences.append(markup("No argument is split over {}.", ", ".join(idle)))
    winner = winner_of(candidates)
    presets = [c for c in candidates if c.is_preset and c is not winner]
    if winner is not None and not table.edited:
        if winner.is_preset:
            sentences.append(markup("It is the standard layout <b>{}</b>.", winner.name))
        sentences += _measured_against(winner, presets)
        sentences += _compiled_against(winner, presets)
    compared = "compared and agree" if table.verified.startswith("yes") else "not compared"
    reason = table.verified.partition(" (")[2][:-1]
    sentences.append(markup("Its results were {}: {}.", compared, reason))
    return sentences


def _shared(table: SpecTable) -> Markup:
    on_device = sum(_bytes_on_device(table).values())
    whole = sum(_bytes_in_all(table).values())
    less = (
        f"{whole / on_device:.1f} times less than the whole" if on_device < whole else "the whole"
    )
    return markup(
        "The work of one call is shared by <b>{} devices</b>, arranged as {}. Its arguments are "
        "{}; each device keeps <b>{}</b> of them, {}.",
        math.prod(table.mesh.axes.values()),
        _mesh_text(table),
        bytes_text(whole),
        bytes_text(on_device),
        less,
    )


def _measured_against(winner: Candidate, presets: Sequence[Candidate]) -> list[Markup]:
    """The measured time beside that of the fastest preset; nothing where either has none."""
    others = [(preset.measured.median_s, preset) for preset in presets if preset.measured]
    if winner.measured is None or not others or not winner.measured.median_s:
        return []
    best_s, best = min(others, key=lambda other: other[0])
    ratio = best_s / winner.measured.median_s
    if ratio >= 1 + NOISE:
        speed = f"{ratio:.2f} times as fast as"
    else:
        speed = "as fast as" if ratio > 1 - NOISE else "no faster than"
    return [
        markup(
            "Measured, one call takes <b>{}</b>: {} the {} standard layout ({}, {}).",
            seconds_text(winner.measured.median_s),
            speed,
            "next best" if winner.is_preset else "best",
            best.name,
            seconds_text(best_s),
        )
    ]


def _compiled_against(winner: Candidate, presets: Sequence[Candidate]) -> list[Markup]:
    """The compiled program's memory beside that of the presets; nothing where none was compiled."""
    peaks = [preset.compiled.peak_bytes for preset in presets if preset.compiled]
    if winner.compiled is None or not peaks:
        return []
    low, high = bytes_text(min(peaks)), bytes_text(max(peaks))
    return [
        markup(
            "The compiled program needs <b>{}</b> a device, and a device sends {} to others in one "
            "call; other standard layouts need {}.",
            bytes_text(winner.compiled.peak_bytes),
            bytes_text(winner.compiled.collective_bytes),
            low if min(peaks) == max(peaks) else f"{low} to {high}",
        )
    ]


# Numbers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Card:
    number: str
    meaning: str


def _cards(table: SpecTable, winner: Candidate | None) -> list[_Card]:
    """The numbers of the winner; the last card, of the arguments, holds for an edited table too."""
    stale = " (stale)" if table.edited else ""
    cards = []
    if winner is not None:
        texts = candidate_texts(winner)
        if winner.measured:
            rounds = f"a call, measured ({winner.measured.rounds} rounds){stale}"
            cards.append(_Card(texts.measured_time, rounds))
            if texts.calls_per_s:
                cards.append(_Card(f"{texts.calls_per_s} / s", f"calls, measured{stale}"))
        elif winner.predicted:
            cards.append(_Card(texts.predicted_time, f"a call, predicted{stale}"))
        if winner.compiled:
            peak, sent = "peak memory a device, compiled", "a device sends in a call, compiled"
            cards.append(_Card(texts.compiled_peak, f"{peak}{stale}"))
            cards.append(_Card(texts.compiled_sent, f"{sent}{stale}"))
    on_device = bytes_text(sum(_bytes_on_device(table).values()))
    cards.append(_Card(on_device, "of the arguments on each device"))
    return cards


def _candidate_rows(candidates: Sequence[Candidate]) -> list[tuple[Candidate, CandidateTexts]]:
    """The candidates, best first, with their texts."""
    ordered = sorted(candidates, key=lambda c: (c.status.rank, _measured_or_predicted_s(c)))
    return [(candidate, candidate_texts(candidate)) for candidate in ordered]


def _measured_or_predicted_s(candidate: Candidate) -> float:
    if candidate.measured:
        return candidate.measured.median_s
    return candidate.predicted.time_s if candidate.predicted else math.inf


@dataclass(frozen=True, slots=True)
class _LeafRow:
    path: str
    numbers: str
    spec: str
    array: str
    logical_axes: str


def _leaf_rows(leaves: dict[str, Leaf]) -> list[_LeafRow]:
    """A row for each leaf or pattern of leaves."""
    rows = []
    for path, (each, leaf) in fold(leaves).items():
        array = f"{leaf.dtype}{leaf.shape}"
        logical_axes = " ".join(name or "-" for name in leaf.logical_axes)
        rows.append(_LeafRow(path, "; ".join(each), spec_text(leaf.spec), array, logical_axes))
    return rows


# Plots --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plot:
    drawing: Markup
    caption: str


@dataclass(frozen=True, slots=True)
class _Number:
    """A number of a candidate.

    Attributes:
        provenance: `predicted`, `compiled` or `measured`: where it is from.
        field: Its name there.
    """

    provenance: str
    field: str

    def of(self, candidate: Candidate) -> float:
        """The number; 0 where the candidate has none of this provenance."""
        evidence = getattr(candidate, self.provenance)
        return 0.0 if evidence is None else float(getattr(evidence, self.field))

    def fills_plot(self, candidates: Iterable[Candidate]) -> bool:
        """True if enough candidates have it."""
        return sum(getattr(candidate, self.provenance) is not None for candidate in candidates) >= 2


_PREDICTED_TIME = _Number("predicted", "time_s")
_PREDICTED_PEAK = _Number("predicted", "peak_bytes")
_PREDICTED_SENT = _Number("predicted", "collective_bytes")
_COMPILED_PEAK = _Number("compiled", "peak_bytes")
_COMPILED_SENT = _Number("compiled", "collective_bytes")
_MEASURED_TIME = _Number("measured", "median_s")

_COMPARED = (
    ("peak", _PREDICTED_PEAK, _COMPILED_PEAK, bytes_text),
    ("sent", _PREDICTED_SENT, _COMPILED_SENT, bytes_text),
    ("time", _PREDICTED_TIME, _MEASURED_TIME, seconds_text),
)
"""What is predicted, and the number that tells how well."""


def _plots(candidates: Sequence[Candidate]) -> list[_Plot]:
    """Time against memory, and predictions against what was compiled or measured."""
    plots = []
    time = _MEASURED_TIME if _MEASURED_TIME.fills_plot(candidates) else _PREDICTED_TIME
    memory = _COMPILED_PEAK if _COMPILED_PEAK.fills_plot(candidates) else _PREDICTED_PEAK
    points = _points(candidates, memory, time)
    if len(points) >= 2:
        x = AxisName(f"peak a device, {memory.provenance}", bytes_text)
        y = AxisName(f"time, {time.provenance}", seconds_text)
        caption = (
            "Time against memory. Left and low is better; the dashed line joins what nothing beats."
        )
        plots.append(_Plot(scatter_svg(points, x, y, front=True), caption))
    for what, predicted, actual, text in _COMPARED:
        points = _points(candidates, predicted, actual)
        if len(points) >= 2:
            x = AxisName(f"{what}, predicted", text)
            y = AxisName(f"{what}, {actual.provenance}", text)
            caption = (
                f"Predicted against {actual.provenance}: {what}. On the dashed line they are equal."
            )
            plots.append(_Plot(scatter_svg(points, x, y, diagonal=True), caption))
    return plots


def _points(candidates: Iterable[Candidate], x: _Number, y: _Number) -> list[Point]:
    """The candidates that have both numbers; a logarithmic axis has no place for 0."""
    points = [Point(x.of(c), y.of(c), c.name, _kind(c)) for c in candidates]
    return [point for point in points if point.x > 0 and point.y > 0]


def _kind(candidate: Candidate) -> str:
    if candidate.status is Status.WINNER:
        return "winner"
    return "preset" if candidate.is_preset else "dot"
