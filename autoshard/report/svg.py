"""Drawings of the HTML report: the mesh with what each device stores, and scatter plots; colours
come from CSS.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape as escape_html

from autoshard.text import printable

_MOST_DEVICES = 64


def escape(text: str) -> str:
    """Text for markup and for terminals: nothing in it acts."""
    return escape_html(printable(text))


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate in a plot: `kind` is `winner`, `preset` or `dot`."""

    x: float
    y: float
    label: str
    kind: str


def mesh_svg(
    axes: Mapping[str, int], stored: Mapping[str, int], bytes_text: Callable[[float], str]
) -> str:
    """The mesh as a grid, its last axis across; in each device a bar of what it stores, by group.

    Args:
        axes: Mesh axes and sizes.
        stored: Bytes of each group on one device; the same on all, since every piece of an array is
            of one size.
        bytes_text: Bytes for people.
    """
    names, sizes = list(axes), list(axes.values())
    places = list(itertools.islice(itertools.product(*map(range, sizes)), _MOST_DEVICES))
    columns = sizes[-1] if sizes and sizes[-1] > 1 else math.ceil(math.sqrt(len(places)))
    columns = min(columns, 8)
    width, height, gap, left, top = 118, 74, 8, 8, 30
    rows = math.ceil(len(places) / columns)
    total = sum(stored.values()) or 1
    parts = []
    if sizes and columns == sizes[-1]:
        parts.append(f'<text class="soft" x="{left}" y="18">{escape(names[-1])} \u2192</text>')
    for number, place in enumerate(places):
        x, y = left + number % columns * (width + gap), top + number // columns * (height + gap)
        where = ", ".join(f"{name} {i}" for name, i in zip(names, place, strict=True))
        parts.append(
            f"<g><title>device {number}: {escape(where)}; "
            f"{bytes_text(sum(stored.values()))}</title>"
        )
        parts.append(
            f'<rect class="cell" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
        )
        parts.append(f'<text x="{x + 9}" y="{y + 19}">device {number}</text>')
        parts.append(
            f'<text class="soft" x="{x + 9}" y="{y + 36}">{escape(_short(where, 18))}</text>'
        )
        start = x + 9.0
        for group, count in stored.items():
            length = (width - 18) * count / total
            parts.append(
                f'<rect class="{group}" x="{start:.1f}" y="{y + 46}" width="{length:.1f}" '
                f'height="14" '
                f'rx="2"><title>{group}: {bytes_text(count)}</title></rect>'
            )
            start += length
        parts.append("</g>")
    more = math.prod(sizes) - len(places)
    full_height = top + rows * (height + gap) + (20 if more else 0)
    if more:
        parts.append(
            f'<text class="soft" x="{left}" y="{full_height - 6}">and {more} more, all alike</text>'
        )
    full_width = left * 2 + columns * (width + gap) - gap
    return _svg(full_width, full_height, parts, "the mesh", natural=full_width)


def scatter_svg(
    points: Sequence[Point], x_name: str, y_name: str, x_text: Callable[[float], str], y_text: Callable[[float], str],
    *, diagonal: bool = False, front: bool = False,
) -> str:  # fmt: skip
    """Points on logarithmic axes.

    Args:
        points: What is shown; every coordinate is positive.
        x_name: Name of the horizontal axis.
        y_name: Name of the vertical axis.
        x_text: A number on it for people.
        y_text: The same for the vertical axis.
        diagonal: Draw where both are equal, on axes of one range.
        front: Join the points that no other beats in both.
    """
    width, height, left, bottom, top, right = 460, 320, 66, 46, 26, 18
    xs, ys = [p.x for p in points], [p.y for p in points]
    if diagonal:
        xs = ys = [*xs, *ys]
    (x0, x1), (y0, y1) = _range(xs), _range(ys)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - math.log(x0)) / (math.log(x1) - math.log(x0))
        up = (math.log(y) - math.log(y0)) / (math.log(y1) - math.log(y0))
        return left + across * (width - left - right), height - bottom - up * (
            height - bottom - top
        )

    parts = [f'<path class="rule" d="M{left} {top}V{height - bottom}H{width - right}"/>']
    for tick in _ticks(x0, x1):
        x, _ = at(tick, y0)
        parts.append(f'<path class="rule" d="M{x:.1f} {height - bottom}v4"/>')
        place = f'x="{x:.1f}" y="{height - bottom + 17}" text-anchor="middle"'
        parts.append(f'<text class="soft" {place}>{x_text(tick)}</text>')
    for tick in _ticks(y0, y1):
        _, y = at(x0, tick)
        parts.append(f'<path class="rule" d="M{left} {y:.1f}h-4"/>')
        parts.append(
            f'<text class="soft" x="{left - 7}" y="{y + 4:.1f}" '
            f'text-anchor="end">{y_text(tick)}</text>'
        )
    parts.append(
        f'<text x="{width - right}" y="{height - 8}" text-anchor="end">{escape(x_name)}</text>'
    )
    parts.append(f'<text x="4" y="14">{escape(y_name)}</text>')
    if diagonal:
        (ax, ay), (bx, by) = at(x0, y0), at(x1, y1)
        parts.append(f'<path class="front" d="M{ax:.1f} {ay:.1f}L{bx:.1f} {by:.1f}"/>')
    if front:
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(p.x, p.y) for p in pareto(points)))
        parts.append(f'<polyline class="front" points="{corners}"/>')
    labels: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda p: ("dot", "preset", "winner").index(p.kind)):
        x, y = at(point.x, point.y)
        said = f"{point.label}: {x_text(point.x)}, {y_text(point.y)}"
        size = 6 if point.kind == "winner" else 4.5
        parts.append(
            f'<circle class="{point.kind}" cx="{x:.1f}" cy="{y:.1f}" '
            f'r="{size}"><title>{escape(said)}</title></circle>'
        )
    for point in sorted(points, key=lambda p: p.kind != "winner"):
        x, y = at(point.x, point.y)
        if point.kind != "dot" and all(abs(x - a) > 90 or abs(y - b) > 13 for a, b in labels):
            labels.append((x, y))
            end = x > width - 110
            place = f'x="{x - 9:.1f}" text-anchor="end"' if end else f'x="{x + 9:.1f}"'
            parts.append(f'<text {place} y="{y + 4:.1f}">{escape(_short(point.label, 16))}</text>')
    return _svg(width, height, parts, f"{y_name} against {x_name}")


def pareto(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both coordinates (smaller is better), by x.

    >>> [p.label for p in pareto([Point(1, 3, "a", "dot"), Point(2, 2, "b", "dot"), Point(3, 2, "c", "dot")])]
    ['a', 'b']
    """
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, p.y)):
        if not best or point.y < best[-1].y:
            best.append(point)
    return best


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = max((high / low) ** 0.08, 1.06)
    return low / margin, high * margin


def _ticks(low: float, high: float) -> list[float]:
    """Three to five places on a logarithmic axis."""
    inner_low, inner_high = low * (high / low) ** 0.06, high / (high / low) ** 0.06
    return [inner_low * (inner_high / inner_low) ** (i / 3) for i in range(4)]


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def _svg(
    width: float, height: float, parts: Sequence[str], title: str, natural: float | None = None
) -> str:
    style = f' style="width:{natural:.0f}px"' if natural else ""
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}"{style}>'
        + "".join(parts) + "</svg>"
    )  # fmt: skip
