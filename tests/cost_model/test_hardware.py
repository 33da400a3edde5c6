"""Hardware: presets, validation, JSON."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model.hardware.backend import ACCELERATOR, CPU
from autoshard.cost_model.hardware.hardware import (
    PRESETS,
    Hardware,
    Link,
    cpu,
    h100,
    hardware_for,
    resolve_hardware,
    tpu_v5e,
)
from autoshard.errors import AutoshardError, HardwareError
from autoshard.evidence.collectives import Collective, CollectiveOp, ring_bytes, summarise

LINK = Link(alpha_s=1e-6, bytes_per_s=1e9)
rates = st.floats(1e6, 1e18)
links = st.builds(Link, alpha_s=st.floats(0, 1), bytes_per_s=rates)
names = st.text(min_size=1, max_size=8)
machines = st.builds(
    Hardware,
    name=names,
    peak_flops_per_s=st.dictionaries(names, rates).map(lambda d: {**d, "float32": 1e12}),
    memory_bytes_per_s=rates,
    memory_bytes=st.integers(1, 2**50),
    link=links,
    links=st.dictionaries(names, links),
    efficiency=st.floats(0.01, 1),
    overlap=st.floats(0, 1),
    source=st.text(max_size=20),
)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_presets_say_where_their_numbers_come_from(preset: Hardware) -> None:
    assert len(preset.source) > 20
    assert hardware_for(preset.name) is preset
    assert Hardware.from_json(preset.to_json()) == preset


@given(machines)
def test_json_round_trip(machine: Hardware) -> None:
    assert Hardware.from_json(machine.to_json()) == machine


def test_files(tmp_path: Path) -> None:
    h100.save(tmp_path / "mine.json")
    assert Hardware.load(tmp_path / "mine.json") == h100
    with pytest.raises(HardwareError, match=r"cannot read hardware description .*absent\.json"):
        Hardware.load(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(
        HardwareError, match=r"bad\.json: this is no hardware description: .*missing required field"
    ):
        Hardware.load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", h100.to_json().replace("0.43", "4.3"), b"\xff\xfe"]
)
def test_json_that_is_none(text: str | bytes) -> None:
    with pytest.raises(HardwareError, match="no hardware description"):
        Hardware.from_json(text)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "tpu_v4"),
        ("TPU v5 lite", "tpu_v5e"),
        ("TPU v5", "tpu_v5p"),
        ("TPU v5p", "tpu_v5p"),
        ("TPU v6 lite", "tpu_v6e"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("cpu", "cpu"),
    ],
)
def test_device_kinds(kind: str, name: str) -> None:
    assert hardware_for(kind).name == name


@pytest.mark.parametrize("name", ["", "TPU v2", "NVIDIA GeForce GTX 970", "h1000x"])
def test_unknown_hardware_names_the_known_ones(name: str) -> None:
    with pytest.raises(
        HardwareError, match=r"is not known; presets are tpu_v4, .*, cpu\. .*Hardware\(\.\.\.\)"
    ) as caught:
        hardware_for(name)
    assert isinstance(caught.value, AutoshardError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("bad", [-1e-6, math.nan, math.inf])
def test_impossible_latency(bad: float) -> None:
    with pytest.raises(HardwareError, match=r"Link\.alpha_s is"):
        Link(alpha_s=bad, bytes_per_s=1e9)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_impossible_rates(bad: float) -> None:
    with pytest.raises(HardwareError, match=r"Link\.bytes_per_s is"):
        Link(alpha_s=0.0, bytes_per_s=bad)
    with pytest.raises(HardwareError, match=r"Hardware 'x': memory_bytes_per_s is"):
        Hardware("x", {"float32": 1e12}, bad, 1, LINK)
    with pytest.raises(HardwareError, match=r"Hardware 'x': peak_flops_per_s\['float32'\] is"):
        Hardware("x", {"float32": bad}, 1e12, 1, LINK)


def test_impossible_shares_and_missing_float32() -> None:
    for efficiency in (0.0, 1.1, -1.0, math.nan):
        with pytest.raises(HardwareError, match="efficiency is"):
            Hardware("x", {"float32": 1e12}, 1e12, 1, LINK, efficiency=efficiency)
    for overlap in (-0.1, 1.1, math.nan):
        with pytest.raises(HardwareError, match="overlap is"):
            Hardware("x", {"float32": 1e12}, 1e12, 1, LINK, overlap=overlap)
    with pytest.raises(HardwareError, match="'float32' is needed"):
        Hardware("x", {"bfloat16": 1e12}, 1e12, 1, LINK)


def test_rates_by_dtype() -> None:
    machine = Hardware(
        "x", {"float32": 10, "bfloat16": 20, "float8": 40}, 1, 1, LINK, efficiency=0.5
    )
    assert [machine.flops_per_s(d) for d in ("float32", "bfloat16", "float8_e5m2", "int32")] == [
        5,
        10,
        20,
        5,
    ]


def test_links_by_mesh_axis() -> None:
    slow = Link(alpha_s=1e-5, bytes_per_s=1e8)
    machine = cpu.with_links({"hosts": slow})
    assert machine.link_for("hosts") == slow
    assert machine.link_for("model") == cpu.link
    assert cpu.link_for("hosts") == cpu.link
    assert machine.with_links({"model": slow}).link_for("hosts") == slow


def test_immutable() -> None:
    with pytest.raises(AttributeError):
        h100.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        h100.peak_flops_per_s["float32"] = 1.0  # type: ignore[index]


def test_hardware_is_resolved_from_a_description_a_file_a_name_or_the_devices(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "mine.json")
    tpu_v5e.save(path)
    for hardware in (path, "tpu_v5e", None):
        resolved = resolve_hardware(hardware, "TPU v5 lite", ["data"])
        assert resolved == tpu_v5e.with_links({"data": "dcn"})
    assert resolve_hardware(None, "TPU v5 lite") == tpu_v5e
    assert resolve_hardware("h100", "TPU v5 lite") == h100
    assert resolve_hardware(tpu_v5e, "cpu", ["data"]) is tpu_v5e  # a description says its links
    with pytest.raises(HardwareError, match="is not known"):
        resolve_hardware(None, "abacus")


def test_a_backend_without_reduce_scatter_sends_an_all_reduce_of_twice_the_bytes() -> None:
    sent = ring_bytes("reduce_scatter", 4096, 4)
    scatter = CollectiveOp("reduce_scatter", ("data",), 4, 3, 4096, sent)
    gather = CollectiveOp("all_gather", ("data",), 4, 3, 4096, sent)
    assert ACCELERATOR.as_sent([scatter, gather]) == [scatter, gather]
    ops = CPU.as_sent([scatter, gather])
    assert [op.kind for op in ops] == ["all_reduce", "all_gather"]
    assert [op.full_bytes for op in ops] == [4096, 4096]
    summary = CPU.as_sent(summarise([scatter, gather]))
    assert sorted(summary, key=lambda c: c.kind) == sorted(summarise(ops), key=lambda c: c.kind)
    assert Collective("all_reduce", ("data",), 3, 2 * 3 * sent) in summary
