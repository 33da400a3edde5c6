"""Efficiency, speed-up and samples a second, in the plan's summary and its explanation."""

from __future__ import annotations

import pytest
from jax.sharding import Mesh

import autoshard
from autoshard.errors import ArgumentError
from autoshard.evidence.throughput import Throughput
from tests import models


def test_relations() -> None:
    found = Throughput(step_s=0.5, compute_s=0.4, comm_s=0.1, alone_s=1.5, samples_per_step=10)
    assert found.efficiency == pytest.approx(0.8)
    assert found.speed_up == pytest.approx(3.0)
    assert dict(found.per_s()) == {"steps": 2.0, "samples": 20.0}
    assert dict(found.per_s(0.25)) == {"steps": 4.0, "samples": 40.0}
    nothing = Throughput(0.0, 0.0, 0.0, 0.0)
    assert (nothing.efficiency, nothing.speed_up) == (1.0, 1.0)


def test_a_plan_says_its_throughput(mesh_4x2: Mesh) -> None:
    plan = autoshard.optimize(
        models.mlp_step, models.mlp_args(batch=64), mesh_4x2, donate_argnums=0, samples_per_step=64,
        effort=autoshard.Effort(compiled=0, measured=0), progress=False,
    )  # fmt: skip
    found = plan.throughput
    assert found is not None
    assert found.efficiency == found.compute_s / (found.compute_s + found.comm_s)
    (line,) = (line for line in str(plan).splitlines() if line.startswith("predicted: step"))
    for said in ("steps a second", "samples a second", "efficiency", "times as fast as one device"):
        assert said in line
    explained = str(plan.explain())
    assert "samples a second" in explained
    assert "speed-up over one device" in explained
    assert dict(plan.explain().throughput.per_s())["samples"] == pytest.approx(64 / found.step_s)


def test_without_samples_none_are_shown(mesh_4x2: Mesh) -> None:
    plan = autoshard.apply(models.mlp_step, models.mlp_args(), mesh_4x2, "fsdp", donate_argnums=0)
    assert "samples a second" not in str(plan.explain())
    known = autoshard.apply(
        models.mlp_step, models.mlp_args(), mesh_4x2, "fsdp", donate_argnums=0, samples_per_step=8
    )
    assert "samples a second" in str(known.explain())


@pytest.mark.parametrize("samples", [0, -1.0, float("inf"), "many"])
def test_impossible_samples_are_refused(mesh_4x2: Mesh, samples: object) -> None:
    for call in (autoshard.optimize, lambda *a, **k: autoshard.apply(*a, "fsdp", **k)):
        with pytest.raises(ArgumentError, match="samples_per_step"):
            call(models.mlp_step, models.mlp_args(), mesh_4x2, samples_per_step=samples)  # type: ignore[operator]
