"""Targets without their compilers: names, meshes, errors, what is kept on disk."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import pytest

import autoshard
from autoshard import Effort, ExtraError, TargetError, optimize
from autoshard.compiler.cache import CompileCache, Refusal, Stored, program_key
from autoshard.compiler.pool import read_refusal
from autoshard.cost_model.hardware.hardware import PRESETS, resolve_hardware
from autoshard.devices.parts import GPUS
from autoshard.devices.target import parse_target
from autoshard.layout.mesh import resolve_mesh
from tests.targets.steps import args, plan, step


@pytest.mark.parametrize(
    ("name", "mesh", "kind", "far"),
    [
        ("tpu:v5e:16x16", "data=16,model=16", "TPU v5 lite", ()),
        ("tpu:v5e:4x4*2", "data=8,model=4", "TPU v5 lite", ("data",)),
        ("tpu:v5e:4x4*2", "slices=2,data=4,model=4", "TPU v5 lite", ("slices",)),
        ("tpu:v5p:4x4x4", "data=8,model=8", "TPU v5", ()),
        ("tpu:v4:2x2x2", "data=8", "TPU v4", ()),
        ("gpu:h100:4x8", "data=4,model=8", "NVIDIA H100 80GB HBM3", ("data",)),
        ("gpu:b200:2x8", "data=16", "NVIDIA B200", ("data",)),
        ("cpu:64", "data=64", "cpu", ()),
    ],
)
def test_a_target_is_a_mesh(name: str, mesh: str, kind: str, far: tuple[str, ...]) -> None:
    made = autoshard.target(name, mesh)
    info = resolve_mesh(made)
    assert made == autoshard.target(name, mesh)
    assert (str(info.target), info.device_kind, info.far_axes) == (name, kind, far)
    assert len(set(made.devices.flat)) == parse_target(name).device_count
    hardware = resolve_hardware(None, info.device_kind, info.far_axes)
    assert hardware.name in PRESETS
    assert all(hardware.link_for(axis) == hardware.dcn for axis in far)


@pytest.mark.parametrize(
    ("name", "mesh", "words"),
    [
        ("tpu:v9:4x4", "data=16", ["no TPU 'v9'", "v5e", "h100"]),
        ("tpu:v5e:3x4", "data=12", ["even sizes"]),
        ("tpu:v5e:4x4x4", "data=64", ["2 dimensions", "tpu:v5e:4x4"]),
        ("tpu:v5e:32x4", "data=128", ["up to 16x16"]),
        ("tpu:v5e:4x4", "data=8", ["8 devices", "16"]),
        ("tpu:v5e:4x4*3", "a=2,b=24", ["3 slices", "multiple of 3"]),
        ("gpu:h300:1x8", "data=8", ["no GPU 'h300'", "b200"]),
        ("gpu:h100:0x8", "data=8", ["no devices"]),
        ("cpu:0", "data=1", ["not known", "cpu:DEVICES"]),
        ("cpu:2147483648", "data=2147483648", ["2147483648 devices", "at most 131072"]),
        ("warp", "data=1", ["not known", "tpu:v5e:4x4"]),
    ],
)
def test_bad_targets_say_what_is_known(name: str, mesh: str, words: list[str]) -> None:
    with pytest.raises(TargetError) as caught:
        autoshard.target(name, mesh)
    assert all(word in str(caught.value) for word in words)


def test_a_captured_description_is_a_part(tmp_path: Path) -> None:
    captured = tmp_path / "mine.txt"
    captured.write_text(GPUS["h200"].description().replace("NVIDIA H200", "NVIDIA H200 NVL"))
    target = parse_target(f"gpu:{captured}:2x4")
    assert target.device_kind == "NVIDIA H200 NVL"
    assert target.memory_bytes == GPUS["h200"].memory_bytes
    captured.write_text("nothing of the kind")
    with pytest.raises(TargetError, match="capture-target"):
        parse_target(f"gpu:{captured}:2x4")


def test_nothing_runs_on_a_target() -> None:
    made = plan("tpu:v5e:4x4", "data=4,model=4", "fsdp")
    params, x = args()
    for run in (lambda: made(params, x), lambda: made.place(0, params), made.compile):
        with pytest.raises(TargetError, match=r"plan\.table\.save"):
            run()
    assert 'sdy.mesh @mesh = <["data"=4, "model"=4]>' in made.lower(params, x).as_text()


def test_a_target_needs_a_mesh_of_text(mesh_4x2: jax.sharding.Mesh) -> None:
    with pytest.raises(TargetError, match="as text"):
        optimize(step, args(), mesh_4x2, target="cpu:8", progress=False)


@pytest.mark.parametrize(
    ("name", "package"), [("tpu:v5e:4x4", "libtpu"), ("gpu:h100:2x8", "jax_cuda12_plugin")]
)
def test_without_its_compiler_a_target_is_still_predicted_and_partitioned(
    name: str, package: str
) -> None:
    def search(effort: Effort) -> Any:
        return optimize(
            step,
            args(),
            "data=2,model=8",
            target=name,
            donate_argnums=0,
            effort=effort,
            progress=False,
        )

    if importlib.util.find_spec(package) is None:
        with pytest.raises(ExtraError, match="pip install 'autoshard"):
            search(Effort())
    found = search(Effort(compiled=0, measured=0, partitioned=4))
    assert any(candidate.partitioned is not None for candidate in found.candidates)
    assert not found.verified
    assert "not here" in found.verified.reason


def test_more_devices_than_xla_has_are_predicted_and_not_compiled() -> None:
    options: dict[str, Any] = {"target": "cpu:60000", "progress": False}
    found = optimize(step, args(), "data=60000", effort=Effort(0, 0), **options)
    assert found.rules == ()
    with pytest.raises(TargetError, match=r"has at most 2048 devices.*compiled=0"):
        optimize(step, args(), "data=60000", effort=Effort(1, 0), **options)


def test_refusals_are_read() -> None:
    message = "E1000: Ran out of memory on HBM, the total memory required for temporaries (512.00G) exceeds available "
    assert read_refusal(message + "HBM (15.75G). HLO module: m.") == Refusal(
        512 * 2**30, int(15.75 * 2**30)
    )
    assert read_refusal(
        "Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm."
    ) == Refusal(int(20.5 * 2**30), int(15.75 * 2**30))
    assert read_refusal("INTERNAL: something else") is None


def test_the_cache_survives_what_is_not_its_own(tmp_path: Path) -> None:
    cache, stored = CompileCache(tmp_path), Stored(refusal=Refusal(2, 1))
    cache.put("ab12", stored)
    assert cache.get("ab12") == stored
    (path,) = (tmp_path / "compiled").rglob("*.json")
    for broken in (path.read_bytes()[:-4], b"", b"[]", b"{}", b"\xff\xfe"):
        path.write_bytes(broken)
        assert cache.get("ab12") is None
    cache.put("ab12", stored)
    assert cache.get("ab12") == stored
    assert cache.get("cd34") is None
    blocked = tmp_path / "file"
    blocked.write_text("")
    CompileCache(blocked).put("ab12", stored)


def test_the_key_depends_on_all_that_matters() -> None:
    here, there = parse_target("tpu:v5e:4x4"), parse_target("tpu:v6e:4x4")
    keys = {
        program_key("a", {}, {"x": 16}, here),
        program_key("b", {}, {"x": 16}, here),
        program_key("a", {"o": 1}, {"x": 16}, here),
        program_key("a", {}, {"y": 16}, here),
        program_key("a", {}, {"x": 16}, there),
    }
    assert len(keys) == 5
    assert program_key("a", {}, {"x": 16}, here) in keys


def test_a_cpu_target_is_compiled_beside_other_devices(tmp_path: Path) -> None:
    def search() -> Any:
        return optimize(
            step, args(batch=64), "data=16", target="cpu:16", donate_argnums=0, cache_dir=tmp_path,
            effort=Effort(compiled=2, measured=0, full=2), progress=False,
        )  # fmt: skip

    found = search()
    winner = next(candidate for candidate in found.candidates if candidate.status == "winner")
    assert winner.compiled is not None
    assert (winner.compiled.level, winner.compiled.compute_from, winner.measured) == (
        "full",
        "predicted",
        None,
    )
    again = search()
    seconds = [t.compiled.compile_s for t in again.candidates if t.compiled is not None]
    assert seconds == [
        t.compiled.compile_s for t in found.candidates if t.compiled is not None
    ]  # as kept on disk
