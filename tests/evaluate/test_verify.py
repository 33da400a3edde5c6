"""Verification: wrong numbers are caught, rounding is no false alarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.axes.axis_classes import axis_classes
from autoshard.compiler.compile import build
from autoshard.evaluate.verification.inputs import inputs_for
from autoshard.evaluate.verification.reference import Reference, unsharded
from autoshard.evaluate.verification.rounding import epsilon_of, longest_sum
from autoshard.evidence.candidate import Verified
from autoshard.layout.mesh import resolve_mesh
from autoshard.layout.prepare import Prepared
from tests.models import decoder_args, decoder_step, mlp_args, mlp_step
from tests.stages import array, layout_of, mesh_of, prepared, traced

MESH = {"data": 4, "model": 2}
SMALL = {"batch": 8, "length": 8, "layers": 1, "d": 16, "heads": 2, "ff": 32, "vocab": 32}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 8)).astype(np.float32)


def reference(fn: Callable[..., Any], args: Any) -> Reference:
    found = traced(fn, *args)
    inputs = inputs_for(found.call, found.program)
    reference_function = unsharded(found, inputs, resolve_mesh(mesh_of(**MESH)))
    return Reference(reference_function, axis_classes(found.program), inputs)


def compare(
    fn: Callable[..., Any], args: Any, changed: Callable[[list[np.ndarray]], Any]
) -> tuple[Verified, bool]:
    """How the reference judges its own outputs after a change."""
    found = reference(fn, args)
    return found.compare(changed([out.copy() for out in found.outputs]))


def sharded(made: Prepared, *rules: str) -> list[Any]:
    built = build(made.traced, layout_of(made, *rules), made.request.mesh)
    inputs = inputs_for(made.traced.call, made.traced.program)
    return list(built.jitted(*inputs.place(built.in_shardings)))


@pytest.mark.parametrize("index", [0, -1])
def test_one_wrong_element_of_one_leaf_is_caught_and_named(index: int) -> None:
    def change(outputs: list[np.ndarray]) -> list[np.ndarray]:
        outputs[1].flat[index] += 0.01
        return outputs

    verified, agrees = compare(mlp_step, mlp_args(), change)
    assert not agrees
    assert verified.leaf == "out/0/w1"
    assert verified.max_abs_err == pytest.approx(0.01, rel=0.01)
    assert verified.max_abs_err > 10 * verified.tolerance
    assert verified.against == "unsharded function"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: jnp.roll(x, 1, 0),
        lambda x: x.at[:4].set(x[4:8]),  # one shard twice, as a miscompiled dynamic slice does
        lambda x: x / 4,  # a mean over the shards of a sum
        lambda x: x[:8],
        lambda x: x.at[0, 0].set(jnp.nan),
        jnp.zeros_like,
    ],
)
def test_a_wrong_compiled_function_is_caught(wrong: Callable[[jax.Array], jax.Array]) -> None:
    def right(x: jax.Array) -> jax.Array:
        return jnp.sin(x) @ jnp.ones((8, 8))

    run = jax.jit(lambda x: wrong(right(x)), in_shardings=NamedSharding(mesh_of(data=4), P("data")))
    found = reference(right, (X,))
    _, agrees = found.compare([run(X)])
    assert not agrees
    _, agrees = found.compare([jax.jit(right)(X)])
    assert agrees


@pytest.mark.parametrize(
    "rules", [(), ("x.0->data",), ("x.0->data", "b1.0->model"), ("w1.0->data", "b1.0->model")]
)
def test_sharded_train_steps_agree(rules: tuple[str, ...]) -> None:
    verified, agrees = reference(mlp_step, mlp_args()).compare(
        sharded(prepared(mlp_step, mlp_args(), mesh_of(**MESH)), *rules)
    )
    assert agrees, verified


def test_a_sharded_decoder_with_momentum_agrees() -> None:
    args = decoder_args(**SMALL)
    made = prepared(decoder_step, args, mesh_of(**MESH))
    verified, agrees = reference(decoder_step, args).compare(
        sharded(made, "tokens.0->data", "w1.2->model")
    )
    assert agrees, verified


def adam(eps: float) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A first Adam step: update = g / (|g| + eps), which turns rounding of tiny gradients into a
    whole step."""
    optimizer = optax.adam(1e-2, eps=eps)
    params = {"w": 0.3 * X.T[:, :8], "v": np.zeros((8, 4), np.float32)}

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(
            lambda p: jnp.mean(jnp.tanh(x @ p["w"]) @ p["v"]) + jnp.mean(jnp.tanh(x @ p["w"])) ** 2
        )(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, (params, optimizer.init(params), X)


@pytest.mark.parametrize("eps", [1e-3, 1e-8])
def test_the_noise_of_adam_is_no_false_alarm(eps: float) -> None:
    step, args = adam(eps)
    made = prepared(step, args, mesh_of(**MESH))
    verified, agrees = reference(step, args).compare(sharded(made, "x.0->data"))
    assert agrees, verified


def test_a_wrong_adam_step_is_still_caught() -> None:
    step, args = adam(1e-3)

    def change(outputs: list[np.ndarray]) -> list[np.ndarray]:
        outputs[1] = outputs[1] + 0.01 * np.sign(outputs[1])  # the update with the wrong sign
        return outputs

    assert not compare(step, args, change)[1]


# Integers, NaNs, shapes


def test_integers_must_be_equal() -> None:
    args = (np.arange(16, dtype=np.int32),)
    assert compare(lambda n: n * 3, args, lambda outs: outs)[1]
    verified, agrees = compare(lambda n: n * 3, args, lambda outs: [outs[0] + (np.arange(16) == 5)])
    assert not agrees
    assert verified.max_abs_err == 1


def test_booleans_must_be_equal() -> None:
    assert not compare(lambda x: x > 10, (X,), lambda outs: [~outs[0]])[1]


def test_an_argmax_between_near_ties_may_differ_and_elsewhere_not() -> None:
    rows = np.array([[1.0, 1.0 + 1e-7, 0], [3.0, 1.0, 0]], np.float32)

    def winner(x: jax.Array) -> jax.Array:
        return jnp.argmax(x * 3.0, -1)

    found = reference(winner, (rows,))
    assert found.outputs[0].tolist() == [1, 0]
    assert found.compare([np.array([0, 0])])[1], "a near tie"
    assert not found.compare([np.array([1, 1])])[1], "no tie at all"


def test_nans_and_infinities_must_be_where_they_were() -> None:
    x = np.array([-1.0, 0.0, 1.0, 4.0], np.float32)

    def fn(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sqrt(x), 1 / x

    assert compare(fn, (x,), lambda outs: outs)[1]
    assert not compare(fn, (x,), lambda outs: [np.nan_to_num(outs[0]), outs[1]])[1]
    assert not compare(fn, (x,), lambda outs: [outs[0], -outs[1]])[1]


def test_complex_numbers_and_low_precision() -> None:
    z = (X + 1j * X[::-1]).astype(np.complex64)
    assert compare(lambda z: z * z, (z,), lambda outs: outs)[1]
    assert not compare(lambda z: z * z, (z,), lambda outs: [outs[0].conj()])[1]
    half = X.astype(jnp.bfloat16)
    assert compare(lambda x: x @ x.T, (half,), lambda outs: [outs[0] * (1 + 2**-8)])[1]
    assert not compare(lambda x: x @ x.T, (half,), lambda outs: [outs[0] * 2])[1]


@pytest.mark.parametrize("low", [jnp.bfloat16, np.float16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_however_low_the_precision_and_long_the_sum_a_lost_shard_is_seen(low: Any) -> None:
    x = RNG.standard_normal((16, 2048)).astype(np.float32)

    def fn(x: jax.Array) -> jax.Array:
        return x.astype(low).astype(jnp.float32) @ jnp.ones((2048, 4))

    found = reference(fn, (x,))
    parts = x.reshape(16, 4, 512)
    assert found.compare([sum(fn_of_part(p, low) for p in parts.swapaxes(0, 1))])[1], (
        "another order of the sum"
    )
    (want,) = found.outputs
    for wrong in (np.zeros_like(want), 2 * want, want / 4, want - fn_of_part(parts[:, 0], low)):
        assert not found.compare([wrong])[1]


def fn_of_part(x: np.ndarray, low: Any) -> np.ndarray:
    return x.astype(low).astype(np.float32) @ np.ones((512, 4), np.float32)


def test_keys_are_compared_as_their_data() -> None:
    def fn(key: jax.Array) -> jax.Array:
        return jax.random.split(key, 3)

    found = reference(fn, (jax.random.key(0),))
    assert found.compare([fn(jax.random.key(0))])[1]
    assert not found.compare([fn(jax.random.key(1))])[1]


# The tolerance


def test_the_tolerance_follows_precision_and_the_longest_sum() -> None:
    def axes_of(fn: Any, *args: Any) -> Any:
        return axis_classes(traced(fn, *args).program)

    assert longest_sum(axes_of(lambda x: (x @ x.T).sum(0), array(16, 32))) == 32
    assert longest_sum(axes_of(lambda x: x.sum(), array(16, 8))) == 16 * 8
    assert longest_sum(axes_of(jnp.sin, array(16))) == 1
    assert epsilon_of(axes_of(jnp.sin, array(16))) == np.finfo(np.float32).eps
    mixed = axes_of(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), array(16))
    assert epsilon_of(mixed) == float(jnp.finfo(jnp.bfloat16).eps)
    assert epsilon_of(axes_of(lambda n: n + 1, array(16, dtype=np.int32))) == 0


def test_the_persons_arrays_are_left_alone() -> None:
    own = jax.device_put(X)
    reference(lambda x: (x + 1, x.argmax(-1)), (own,))
    np.testing.assert_array_equal(np.asarray(own), X)
