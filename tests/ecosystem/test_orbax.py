"""Checkpoints on disk: saved under one plan, restored under others straight into their shards,
training continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh

import autoshard
from tests.models import decoder_args, decoder_step

STEPS = 5


def mesh_of(axis_type: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))]).reshape(
        tuple(axes.values())
    )
    return Mesh(devices, tuple(axes), axis_types=(axis_type,) * len(axes))


def args() -> tuple[Any, Any]:
    params, moment, _ = decoder_args()
    return params, moment


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 128, (8, 32)).astype(np.int32)


def plan_on(mesh: Mesh, layout: str) -> autoshard.Plan:
    return autoshard.apply(decoder_step, (*args(), batch(0)), mesh, layout, donate_argnums=(0, 1))


def train(plan: Any, params: Any, moment: Any, steps: range) -> tuple[Any, Any, list[float]]:
    losses = []
    for step in steps:
        params, moment, loss = plan(params, moment, batch(step))
        losses.append(float(loss))
    return params, moment, losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint after 5 steps under plan A on 4x2, and the losses of 10 steps without
    interruption."""
    plan = plan_on(mesh_of(data=4, model=2), "fsdp+tp")
    params, moment = args()
    params, moment, first = train(plan, plan.place(0, params), plan.place(1, moment), range(STEPS))
    path = tmp_path_factory.mktemp("checkpoints") / "five"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"params": params, "moment": moment})
    _, _, rest = train(plan, params, moment, range(STEPS, 2 * STEPS))
    return path, first + rest


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ({"data": 2, "model": 4}, "fsdp+tp"),
        ({"data": 2, "model": 4}, "tp"),
        ({"data": 2}, "fsdp"),
        ({"model": 2}, "tp"),
        ({"data": 2, "model": 4, "axis_type": AxisType.Explicit}, "fsdp+tp"),
    ],
)
def test_restored_under_another_plan_training_continues_as_if_nothing_happened(
    saved: tuple[Path, list[float]], mesh: dict[str, Any], layout: str
) -> None:
    path, losses = saved
    plan = plan_on(mesh_of(**mesh), layout)
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(
            path, {"params": plan.abstract("params"), "moment": plan.abstract("moment")}
        )
    for name in ("params", "moment"):
        for leaf, value in state[name].items():
            assert value.sharding.spec == plan.specs[f"{name}/{leaf}"]
            assert value.sharding.mesh == plan.mesh.user
            assert value.sharding.mesh.axis_types == plan.mesh.user.axis_types
    _, _, rest = train(plan, state["params"], state["moment"], range(STEPS, 2 * STEPS))
    np.testing.assert_allclose(rest, losses[STEPS:], rtol=1e-5)


def test_the_manager_restores_into_the_plan_too(
    saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    plan, other = plan_on(mesh_of(data=4, model=2), "fsdp"), plan_on(mesh_of(data=2), "fsdp")
    params = plan.place("params", args()[0])
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave(params))
        manager.wait_until_finished()
        restored = manager.restore(1, args=ocp.args.StandardRestore(other.abstract("params")))
    for leaf, value in restored.items():
        assert value.sharding.spec == other.specs[f"params/{leaf}"]
        np.testing.assert_array_equal(np.asarray(value), np.asarray(params[leaf]))
