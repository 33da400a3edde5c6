"""Which mesh axes a collective spans: compiled programs and StableHLO only list device numbers.

A device number is the place of a device in the flattened mesh (XLA's partition id). A group spans a
mesh axis if the coordinates of its devices vary along it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Groups = NDArray[np.int64]
"""Device numbers, one group a row."""

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, ?device_ids=\((.*?)\))? ?\{([^}]*)\}")
_AXIS_REF = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_MESH_AXIS = re.compile(r"'([^']*)'=(\d+)")
_TRANSPOSED = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


class MeshCoordinates:
    """Maps groups of device numbers to the names of mesh axes.

    Args:
        mesh_axes: Name and size of every mesh axis, in mesh order.
        device_ids: Device numbers laid out as the mesh; None is the row-major order.
    """

    def __init__(
        self, mesh_axes: Mapping[str, int], device_ids: NDArray[np.int64] | None = None
    ) -> None:
        self.sizes = dict(mesh_axes)
        shape = tuple(self.sizes.values())
        count = math.prod(shape)
        ids = np.arange(count) if device_ids is None else np.asarray(device_ids).reshape(-1)
        self._coordinates = {
            int(device): tuple(int(c) for c in np.unravel_index(place, shape)) if shape else ()
            for place, device in enumerate(ids)
        }

    @property
    def all_devices(self) -> Groups:
        """The one group of all devices."""
        return np.array([sorted(self._coordinates)], dtype=np.int64)

    def ordered(self, names: Sequence[str]) -> tuple[str, ...]:
        """The distinct names in mesh order."""
        return tuple(axis for axis in self.sizes if axis in names)

    def spanned(self, groups: Groups) -> tuple[str, ...]:
        """Mesh axes that every group spans, in mesh order; () if there is no such set.

        Each group must be a full grid over its axes: all combinations of some coordinates of each.
        The part of an axis that is spanned may be a divisor of its size, when the program splits
        the axis into factors.
        """
        found: tuple[str, ...] | None = None
        for group in groups.tolist():
            axes = self._grid(group)
            if axes is None or (found is not None and axes != found):
                return ()
            found = axes
        return found or ()

    def _grid(self, group: Sequence[int]) -> tuple[str, ...] | None:
        if any(device not in self._coordinates for device in group):
            return None
        points = {self._coordinates[device] for device in group}
        seen = [len({point[d] for point in points}) for d in range(len(self.sizes))]
        if math.prod(seen) != len(points) or len(points) != len(group):
            return None
        if any(size % part for part, size in zip(seen, self.sizes.values(), strict=True)):
            return None
        return tuple(axis for axis, part in zip(self.sizes, seen, strict=True) if part > 1)

    def moved_along(self, pairs: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        """Mesh axes along which some source differs from its target, in mesh order; () if a device
        is unknown.
        """
        moved: set[str] = set()
        for source, target in pairs:
            if source not in self._coordinates or target not in self._coordinates:
                return ()
            there = zip(
                self.sizes, self._coordinates[source], self._coordinates[target], strict=True
            )
            moved.update(axis for axis, a, b in there if a != b)
        return self.ordered(sorted(moved))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(reshape: str, transpose: str | None) -> NDArray[np.int64]:
    shape = _numbers(reshape)
    grid = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    return grid.transpose(_numbers(transpose)) if transpose else grid


def parse_groups(text: str) -> Groups | None:
    """Reads replica groups in any of the forms that XLA prints.

    Args:
        text: What follows `replica_groups=`; more text may follow.

    Returns:
        The groups; None for `{}` (all devices) and for a form that is not known.

    >>> parse_groups("{{0,1},{2,3}}").tolist(), parse_groups("[2,2]<=[2,2]T(1,0)").tolist()
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    >>> parse_groups("mesh['x'=2,'y'=2] {'x'}").tolist()
    [[0, 2], [1, 3]]
    """
    if text.startswith("{{"):
        rows = [_numbers(row) for row in text[1 : text.index("}}") + 1].split("}") if _numbers(row)]
        return np.array(rows, dtype=np.int64) if len({len(row) for row in rows}) == 1 else None
    if match := _IOTA.match(text):
        return _iota(match[2], match[3]).reshape(_numbers(match[1]))
    if match := _MESH.match(text):
        return _mesh_groups(*match.groups())
    return None


def _mesh_groups(axes_text: str, devices_text: str | None, spanned_text: str) -> Groups:
    """Groups of `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(1)2}`."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes_text)}
    devices = np.arange(math.prod(sizes.values()), dtype=np.int64)
    if devices_text is not None:
        transposed = _TRANSPOSED.fullmatch(devices_text)
        if transposed and math.prod(_numbers(transposed[1])) == devices.size:
            devices = _iota(*transposed.groups())
        else:
            devices = np.array(_numbers(devices_text), dtype=np.int64)
    spanned = {
        name: (int(pre or 1), int(size or sizes[name]))
        for name, pre, size in _AXIS_REF.findall(spanned_text)
    }
    shape: list[int] = []
    inside: list[int] = []
    for name, full in sizes.items():
        pre, size = spanned.get(name, (full, 1))
        inside.append(len(shape) + 1)
        shape += [pre, size, full // (pre * size)]
    outside = [d for d in range(len(shape)) if d not in inside]
    group_size = math.prod(shape[d] for d in inside)
    return devices.reshape(shape).transpose(outside + inside).reshape(-1, group_size)
