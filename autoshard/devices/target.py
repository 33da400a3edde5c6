"""Targets: hardware that is not here, as a Mesh to plan and compile for, never to run on.

A target is named `platform:part:shape`: `tpu:v5e:16x16` (chips; `tpu:v5e:4x4*2` is two slices
joined by the data-centre network), `gpu:h100:4x8` (hosts x GPUs), `cpu:64`. Its devices are plain
values of this module that know their place; jax traces and lowers for them as for any device, with
nothing installed but jax. Only the process that compiles (`compiler.worker`) opens the real
compilers, through `topology`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
from numpy.typing import NDArray

from autoshard.arguments import check_kind
from autoshard.devices.mesh_text import axes_text, parse_axes
from autoshard.devices.parts import GPUS, TPUS, gpu_description
from autoshard.devices.platforms import facts_of
from autoshard.errors import TargetError

MAX_CPU_DEVICES = 2**11
"""CPU devices of one process, by XLA (kMaxCpuDevicesPerProcess in pjrt/plugin/xla_cpu): with more,
jax takes some for another process's, and hangs."""

MAX_DEVICES = 2**17
"""Devices of a target: more than any cluster that is known (100,000 GPUs, 2024); each is a value in
memory. Chosen by hand; test_bad_targets_say_what_is_known has more."""

Platform = Literal["tpu", "gpu", "cpu"]

_TPU = re.compile(r"tpu:(\w+):(\d+(?:x\d+){1,2})(?:\*(\d+))?")
_GPU = re.compile(r"gpu:(.+):(\d+)x(\d+)")
_CPU = re.compile(r"cpu:(\d+)")


@dataclass(frozen=True, slots=True)
class Target:
    """Hardware that is not here.

    Attributes:
        platform: `tpu`, `gpu` or `cpu`.
        part: `v5e`, `h100`, `cpu`; of a captured GPU the path of its description.
        shape: Chips of one TPU slice along x, y (and z); (hosts, GPUs of a host); (devices,).
        slices: TPU slices.
        description: Of a GPU, as the compiler reads it (text proto); "" for others.
    """

    platform: Platform
    part: str
    shape: tuple[int, ...]
    slices: int = 1
    description: str = ""

    def __str__(self) -> str:
        grid = "x".join(map(str, self.shape))
        if facts_of(self.platform).on_host:
            return f"{self.platform}:{grid}"
        times = f"*{self.slices}" if self.slices > 1 else ""
        return f"{self.platform}:{self.part}:{grid}{times}"

    @property
    def device_count(self) -> int:
        """Devices in all."""
        return math.prod(self.shape) * self.slices

    @property
    def device_kind(self) -> str:
        """As `jax.Device.device_kind` names these devices."""
        if self.platform == "tpu":
            return TPUS[self.part].device_kind
        if self.platform == "gpu":
            kind = re.search(r'\bdevice_description_str: "([^"]*)"', self.description)
            return kind[1] if kind else self.part
        return "cpu"

    @property
    def memory_bytes(self) -> int | None:
        """Memory of a device that a program may use; None where that is the host's (CPU)."""
        if self.platform == "tpu":
            return TPUS[self.part].hbm_bytes
        size = re.search(r"\bdevice_memory_size: (\d+)", self.description)
        return int(size[1]) if size else None

    @property
    def clock_hz(self) -> float | None:
        """Cycles a second of the compiler's estimates; None where it makes none."""
        return TPUS[self.part].clock_hz if self.platform == "tpu" else None

    def devices(self) -> list[TargetDevice]:
        """The devices: by slice, then by host, or by coordinates with x fastest."""
        if self.platform == "tpu":
            return self._chips()
        if self.platform == "gpu":
            _, per_host = self.shape
            count = self.device_count
            return [TargetDevice(self, i, process_index=i // per_host) for i in range(count)]
        return [TargetDevice(self, i) for i in range(self.device_count)]

    def _chips(self) -> list[TargetDevice]:
        x_size, y_size, z_size = (*self.shape, 1)[:3]  # TPUs of two dimensions lie in a plane
        zyx = list(itertools.product(range(z_size), range(y_size), range(x_size)))
        chips: list[TargetDevice] = []
        for slice_index in range(self.slices):
            for z, y, x in zyx:
                chip = TargetDevice(self, len(chips), coords=(x, y, z), slice_index=slice_index)
                chips.append(chip)
        return chips


class _Client:
    """What jax asks the client of a device for when it lowers."""

    supports_executable_serialization = False

    def __init__(self, target: Target) -> None:
        self.platform = self._raw_platform = "cuda" if target.platform == "gpu" else target.platform
        self.platform_version = str(target)
        self._target = target

    def process_index(self) -> int:
        """Of this process; targets have no other."""
        return 0

    def compile_and_load(self, *args: Any, **kwargs: Any) -> Any:
        """What `lowered.compile()` comes to."""
        raise TargetError(
            f"{self._target} is not here: nothing can be loaded or run on it in this process. "
            f"autoshard.optimize compiles for it in processes of its own, and plan.lower(...) "
            f"gives the program."
        )


@dataclass(frozen=True)
class TargetDevice:
    """A device of a target; jax takes it where it takes a `jax.Device`, but for running.

    Attributes:
        target: Which target.
        id: Number in `Target.devices()`.
        process_index: Of the host, on GPUs.
        coords: Of a TPU chip in its slice.
        slice_index: Of its slice.
    """

    target: Target
    id: int
    process_index: int = 0
    coords: tuple[int, int, int] = (0, 0, 0)
    slice_index: int = 0

    core_on_chip = 0
    num_cores = 1

    @property
    def platform(self) -> str:
        """`tpu`, `gpu` or `cpu`."""
        return self.target.platform

    @property
    def device_kind(self) -> str:
        """As jax names it."""
        return self.target.device_kind

    @cached_property
    def client(self) -> Any:
        """What jax lowers with."""
        return _Client(self.target)

    def __repr__(self) -> str:
        return f"{self.target}[{self.id}]"


def parse_target(name: str) -> Target:
    """The target of a name.

    >>> parse_target("tpu:v5e:4x4*2").device_count, parse_target("gpu:h100:4x8").device_kind
    (32, 'NVIDIA H100 80GB HBM3')

    Raises:
        TargetError: If there is no such target; the message lists what there is.
    """
    if not isinstance(name, str):
        raise TargetError(f"target {name!r} is a {type(name).__name__}; {KNOWN}")
    if match := _TPU.fullmatch(name):
        return _tpu(name, match[1], tuple(map(int, match[2].split("x"))), int(match[3] or 1))
    if match := _GPU.fullmatch(name):
        shape = int(match[2]), int(match[3])
        if not all(shape):
            raise TargetError(f"target {name!r}: {match[2]}x{match[3]} has no devices. {KNOWN}")
        return Target("gpu", match[1], shape, description=gpu_description(match[1], name, KNOWN))
    if (match := _CPU.fullmatch(name)) and int(match[1]):
        return Target("cpu", "cpu", (int(match[1]),))
    raise TargetError(f"target {name!r} is not known. {KNOWN}")


def _tpu(name: str, part: str, shape: tuple[int, ...], slices: int) -> Target:
    """The TPU target of a name, taken apart.

    Raises:
        TargetError: If there are no such slices.
    """
    if part not in TPUS:
        raise TargetError(f"target {name!r}: there is no TPU {part!r}. {KNOWN}")
    largest = TPUS[part].largest
    if len(shape) != len(largest):
        example = "x".join(["4"] * len(largest))
        raise TargetError(
            f"target {name!r}: slices of {part} have {len(largest)} dimensions, not {len(shape)}. "
            f"Write for example tpu:{part}:{example}."
        )
    fits = all(1 <= size <= most for size, most in zip(shape, largest, strict=True))
    if not slices or not fits:
        largest_text = "x".join(map(str, largest))
        raise TargetError(
            f"target {name!r}: slices of {part} go up to {largest_text}, from 1 in each dimension."
        )
    odd = [size for size in shape[:2] if size > 1 and size % 2]
    if odd:
        raise TargetError(
            f"target {name!r}: hosts have 2x2 chips, which {odd[0]} does not divide by. Use even "
            f"sizes in the first two dimensions."
        )
    return Target("tpu", part, shape, slices)


KNOWN = (
    f"Known are tpu:PART:XxY or XxYxZ with PART one of {', '.join(TPUS)} (chips; *N at the end for "
    f"N slices), gpu:PART:HOSTSxGPUS with PART one of {', '.join(GPUS)} or the path of a "
    f"description that `autoshard capture-target` wrote, and cpu:DEVICES; for example "
    f"tpu:v5e:4x4, tpu:v5e:16x16*2, gpu:h100:4x8."
)


def target(name: str, mesh: str | Mapping[str, int]) -> Mesh:
    """A mesh over hardware that is not here, for `optimize` and `apply`.

    Nothing is installed or opened: predicting and partitioning work at once. Compiling, which
    `optimize` does in processes of its own, needs the compiler: `pip install 'autoshard[tpu]'` or
    `'autoshard[gpu]'`.

    Args:
        name: `tpu:v5e:16x16`, `tpu:v5e:4x4*2`, `gpu:h100:4x8` (hosts x GPUs), `gpu:PATH:4x8` (a
            description written by `autoshard capture-target`), `cpu:64`.
        mesh: Mesh axes in order, such as `"data=16,model=16"`. Slices, and hosts of GPUs, lie along
            the first axes.

    Raises:
        TargetError: If there is no such target, or the mesh does not match it.

    >>> dict(target("cpu:8", "data=4,model=2").shape)
    {'data': 4, 'model': 2}
    """
    hardware = parse_target(name)
    if hardware.device_count > MAX_DEVICES:
        raise TargetError(
            f"target {name!r} has {hardware.device_count} devices, at most {MAX_DEVICES} are "
            f"planned for. Name a part of it."
        )
    use = "'data=4,model=2', or a mapping of names to sizes"
    check_kind("mesh", mesh, (str, Mapping), use, TargetError)
    axes = parse_axes(mesh) if isinstance(mesh, str) else dict(mesh)
    for axis, size in axes.items():
        check_kind("a mesh axis", axis, str, use, TargetError)
        check_kind(f"mesh axis {axis!r}", size, int, use, TargetError)
    count = math.prod(axes.values())
    if count != hardware.device_count:
        raise TargetError(
            f"mesh {axes_text(axes)} has {count} devices, but {hardware} has "
            f"{hardware.device_count}. Use sizes whose product is {hardware.device_count}."
        )
    return Mesh(_arranged(hardware, axes), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def mesh_on(target_name: str | None, mesh: Mesh | str) -> Mesh | str:
    """The mesh that `optimize(..., mesh, target=...)` means.

    Raises:
        TargetError: If a target is named and the mesh is none of text, or does not match it.
    """
    if target_name is None:
        return mesh
    if not isinstance(mesh, str):
        raise TargetError(
            f"target={target_name!r} with a mesh that has devices already. Write the mesh as text, "
            f"such as 'data=4,model=4', or leave target out."
        )
    return target(target_name, mesh)


def _arranged(target: Target, axes: Mapping[str, int]) -> NDArray[Any]:
    """The devices in the shape of the mesh: TPU chips so that neighbours of the mesh are neighbours
    of the torus.
    """
    devices, shape = target.devices(), tuple(axes.values())
    if target.platform != "tpu":
        grid = np.empty(len(devices), dtype=object)
        grid[:] = devices
        return grid.reshape(shape)
    if target.slices == 1:
        return _on_torus(devices, shape)
    return _over_slices(target, axes)


def _over_slices(target: Target, axes: Mapping[str, int]) -> NDArray[Any]:
    """The chips of several slices, one slice after the other along the first axis of the mesh.

    Raises:
        TargetError: If that axis does not take them.
    """
    shape = list(axes.values())
    first = next(i for i, size in enumerate(shape) if size > 1)
    if shape[first] % target.slices:
        name = list(axes)[first]
        raise TargetError(
            f"mesh {axes_text(axes)}: the {target.slices} slices of {target} lie along its first "
            f"axis, {name!r}, whose size {shape[first]} they do not divide. Make it a multiple of "
            f"{target.slices}."
        )
    shape[first] //= target.slices
    chips_of_slice: list[list[TargetDevice]] = [[] for _ in range(target.slices)]
    for chip in target.devices():
        chips_of_slice[chip.slice_index].append(chip)
    slices = [_on_torus(chips, tuple(shape)) for chips in chips_of_slice]
    return np.concatenate(slices, axis=first)


def _on_torus(chips: list[TargetDevice], shape: tuple[int, ...]) -> NDArray[Any]:
    """The chips of a slice in the shape of a mesh, as jax arranges them."""
    mesh: NDArray[Any] = mesh_utils.create_device_mesh(shape, chips, allow_split_physical_axes=True)
    return mesh
