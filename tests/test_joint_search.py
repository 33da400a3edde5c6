"""One search over mesh shapes, or over variants of a function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.cost_model.hardware.backend import CPU
from autoshard.cost_model.hardware.hardware import Link, h100
from autoshard.cost_model.predict import Predictor
from autoshard.errors import ArgumentError, MeshError, NoFeasiblePlanError
from autoshard.joint_search import axis_names, mesh_shapes
from autoshard.search.proposer import propose
from tests.models import decoder_args, decoder_step, mlp_args, mlp_step
from tests.stages import array, mesh_of, prepared

NAMES = ("data", "fsdp", "model")
FREE = h100.with_links({name: Link(alpha_s=0.0, bytes_per_s=1e10) for name in NAMES})
NOTHING = autoshard.Effort(0, 0)


@pytest.mark.parametrize(("devices", "count"), [(1, 1), (2, 1), (6, 3), (8, 4), (64, 16)])
def test_shapes_are_every_factorisation(devices: int, count: int) -> None:
    shapes = mesh_shapes(devices)
    assert len(set(shapes)) == len(shapes) == count
    assert all(
        np.prod(shape) == devices and len(axis_names(shape)) == len(shape) for shape in shapes
    )


def predicted(plan: autoshard.Plan) -> float:
    return next(t.predicted.time_s for t in plan.candidates if t.status == "winner")


def test_the_shape_is_the_one_that_enumeration_picks() -> None:
    args = decoder_args(batch=4, length=64, d=128, heads=4, ff=256)
    found: dict[str, float] = {}
    for shape in mesh_shapes(8):
        axes = dict(zip(axis_names(shape), shape, strict=True))
        made = prepared(decoder_step, args, mesh_of(**axes), donate_argnums=(0, 1))
        predictor = Predictor(made.problem, FREE, made.traced.call.donated, CPU)
        best = propose(made.problem, predictor).ranked[0]
        found[",".join(f"{n}={s}" for n, s in axes.items())] = best.prediction.time_s
    plan = autoshard.optimize(
        decoder_step,
        args,
        "8",
        donate_argnums=(0, 1),
        hardware=FREE,
        effort=NOTHING,
        progress=False,
    )
    assert predicted(plan) == pytest.approx(min(found.values()))
    assert found[plan.chosen] == pytest.approx(min(found.values()))
    assert ",".join(f"{n}={s}" for n, s in plan.mesh.axes.items()) == plan.chosen
    assert sum(note.startswith("mesh shape") for note in plan.notes) == 1 + len(found)


def test_64_devices_that_are_not_here() -> None:
    args = (array(4096, 4096), array(4096, 4096), array(64, 4096))
    plan = autoshard.optimize(
        lambda a, b, x: jnp.tanh(x @ a) @ b,
        args,
        "64",
        target="cpu:64",
        hardware=FREE,
        effort=NOTHING,
        progress=False,
    )
    assert np.prod(list(plan.mesh.axes.values())) == 64
    texts = [note for note in plan.notes if note.startswith("mesh shape") and "predicted" in note]
    assert len(texts) == len(mesh_shapes(64))


def test_a_plan_on_fewer_devices_than_there_are_runs() -> None:
    plan = autoshard.optimize(
        mlp_step,
        mlp_args(batch=64),
        4,
        hardware=FREE,
        effort=autoshard.Effort(2, 0),
        progress=False,
    )
    assert plan.verified.ok
    _, loss = plan(*mlp_args(batch=64))
    assert np.allclose(loss, jax.jit(mlp_step)(*mlp_args(batch=64))[1], rtol=1e-5)


@pytest.mark.parametrize("mesh", ["0", 0, "64"])
def test_impossible_numbers_of_devices(mesh: Any) -> None:
    with pytest.raises(MeshError, match=r"at least 1 device|this process has 8"):
        autoshard.optimize(mlp_step, mlp_args(), mesh, effort=NOTHING, progress=False)


def twice(w: Any, x: Any) -> Any:
    for _ in range(2):
        x = jnp.tanh(x @ w)
    return x.sum()


def often(w: Any, x: Any) -> Any:
    for _ in range(12):
        x = jnp.tanh(x @ w)
    return x.sum()


ARGS = (np.ones((64, 64), np.float32), np.ones((32, 64), np.float32))


def test_the_faster_variant_wins_and_the_others_are_noted() -> None:
    plan = autoshard.optimize(
        None,
        ARGS,
        "data=4,model=2",
        variants={"often": often, "twice": twice},
        hardware=FREE,
        effort=NOTHING,
        progress=False,
    )
    assert plan.chosen == "twice"
    assert any(note.startswith("variant often: ") for note in plan.notes)
    assert plan(*ARGS) == pytest.approx(float(twice(*map(jnp.asarray, ARGS))), rel=1e-4)


def test_samples_decide_what_is_fast() -> None:
    large = (ARGS[0], np.ones((128, 64), np.float32))
    variants = {"batch=32": twice, "batch=128": (twice, large)}

    def chosen(samples: Any) -> str:
        return autoshard.optimize(
            None,
            ARGS,
            "data=4,model=2",
            variants=variants,
            samples_per_step=samples,
            hardware=FREE,
            effort=NOTHING,
            progress=False,
        ).chosen

    assert chosen(None) == "batch=32"
    assert chosen({"batch=32": 32, "batch=128": 128_000}) == "batch=128"


def test_the_budget_rules_variants_out() -> None:
    large = (ARGS[0], np.ones((1 << 14, 64), np.float32))
    options: dict[str, Any] = {"hardware": FREE, "effort": NOTHING, "progress": False}
    variants = {"large": (twice, large), "small": (often, ARGS)}
    plan = autoshard.optimize(
        None, None, "data=4,model=2", variants=variants, memory_budget_bytes=400_000, **options
    )
    assert plan.chosen == "small"
    assert any("variant large: does not fit" in note for note in plan.notes)
    with pytest.raises(
        NoFeasiblePlanError, match=r"no variant has a plan that fits:\n  variant large"
    ):
        autoshard.optimize(
            None, None, "data=4,model=2", variants=variants, memory_budget_bytes=1000, **options
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variants": {}}, "at least one"),
        ({"variants": {"a": 3}}, "variant 'a': give a function"),
        ({"variants": {"a": twice}, "samples_per_step": {"b": 1}}, "samples_per_step has"),
        ({"variants": {"a": twice}, "samples_per_step": 0.0}, "must be more than 0"),
        ({}, "needs fn and example_args"),
    ],
)
def test_variants_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        autoshard.optimize(None, ARGS, "data=4,model=2", effort=NOTHING, progress=False, **options)
