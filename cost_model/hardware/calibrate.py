"""Calibration: the rates and links that explain best what microbenchmarks take on these devices.

    matmul      op_s + flops / rate, for each dtype
    stream      op_s + bytes / memory rate (one read, one write of each byte)
    collective  as in `collectives`: steps * alpha + bytes / bandwidth, for each kind over each mesh
                axis
    overlap     what an independent matmul and all_reduce take together, against one after the other

Each is linear in what is fitted (seconds, and seconds a flop or byte), which is fitted robustly to
relative errors (`robust_fit`). The limit beyond which an error counts less is fixed: one that
follows the residuals drops, of the few sizes of a collective, now this one and now that.

Reference:
    Hockney (1994), "The communication challenge for MPP" (alpha-beta).
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from autoshard.cost_model.hardware.backend import backend_for
from autoshard.cost_model.hardware.collectives import collective_s
from autoshard.cost_model.hardware.hardware import Hardware, Link, hardware_for
from autoshard.cost_model.hardware.microbenchmarks import (
    OVERLAP_BYTES,
    OVERLAP_ROWS,
    Sample,
    collective_benchmarks,
    compute_benchmarks,
    interleaved,
    overlap_run,
)
from autoshard.cost_model.hardware.robust_fit import robust_fit
from autoshard.errors import HardwareError

ROUNDS = 160
"""Rounds of timing: 20 in each of the 8 places of the arguments, of which the lowest 2 count.
`test_two_calibrations_agree_and_beat_the_preset` holds with it: two calibrations within 25 %."""

HUBER = 0.3
"""Relative errors beyond this count linearly: alpha-beta itself is off by so much between the sizes
of one collective. `test_one_wild_measurement_hardly_matters` fails where all count by squares."""

FASTEST_PER_S = 1e18
"""Flops or bytes a second beyond which a rate is none: nothing is that fast. A fit ends there where
times do not grow with the size; `test_what_takes_no_time_is_an_error`."""

UNKNOWN_DEVICE = Hardware(
    name="unknown",
    peak_flops_per_s={"float32": 1.0},
    memory_bytes_per_s=1.0,
    memory_bytes=2**60,
    link=Link(alpha_s=1e-6, bytes_per_s=1e9),
)
"""Stands for the preset of devices that none describes: any rate reaches all of its peak, no layout
is too large for its memory, and its link serves a lone device, which sends nothing."""


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` measured and fitted.

    Attributes:
        hardware: To be saved, and given to `optimize`.
        samples: The measurements with what the fit predicts for each.
    """

    hardware: Hardware
    samples: tuple[Sample, ...]

    def residuals(self) -> Mapping[str, float]:
        """Median absolute relative residual by what was measured (collectives by mesh axis)."""
        groups: dict[str, list[float]] = {}
        for sample in self.samples:
            name = f"collectives over {sample.mesh_axis}" if sample.mesh_axis else sample.what
            groups.setdefault(name, []).append(abs(sample.residual))
        return {name: statistics.median(residuals) for name, residuals in groups.items()}

    def spread(self, share: float) -> float:
        """The spread that this share of the measurements does not exceed: 0.5 for the median."""
        return float(np.quantile([sample.spread for sample in self.samples], share))


def calibrate(
    mesh: Mesh,
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    rounds: int = ROUNDS,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measures the devices of a mesh and fits a `Hardware`.

    Args:
        mesh: Its devices are measured together, its axes one after the other.
        dtypes: Of the matmuls; `float32` must be among them.
        rounds: Rounds of timing, over all places.
        on_progress: Is called with what is being done.

    Returns:
        The hardware, and the samples with their residuals.

    Raises:
        HardwareError: If a rate cannot be determined: an operation took the same time whatever the
            size.
    """
    benchmarks = [*compute_benchmarks(mesh, dtypes), *collective_benchmarks(mesh)]
    overlapping = overlap_run(mesh)
    on_progress(f"measuring {len(benchmarks)} operations on {mesh.size} devices")

    runs = [benchmark.run for benchmark in benchmarks]
    if overlapping is not None:
        runs.append(overlapping)
    watches = interleaved(runs, rounds)
    samples = []
    for benchmark, watch in zip(benchmarks, watches[: len(benchmarks)], strict=True):
        measured = replace(benchmark.sample, measured_s=watch.operation_s(), spread=watch.spread())
        samples.append(measured)

    device = mesh.devices.flat[0]
    mesh_axes = {str(axis): int(n) for axis, n in mesh.shape.items()}
    hardware = fit_hardware(samples, str(device.device_kind), mesh_axes, dtypes)
    if overlapping is not None:
        overlap = _overlap(samples, watches[-1].operation_s())
        hardware = replace(hardware, overlap=overlap)
    memory_bytes = _memory_bytes(device)
    if memory_bytes:
        hardware = replace(hardware, memory_bytes=memory_bytes)
    fitted = [replace(sample, fitted_s=predicted_s(hardware, sample)) for sample in samples]
    return Calibration(hardware, tuple(fitted))


def predicted_s(hardware: Hardware, sample: Sample) -> float:
    """Seconds that a hardware predicts for a sample."""
    family, _, dtype = sample.what.partition(" ")
    if family == "matmul":
        return hardware.op_s + sample.amount / hardware.flops_per_s(dtype)
    if family == "stream":
        return hardware.op_s + sample.amount / hardware.memory_bytes_per_s
    return collective_s(
        sample.what, int(sample.amount), hardware.link_for(sample.mesh_axis), sample.group_size
    )


# The fit ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ComputeFit:
    """Seconds that every operation takes, and rates.

    Attributes:
        op_s: Seconds of an operation besides its arithmetic and traffic.
        flops_per_s: Rate of matmuls, by dtype.
        memory_bytes_per_s: Rate of streams.
    """

    op_s: float
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float


def fit_hardware(
    samples: Sequence[Sample], device_kind: str, mesh_axes: Mapping[str, int], dtypes: Sequence[str]
) -> Hardware:
    """The hardware that explains samples best; without overlap, which no single sample shows.

    Raises:
        HardwareError: If a rate cannot be determined.
    """
    preset = _preset_of(device_kind)
    compute = _fit_compute([s for s in samples if not s.mesh_axis], dtypes)
    links = {axis: _fit_link(samples, axis) for axis, n in mesh_axes.items() if n > 1}
    slowest = min(links.values(), key=lambda link: link.bytes_per_s, default=preset.link)
    efficiency = _efficiency(compute.flops_per_s, preset)
    mesh_text = ", ".join(f"{axis}={n}" for axis, n in mesh_axes.items())
    return Hardware(
        name=f"calibrated {device_kind}",
        peak_flops_per_s={d: rate / efficiency for d, rate in compute.flops_per_s.items()},
        memory_bytes_per_s=compute.memory_bytes_per_s,
        memory_bytes=preset.memory_bytes,
        link=slowest,
        links=links,
        efficiency=efficiency,
        overlap=0.0,
        source=f"autoshard calibrate: {mesh_text}, jax {jax.__version__}",
        dcn=preset.dcn,
        op_s=compute.op_s,
        measured_on=device_kind,
    )


def _fit_compute(samples: Sequence[Sample], dtypes: Sequence[str]) -> _ComputeFit:
    names = [*(f"matmul {dtype}" for dtype in dtypes), "stream"]
    # [samples, 1 + names]: an operation each, then the flops or bytes of what it is
    amounts = np.zeros((len(samples), 1 + len(names)))
    amounts[:, 0] = 1.0
    for i, sample in enumerate(samples):
        amounts[i, 1 + names.index(sample.what)] = sample.amount
    op_s, *inverse_rates = _fit_seconds(amounts, samples)
    rates = []
    for name, inverse_rate in zip(names, inverse_rates, strict=True):
        rates.append(1.0 / _checked_inverse(inverse_rate, name))
    *flops_per_s, memory_bytes_per_s = rates
    return _ComputeFit(op_s, dict(zip(dtypes, flops_per_s, strict=True)), memory_bytes_per_s)


def _fit_link(samples: Iterable[Sample], axis: str) -> Link:
    """Alpha and bandwidth of a mesh axis, over all collectives and for each kind."""
    own = [s for s in samples if s.mesh_axis == axis]
    common = _fit_alpha_beta(own, f"collectives over {axis}")
    kinds = {}
    for kind in dict.fromkeys(s.what for s in own):
        with contextlib.suppress(HardwareError):  # the common link serves
            kinds[kind] = _fit_alpha_beta([s for s in own if s.what == kind], kind)
    return replace(common, kinds=kinds)


def _fit_alpha_beta(samples: Sequence[Sample], name: str) -> Link:
    """The link by which collectives over it take what they do."""
    # Seconds are linear in alpha and in 1 / bandwidth: over a link with alpha 1 and endless
    # bandwidth they count the steps, over one with bandwidth 1 and no alpha the bytes.
    alpha_only = Link(alpha_s=1.0, bytes_per_s=1e300)
    bandwidth_only = Link(alpha_s=0.0, bytes_per_s=1.0)
    # [samples, 2]: steps, bytes
    amounts = np.empty((len(samples), 2))
    for i, s in enumerate(samples):
        for column, link in enumerate((alpha_only, bandwidth_only)):
            amounts[i, column] = collective_s(s.what, int(s.amount), link, s.group_size)
    alpha_s, inverse_rate = _fit_seconds(amounts, samples)
    return Link(alpha_s, 1.0 / _checked_inverse(inverse_rate, name))


def _fit_seconds(amounts: NDArray[np.float64], samples: Sequence[Sample]) -> list[float]:
    """Seconds for one of each amount, >= 0.

    Args:
        amounts: [samples, unknowns] of which each sample takes the sum; in each column some > 0.
        samples: Measured.
    """
    measured_s = np.array([s.measured_s for s in samples])
    # as if each alone accounted for the sample in which it weighs most
    start = 1.0 / (amounts / measured_s[:, None]).max(axis=0)
    seconds: list[float] = robust_fit(lambda _: amounts, measured_s, start, huber=HUBER).tolist()
    return seconds


def _checked_inverse(inverse_rate: float, name: str) -> float:
    """The inverse of a rate, once it is known to be one."""
    if not inverse_rate > 1.0 / FASTEST_PER_S:
        raise HardwareError(
            f"calibration: {name} took the same time whatever the size, so its rate cannot be "
            f"determined. The machine was too busy, or the clock too coarse; calibrate again, with "
            f"more rounds."
        )
    return inverse_rate


def _efficiency(flops_per_s: Mapping[str, float], preset: Hardware) -> float:
    """Share of the peak that matmuls reach, at most 1."""
    reached = 0.0
    for dtype, rate in flops_per_s.items():
        reached = max(reached, rate / preset.flops_per_s(dtype) * preset.efficiency)
    return min(1.0, reached)


def _preset_of(device_kind: str) -> Hardware:
    try:
        return hardware_for(device_kind)
    except HardwareError:
        return UNKNOWN_DEVICE


def _memory_bytes(device: jax.Device) -> int | None:
    """Memory of a device, where it has its own and tells."""
    if backend_for(device.platform).shares_host_memory:
        return None
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return int(limit) if limit else None


def _overlap(samples: Sequence[Sample], both_s: float) -> float:
    """The share of the shorter of compute and communication that the longer one hides."""
    compute_s = _measured_s(samples, "matmul float32", 2.0 * OVERLAP_ROWS**3)
    comm_s = _measured_s(samples, "all_reduce", float(OVERLAP_BYTES))
    hidden_s = compute_s + comm_s - both_s
    return min(1.0, max(0.0, hidden_s / min(compute_s, comm_s)))


def _measured_s(samples: Sequence[Sample], what: str, amount: float) -> float:
    """Seconds of the first sample of this kind and size: of collectives, over the first mesh axis,
    as in `overlap_run`.
    """
    return next(s.measured_s for s in samples if (s.what, s.amount) == (what, amount))
