"""Drawings of the HTML report: the mesh with what each device stores, and scatter plots.

Here is the geometry, in pixels; the markup is in `templates/`, the colours are in the page's CSS.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoshard.evidence.pareto import pareto
from autoshard.report.fill_template import fill

if TYPE_CHECKING:
    from markupsafe import Markup

MOST_DEVICES = 64
"""Devices that are drawn; all are alike, so more show nothing. Chosen by hand;
test_large_meshes_are_drawn_in_part pins it."""

MOST_COLUMNS = 8
"""Devices side by side: as many as fit a page of 1120 pixels."""

_Text = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate in a plot: `kind` is `winner`, `preset` or `dot`."""

    x: float
    y: float
    label: str
    kind: str


# The mesh -----------------------------------------------------------------------------------------

DEVICE_WIDTH, DEVICE_HEIGHT, GAP, MARGIN, HEAD = 118, 74, 8, 8, 30
"""Pixels of a device's box, between boxes, around them, and above them. Chosen by eye."""


@dataclass(frozen=True, slots=True)
class _Bar:
    group: str
    x: float
    width: float
    size: str


@dataclass(frozen=True, slots=True)
class _Device:
    number: int
    x: int
    y: int
    coordinates: str
    label: str
    bars: tuple[_Bar, ...]
    width: int = DEVICE_WIDTH
    height: int = DEVICE_HEIGHT


def mesh_svg(axes: Mapping[str, int], stored: Mapping[str, int], bytes_text: _Text) -> Markup:
    """The mesh as a grid, its last axis across; in each device a bar of what it stores, by group.

    Args:
        axes: Mesh axes and sizes.
        stored: Bytes of each group on one device; the same on all, since all shards of an array
            have one size.
        bytes_text: Bytes for people.
    """
    names, sizes = list(axes), list(axes.values())
    shown = [range(min(size, MOST_DEVICES)) for size in sizes]  # `product` makes lists of them
    positions = list(itertools.islice(itertools.product(*shown), MOST_DEVICES))
    columns = sizes[-1] if sizes and sizes[-1] > 1 else math.ceil(math.sqrt(len(positions)))
    columns = min(columns, MOST_COLUMNS)
    devices = []
    for number, position in enumerate(positions):
        row, column = divmod(number, columns)
        x, y = MARGIN + column * (DEVICE_WIDTH + GAP), HEAD + row * (DEVICE_HEIGHT + GAP)
        coordinates = ", ".join(f"{name} {i}" for name, i in zip(names, position, strict=True))
        bars = _bars(stored, x, bytes_text)
        devices.append(_Device(number, x, y, coordinates, _cut(coordinates, 18), bars))
    more = math.prod(sizes) - len(positions)
    rows = math.ceil(len(positions) / columns)
    return fill(
        "mesh.svg",
        width=MARGIN * 2 + columns * (DEVICE_WIDTH + GAP) - GAP,
        height=HEAD + rows * (DEVICE_HEIGHT + GAP) + (20 if more else 0),
        left=MARGIN,
        across=names[-1] if sizes and columns == sizes[-1] else "",
        devices=devices,
        stored=bytes_text(sum(stored.values())),
        more=more,
    )


def _bars(stored: Mapping[str, int], device_x: int, bytes_text: _Text) -> tuple[_Bar, ...]:
    """Bars side by side that together are as wide as a device's box, without its margins."""
    total = sum(stored.values()) or 1
    x = device_x + 9.0
    bars = []
    for group, count in stored.items():
        width = (DEVICE_WIDTH - 18) * count / total
        bars.append(_Bar(group, x, width, bytes_text(count)))
        x += width
    return tuple(bars)


# Scatter plots ------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 460, 320, 66, 274, 26, 442
"""Pixels of a plot, and where its axes begin and end. Chosen by eye."""

LABEL_WIDTH, LABEL_HEIGHT = 90, 13
"""Pixels that a label takes; one nearer to another than that is left out. Chosen by eye."""

_KINDS = ("dot", "preset", "winner")
"""Kinds of points in the order in which they are drawn, later ones on top."""


@dataclass(frozen=True, slots=True)
class _LogAxis:
    """A logarithmic axis from `low` at pixel `start` to `high` at pixel `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Pixel of a value."""
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.start + share * (self.end - self.start)

    def ticks(self, text: _Text) -> list[_Tick]:
        """Four places, evenly apart and away from the ends."""
        # By eye: a tick at the very end would have its text cut off.
        low = self.low * (self.high / self.low) ** 0.06
        high = self.high / (self.high / self.low) ** 0.06
        values = [low * (high / low) ** (i / 3) for i in range(4)]
        return [_Tick(self.at(value), text(value)) for value in values]


@dataclass(frozen=True, slots=True)
class _Tick:
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class _Dot:
    kind: str
    x: float
    y: float
    radius: float
    title: str


@dataclass(frozen=True, slots=True)
class _Label:
    x: float
    y: float
    before: bool
    text: str


@dataclass(frozen=True, slots=True)
class AxisName:
    """What an axis of a plot shows: its name, and a number on it for people."""

    name: str
    text: Callable[[float], str]


def scatter_svg(
    points: Sequence[Point],
    x: AxisName,
    y: AxisName,
    *,
    diagonal: bool = False,
    front: bool = False,
) -> Markup:
    """Points on logarithmic axes.

    Args:
        points: What is shown; every coordinate is positive.
        x: The horizontal axis.
        y: The vertical axis.
        diagonal: Draw where both are equal, on axes of one range.
        front: Join the points that no other beats in both.
    """
    xs, ys = [point.x for point in points], [point.y for point in points]
    if diagonal:
        xs = ys = [*xs, *ys]
    across = _LogAxis(*_range(xs), LEFT, RIGHT)
    up = _LogAxis(*_range(ys), BOTTOM, TOP)
    corners = pareto(points, lambda point: (point.x, point.y)) if front else []
    return fill(
        "scatter.svg",
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=RIGHT,
        top=TOP,
        bottom=BOTTOM,
        x_name=x.name,
        y_name=y.name,
        x_ticks=across.ticks(x.text),
        y_ticks=up.ticks(y.text),
        diagonal=((LEFT, BOTTOM), (RIGHT, TOP)) if diagonal else (),
        front=[(across.at(corner.x), up.at(corner.y)) for corner in corners],
        dots=[
            _Dot(
                kind=point.kind,
                x=across.at(point.x),
                y=up.at(point.y),
                radius=6 if point.kind == "winner" else 4.5,
                title=f"{point.label}: {x.text(point.x)}, {y.text(point.y)}",
            )
            for point in sorted(points, key=lambda point: _KINDS.index(point.kind))
        ],
        labels=_labels(points, across, up),
    )


def _labels(points: Sequence[Point], across: _LogAxis, up: _LogAxis) -> list[_Label]:
    """Names beside the winner and the presets, as far as they do not cover each other."""
    labels: list[_Label] = []
    taken: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: point.kind != "winner"):
        x, y = across.at(point.x), up.at(point.y)
        free = all(abs(x - a) > LABEL_WIDTH or abs(y - b) > LABEL_HEIGHT for a, b in taken)
        if point.kind != "dot" and free:
            taken.append((x, y))
            before = x > WIDTH - 110  # else it would leave the plot
            beside = x - 9 if before else x + 9
            labels.append(_Label(beside, y + 4, before, _cut(point.label, 16)))
    return labels


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The values' range with a margin, which equal values need to have a range at all."""
    low, high = min(values), max(values)
    margin = max((high / low) ** 0.08, 1.06)  # by eye
    return low / margin, high * margin


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"
