"""Side effects, host callbacks, meshes of every form, and functions that cannot be traced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from same import (
    assert_same,
    floats,
    free_collectives,
    integers,
    mesh_of,
    pin_and_compare,
    plain,
    search,
    search_and_compare,
)

import autoshard

# Effects


def test_prints_and_callbacks_are_kept_and_noted(capfd):
    seen = []

    def fn(x, w):
        y = jnp.tanh(x @ w)
        jax.debug.print("mean {m}", m=y.mean(), ordered=False)
        io_callback(lambda v: seen.append(float(v)), None, y.sum(), ordered=False)
        return y

    args = floats(8, 16), floats(16, 16, scale=0.2)
    plan = search_and_compare(fn, args, mesh_of(a=4, b=2))
    (note,) = (note for note in plan.notes if "side effects" in note)
    assert "debug_print" in note
    assert "io_callback" in note
    pin_and_compare(fn, args, mesh_of(a=4, b=2), {"x": P("a"), "w": P(None, "b")})
    jax.effects_barrier()
    before = len(seen)
    plan(*args)
    jax.effects_barrier()
    assert len(seen) == before + 1
    assert "mean" in capfd.readouterr().out


def test_effects_in_loops_and_branches():
    seen = []

    def fn(x):
        def body(carry, row):
            jax.debug.callback(lambda v: seen.append(float(v)), carry)
            return carry + row.sum(), None

        total = jax.lax.scan(body, 0.0, x)[0]
        jax.lax.cond(total > 0, lambda: jax.debug.print("positive"), lambda: None)
        return total

    search_and_compare(fn, (floats(4, 8),), mesh_of(a=4, b=2))


@pytest.mark.parametrize("where", ["top", "scan"])
def test_ordered_effects_are_refused_by_name_with_the_way_out(where):
    def say(v):
        jax.debug.print("{v}", v=v, ordered=True)
        return v

    def fn(x):
        return (
            say(x) if where == "top" else jax.lax.scan(lambda c, r: (say(c + r), None), x[0], x)[0]
        )

    with pytest.raises(
        autoshard.TraceError, match=r"debug_print \(test_case_effects.*ordered=False"
    ):
        search(fn, (floats(4, 8),), mesh_of(a=4, b=2))
    plan = search(fn, (floats(4, 8),), mesh_of(a=1))
    assert_same(plan(floats(4, 8)), plain(fn, (floats(4, 8),)))


def test_ordered_callbacks_that_jax_runs_on_many_devices():
    seen = []

    def fn(x):
        y = x * 2
        io_callback(lambda v: seen.append(float(v)), None, y.sum(), ordered=True)
        return y

    search_and_compare(fn, (floats(8, 8),), mesh_of(a=4, b=2))


def sort_on_the_host(x):
    def host(v):
        return np.sort(np.asarray(v), axis=-1).astype(v.dtype)

    return jax.pure_callback(
        host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims"
    )


def test_pure_callback_in_the_middle():
    def fn(x, w):
        return sort_on_the_host(x) @ w

    args = floats(8, 16), floats(16, 4)
    search_and_compare(fn, args, mesh_of(a=4, b=2))
    pin_and_compare(fn, args, mesh_of(a=4, b=2), {"x": P("a"), "w": P(None, "b")})


def test_pure_callback_under_vmap_on_integers():
    def fn(x):
        return jax.vmap(sort_on_the_host)(x)

    search_and_compare(fn, (integers(100, 8, 4, 16),), mesh_of(a=4, b=2))


# Meshes


def heads(p, x):
    batch, seq, _ = x.shape
    q = (x @ p["wq"]).reshape(batch, seq, 4, 4)
    k = (x @ p["wk"]).reshape(batch, seq, 4, 4)
    scores = jnp.einsum("bshd,bthd->bhst", q, k)
    return jax.nn.softmax(scores, -1).mean((1, 2)), p["emb"][jnp.argmax(scores.mean(1), -1)]


def heads_args():
    p = {
        "wq": floats(16, 16, scale=0.2),
        "wk": floats(16, 16, scale=0.2, seed=1),
        "emb": floats(8, 4),
    }
    return p, floats(4, 8, 16)


@pytest.mark.parametrize("explicit", [("data", "model"), ("data",), ("model",)])
def test_explicit_axes(explicit):
    mesh = mesh_of(data=2, model=4, explicit=explicit)
    plan = search_and_compare(heads, heads_args(), mesh)
    assert any("Explicit" in note for note in plan.notes)
    out, _ = plan(*heads_args())
    assert out.sharding.mesh.axis_types == mesh.axis_types
    with jax.set_mesh(mesh):
        assert_same(plan(*heads_args()), plain_outside(heads, heads_args()))
    pins = {"p/wq": P(None, "model"), "p/wk": P(None, "model"), "x": P("data")}
    pin_and_compare(heads, heads_args(), mesh, pins)


def plain_outside(fn, args):
    """The plain result, computed on one device whatever mesh is set."""
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("one",))):
        return jax.tree.map(np.asarray, plain(fn, args))


def test_explicit_arrays_go_in_and_come_out():
    mesh = mesh_of(data=2, model=4, explicit=("data", "model"))
    x = jax.device_put(floats(4, 8, 16), NamedSharding(mesh, P("data")))
    plan = search(heads, (heads_args()[0], x), mesh)
    assert_same(plan(heads_args()[0], x), plain(heads, heads_args()))


@pytest.mark.parametrize(
    "axes",
    [
        {"a": 1},
        {"a": 8},
        {"a": 3, "b": 2},
        {"a": 2, "b": 2, "c": 2},
        {"a": 2, "b": 1, "c": 2, "d": 2},
        {"a": 1, "b": 1, "c": 1, "d": 1},
        {"a": 7},
    ],
    ids=str,
)
def test_meshes_of_many_forms(axes):
    search_and_compare(heads, heads_args(), mesh_of(**axes), hardware=free_collectives())


def test_more_devices_than_any_dimension():
    def fn(x, w):
        return jax.nn.relu(x @ w).sum(-1)

    plan = search_and_compare(
        fn, (floats(4, 4), floats(4, 2)), mesh_of(a=8), hardware=free_collectives()
    )
    assert all(spec == P() for spec in plan.specs.values())


def test_a_mesh_of_devices_in_another_order():
    devices = np.array(jax.devices())[[3, 1, 7, 5, 0, 2, 6, 4]].reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    search_and_compare(heads, heads_args(), mesh, hardware=free_collectives())


def test_a_mesh_string():
    plan = autoshard.apply(heads, heads_args(), "data=2,model=4", "replicated")
    assert_same(plan(*heads_args()), plain(heads, heads_args()))
    with pytest.raises(autoshard.MeshError, match="needs 6 devices"):
        autoshard.apply(heads, heads_args(), "data=3,model=2", "replicated")


# Functions that jax cannot trace


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda x: x[x > 0].sum(), "NonConcreteBooleanIndexError"),
        (lambda x: x.sum() if x.sum() > 0 else x, "TracerBoolConversionError"),
        (lambda x: np.asarray(x).sum(), "TracerArrayConversionError"),
        (lambda x: jnp.zeros(int(x[0, 0])), "ConcretizationTypeError"),
        (lambda x: x @ x[:3], "TypeError"),
    ],
)
def test_jaxs_own_message_comes_through(fn, name):
    with pytest.raises(autoshard.TraceError, match=name) as caught:
        search(fn, (floats(8, 8),), mesh_of(a=4, b=2))
    assert "jax.jit" in str(caught.value), "it says that plain jit fails as well"
    assert caught.value.__cause__ is not None


def test_errors_of_the_function_itself_come_through():
    def fn(x):
        raise KeyError("no such layer")

    with pytest.raises(autoshard.TraceError, match=r"KeyError.*no such layer"):
        search(fn, (floats(8, 8),), mesh_of(a=4, b=2))
