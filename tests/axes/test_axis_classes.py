"""Axis classes: which dimensions of a program are one and the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.models import decoder_args, decoder_loss, decoder_step
from tests.stages import NO_AXIS, Axes, array


def test_elementwise_operations_and_broadcasting_join() -> None:
    axes = Axes(lambda x, y, b: jnp.sin(x) * y + b, array(8, 4), array(8, 4), array(4))
    assert axes["x"] == axes["y"] == axes["out"]
    assert axes["b"] == axes["x"][1:]
    assert len(set(axes["x"])) == 2


def test_dimensions_of_size_one_have_no_axis() -> None:
    axes = Axes(lambda x, y: x + y, array(8, 1), array(1, 4))
    assert axes["x"] == (axes["out"][0], NO_AXIS)
    assert axes["y"] == (NO_AXIS, axes["out"][1])


def test_a_contraction_joins_what_it_sums() -> None:
    axes = Axes(lambda x, w: x @ w, array(8, 4), array(4, 6))
    (batch, inner), (same, outer) = axes["x"], axes["w"]
    assert inner == same
    assert axes["out"] == (batch, outer)
    assert axes.classes.count == 3


def test_batched_attention() -> None:
    axes = Axes(
        lambda q, k: jnp.einsum("bqhk,bshk->bhqs", q, k), array(2, 8, 4, 16), array(2, 8, 4, 16)
    )
    (b, q, h, k), (b2, s, h2, k2) = axes["q"], axes["k"]
    assert (b, h, k) == (b2, h2, k2)
    assert axes["out"] == (b, h, q, s)
    assert q != s, "queries and keys are one axis only where the model makes them from one sequence"


def test_self_attention_is_a_conflict_of_one_axis() -> None:
    axes = Axes(lambda x: jnp.einsum("bqk,bsk->bqs", x, x), array(2, 8, 16))
    assert axes["out"] == (axes["x"][0], axes["x"][1], axes["x"][1])


def test_a_split_dimension_keeps_its_axis_at_the_major_factor() -> None:
    axes = Axes(lambda x: x.reshape(8, 4, 16), array(8, 64))
    assert axes["out"][:2] == axes["x"]
    assert axes["out"][2] not in axes["x"]


def test_a_merged_dimension_is_its_major_factor() -> None:
    axes = Axes(lambda x: x.reshape(8, 64), array(8, 4, 16))
    assert axes["out"] == axes["x"][:2]
    axes = Axes(lambda x: x.reshape(2, 3, 4, 5).reshape(6, 20).reshape(2, 3, 20), array(6, 4, 5))
    assert axes["out"] == (axes["x"][0], axes["out"][1], axes["x"][1])


def test_a_transpose_permutes_and_a_reduction_drops() -> None:
    axes = Axes(lambda x: x.transpose(2, 0, 1).max(0), array(2, 3, 4))
    assert axes["out"] == axes["x"][:2]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x[:5],
        lambda x: jnp.pad(x, (0, 3)),
        lambda x: jnp.concatenate([x, x]),
        lambda x: jnp.sort(x)[:4],
        lambda x: x[jnp.array([3, 1])],
    ],
)
def test_what_is_cut_padded_or_picked_is_another_axis(fn: Any) -> None:
    axes = Axes(fn, array(8))
    assert axes["out"] != axes["x"]


# Constants link nothing


def test_one_mask_for_two_sequences_does_not_make_them_one() -> None:
    def two(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        mask = jnp.tril(jnp.ones((8, 8)))
        return x @ mask, y @ mask.T

    axes = Axes(two, array(4, 8), array(4, 8))
    assert not set(axes["x"]) & set(axes["y"])


def test_one_arange_for_two_sequences_merges_nothing() -> None:
    def positions(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        where = jnp.arange(8.0)
        return x + jnp.sin(where), y + jnp.sin(where)[:, None]

    axes = Axes(positions, array(4, 8), array(8, 4))
    assert not set(axes["x"]) & set(axes["y"])


def test_a_constant_adopts_the_classes_of_its_reader() -> None:
    axes = Axes(lambda x: x + jnp.zeros((4, 8)) * 2, array(4, 8))
    zeros = next(e for e in axes.program.eqns if e.primitive == "broadcast_in_dim").outputs[0]
    assert axes.classes.constant[zeros.index]
    assert axes.classes.of_value[zeros.index] == axes["x"]


# Loops and other bodies


def test_gradient_accumulation_keeps_the_batch() -> None:
    def accumulate(w: jax.Array, batch: jax.Array) -> jax.Array:
        def micro(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.grad(lambda w: jnp.sin(x @ w).sum())(w), None

        return jax.lax.scan(micro, jnp.zeros_like(w), batch.reshape(4, 8, 16))[0]

    axes = Axes(accumulate, array(16, 4), array(32, 16))
    split = next(e for e in axes.program.eqns if e.primitive == "reshape").outputs[0]
    trip_count, batch, features = axes.classes.of_value[split.index]
    assert (batch, features) == axes["batch"]
    assert trip_count != batch
    assert trip_count in axes.classes.scanned
    assert batch not in axes.classes.scanned
    assert features == axes["w"][0]


def test_scanned_dimensions_are_told_from_the_others() -> None:
    def scanned(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum(-1)), x, w)

    axes = Axes(scanned, array(6, 4, 4), array(8, 4))
    layers, rows, columns = axes["w"]
    stacked, batch = axes["out/1"]
    assert axes.classes.scanned == {layers, stacked}
    assert rows == columns == axes["x"][1], "the carry makes the two one"
    assert axes["out/0"] == axes["x"]
    assert batch == axes["x"][0]


def test_a_while_loop_links_carry_body_and_result() -> None:
    def doubled(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: c * 2 + y, x)

    axes = Axes(doubled, array(8, 4), array(8, 4))
    assert axes["x"] == axes["y"] == axes["out"]


def test_branches_are_linked_to_operands_and_results() -> None:
    def branch(p: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.cond(p, lambda x, y: jnp.sin(x), lambda x, y: y * 2, x, y)

    axes = Axes(branch, array(dtype=np.bool_), array(8, 4), array(8, 4))
    assert axes["x"] == axes["y"] == axes["out"]


@jax.custom_vjp
def own(x: jax.Array) -> jax.Array:
    return x * 2


own.defvjp(lambda x: (own(x), x), lambda x, g: (g * x,))


@pytest.mark.parametrize(
    "wrap",
    [jax.checkpoint, jax.jit, lambda f: lambda x: own(f(x)), lambda f: lambda x: jax.nn.relu(f(x))],
)
def test_calls_are_entered(wrap: Any) -> None:
    axes = Axes(lambda x, w: wrap(jnp.sin)(x) @ w, array(8, 4), array(4, 6))
    assert axes["out"] == (axes["x"][0], axes["w"][1])
    assert axes["x"][1] == axes["w"][0]


def test_gradients_have_the_axes_of_what_they_are_gradients_of() -> None:
    axes = Axes(jax.grad(lambda w, x: own(jnp.tanh(x @ w)).sum()), array(4, 6), array(8, 4))
    assert axes["out"] == axes["w"]


# Whole steps


def test_optimizer_moments_join_their_parameters_by_themselves() -> None:
    optimizer = optax.adamw(1e-3)
    params = {"a": array(4, 6), "b": array(6)}
    state = jax.eval_shape(optimizer.init, params)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.sin(x @ p["a"] + p["b"]).sum())(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    axes = Axes(step, params, state, array(8, 4))
    moments = [
        path for path in axes.program.input_paths if path.startswith("state") and path[-1] in "ab"
    ]
    assert len(moments) == 4
    assert all(axes[path] == axes[f"params/{path[-1]}"] for path in moments)


def test_a_carry_joins_an_argument_and_its_next_value() -> None:
    def shift(state: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.concatenate([state[1:], x[None]])

    args = (array(8, 4), array(4))
    alone, carried = Axes(shift, *args), Axes(shift, *args, carry=[(0, 0)])
    assert alone["state"][0] != alone["out"][0]
    assert carried["state"] == carried["out"]


def test_a_scanned_train_step_has_about_twenty_axes_whatever_its_depth() -> None:
    shallow, deep = (Axes(decoder_step, *decoder_args(layers=n)) for n in (2, 5))
    assert shallow.classes.count == deep.classes.count <= 22
    (batch, sequence) = deep["tokens"]
    d_model = deep["params/emb"][1]
    assert deep["params/w1"][1] == deep["params/w2"][2] == d_model
    assert deep["params/w1"][2] == deep["params/w2"][1]
    assert len({batch, sequence, d_model}) == 3
    assert all(deep[f"moment/{name}"] == deep[f"params/{name}"] for name in ("emb", "wq", "w2"))


def test_factors_of_an_equation_name_class_and_size() -> None:
    axes = Axes(decoder_loss, decoder_args()[0], decoder_args()[2])
    scores = next(
        e
        for e in axes.program.eqns
        if e.primitive == "dot_general" and e.outputs[0].shape == (8, 4, 32, 32)
    )
    factors = axes.classes.factors(scores)
    assert sorted(size for _, size in factors) == [4, 8, 16, 32, 32], (
        "two sequence factors, one class each or the same"
    )
