"""The real compilers' view of a target: its devices as `jax.experimental.topologies` gives them.

Opened in the process that compiles (`compile_worker`) only: libtpu and the CUDA plugin are large,
write to standard error, look for a cloud's metadata server, and abort on what they do not like.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental import topologies

from autoshard.devices.parts import TPUS
from autoshard.devices.target import Target
from autoshard.errors import ExtraError

_EXTRAS = {
    "tpu": ("libtpu", "tpu", "libtpu, about 640 MB, under Google Cloud's own terms"),
    "gpu": (
        "jax_cuda12_plugin",
        "gpu",
        "jax's CUDA plugin; it needs no driver, no toolkit and no GPU",
    ),
}


def require_compiler(target: Target) -> None:
    """Checks that the compiler of a target is installed; opens nothing.

    Raises:
        ExtraError: If it is not; the message has the command that installs it.
    """
    if target.platform == "cpu":
        return
    package, extra, what = _EXTRAS[target.platform]
    names = (package, package.replace("12", "13")) if target.platform == "gpu" else (package,)
    if not any(importlib.util.find_spec(name) for name in names):
        raise ExtraError(
            f"compiling for {target} needs a compiler that is not installed ({what}). Install it: "
            f"pip install 'autoshard[{extra}]'. Without it, effort=autoshard.Effort(compiled=0, "
            f"measured=0) gives the "
            f"plan that prediction and the partitioner rank first."
        )


def environment(target: Target) -> dict[str, str]:
    """Variables of a process that compiles for a target: no real accelerator, no look for a cloud
    around it.
    """
    if target.platform == "cpu":
        return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(target.device_count)}
    quiet = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    if target.platform == "gpu":
        return quiet
    return quiet | {
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
    if target.platform == "cpu":
        return {device.id: device for device in jax.local_devices(backend="cpu")}
    if target.platform == "gpu":
        hosts, per_host = target.shape
        found = topologies.get_topology_desc(
            platform="cuda", target_config=target.description, topology=f"1x{hosts}x{per_host}"
        )
        return dict(enumerate(sorted(found.devices, key=_number)))
    found = topologies.get_topology_desc(_tpu_name(target), platform="tpu", **_tpu_options(target))
    return dict(enumerate(sorted(found.devices, key=_place)))


def _tpu_name(target: Target) -> str:
    return f"{target.part}:{'x'.join(map(str, target.shape))}"


def _tpu_options(target: Target) -> Mapping[str, Any]:
    return dict(_options(target))


def _options(target: Target) -> Iterator[tuple[str, Any]]:
    x, y = target.shape[:2]
    if TPUS[target.part].megacore:
        whole = all(
            size % 4 == 0 for size in target.shape
        )  # a cube of 4x4x4 and its multiples close to a torus
        yield "chip_config_name", "megacore"
        yield "wrap", (whole,) * 3
    if TPUS[target.part].megacore or min(x, y) == 1:
        yield "chips_per_host_bounds", (min(x, 2), min(y, 2), 1)
    if target.slices > 1:
        yield "num_slices", target.slices


def _number(device: Any) -> int:
    return int(device.id)


def _place(device: Any) -> tuple[int, ...]:
    x, y, z = device.coords
    return (getattr(device, "slice_index", None) or 0, z, y, x, device.core_on_chip)
