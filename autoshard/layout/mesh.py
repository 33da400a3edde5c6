"""Meshes: from a string or any `jax.sharding.Mesh` to the Auto version that the search works on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from autoshard.devices.mesh_text import parse_axes
from autoshard.devices.platforms import facts_of
from autoshard.devices.target import Target
from autoshard.errors import MeshError
from autoshard.layout.spec import Spec, to_partition_spec


@dataclass(frozen=True, eq=False)
class MeshInfo:
    """The user's mesh and its Auto version.

    Attributes:
        user: As given; plans take and return arrays of this mesh.
        auto: The same devices with Auto axes; tracing and constraints use it.
    """

    user: Mesh
    auto: Mesh

    @property
    def axes(self) -> Mapping[str, int]:
        """Size of each mesh axis, in order."""
        return {str(name): int(size) for name, size in self.user.shape.items()}

    @property
    def explicit_axes(self) -> tuple[str, ...]:
        """Mesh axes of Explicit type."""
        types = zip(self.user.axis_names, self.user.axis_types, strict=True)
        return tuple(str(name) for name, kind in types if kind == AxisType.Explicit)

    @property
    def for_tracing(self) -> tuple[Mesh, ...]:
        """The meshes under which a function may be written to run, the likelier first."""
        return (self.auto, self.user) if self.explicit_axes else (self.auto,)

    @property
    def axis_types(self) -> tuple[str, ...]:
        """`auto` or `explicit`, by axis."""
        return tuple("explicit" if name in self.explicit_axes else "auto" for name in self.axes)

    @property
    def platform(self) -> str:
        """Platform of the devices (`cpu`, `gpu`, `tpu`)."""
        return str(self.user.devices.flat[0].platform)

    @property
    def device_kind(self) -> str:
        """Kind of the devices as jax names it."""
        return str(self.user.devices.flat[0].device_kind)

    @property
    def processes(self) -> tuple[int, ...]:
        """Numbers of the processes whose devices these are, in order."""
        # The devices of a target belong to hosts that are not here: this process plans for all.
        if self.target is not None:
            return (0,)
        return tuple(sorted({int(device.process_index) for device in self.user.devices.flat}))

    @property
    def own_device(self) -> jax.Device:
        """The first of the devices that this process has."""
        own = jax.process_index()
        device: jax.Device = next(d for d in self.user.devices.flat if d.process_index == own)
        return device

    @property
    def target(self) -> Target | None:
        """What the mesh is of where its devices are not here; None where they are."""
        target: Target | None = getattr(self.user.devices.flat[0], "target", None)
        return target

    @property
    def far_axes(self) -> tuple[str, ...]:
        """Mesh axes that cross a slower network: slices of TPUs, hosts of GPUs."""
        attribute = facts_of(self.platform).island
        if not attribute:
            return ()
        # None (and no attribute at all) stands for a single slice.
        numbers = [getattr(device, attribute, None) or 0 for device in self.user.devices.flat]
        # [size of each mesh axis]: slice or host of each device.
        islands = np.array(numbers).reshape(self.user.devices.shape)
        crossing = [bool(np.diff(islands, axis=i).any()) for i in range(islands.ndim)]
        return tuple(name for name, crosses in zip(self.axes, crossing, strict=True) if crosses)

    def explicit_part(self, spec: Spec) -> NamedSharding:
        """The part of a sharding that jax tracks in types on this mesh: Explicit axes only."""
        explicit = self.explicit_axes
        return self.sharding(tuple(tuple(a for a in axes if a in explicit) for axes in spec))

    def sharding(self, spec: Spec, memory_kind: str | None = None) -> NamedSharding:
        """A NamedSharding on the user's mesh, in the devices' own memory unless told otherwise."""
        return NamedSharding(self.user, to_partition_spec(spec), memory_kind=memory_kind)


def resolve_mesh(mesh: Mesh | str) -> MeshInfo:
    """The user's mesh and its Auto version.

    Args:
        mesh: A Mesh with Auto or Explicit axes, or a string over the local devices.

    Raises:
        MeshError: If a string needs another number of devices than there are, or the mesh has
            Manual axes.
    """
    if isinstance(mesh, str):
        mesh = _over_local_devices(mesh)
    _check(mesh)
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return MeshInfo(mesh, auto)


def _over_local_devices(text: str) -> Mesh:
    axes = parse_axes(text)
    devices = jax.devices()
    needed = math.prod(axes.values())
    if needed != len(devices):
        platform = devices[0].platform
        fix = (
            f"--cpu-devices {needed}"
            if facts_of(platform).on_host
            else "a mesh of that many devices"
        )
        raise MeshError(
            f"mesh={text!r} needs {needed} devices, but this process has {len(devices)} "
            f"{platform} devices. Use sizes whose product is {len(devices)}, or {fix} "
            f'(in Python: jax.config.update("jax_num_cpu_devices", {needed}) before anything '
            f"else; or pass a jax.sharding.Mesh over a part of the devices)."
        )
    grid = np.array(devices).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _check(mesh: object) -> None:
    if not isinstance(mesh, Mesh):
        raise MeshError(
            f"mesh is a {type(mesh).__name__}; pass a jax.sharding.Mesh or a string such as "
            f"'data=4,model=2'."
        )
    if not mesh.devices.size:
        raise MeshError("the mesh has no devices.")
    for name in mesh.axis_names:
        if not isinstance(name, str) or not name.isascii():
            raise MeshError(
                f"mesh axis {name!r}: some compilers abort on such a name. Use ASCII text, such as "
                f"'data'."
            )
    if any(kind == AxisType.Manual for kind in mesh.axis_types):
        raise MeshError(
            "the mesh has Manual axes: those belong inside shard_map. Pass the mesh outside of it."
        )
