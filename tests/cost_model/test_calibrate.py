"""Calibration: the fit finds the hardware behind the samples, outliers or not; files of other
devices are refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from autoshard.cost_model.hardware import microbenchmarks
from autoshard.cost_model.hardware.calibrate import calibrate, fit_hardware, predicted_s
from autoshard.cost_model.hardware.collectives import collective_s
from autoshard.cost_model.hardware.hardware import Hardware, Link, cpu, resolve_hardware
from autoshard.cost_model.hardware.microbenchmarks import Sample, Stopwatch
from autoshard.errors import HardwareError

TRUE = Hardware(
    name="true",
    peak_flops_per_s={"float32": 5e10},
    memory_bytes_per_s=2e10,
    memory_bytes=2**30,
    link=Link(2e-5, 1e9),
    links={"data": Link(2e-5, 1e9)},
    op_s=1e-5,
)


def samples(noise: float = 0.0) -> list[Sample]:
    """What microbenchmarks of the true hardware take."""
    benchmarks = [Sample("matmul float32", "", 1, 2.0 * n**3) for n in (64, 128, 256, 512)]
    benchmarks += [Sample("stream", "", 1, 2.0 * size) for size in (2**18, 2**20, 2**22)]
    for kind in ("all_gather", "all_reduce", "all_to_all", "collective_permute"):
        for size in (2**12, 2**16, 2**20, 2**22):
            benchmarks.append(Sample(kind, "data", 4, float(size)))
    rng = np.random.default_rng(0)
    factors = np.exp(noise * rng.standard_normal(len(benchmarks)))
    return [
        replace(sample, measured_s=predicted_s(TRUE, sample) * factor)
        for sample, factor in zip(benchmarks, factors, strict=True)
    ]


def fitted(measured: list[Sample]) -> Hardware:
    return fit_hardware(measured, "cpu", {"data": 4}, ("float32",))


def test_the_fit_finds_the_hardware_behind_the_samples() -> None:
    hardware = fitted(samples())
    assert hardware.op_s == pytest.approx(1e-5, rel=1e-3)
    assert hardware.flops_per_s("float32") == pytest.approx(5e10, rel=1e-3)
    assert hardware.memory_bytes_per_s == pytest.approx(2e10, rel=1e-3)
    assert hardware.links["data"].alpha_s == pytest.approx(2e-5, rel=1e-3)
    assert hardware.links["data"].bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert hardware.measured_on == "cpu"


def test_devices_that_no_preset_describes_reach_their_peak() -> None:
    hardware = fit_hardware(samples(), "abacus", {"data": 4}, ("float32",))
    assert hardware.efficiency == 1.0
    assert hardware.flops_per_s("float32") == pytest.approx(5e10, rel=1e-3)
    assert hardware.memory_bytes == 2**60
    assert hardware.dcn is None
    alone = fit_hardware(samples(), "abacus", {"data": 1}, ("float32",))
    assert alone.link == Link(alpha_s=1e-6, bytes_per_s=1e9)
    assert not alone.links


@pytest.mark.parametrize("times", [20, 0.5])
def test_one_wild_measurement_hardly_matters(times: float) -> None:
    spoiled = samples()
    spoiled[9] = replace(spoiled[9], measured_s=times * spoiled[9].measured_s)
    link = fitted(spoiled).links["data"]
    assert link.alpha_s == pytest.approx(2e-5, rel=0.1)
    assert link.bytes_per_s == pytest.approx(1e9, rel=0.1)


def test_noise_moves_predictions_little() -> None:
    hardware = fitted(samples(noise=0.1))
    for sample in samples():
        assert predicted_s(hardware, sample) == pytest.approx(sample.measured_s, rel=0.3), sample


def test_what_a_call_itself_takes_is_not_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of our own, on which a call takes 5, an operation 2, and 4 in one place of
    eight."""
    now = 0.0

    def run(times: int, place: int) -> None:
        nonlocal now
        now += 5.0 + times * (4.0 if place == 3 else 2.0)

    monkeypatch.setattr(microbenchmarks.time, "perf_counter", lambda: now)
    watch = Stopwatch(run, 10)
    for _ in range(20):
        watch.time_round()
    assert watch.operation_s() == pytest.approx(2.0)
    assert watch.spread() == pytest.approx(0.0)


def test_what_takes_no_time_is_an_error() -> None:
    flat = [replace(s, measured_s=1e-3) for s in samples()]
    with pytest.raises(HardwareError, match="the same time whatever the size"):
        fitted(flat)


def test_a_file_of_other_devices_is_refused(tmp_path: Path) -> None:
    own, other = tmp_path / "own.json", tmp_path / "other.json"
    fitted(samples()).save(own)
    replace(fitted(samples()), measured_on="NVIDIA H100 80GB HBM3").save(other)
    assert resolve_hardware(str(own), "cpu").link_for("data").kinds
    with pytest.raises(
        HardwareError, match="calibrated on 'NVIDIA H100 80GB HBM3' devices; this mesh has 'cpu'"
    ):
        resolve_hardware(str(other), "cpu")


def test_a_file_with_a_negative_bandwidth_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hw.json"
    fitted(samples()).save(path)
    path.write_text(path.read_text().replace('"memory_bytes_per_s": ', '"memory_bytes_per_s": -'))
    with pytest.raises(HardwareError, match="must be finite and above 0"):
        Hardware.load(path)


def test_named_links() -> None:
    with pytest.raises(HardwareError, match="its dcn is not known"):
        cpu.with_links({"data": "dcn"})
    with pytest.raises(HardwareError, match="no such link"):
        cpu.with_links({"data": "infiniband"})


def test_an_all_to_all_on_a_ring_passes_through_those_between() -> None:
    direct, ring = Link(0.0, 1e9), Link(0.0, 1e9, topology="ring")
    for n in range(2, 20):
        slow, fast = (collective_s("all_to_all", 10**6, link, n) for link in (ring, direct))
        assert slow >= fast
        assert slow <= collective_s("all_gather", 10**6, ring, n)


@pytest.mark.bench
def test_two_calibrations_agree_and_beat_the_preset(tmp_path: Path) -> None:
    """The predicted seconds of a fixed set of collectives and matmuls, twice; and their distance
    from what they take.

    Each calibration is a command of its own, as people run it: in one process the second finds its
    small buffers in other places, and another time for small collectives.
    """
    first, second = (calibrated_by_command(tmp_path / f"{number}.json") for number in range(2))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    measured = calibrate(mesh).samples
    fixed = fixed_set(measured)
    ratios = [predicted_s(second, s) / predicted_s(first, s) for s in fixed]
    print("\nsecond / first:", " ".join(f"{ratio:.2f}" for ratio in ratios))
    print(
        f"median |log(predicted / measured)|: calibrated {distance(first, measured):.2f}, preset "
        f"{distance(cpu, measured):.2f}"
    )
    assert distance(first, measured) < distance(cpu, measured)
    assert all(0.75 <= ratio <= 1.25 for ratio in ratios)


def calibrated_by_command(out: Path) -> Hardware:
    command = ["calibrate", "--mesh", "data=4,model=2", "--cpu-devices", "8", "--out", str(out)]
    subprocess.run([sys.executable, "-m", "autoshard", *command], check=True, capture_output=True)
    return Hardware.load(out)


def fixed_set(measured: Sequence[Sample]) -> list[Sample]:
    fixed = [s for s in measured if s.amount >= 2**16 and s.what != "matmul bfloat16"][:20]
    assert len(fixed) == 20
    return fixed


def distance(hardware: Hardware, measured: Sequence[Sample]) -> float:
    """Median distance of predictions from measurements, in logarithms."""
    return float(
        np.median([abs(np.log(predicted_s(hardware, s) / s.measured_s)) for s in measured])
    )
