"""The real compilers' view of a target: its devices as `jax.experimental.topologies` gives them.

Opened in the process that compiles (`compiler.worker`) only: libtpu and the CUDA plugin are large,
write to standard error, look for a cloud's metadata server, and abort on what they do not like.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from autoshard.devices.parts import TPUS
from autoshard.devices.platforms import facts_of
from autoshard.devices.target import MAX_CPU_DEVICES, Target
from autoshard.errors import ExtraError, TargetError


@dataclass(frozen=True, slots=True)
class _Extra:
    """An optional part of the installation that has a compiler: any of the packages will do."""

    name: str
    packages: tuple[str, ...]
    what: str


_EXTRAS = {
    "tpu": _Extra("tpu", ("libtpu",), "libtpu, about 640 MB, under Google Cloud's own terms"),
    "gpu": _Extra(
        "gpu",
        ("jax_cuda12_plugin", "jax_cuda13_plugin"),
        "jax's CUDA plugin; it needs no driver, no toolkit and no GPU",
    ),
}


def require_compiler(target: Target) -> None:
    """Checks that the compiler of a target is installed; opens nothing.

    Raises:
        ExtraError: If it is not; the message has the command that installs it.
        TargetError: If it takes no so many devices.
    """
    if facts_of(target.platform).on_host:
        if target.device_count > MAX_CPU_DEVICES:
            raise TargetError(
                f"compiling for {target}: XLA:CPU has at most {MAX_CPU_DEVICES} devices. Name "
                f"fewer, or predict only: effort=autoshard.Effort(compiled=0, measured=0)."
            )
        return
    extra = _EXTRAS[target.platform]
    if not any(importlib.util.find_spec(package) for package in extra.packages):
        raise ExtraError(
            f"compiling for {target} needs a compiler that is not installed ({extra.what}). "
            f"Install it: pip install 'autoshard[{extra.name}]'. Without it, "
            f"effort=autoshard.Effort(compiled=0, measured=0) gives the plan that prediction and "
            f"the partitioner rank first."
        )


def environment(target: Target) -> dict[str, str]:
    """Variables of a process that compiles for a target, and looks for no accelerator or cloud."""
    if facts_of(target.platform).on_host:
        return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(target.device_count)}
    host_only = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    if target.platform == "gpu":
        return host_only
    # libtpu would ask a cloud's metadata server what machine this is, and refuse to be loaded by
    # several processes of one machine.
    return host_only | {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": os.environ.get("TPU_ACCELERATOR_TYPE", "v5litepod-16"),
    }


def open_devices(target: Target) -> dict[int, jax.Device]:
    """The compiler's devices by the number that `Target.devices` gives them.

    Raises:
        RuntimeError: Of the compiler, where it does not know the target.
    """
    if facts_of(target.platform).on_host:
        return {device.id: device for device in jax.local_devices(backend="cpu")}
    if target.platform == "gpu":
        hosts, per_host = target.shape
        cuda = topologies.get_topology_desc(
            platform="cuda", target_config=target.description, topology=f"1x{hosts}x{per_host}"
        )
        return dict(enumerate(sorted(cuda.devices, key=_number)))
    shape = "x".join(map(str, target.shape))
    tpu = topologies.get_topology_desc(
        f"{target.part}:{shape}", platform="tpu", **_tpu_options(target)
    )
    return dict(enumerate(sorted(tpu.devices, key=_position)))


def _tpu_options(target: Target) -> dict[str, Any]:
    """What libtpu cannot tell from a topology's name."""
    options: dict[str, Any] = {}
    x, y = target.shape[:2]
    megacore = TPUS[target.part].megacore
    if megacore:
        # A cube of 4x4x4 and its multiples close to a torus; smaller slices are grids.
        torus = all(size % 4 == 0 for size in target.shape)
        options["chip_config_name"] = "megacore"
        options["wrap"] = (torus,) * 3
    if megacore or min(x, y) == 1:
        options["chips_per_host_bounds"] = (min(x, 2), min(y, 2), 1)
    if target.slices > 1:
        options["num_slices"] = target.slices
    return options


def _number(device: Any) -> int:
    return int(device.id)


def _position(device: Any) -> tuple[int, ...]:
    """Where a TPU core is, in the order of `Target.devices`: by slice, then x fastest."""
    x, y, z = device.coords
    return (getattr(device, "slice_index", None) or 0, z, y, x, device.core_on_chip)
