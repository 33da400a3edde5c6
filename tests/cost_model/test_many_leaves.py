"""Programs whose equations carry many arrays cost as much more as there are more arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost_model.hardware.hardware import h100
from autoshard.cost_model.predict import Prediction, Predictor
from tests.stages import array, layout_of, mesh_of, prepared

Leaves = list[jax.Array]
ROWS, COLUMNS = 64, 32


def more(w: Leaves) -> Leaves:
    return [jnp.sin(x) * 2 for x in w]


def of_cond(w: Leaves) -> Leaves:
    return jax.lax.cond(w[0].shape[0] > jnp.int32(1), more, lambda w: w, w)


def of_switch(w: Leaves) -> Leaves:
    return jax.lax.switch(jnp.int32(1), [more, lambda w: w, more], w)


def of_scan(w: Leaves) -> Leaves:
    return jax.lax.scan(lambda carry, _: (more(carry), None), w, None, length=3)[0]


def of_scanned(w: Leaves) -> Leaves:
    return jax.lax.scan(lambda carry, x: (carry, more(x)), 0, w)[1]


def of_while(w: Leaves) -> Leaves:
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, more(c[1])), (0, w))[1]


def of_barrier(w: Leaves) -> Leaves:
    return jax.lax.optimization_barrier(more(w))


def of_device_put(w: Leaves) -> Leaves:
    return jax.device_put(more(w), jax.memory.Space.Device)


def of_callback(w: Leaves) -> Leaves:
    return jax.pure_callback(lambda w: w, w, more(w))


def of_remat(w: Leaves) -> Leaves:
    return jax.grad(jax.checkpoint(lambda w: sum(jnp.sum(x) for x in more(w))))(w)


@jax.custom_vjp
def sines(w: Leaves) -> Leaves:
    return [jnp.sin(x) for x in w]


sines.defvjp(
    lambda w: (sines(w), w), lambda w, g: ([a * jnp.cos(x) for a, x in zip(g, w, strict=True)],)
)


def of_custom_vjp(w: Leaves) -> Leaves:
    return jax.grad(lambda w: sum(jnp.sum(x) for x in sines(w)))(w)


CARRIERS = [
    of_cond,
    of_switch,
    of_scan,
    of_scanned,
    of_while,
    of_barrier,
    of_device_put,
    of_callback,
    of_remat,
    of_custom_vjp,
]


def predict(carrier: Callable[[Leaves], Leaves], leaves: int) -> Prediction:
    """Rows split over four devices, columns over two, of each leaf."""
    made = prepared(carrier, ([array(ROWS, COLUMNS)] * leaves,), mesh_of(data=4, model=2))
    axes = {axis.name for axis in made.problem.logical_axes.axes}
    rules = [f"0.{dim}->{name}" for dim, name in enumerate(("data", "model")) if f"0.{dim}" in axes]
    return Predictor(made.problem, h100, made.traced.call.donated).predict(layout_of(made, *rules))


def figures(prediction: Prediction) -> dict[str, float]:
    return {
        "compute_s": prediction.compute_s,
        "peak_bytes": prediction.peak_bytes,
        "argument_bytes": sum(prediction.argument_bytes.values()),
        "collective_bytes": prediction.collective_bytes,
        "collectives": sum(c.count for c in prediction.collectives),
    }


def holds_for(carrier: Any, leaves: int) -> None:
    """Each leaf more adds what the leaves before it did."""
    two, three, many = (figures(predict(carrier, n)) for n in (2, 3, leaves))
    for name, value in many.items():
        each = three[name] - two[name]
        assert value == pytest.approx(two[name] + each * (leaves - 2), rel=1e-9), name


@pytest.mark.parametrize("leaves", [1, 43, 65, 130])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_each_array_more_costs_as_much_as_the_one_before(carrier: Any, leaves: int) -> None:
    holds_for(carrier, leaves)


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [513, 2000])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_thousands_of_arrays_cost_as_much_each_as_few(carrier: Any, leaves: int) -> None:
    holds_for(carrier, leaves)


def test_what_passes_a_barrier_stays_split() -> None:
    """Each array for itself: one of them may not take the mesh axis from the others."""
    prediction = predict(of_barrier, 5)
    assert prediction.collectives == ()
    assert sum(prediction.argument_bytes.values()) == 5 * 4 * ROWS * COLUMNS // 8
