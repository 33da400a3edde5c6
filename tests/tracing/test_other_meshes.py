"""Meshes that a function makes itself: over the same devices they are put in the plan's order, over
others they are refused once, where the function is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import TraceError
from tests.stages import mesh_of

X = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
ORDERS = {
    "in order": [0, 1, 2, 3, 4, 5, 6, 7],
    "odd ones last": [0, 2, 4, 6, 1, 3, 5, 7],
    "reversed": [7, 6, 5, 4, 3, 2, 1, 0],
}


def mesh_over(numbers: list[int], *names: str) -> Mesh:
    devices = np.array(jax.devices())[numbers]
    shape = (len(numbers),) if len(names) == 1 else (len(numbers) // 2, 2)
    return Mesh(devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def constrained(mesh: Mesh, x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(mesh.axis_names)))


def jitted(mesh: Mesh, x: jax.Array) -> jax.Array:
    return jax.jit(jnp.sin, out_shardings=NamedSharding(mesh, P(mesh.axis_names)))(x)


def moved(mesh: Mesh, x: jax.Array) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, P(mesh.axis_names)))


def mapped(mesh: Mesh, x: jax.Array) -> jax.Array:
    """The index of each shard counts, and shards go round."""
    axes = mesh.axis_names
    around = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]

    def shard(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x * (1 + jax.lax.axis_index(axes)), axes, around)

    return jax.shard_map(shard, mesh=mesh, in_specs=P(axes), out_specs=P(axes))(x)


def looped(mesh: Mesh, x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 3, lambda _, x: constrained(mesh, x) * 2, x)


def captured(mesh: Mesh, x: jax.Array) -> jax.Array:
    return x + jax.device_put(X, NamedSharding(mesh, P(mesh.axis_names)))


WAYS = [constrained, jitted, moved, mapped, looped]


def tried(fn: Callable[..., Any]) -> Any:
    """A search of little effort for a function of `X`."""
    effort = autoshard.Effort(compiled=1, measured=0)
    return autoshard.optimize(
        fn, (X,), mesh_of(data=4, model=2), effort=effort, progress=False, isolate=False
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_mesh_over_the_same_devices_in_any_order_means_the_same(way: Any, order: str) -> None:
    own = mesh_over(ORDERS[order], "rows", "columns")
    plan = tried(lambda x: way(own, x).sum(0))
    # On a mesh of this order jax itself runs the function.
    np.testing.assert_allclose(plan(X), jax.jit(lambda x: way(own, x).sum(0))(X), atol=1e-4)
    assert plan.verified
    assert not [c for c in plan.candidates if c.status == "rejected"]
    noted = [note for note in plan.notes if "another order" in note]
    assert len(noted) == (order != "in order")


def test_a_constraint_on_the_plans_own_names_in_another_order_is_a_pin() -> None:
    own = mesh_over(ORDERS["reversed"], "data", "model")
    plan = tried(lambda x: constrained(own, x + 1).sum(0))
    np.testing.assert_allclose(plan(X), (X + 1).sum(0), atol=1e-4)
    assert len(plan.layout.problem.pins) == 1


def test_an_array_captured_on_a_mesh_of_another_order_is_moved() -> None:
    kept = captured(mesh_over(ORDERS["reversed"], "rows"), jnp.zeros_like(X))
    plan = tried(lambda x: x + kept)
    np.testing.assert_allclose(plan(X), 2 * X, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_mesh_over_other_devices_is_refused_where_the_function_is_traced(way: Any) -> None:
    own = mesh_over([0, 1, 2, 3], "rows")
    refused = (
        r"\(.*test_other_meshes.py:\d+\) names a mesh \{'rows': 4\} over 4 cpu devices "
        r"\(0, 1, 2, 3\), but the plan's mesh \{'data': 4, 'model': 2\} is over 8 cpu devices"
    )
    with pytest.raises(TraceError, match=refused):
        tried(lambda x: way(own, x).sum(0))


def test_a_constraint_that_is_left_out_may_name_any_devices() -> None:
    own = mesh_over([0, 1, 2, 3], "rows")
    plan = autoshard.apply(
        lambda x: constrained(own, x).sum(0),
        (X,),
        mesh_of(data=4, model=2),
        ("x.0->data",),
        user_constraints="ignore",
    )
    np.testing.assert_allclose(plan(X), X.sum(0), atol=1e-4)
