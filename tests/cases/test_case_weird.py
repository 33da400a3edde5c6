"""Inputs that nobody thinks of first; each once surprised this tool or another."""

from __future__ import annotations

import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from jax.experimental.ode import odeint
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from same import (
    assert_same,
    floats,
    free_collectives,
    integers,
    mesh_of,
    plain,
    search,
    search_and_compare,
)

import autoshard


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return mesh_of(a=4, b=2)


# What counts as a function


class Affine:
    def __init__(self):
        self.w = floats(16, 8)

    def __call__(self, x):
        return x @ self.w

    def shifted(self, x):
        return x @ self.w + 1


@pytest.mark.parametrize(
    "fn",
    [
        Affine(),
        Affine().shifted,
        functools.partial(jnp.dot, b=floats(16, 8)),
        jnp.sin,
        jax.jit(jax.vmap(jnp.sort)),
    ],
    ids=["object", "method", "partial", "ufunc", "jit of vmap"],
)
def test_anything_that_can_be_called(fn, mesh):
    search_and_compare(fn, (floats(8, 16),), mesh)


def test_no_arguments_no_outputs_no_arrays(mesh):
    assert_same(search(lambda: jnp.arange(8) * 2, (), mesh)(), jnp.arange(8) * 2)
    assert search(lambda x: None, (floats(8, 8),), mesh)(floats(8, 8)) is None
    assert search(lambda x: {"a": (), "b": [None]}, (floats(8, 8),), mesh)(floats(8, 8)) == {
        "a": (),
        "b": [None],
    }
    search_and_compare(lambda a, b: a * b + 1, (1.5, 2), mesh)


# What counts as static


class Mode(enum.Enum):
    DOUBLE = 2


@pytest.mark.parametrize(
    "static", [Mode.DOUBLE, {"k": 2}, np.ones(3), None], ids=["enum", "dict", "array", "none"]
)
def test_statics_need_not_be_hashable(static, mesh):
    def fn(x, how):
        return x * (2 if how is None else len(str(how)))

    plan = search(fn, (floats(8, 8), static), mesh, static_argnums=-1)
    np.testing.assert_allclose(plan(floats(8, 8), static), fn(floats(8, 8), static), rtol=1e-6)


def test_a_jitted_function_brings_its_own_statics(mesh):
    @functools.partial(jax.jit, static_argnums=1, donate_argnames="x")
    def power(x, n):
        return x**n if n > 1 else x

    plan = search(power, (jnp.asarray(floats(8, 8)), 3), mesh)
    assert plan.traced.call.donated == (True,)
    for n in (3, 1):
        np.testing.assert_allclose(plan(floats(8, 8), n), floats(8, 8) ** n, rtol=1e-5)


@pytest.mark.parametrize(
    "odd",
    [
        np.array(["a", "b"]),
        np.array([None, 1], object),
        np.datetime64("2020-01-01"),
        object(),
        "text",
    ],
)
def test_leaves_that_are_no_arrays_for_jax(odd, mesh):
    search(lambda x, odd: x * 2, (floats(8, 8), odd), mesh)


# What counts as an array


def test_mutable_arrays_inside_are_fine_as_arguments_they_are_refused(mesh):
    def inside(x):
        ref = jax.new_ref(jnp.zeros_like(x))
        ref[...] = x * 2
        ref[0] += 1.0
        return ref[...]

    search_and_compare(inside, (floats(8, 8),), mesh)
    with pytest.raises(autoshard.ArgumentError, match=r"state\['r'\] is a mutable array"):
        search(lambda state: state["r"][...], ({"r": jax.new_ref(jnp.zeros(8))},), mesh)


def test_masked_arrays_are_refused_by_name(mesh):
    masked = np.ma.array(floats(8, 8), mask=floats(8, 8) > 0)
    with pytest.raises(autoshard.ArgumentError, match=r"^x: numpy masked arrays"):
        search(lambda x: x * 2, (masked,), mesh)


def test_sparse_matrices_are_pytrees(mesh):
    matrix = sparse.BCOO.fromdense(
        jnp.asarray(np.where(integers(3, 16, 16) == 0, floats(16, 16), 0))
    )
    search_and_compare(lambda m, x: m @ x, (matrix, floats(16, 8)), mesh)


def test_nine_dimensions(mesh):
    search_and_compare(lambda x: jnp.sin(x).sum((0, 3)), (floats(*[2] * 9),), mesh)


def test_double_precision(mesh):
    with jax.enable_x64(True):
        plan = search_and_compare(
            lambda x, n: (x @ x.T, n + 1), (floats(8, 8, dtype=np.float64), np.int64(3)), mesh
        )
        assert {leaf.dtype for leaf in plan.table.inputs.values()} == {"float64", "int64"}


class Box:
    def __init__(self, x, meta):
        self.x, self.meta = x, meta


jax.tree_util.register_pytree_node(
    Box, lambda b: ((b.x,), b.meta), lambda meta, xs: Box(xs[0], meta)
)


@pytest.mark.parametrize("meta", [[1, 2], float("nan"), "text"])
def test_pytree_nodes_with_any_metadata(meta, mesh):
    plan = search(lambda b: Box(b.x * 2, b.meta), (Box(floats(8, 8), meta),), mesh)
    assert plan(Box(floats(8, 8), meta)).meta is meta


# Numbers


def test_values_that_are_not_finite(mesh):
    x = floats(8, 8)
    x[0, 0], x[1] = np.nan, np.inf
    assert search(
        lambda x, w: (x @ w, jnp.log(x), jnp.exp(x * 80)), (x, floats(8, 8)), mesh
    ).verified


def test_sums_that_cancel(mesh):
    x = np.tile(np.array([1e8, -1e8, 1.0, -1.0], np.float32), (16, 8))
    assert search(lambda x: x.sum() + x.sum(0), (x,), mesh).verified


def test_integers_that_overflow_and_bits_that_are_counted(mesh):
    def fn(n, x):
        return (
            (n * n).sum(0),
            lax.bitcast_convert_type(x, jnp.uint8).sum(-1),
            lax.population_count(n),
        )

    search_and_compare(fn, (np.full((64, 8), 2**15, np.int32), floats(8, 8)), mesh)


# Programs


def test_an_integrator_with_captured_arrays_in_nested_jits(mesh):
    rate = floats(8, 4)

    def fn(y, t):
        return odeint(lambda y, t: -y * jnp.abs(rate), y, t)

    search_and_compare(fn, (floats(8, 4), np.linspace(0, 1, 5, dtype=np.float32)), mesh)


def test_a_conjugate_gradient_solver(mesh):
    a = floats(8, 8)

    def fn(a, b):
        return jax.scipy.sparse.linalg.cg(lambda v: a @ v, b)[0]

    search_and_compare(fn, (a @ a.T + 8 * np.eye(8, dtype=np.float32), floats(8)), mesh)


def test_an_opaque_kernel(mesh):
    pallas = pytest.importorskip("jax.experimental.pallas")

    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def fn(x, w):
        doubled = pallas.pallas_call(
            double, out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32), interpret=True
        )(x)
        return doubled @ w

    search_and_compare(fn, (floats(8, 8), floats(8, 8)), mesh)


def test_ragged_groups(mesh):
    args = floats(16, 8), floats(4, 8, 8), np.array([1, 7, 0, 8], np.int32)
    search_and_compare(lax.ragged_dot, args, mesh)


def test_collectives_over_a_vmapped_axis_named_like_a_mesh_axis(mesh):
    def fn(x):
        return jax.vmap(lambda row: row - lax.pmean(row, "a"), axis_name="a")(x)

    search_and_compare(fn, (floats(8, 8),), mesh)


def test_sixty_jits_in_a_row(mesh):
    def fn(x):
        for _ in range(60):
            x = jax.jit(lambda y: jnp.tanh(y) + 0.01)(x)
        return x

    search_and_compare(fn, (floats(8, 8),), mesh)


def test_a_map_in_batches_that_do_not_divide(mesh):
    search_and_compare(lambda x: lax.map(jnp.sort, x, batch_size=3), (floats(8, 8),), mesh)


# Surroundings


def test_another_mesh_is_set_by_the_caller(mesh):
    x, w = floats(8, 8), floats(8, 8, seed=1)
    want = np.asarray(plain(jnp.matmul, (x, w)))
    with jax.set_mesh(mesh_of(p=8, explicit=("p",))):
        plan = search(jnp.matmul, (x, w), mesh)
        np.testing.assert_allclose(plan(x, w), want, rtol=1e-5, atol=1e-5)


def test_mesh_axes_with_names_like_rules(tmp_path):
    devices = np.array(jax.devices()).reshape(4, 2)
    odd = Mesh(devices, ("m->x", "batch_2"), axis_types=(AxisType.Auto,) * 2)
    args = floats(8, 8), floats(8, 8)
    plan = search_and_compare(jnp.matmul, args, odd, hardware=free_collectives())
    plan.table.save(tmp_path / "odd.json")
    assert autoshard.apply(jnp.matmul, args, odd, tmp_path / "odd.json").specs == plan.specs


def test_inside_a_transformation_the_plan_is_the_plain_function(mesh):
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    args = floats(8, 8), floats(8, 8, seed=1)
    plan = search(loss, args, mesh)
    assert_same(jax.jit(jax.grad(plan))(*args), jax.jit(jax.grad(loss))(*args))
    w, rows = args[0], args[1][:, None]
    assert_same(jax.vmap(plan.fn, (None, 0))(w, rows), jax.vmap(loss, (None, 0))(w, rows))


def test_the_search_is_the_same_every_time(mesh):
    plans = [
        search(lambda x, w: jnp.tanh(x @ w), (floats(8, 16), floats(16, 8)), mesh, seed=1)
        for _ in range(2)
    ]
    assert plans[0].specs == plans[1].specs
    assert [t.key for t in plans[0].candidates] == [t.key for t in plans[1].candidates]


def test_a_pin_on_everything_leaves_nothing_to_search(mesh):
    plan = search_and_compare(
        jnp.matmul, (floats(8, 8), floats(8, 8)), mesh, pins={"a": P("a"), "b": P(None, "b")}
    )
    assert (plan.specs["a"], plan.specs["b"]) == (P("a"), P(None, "b"))


def test_an_opaque_kernel_is_a_loud_warning_with_the_way_out():
    pallas = pytest.importorskip("jax.experimental.pallas")

    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def fn(x):
        return pallas.pallas_call(double, out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32))(x)

    plan = autoshard.optimize(
        fn,
        (floats(8, 8),),
        mesh_of(a=8),
        effort=autoshard.Effort(compiled=0, measured=0),
        progress=False,
    )
    assert any(
        note.startswith("WARNING: pallas_call (test_case_weird.py:") for note in plan.notes
    ), plan.notes
    assert "shard_map" in str(plan)
