"""A layout changes the spec of an array, never the memory that it is kept in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.cost_model.hardware.backend import ACCELERATOR, CPU, Backend
from autoshard.cost_model.hardware.hardware import h100
from autoshard.cost_model.predict import Predictor
from tests.stages import layout_of, mesh_of, prepared

Space = jax.memory.Space
MESH = {"data": 4, "model": 2}
RULES = ("w.0->data", "w.1->model", "x.0->data")


def step(w: Any, m: Any, x: Any) -> Any:
    """Momentum that is kept on the host."""
    loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    new = 0.9 * jax.device_put(m, Space.Device) + g
    return w - 0.1 * new, jax.device_put(new, Space.Host), loss


def plain_step(w: Any, m: Any, x: Any) -> Any:
    """The same, which says nothing of memories."""
    loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * (0.9 * m + g), 0.9 * m + g, loss


def streamed(w: Any, m: Any, x: Any) -> Any:
    """Weights of a scan that come from the host one after the other."""

    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ jax.device_put(w, Space.Device)), None

    return jax.lax.scan(layer, x @ w, m)[0], m


def on_host(w: Any, m: Any, x: Any) -> Any:
    """What comes from the host and goes back untouched; and what was on the devices."""
    return m, jax.device_put(w, Space.Host), x.sum()


def arguments() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(s).astype(np.float32) for s in ((16, 8), (16, 8), (32, 16)))  # type: ignore[return-value]


def kept_in(kind: str, array: np.ndarray) -> jax.Array:
    return jax.device_put(array, SingleDeviceSharding(jax.devices()[0], memory_kind=kind))


def kinds(tree: Any) -> list[str]:
    return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)]


def case(fn: Callable[..., Any], kind: str) -> tuple[Any, ...]:
    w, m, x = arguments()
    if fn is streamed:
        m = np.stack([m[:8], m[8:]])
    return w, kept_in(kind, m), x


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host", "device"])
@pytest.mark.parametrize("fn", [step, streamed, on_host])
def test_arguments_stay_where_they_are_and_results_are_where_jit_leaves_them(
    fn: Callable[..., Any], kind: str
) -> None:
    args = case(fn, kind)
    plan = autoshard.apply(fn, args, mesh_of(**MESH), RULES)
    assert [s.memory_kind for s in plan.in_shardings] == ["device", kind, "device"]
    want, got = jax.jit(fn)(*args), plan(*args)
    assert kinds(got) == kinds(want) == [s.memory_kind for s in plan.out_shardings]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), got, want)

    placed = plan.place("m", args[1])
    assert placed.sharding == plan.in_shardings[1]
    assert placed.sharding.memory_kind == plan.abstract("m").sharding.memory_kind == kind
    jax.tree.map(np.testing.assert_array_equal, plan(args[0], placed, args[2]), got)


@pytest.mark.parametrize("example", ["single device", "sharded", "abstract"])
def test_a_search_keeps_state_on_the_host(example: str) -> None:
    w, m, x = arguments()
    sharding = NamedSharding(mesh_of(**MESH), P("data"), memory_kind="pinned_host")
    given: Any = {
        "single device": kept_in("pinned_host", m),
        "sharded": jax.device_put(m, sharding),
        "abstract": jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=sharding),
    }[example]
    plan = autoshard.optimize(
        step,
        (w, given, x),
        mesh_of(**MESH),
        donate_argnums=(0, 1),
        pins={"w": P("data", "model"), "m": P("data", "model")},
        effort=autoshard.Effort(compiled=1, measured=1),
        progress=False,
    )
    assert plan.verified
    assert not [c for c in plan.candidates if c.status == "rejected"]
    want_w, want_m, _ = jax.jit(plain_step)(*jax.jit(plain_step)(w, m, x)[:2], x)
    new_w, new_m, _ = plan(plan.place("w", w), plan.place("m", m), x)
    assert new_m.sharding == NamedSharding(plan.mesh.user, P("data", "model"), "pinned_host")
    new_w, new_m, _ = plan(new_w, new_m, x)
    np.testing.assert_allclose(new_w, want_w, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(new_m, want_m, rtol=1e-3, atol=1e-4)


def test_a_function_that_says_nothing_of_memories_gets_its_arguments_on_the_devices() -> None:
    w, m, x = arguments()
    args = (w, kept_in("pinned_host", m), x)
    with pytest.raises(ValueError, match="memory_space"):
        jax.jit(plain_step)(*args)
    plan = autoshard.optimize(
        plain_step,
        args,
        mesh_of(**MESH),
        donate_argnums=(0, 1),
        effort=autoshard.Effort(compiled=1, measured=1),
        progress=False,
    )
    assert plan.in_shardings[1].memory_kind == "pinned_host"
    assert any("m: kept in the host's memory" in note for note in plan.notes)
    assert not [c for c in plan.candidates if c.status == "rejected"]
    got, want = plan(*args), jax.jit(plain_step)(w, m, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), got, want)
    plan(got[0], got[1], x)  # what came back on the devices is sent to the host


@pytest.mark.parametrize(("backend", "counted"), [(ACCELERATOR, False), (CPU, True)])
def test_what_is_on_the_host_takes_no_memory_of_a_device_that_has_its_own(
    backend: Backend, counted: bool
) -> None:
    w, m, x = arguments()
    held = {}
    for kind in ("pinned_host", "device"):
        made = prepared(on_host, (w, kept_in(kind, m), x), mesh_of(**MESH))
        predictor = Predictor(made.problem, h100, made.traced.call.donated, backend)
        prediction = predictor.predict(layout_of(made))
        held[kind] = (sum(prediction.argument_bytes.values()), prediction.peak_bytes)
    differences = [a - b for a, b in zip(held["device"], held["pinned_host"], strict=True)]
    assert differences == ([0, 0] if counted else [m.nbytes, m.nbytes])
