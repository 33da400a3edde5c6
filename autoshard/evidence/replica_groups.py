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

# [2,2]<=[2,2]T(1,0), and mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(1)2}
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
        ids = np.arange(math.prod(shape)) if device_ids is None else np.asarray(device_ids)
        # [devices, mesh axes]: where each device lies in the mesh
        points = np.stack(np.unravel_index(np.arange(ids.size), shape), axis=-1) if shape else [()]
        self._coordinates: dict[int, tuple[int, ...]] = {}
        for device, point in zip(ids.reshape(-1), points, strict=True):
            self._coordinates[int(device)] = tuple(int(coordinate) for coordinate in point)

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
        spanned: set[tuple[str, ...] | None] = {self._grid(group) for group in groups.tolist()}
        axes = spanned.pop() if len(spanned) == 1 else None
        return axes or ()

    def _grid(self, group: Sequence[int]) -> tuple[str, ...] | None:
        """Mesh axes over which a group is a full grid; None if it is none."""
        if any(device not in self._coordinates for device in group):
            return None
        points = {self._coordinates[device] for device in group}
        # By mesh axis: how many coordinates the group has there.
        extents = [len(set(coordinates)) for coordinates in zip(*points, strict=True)]
        if not len(group) == len(points) == math.prod(extents):
            return None
        axes = []
        for (axis, size), extent in zip(self.sizes.items(), extents, strict=True):
            if size % extent:
                return None
            if extent > 1:
                axes.append(axis)
        return tuple(axes)

    def moved_along(self, pairs: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        """Mesh axes along which some source differs from its target, in mesh order; () if a device
        is unknown.
        """
        moved: set[str] = set()
        for source, target in pairs:
            if source not in self._coordinates or target not in self._coordinates:
                return ()
            before, after = self._coordinates[source], self._coordinates[target]
            for axis, start, end in zip(self.sizes, before, after, strict=True):
                if start != end:
                    moved.add(axis)
        return self.ordered(sorted(moved))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(reshape: str, transpose: str | None) -> NDArray[np.int64]:
    """Device numbers in XLA's iota form: counted up in a shape, then transposed."""
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
    >>> parse_groups("mesh['x'=2,'y'=2] {'y','x'}").tolist()
    [[0, 2, 1, 3]]
    """
    if text.startswith("{{"):
        rows = [row for row in map(_numbers, text[: text.index("}}")].split("}")) if row]
        same_size = len({len(row) for row in rows}) == 1
        return np.array(rows, dtype=np.int64) if same_size else None
    if match := _IOTA.match(text):
        return _iota(match[2], match[3]).reshape(_numbers(match[1]))
    if match := _MESH.match(text):
        return _mesh_groups(*match.groups())
    return None


def _mesh_groups(axes_text: str, devices_text: str | None, spanned_text: str) -> Groups:
    """Groups of `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(1)2}`."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes_text)}
    # By mesh axis: how many parts lie before each spanned one (its stride), and the spanned size.
    spanned: dict[str, tuple[int, int]] = {}
    for name, before, size in _AXIS_REF.findall(spanned_text):
        spanned[name] = int(before or 1), int(size or sizes[name])

    # Each mesh axis becomes three dimensions: before, in, and after the part that is spanned.
    shape: list[int] = []
    middle: dict[str, int] = {}
    for name, full in sizes.items():
        before, size = spanned.get(name, (full, 1))
        middle[name] = len(shape) + 1
        shape += [before, size, full // (before * size)]
    inside = [middle[name] for name in spanned]  # as they are named: the first one is outermost
    outside = [d for d in range(len(shape)) if d not in inside]
    group_size = math.prod(shape[d] for d in inside)
    devices = _mesh_devices(math.prod(sizes.values()), devices_text)
    return devices.reshape(shape).transpose(outside + inside).reshape(-1, group_size)


def _mesh_devices(count: int, text: str | None) -> NDArray[np.int64]:
    """The device numbers of a mesh in row-major order, from its `device_ids` if it states them."""
    if text is None:
        return np.arange(count, dtype=np.int64)
    transposed = _TRANSPOSED.fullmatch(text)
    if transposed and math.prod(_numbers(transposed[1])) == count:
        return _iota(*transposed.groups())
    return np.array(_numbers(text), dtype=np.int64)
