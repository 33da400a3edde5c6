"""A spec table as one HTML file that a manager can read and an engineer can search: no network,
light, dark, phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import jax.numpy as jnp

from autoshard.evidence.candidate import Candidate, Status, winner_of
from autoshard.report.svg import Point, mesh_svg, scatter_svg
from autoshard.table.leaf_patterns import fold
from autoshard.table.spec_table import Leaf, SpecTable, candidates_of, spec_text
from autoshard.text import bytes_text, printable, seconds_text

_GROUPS = ("parameters", "optimizer", "data", "other")
_KEY_BYTES = 8


def report_html(table: SpecTable) -> str:
    """The page."""
    candidates = candidates_of(table)
    title = f"{table.function} on {_mesh_text(table)}"
    body = "\n".join(
        [
            _head(table, candidates, title),
            _stored(table),
            _candidates(candidates),
            _plots(candidates),
            _rules(table),
            _specs(table),
            _constraints(table),
            _evidence(table),
        ]
    )
    page = files("autoshard.report").joinpath("page.html").read_text(encoding="utf-8")
    return page.replace("<!--TITLE-->", _safe(title)).replace("<!--BODY-->", body)


def fragment_html(table: SpecTable) -> str:
    """The part that a notebook shows: what the plan is in words, its rules and specs."""
    return "\n".join(
        [
            f"<p><b>{_safe(table.function)}</b> on {_safe(_mesh_text(table))}</p>",
            *(f"<p>{sentence}</p>" for sentence in summary(table, candidates_of(table))),
            f"<p>Rules: "
            f"{', '.join(f'<code>{_safe(rule)}</code>' for rule in table.rules) or 'none'}</p>",
            _leaf_table(table.inputs, ""),
        ]
    )


def _safe(text: object) -> str:
    return escape(printable(str(text)))


def _mesh_text(table: SpecTable) -> str:
    return ", ".join(f"{name}={size}" for name, size in table.mesh.axes.items())


def leaf_bytes(leaf: Leaf) -> int:
    """Bytes of the whole array."""
    try:
        itemsize = jnp.dtype(leaf.dtype).itemsize
    except TypeError:  # a typed random key
        itemsize = _KEY_BYTES
    return itemsize * math.prod(leaf.shape)


def shard_bytes(leaf: Leaf, axes: dict[str, int]) -> int:
    """Bytes of the piece that one device stores."""
    names = [
        a for dim in leaf.spec if dim is not None for a in ([dim] if isinstance(dim, str) else dim)
    ]
    return leaf_bytes(leaf) // max(1, math.prod(axes.get(name, 1) for name in names))


def _by_group(table: SpecTable, of_one: bool) -> dict[str, int]:
    found = dict.fromkeys(_GROUPS, 0)
    for leaf in table.inputs.values():
        group = leaf.group if leaf.group in _GROUPS else "other"
        found[group] += shard_bytes(leaf, table.mesh.axes) if of_one else leaf_bytes(leaf)
    return {group: count for group, count in found.items() if count}


def summary(table: SpecTable, candidates: Sequence[Candidate]) -> list[str]:
    """The plan in plain words, a sentence each (HTML)."""
    devices = math.prod(table.mesh.axes.values())
    one, whole = sum(_by_group(table, True).values()), sum(_by_group(table, False).values())
    sentences = [
        f"The work of one call is shared by <b>{devices} devices</b>, arranged as "
        f"{_safe(_mesh_text(table))}. "
        f"Its arguments are {bytes_text(whole)}; each device keeps <b>{bytes_text(one)}</b> of them"
        + (f", {whole / one:.1f} times less than the whole." if one < whole else ", the whole.")
    ]
    used = {
        a
        for leaf in table.inputs.values()
        for d in leaf.spec
        if d
        for a in ([d] if isinstance(d, str) else d)
    }
    idle = [axis for axis in table.mesh.axes if axis not in used]
    if idle:
        sentences.append(f"No argument is split over {_safe(', '.join(idle))}.")
    winner = winner_of(candidates)
    presets = [t for t in candidates if t.is_preset and t is not winner]
    if winner is not None and not table.edited:
        sentences += _against(winner, presets)
    compared = "compared and agree" if table.verified.startswith("yes") else "not compared"
    sentences.append(
        f"Its results were {compared}: {_safe(table.verified.partition(' (')[2][:-1])}."
    )
    return sentences


def _against(winner: Candidate, presets: Sequence[Candidate]) -> list[str]:
    standard = winner.is_preset
    found = [f"It is the standard layout <b>{_safe(winner.name)}</b>."] if standard else []
    measured = [t for t in presets if t.measured]
    if winner.measured and measured:
        best = min(measured, key=lambda t: t.measured.median_s if t.measured else math.inf)
        assert best.measured is not None
        ratio = best.measured.median_s / winner.measured.median_s
        how = (
            f"{ratio:.2f} times as fast as"
            if ratio >= 1.005
            else "as fast as"
            if ratio > 0.995
            else "no faster than"
        )
        other = "next best" if standard else "best"
        found.append(
            f"Measured, one call takes <b>{seconds_text(winner.measured.median_s)}</b>: {how} the "
            f"{other} standard "
            f"layout ({_safe(best.name)}, {seconds_text(best.measured.median_s)})."
        )
    compiled = [t.compiled for t in presets if t.compiled]
    if winner.compiled and compiled:
        low, high = min(c.peak_bytes for c in compiled), max(c.peak_bytes for c in compiled)
        span = bytes_text(low) if low == high else f"{bytes_text(low)} to {bytes_text(high)}"
        found.append(
            f"The compiled program needs <b>{bytes_text(winner.compiled.peak_bytes)}</b> a device, "
            f"and a device sends "
            f"{bytes_text(winner.compiled.collective_bytes)} to others in one call; other standard "
            f"layouts need {span}."
        )
    return found


def _head(table: SpecTable, candidates: Sequence[Candidate], title: str) -> str:
    yes = table.verified.startswith("yes")
    stale = (
        '<div class="banner"><b>Stale.</b> Specs or rules were edited after the search: the '
        'numbers below are of the '
        "plan before the edit.</div>" if table.edited else ""
    )  # fmt: skip
    badge = f'<span class="badge {"good" if yes else "bad"}">{"verified" if yes else "not verified"}</span>'
    when = table.evidence.when.replace("T", " ").replace("Z", " UTC")
    searched = f"searched {when}" if when else "not searched: a known layout"
    sentences = "".join(f"<p>{sentence}</p>" for sentence in summary(table, candidates))
    return (
        f'<header><h1>{_safe(title)}</h1><p>{badge}<span class="soft '
        f'small">{_safe(searched)}</span></p></header>'
        f"{stale}<section>{sentences}</section>{_cards(candidates, table)}"
    )


def _cards(candidates: Sequence[Candidate], table: SpecTable) -> str:
    winner = winner_of(candidates)
    cards = []
    if winner is not None and winner.measured:
        cards.append(
            (
                seconds_text(winner.measured.median_s),
                f"a call, measured ({winner.measured.rounds} rounds)",
            )
        )
        cards.append((f"{1 / winner.measured.median_s:.3g} / s", "calls, measured"))
    elif winner is not None and winner.predicted:
        cards.append((seconds_text(winner.predicted.time_s), "a call, predicted"))
    if winner is not None and winner.compiled:
        cards.append((bytes_text(winner.compiled.peak_bytes), "peak memory a device, compiled"))
        cards.append(
            (bytes_text(winner.compiled.collective_bytes), "a device sends in a call, compiled")
        )
    cards.append(
        (bytes_text(sum(_by_group(table, True).values())), "of the arguments on each device")
    )
    stale = " (stale)" if table.edited else ""
    return '<div class="cards">' + "".join(
        f'<div '
        f'class="card"><b>{_safe(number)}</b><span>{_safe(what)}{stale if i < len(cards) - 1 else ""}</span></div>'
        for i, (number, what) in enumerate(cards)
    ) + "</div>"  # fmt: skip


def _stored(table: SpecTable) -> str:
    one, whole = _by_group(table, True), _by_group(table, False)
    legend = "".join(f'<span><i class="key {group}"></i>{group}</span>' for group in one)
    rows = [
        [
            f'<i class="key {g}"></i>{g}',
            bytes_text(whole[g]),
            bytes_text(one[g]),
            f"{whole[g] / max(1, one[g]):.3g}",
        ]
        for g in one
    ]
    total = ["all arguments", *map(bytes_text, (sum(whole.values()), sum(one.values()))), ""]
    drawing = mesh_svg(table.mesh.axes, one, bytes_text)
    return (
        f'<h2>The mesh, and what each device stores</h2><div class="wide">{drawing}</div>'
        f'<p class="legend small">{legend}</p>'
        + _table(
            ["stored", "whole", "on each device", "times less"], [*rows, total], numbers={1, 2, 3}
        )
    )


_COLUMNS = (
    "candidate", "outcome", "predicted time", "measured time", "calls / s", "predicted peak", "compiled peak",
    "predicted sent", "partitioned sent", "compiled sent",
)  # fmt: skip


def _candidates(candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return '<h2>Candidates</h2><p class="soft">None: this layout was applied, not searched.</p>'
    rows, classes = [], []
    for t in sorted(
        candidates,
        key=lambda t: (t.status.rank, t.measured.median_s if t.measured else _predicted(t)),
    ):
        p, c, m = t.predicted, t.compiled, t.measured
        rows.append(
            [
                _safe(t.name),
                _safe(f"{t.status}{': ' + t.reason.splitlines()[0] if t.reason else ''}"),
                seconds_text(p.time_s) if p else "",
                seconds_text(m.median_s) if m else "",
                f"{1 / m.median_s:.3g}" if m else "",
                bytes_text(p.peak_bytes) if p else "",
                bytes_text(c.peak_bytes) if c else "",
                bytes_text(p.collective_bytes) if p else "",
                bytes_text(t.partitioned.collective_bytes) if t.partitioned else "",
                bytes_text(c.collective_bytes) if c else "",
            ]
        )
        classes.append(t.status)
    note = (
        '<p class="soft small">Each number says where it is from: the model (predicted), the '
        "partitioner "
        "(partitioned), the compiled program (compiled) or the clock (measured). What is sent is "
        "what one device sends "
        "in one call.</p>"
    )
    return f"<h2>Candidates</h2>{note}" + _table(
        _COLUMNS, rows, numbers=set(range(2, 10)), classes=classes, keep={0, 1}
    )


def _predicted(candidate: Candidate) -> float:
    return candidate.predicted.time_s if candidate.predicted else math.inf


def _kind(candidate: Candidate) -> str:
    return (
        "winner"
        if candidate.status is Status.WINNER
        else "preset"
        if candidate.is_preset
        else "dot"
    )


def _plots(candidates: Sequence[Candidate]) -> str:
    measured = sum(t.measured is not None for t in candidates) >= 2
    time_name = "time, measured" if measured else "time, predicted"
    compiled = sum(t.compiled is not None for t in candidates) >= 2
    memory_name = "peak a device, compiled" if compiled else "peak a device, predicted"

    def time(t: Candidate) -> float:
        return (
            (t.measured.median_s if t.measured else 0.0)
            if measured
            else t.predicted.time_s
            if t.predicted
            else 0.0
        )

    def memory(t: Candidate) -> float:
        return (
            (t.compiled.peak_bytes if t.compiled else 0)
            if compiled
            else t.predicted.peak_bytes
            if t.predicted
            else 0
        )

    def points(of: Iterable[tuple[Candidate, float, float]]) -> list[Point]:
        return [Point(x, y, t.name, _kind(t)) for t, x, y in of if x > 0 and y > 0]

    trade = points((t, memory(t), time(t)) for t in candidates)
    plots = []
    if len(trade) >= 2:
        drawing = scatter_svg(trade, memory_name, time_name, bytes_text, seconds_text, front=True)
        plots.append(
            (
                drawing,
                "Time against memory. Left and low is better; the dashed line joins what nothing "
                "beats.",
            )
        )
    compared: Sequence[tuple[str, str, Any, Any, Any]] = (
        ("peak", "compiled", bytes_text, lambda t: t.predicted.peak_bytes,
         lambda t: t.compiled and t.compiled.peak_bytes),
        ("sent", "compiled", bytes_text, lambda t: t.predicted.collective_bytes,
         lambda t: t.compiled and t.compiled.collective_bytes),
        ("time", "measured", seconds_text, lambda t: t.predicted.time_s, lambda t: t.measured and t.measured.median_s),
    )  # fmt: skip
    for what, source, text, predicted, found in compared:
        both = points((t, predicted(t), found(t) or 0) for t in candidates if t.predicted)
        if len(both) >= 2:
            drawing = scatter_svg(
                both, f"{what}, predicted", f"{what}, {source}", text, text, diagonal=True
            )
            plots.append(
                (drawing, f"Predicted against {source}: {what}. On the dashed line they are equal.")
            )
    if not plots:
        return ""
    legend = (
        '<p class="legend small"><span><i class="key" '
        'style="background:var(--accent)"></i>winner</span>'
        '<span><i class="key optimizer"></i>standard layout (preset)</span>'
        '<span><i class="key other"></i>found by search</span></p>'
    )
    figures = "".join(
        f"<figure>{drawing}<figcaption>{escape(c)}</figcaption></figure>" for drawing, c in plots
    )
    return f'<h2>Trade-offs, and how good the predictions are</h2>{legend}<div class="plots">{figures}</div>'


def _rules(table: SpecTable) -> str:
    where = (
        "stated inside the function too"
        if table.constraints == "anchors"
        else "on arguments and outputs only"
    )
    items = "".join(f"<li><code>{_safe(rule)}</code></li>" for rule in table.rules)
    listed = (
        f'<ol class="rules">{items}</ol>' if items else "<p>None: everything is replicated.</p>"
    )
    return (
        f'<h2>Rules</h2><p class="soft small">Each array takes the rules in order: a rule gives a '
        f"mesh axis to the "
        f"dimension with that name, if the axis is still free in this array and divides the "
        f"dimension; {where}.</p>" + listed
    )


def _specs(table: SpecTable) -> str:
    box = (
        '<input type="search" id="find" placeholder="Search leaves, specs, logical axes" '
        'aria-label="Search specs" '
        'data-rows="tr.leaf" data-count="found"><p class="soft small" id="found"></p>'
    )
    return f"<h2>Specs</h2>{box}{_leaf_table(table.inputs, 'leaf')}"


def _leaf_table(leaves: dict[str, Leaf], row_class: str) -> str:
    rows = []
    for path, (each, leaf) in fold(leaves).items():
        where = f' <span class="soft small">* is {_safe("; ".join(each))}</span>' if each else ""
        logical_axes = " ".join(logical_axis or "-" for logical_axis in leaf.logical_axes)
        rows.append(
            [
                f"<code>{_safe(path)}</code>{where}",
                f"<code>{_safe(spec_text(leaf.spec))}</code>",
                f"<code>{_safe(leaf.dtype)}{leaf.shape}</code>",
                f'<span class="soft">{_safe(logical_axes)}</span>',
            ]
        )
    return _table(
        ["leaf", "spec", "array", "logical axes of its dimensions"],
        rows,
        classes=[row_class] * len(rows),
        keep={1, 2, 3},
    )


def _constraints(table: SpecTable) -> str:
    if not table.inside:
        return "<h2>Constraints inside the function</h2><p>None: the layout is stated on arguments and outputs only.</p>"
    rows = [
        [
            f"<code>{_safe(e.source)}</code>",
            f"{_safe(e.primitive)}, {_safe(e.place)}",
            f"<code>{e.shape}</code>",
            f"<code>{_safe(e.spec)}</code>",
            str(e.times),
        ]
        for e in table.inside
    ]
    listed = _table(
        ["source", "where", "shape", "spec", "times"],
        rows,
        numbers={4},
        classes=["stated"] * len(rows),
        keep={0},
    )
    return (
        '<h2>Constraints inside the function</h2><p class="soft small">The compiler is told the '
        "layout at these places "
        "of the model too, because arguments alone leave it to guess.</p><details><summary>"
        f"{len(rows)} constraints by source line</summary>"
        '<input type="search" placeholder="Search constraints" aria-label="Search constraints" '
        f'data-rows="tr.stated" data-count="stated"><p class="soft small" '
        f'id="stated"></p>{listed}</details>'
    )


def _evidence(table: SpecTable) -> str:
    found = table.evidence
    rows = [
        ["hardware", _safe(", ".join(f"{k} {v}" for k, v in found.hardware.items()) or "unknown")],
        ["versions", _safe(", ".join(f"{k} {v}" for k, v in found.versions.items()))],
        ["search took", seconds_text(found.search_s) if found.search_s else "no search"],
        ["program", f"<code>{_safe(found.fingerprint)}</code>"],
        ["arguments", f"<code>{_safe(found.arguments)}</code>"],
    ]
    return "<h2>Where this comes from</h2>" + _table(["", ""], rows)


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: set[int] | None = None,
    classes: Sequence[str] | None = None, keep: set[int] | None = None,
) -> str:  # fmt: skip
    """A table of cells that are HTML already; `numbers` are right-aligned columns, `keep` those
    that do not wrap.
    """

    def cell(tag: str, i: int, text: str) -> str:
        kind = (
            ' class="n"' if i in (numbers or ()) else ' class="keep"' if i in (keep or ()) else ""
        )
        return f"<{tag}{kind}>{text}</{tag}>"

    lines = (
        [f"<tr>{''.join(cell('th', i, escape(h)) for i, h in enumerate(head))}</tr>"]
        if any(head)
        else []
    )
    for number, row in enumerate(rows):
        css = f' class="{classes[number]}"' if classes and classes[number] else ""
        lines.append(f"<tr{css}>{''.join(cell('td', i, text) for i, text in enumerate(row))}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'
