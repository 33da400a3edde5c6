"""Jaxprs evaluated equation by equation give what jax gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.evaluate.verification import interpret
from autoshard.evaluate.verification.interpret import TooLongError, each_alone, op_by_op
from tests.models import mlp_args, mlp_step

X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return jnp.clip(x, -1, 1)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.where(abs(x) < 1, g, 0.1 * g),))


def loops(x: jax.Array) -> Any:
    total, rows = lax.scan(lambda c, r: (c + r, (c * r, r.sum())), jnp.zeros(8), x, reverse=True)
    counted, _ = lax.scan(lambda c, _: (c * 1.5, None), x[0], None, length=4)
    grown = lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] * x.mean()), (0, x[1]))
    return total, rows, counted, grown


def branches(x: jax.Array) -> Any:
    n = jnp.argmax(x[0])
    picked = lax.switch(n, [lambda v: v, lambda v: -v, lambda v: v * 2], x[1])
    return picked, lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)


def derivatives(x: jax.Array) -> Any:
    def f(x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda v: jnp.sin(jax.nn.relu(v) @ v.T))
        return (layer(x) ** 2).sum() + clipped(x).sum() + jax.nn.logsumexp(x)

    return jax.value_and_grad(f)(x), jax.jvp(jax.nn.relu, (x,), (x,))


def randomness(x: jax.Array) -> Any:
    key = jax.random.key(3)
    return jax.random.split(key, 2), x + jax.random.normal(jax.random.fold_in(key, 1), x.shape)


def nested(x: jax.Array) -> Any:
    table = np.arange(48.0, dtype=np.float32).reshape(6, 8)  # a captured constant
    inner = jax.jit(lambda v: jax.jit(jnp.tanh)(v) + table)
    return inner(x), inner(inner(x)), jnp.sort(x), x.astype(jnp.int32), jnp.fft.fft(x)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "loops": (loops, (X,)),
    "branches": (branches, (X,)),
    "derivatives": (derivatives, (X,)),
    "randomness": (randomness, (X,)),
    "nested": (nested, (X,)),
    "mlp": (mlp_step, mlp_args(8, 4, 8)),
}


def flat(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """The closed jaxpr of a function and its flat arguments."""
    return jax.make_jaxpr(fn)(*args), jax.tree.leaves(args)


def host(leaf: Any) -> np.ndarray:
    keys = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if keys else leaf)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("way", ["each alone", "op by op"])
def test_it_gives_what_jit_gives(name: str, way: str) -> None:
    fn, args = PROGRAMS[name]
    closed, leaves = flat(fn, args)
    if way == "each alone":
        outputs = jax.jit(each_alone(closed))(np.uint32(0), *leaves)
    else:
        outputs = op_by_op(closed)(*leaves)
    wanted = jax.tree.leaves(jax.jit(fn)(*args))
    for output, leaf in zip(outputs, wanted, strict=True):
        assert output.dtype == leaf.dtype
        np.testing.assert_allclose(host(output), host(leaf), rtol=1e-5, atol=1e-6)


def test_a_loop_that_is_too_long_to_be_run_op_by_op_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interpret, "OPERATIONS", 50)

    def sums(x: jax.Array, trips: int) -> Any:
        return lax.fori_loop(0, trips, lambda _, v: v * 0.5, x)

    for trips, fits in ((10, True), (40, False)):
        closed, leaves = flat(lambda x, trips=trips: sums(x, trips), (X,))
        if fits:
            op_by_op(closed)(*leaves)
        else:
            with pytest.raises(TooLongError, match="more than 50 operations"):
                op_by_op(closed)(*leaves)


def test_an_update_in_place_that_reads_what_it_overwrites_is_right_in_both() -> None:
    def shifted(x: jax.Array) -> jax.Array:
        base = x + np.int32(1)
        return base.at[1:].set(base[:-1]).reshape((1, *base.shape))

    x = np.arange(128, dtype=np.int32).reshape(8, 16)
    wanted = x + 1
    wanted[1:] = x[:-1] + 1
    closed, leaves = flat(shifted, (x,))
    for outputs in (jax.jit(each_alone(closed))(np.uint32(0), *leaves), op_by_op(closed)(*leaves)):
        np.testing.assert_array_equal(outputs[0][0], wanted)
