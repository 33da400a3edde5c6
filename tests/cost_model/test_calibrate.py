"""Calibration: the fit finds what made the samples, outliers or not; files of other devices are
refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from autoshard._optimize import resolve_hardware
from autoshard.cost_model.hardware import calibrate as calibration
from autoshard.cost_model.hardware.calibrate import Sample, calibrate, predicted_s
from autoshard.cost_model.hardware.collectives import collective_s
from autoshard.cost_model.hardware.hardware import Hardware, Link, cpu
from autoshard.errors import HardwareError
from autoshard.layout.mesh import resolve_mesh

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
    rng = np.random.default_rng(0)
    made = [Sample("matmul float32", "", 1, 2.0 * n**3, 0.0) for n in (64, 128, 256, 512)]
    made += [Sample("stream", "", 1, 2.0 * size, 0.0) for size in (2**18, 2**20, 2**22)]
    made += [
        Sample(kind, "data", 4, float(size), 0.0)
        for kind in ("all_gather", "all_reduce", "all_to_all", "collective_permute")
        for size in (2**12, 2**16, 2**20, 2**22)
    ]
    factors = np.exp(noise * rng.standard_normal(len(made)))
    return [
        replace(s, measured_s=predicted_s(TRUE, s) * f) for s, f in zip(made, factors, strict=True)
    ]


def fitted(found: list[Sample]) -> Hardware:
    return calibration._fit(found, "cpu", {"data": 4}, ("float32",))


def test_the_fit_finds_the_hardware_that_made_the_samples() -> None:
    found = fitted(samples())
    assert found.op_s == pytest.approx(1e-5, rel=1e-3)
    assert found.flops_per_s("float32") == pytest.approx(5e10, rel=1e-3)
    assert found.memory_bytes_per_s == pytest.approx(2e10, rel=1e-3)
    assert found.links["data"].alpha_s == pytest.approx(2e-5, rel=1e-3)
    assert found.links["data"].bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert found.measured_on == "cpu"


def test_one_wild_measurement_hardly_matters() -> None:
    spoiled = samples()
    spoiled[9] = replace(spoiled[9], measured_s=20 * spoiled[9].measured_s)
    link = fitted(spoiled).links["data"]
    assert link.alpha_s == pytest.approx(2e-5, rel=0.1)
    assert link.bytes_per_s == pytest.approx(1e9, rel=0.1)


def test_noise_moves_predictions_little() -> None:
    found = fitted(samples(noise=0.1))
    for sample in samples():
        assert predicted_s(found, sample) == pytest.approx(sample.measured_s, rel=0.3), sample


def test_what_a_call_itself_takes_is_not_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of our own, on which a call takes 5, an operation 2, and 4 in one place of
    eight."""
    now = 0.0

    def run(times: int, place: int) -> None:
        nonlocal now
        now += 5.0 + times * (4.0 if place == 3 else 2.0)

    monkeypatch.setattr(calibration.time, "perf_counter", lambda: now)
    clock = calibration._Clock(run, 10)
    for _ in range(20):
        clock.tick()
    assert clock.operation_s() == pytest.approx(2.0)
    assert clock.spread() == pytest.approx(0.0)


def test_what_takes_no_time_is_an_error() -> None:
    flat = [replace(s, measured_s=1e-3) for s in samples()]
    with pytest.raises(HardwareError, match="the same time whatever the size"):
        fitted(flat)


def test_a_file_of_other_devices_is_refused(tmp_path: Path) -> None:
    mesh = resolve_mesh("data=4,model=2")
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    fitted(samples()).save(mine)
    replace(fitted(samples()), measured_on="NVIDIA H100 80GB HBM3").save(other)
    assert resolve_hardware(str(mine), mesh).link_for("data").kinds
    with pytest.raises(
        HardwareError, match="calibrated on 'NVIDIA H100 80GB HBM3' devices; this mesh has 'cpu'"
    ):
        resolve_hardware(str(other), mesh)


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
    from the clock.

    Each calibration is a command of its own, as people run it: in one process the second finds its
    small buffers in other places, and another time for small collectives.
    """
    found = []
    for number in range(2):
        out = tmp_path / f"{number}.json"
        command = ["calibrate", "--mesh", "data=4,model=2", "--cpu-devices", "8", "--out", str(out)]
        subprocess.run(
            [sys.executable, "-m", "autoshard", *command], check=True, capture_output=True
        )
        found.append(Hardware.load(out))
    first, second = found
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    measured = calibrate(mesh).samples
    fixed = [s for s in measured if s.amount >= 2**16 and s.what != "matmul bfloat16"][:20]
    assert len(fixed) == 20
    ratios = [predicted_s(second, s) / predicted_s(first, s) for s in fixed]
    print("\nsecond / first:", " ".join(f"{ratio:.2f}" for ratio in ratios))

    def distance(hardware: Hardware) -> float:
        return float(
            np.median([abs(np.log(predicted_s(hardware, s) / s.measured_s)) for s in measured])
        )

    print(
        f"median |log(predicted / measured)|: calibrated {distance(first):.2f}, preset "
        f"{distance(cpu):.2f}"
    )
    assert distance(first) < distance(cpu)
    assert all(0.75 <= ratio <= 1.25 for ratio in ratios)
