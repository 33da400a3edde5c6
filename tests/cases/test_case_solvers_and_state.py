"""What solvers, decoders, quantisers and mutable arrays make of a program: high-level primitives,
odd loops, state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autoshard
from tests.cases.same import (
    assert_same,
    floats,
    integers,
    mesh_of,
    pin_and_compare,
    plain,
    search,
    search_and_compare,
    split_leaves,
)


def doubled_in_place(x):
    state = jax.new_ref(jnp.zeros_like(x))

    def body(i, carry):
        state[i] = x[i] * 2
        return carry

    lax.fori_loop(0, len(x), body, 0)
    return state[...]


def test_a_mutable_array_made_inside_is_an_update_like_any_other():
    x, mesh = jnp.asarray(floats(8, 16)), mesh_of(a=4, b=2)
    search_and_compare(doubled_in_place, (x,), mesh)
    pin_and_compare(doubled_in_place, (x,), mesh, {"x": jax.P("a")})
    plan = autoshard.apply(doubled_in_place, (x,), mesh, ["x.1->a"])
    assert plan.compile().evidence.collective_bytes == 0, "each column is written where it lies"


def test_gradients_through_a_mutable_array():
    def step(w, x):
        def loss(w):
            hidden = jax.new_ref(jnp.zeros((len(x), w.shape[1])))
            hidden[...] = x @ w
            hidden[...] = jnp.tanh(hidden[...])
            return jnp.sum(hidden[...] ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    args = jnp.asarray(floats(16, 32)), jnp.asarray(floats(64, 16))
    search_and_compare(step, args, mesh_of(a=4, b=2), donate_argnums=0)


def test_a_mutable_array_given_to_jitted_helpers():
    @jax.jit
    def add(total, x):
        total[...] += x

    def fn(x):
        total = jax.new_ref(x)
        add(total, x)
        add(total, 2 * x)
        return jax.freeze(total)

    search_and_compare(fn, (jnp.asarray(floats(16, 8)),), mesh_of(a=4, b=2))


def test_a_mutable_array_of_outside_is_refused_with_the_way_out():
    count = jax.new_ref(jnp.zeros(()))

    def counting(x):
        count[...] += 1
        return x * count[...]

    with pytest.raises(
        autoshard.TraceError, match=r"counting reads or writes a mutable array .*Pass its value"
    ):
        search(counting, (floats(8, 8),), mesh_of(a=8))


def cube_root(x):
    def newton(g, y):
        return lax.fori_loop(0, 20, lambda _, y: y - g(y) / (3 * y * y + 1e-3), y)

    return lax.custom_root(lambda y: y**3 - x, x, newton, lambda g, y: y / g(jnp.ones_like(y)))


@pytest.mark.parametrize("fn", [cube_root, jax.grad(lambda x: jnp.sum(cube_root(x)))])
def test_an_implicit_root_is_as_elementwise_as_its_function(fn):
    args, mesh = (abs(floats(16, 8)) + 1,), mesh_of(a=4, b=2)
    search_and_compare(fn, args, mesh)
    plan = autoshard.apply(fn, args, mesh, ["x.0->a", "x.1->b"])
    assert_same(plan(*args), plain(fn, args))
    assert plan.compile().evidence.collective_bytes == 0


def test_an_exported_program_is_opaque_and_right():
    exported = jax.export.export(jax.jit(lambda x: jnp.sin(x) @ x.T))(
        jax.ShapeDtypeStruct((8, 16), np.float32)
    )
    search_and_compare(lambda x: exported.call(x) * 2, (floats(8, 16),), mesh_of(a=4, b=2))


def test_collectives_of_vmap_are_sums_like_others():
    def fn(x):
        return jax.vmap(lambda row: row / lax.psum(jnp.sum(row), "i"), axis_name="i")(x)

    search_and_compare(fn, (abs(floats(8, 16)) + 1,), mesh_of(a=4, b=2))


def test_reductions_of_pairs():
    def fn(x):
        columns = lax.broadcasted_iota(jnp.int32, x.shape, 1)

        def larger(a, b):
            return jnp.maximum(a[0], b[0]), jnp.where(a[0] >= b[0], a[1], b[1])

        return lax.reduce((x, columns), (-jnp.inf, 0), larger, (1,))

    plan = search_and_compare(fn, (floats(16, 8),), mesh_of(a=4, b=2))
    pin_and_compare(fn, (floats(16, 8),), mesh_of(a=4, b=2), {"x": jax.P("a", "b")})
    assert plan.verified.ok


def test_beam_search_and_viterbi():
    def beams(table, tokens):
        def step(state, _):
            tokens, scores = state
            grown = (scores[:, None] + jax.nn.log_softmax(table[tokens], -1)).reshape(-1)
            best, where = lax.top_k(grown, 4)
            return (where % table.shape[1], best), where // table.shape[1]

        return lax.scan(step, (tokens, jnp.zeros(4)), None, length=6)

    def viterbi(transitions, emissions):
        def step(scores, emission):
            through = scores[:, None] + transitions
            return jnp.max(through, 0) + emission, jnp.argmax(through, 0)

        last, back = lax.scan(step, emissions[0], emissions[1:])
        return lax.scan(
            lambda i, pointers: (pointers[i], pointers[i]), jnp.argmax(last), back, reverse=True
        )

    mesh = mesh_of(a=4, b=2)
    search_and_compare(beams, (floats(32, 32), integers(32, 4)), mesh)
    search_and_compare(viterbi, (floats(8, 8), floats(20, 8)), mesh)


def test_quantised_products_and_contrastive_losses():
    def quantised(x, w, scale):
        product = lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
        return product.astype(jnp.float32) * scale

    def contrastive(w, x, y):
        def loss(w):
            a, b = x @ w["a"], y @ w["b"]
            a, b = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (a, b))
            return -jnp.mean(jnp.diag(jax.nn.log_softmax(10 * a @ b.T)))

        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))

    mesh = mesh_of(a=4, b=2)
    numbers = integers(100, 16, 32).astype(np.int8), integers(100, 32, 8).astype(np.int8)
    plan = search_and_compare(quantised, (*numbers, floats(8)), mesh)
    pin_and_compare(quantised, (*numbers, floats(8)), mesh, {"x": jax.P("a", "b"), "w": jax.P("b")})
    weights = {"a": floats(16, 32), "b": floats(24, 32)}
    plan = search_and_compare(
        contrastive, (weights, floats(64, 16), floats(64, 24)), mesh, donate_argnums=0
    )
    assert plan.verified.ok
    pin_and_compare(
        contrastive,
        (weights, floats(64, 16), floats(64, 24)),
        mesh,
        {"x": jax.P("a"), "y": jax.P("a")},
    )


def test_a_function_that_returns_its_own_pullback():
    def fn(w, x):
        return jax.vjp(lambda w: jnp.tanh(x @ w), w)

    args = floats(8, 16), floats(32, 8)
    plan = search(fn, args, mesh_of(a=4, b=2))
    value, pullback = plan(*args)
    expected, expected_pullback = jax.jit(fn)(*args)
    np.testing.assert_allclose(value, expected, atol=1e-5)
    ones = np.ones_like(expected)
    np.testing.assert_allclose(pullback(ones)[0], expected_pullback(ones)[0], atol=1e-4)
    assert split_leaves(plan)
