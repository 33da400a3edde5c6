"""A function that is jitted already says what is static and what is donated, however it is
wrapped."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autoshard
from autoshard.tracing.jit_options import options_for
from tests.stages import call_of

X = np.ones((8, 4), np.float32)
MESH = "data=4,model=2"


def scaled(x: Any, times: int, mode: str = "plain") -> Any:
    for _ in range(times):  # fails where `times` is traced
        x = x * 2
    return x + 1 if mode == "plain" else x


def shifted(scale: Any, x: Any, times: int) -> Any:
    return scale * scaled(x, times)


by_name = jax.jit(shifted, static_argnames="times", donate_argnames="x")
by_position = jax.jit(shifted, static_argnums=2, donate_argnums=1)
filtered = eqx.filter_jit(shifted, donate="all-except-first")


@functools.wraps(by_name)
def decorated(*args: Any, **kwargs: Any) -> Any:
    return by_name(*args, **kwargs)


class Trainer:
    """Steps of a class, jitted in each of the ways."""

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def jitted(self, x: Any, times: int) -> Any:
        return scaled(x, times)

    @functools.partial(jax.jit, static_argnames=("self", "times"))
    def by_names(self, x: Any, times: int) -> Any:
        return scaled(x, times)

    @functools.partial(nnx.jit, static_argnums=(0, 2))
    def nnx_jitted(self, x: Any, times: int) -> Any:
        return scaled(x, times)

    @eqx.filter_jit
    def filtered(self, x: Any, times: int) -> Any:
        return scaled(x, times)

    @eqx.filter_jit
    def __call__(self, x: Any, times: int) -> Any:
        return scaled(x, times)


# [name, function, arguments]: each runs as it stands, with `times` a Python int.
WRAPPED: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("jit by name", by_name, (1.0, X, 2)),
    ("jit by position", by_position, (1.0, X, 2)),
    ("partial of a jit", functools.partial(by_position, 1.5), (X, 2)),
    ("partial of a partial", functools.partial(functools.partial(by_name, 1.5), X), (2,)),
    ("jax's Partial", jax.tree_util.Partial(by_position, 1.5), (X, 2)),
    ("decorated", decorated, (1.0, X, 2)),
    ("partial of decorated", functools.partial(decorated, 1.0), (X, 2)),
    ("nnx.jit", nnx.jit(shifted, static_argnames="times"), (1.0, X, 2)),
    ("method", Trainer().jitted, (X, 2)),
    ("method by name", Trainer().by_names, (X, 2)),
    ("nnx method", Trainer().nnx_jitted, (X, 2)),
    ("filter_jit", filtered, (jnp.float32(1.0), X, 2)),
    ("filter_jit method", Trainer().filtered, (X, 2)),
    ("filter_jit __call__", Trainer(), (X, 2)),
    ("partial of filter_jit", functools.partial(filtered, jnp.float32(1.5)), (X, 2)),
    ("Equinox's Partial", eqx.Partial(filtered, jnp.float32(1.5)), (X, 2)),
    ("filter_jit of a jit", eqx.filter_jit(by_position), (jnp.float32(1.0), X, 2)),
    ("gradient of a filter_jit", jax.grad(eqx.filter_jit(lambda x, n: scaled(x, n).sum())), (X, 2)),
]


@pytest.mark.parametrize(("fn", "args"), [w[1:] for w in WRAPPED], ids=[w[0] for w in WRAPPED])
def test_the_rule_of_a_wrapper_is_that_of_the_jit_inside(fn: Any, args: tuple[Any, ...]) -> None:
    wanted = fn(*jax.tree.map(jnp.array, args[:-1]), args[-1])
    plan = autoshard.apply(fn, args, MESH, "replicated")
    np.testing.assert_allclose(np.asarray(plan(*args)), np.asarray(wanted), rtol=1e-6)
    changed = (*args[:-1], 3)  # another static is another signature
    wanted = fn(*jax.tree.map(jnp.array, changed[:-1]), 3)
    np.testing.assert_allclose(np.asarray(plan(*changed)), np.asarray(wanted), rtol=1e-6)


def test_donation_moves_with_the_arguments_that_are_bound() -> None:
    assert call_of(by_name, (1.0, X, 2)).donated == (False, True)
    assert call_of(functools.partial(by_name, 1.0), (X, 2)).donated == (True,)
    assert call_of(filtered, (X, X, 2)).donated == (False, True)
    assert call_of(functools.partial(filtered, X), (X, 2)).donated == (True,)
    assert call_of(eqx.filter_jit(shifted, donate="all"), (X, X, 2)).donated == (True, True)
    assert call_of(eqx.filter_jit(shifted), (X, X, 2)).donated == (False, False)
    assert call_of(eqx.filter_jit(shifted, donate="all"), (X,), {"x": X, "times": 2}).donated == (
        True,
        True,
    )


def test_what_is_passed_to_us_wins_over_what_the_wrapper_says() -> None:
    assert options_for(by_name, donate_argnums=0).donate_argnums == {0}
    assert options_for(by_name, donate_argnums=0).static_argnums == {2}
    assert options_for(functools.partial(by_name, 1.0), static_argnums=()).static_argnums == set()


def test_the_outermost_jit_decides() -> None:
    assert not options_for(jax.jit(eqx.filter_jit(shifted))).arrays_only
    assert options_for(eqx.filter_jit(by_position)).arrays_only
    assert not options_for(eqx.filter_jit(by_position)).static_argnums


def test_true_and_one_are_two_statics() -> None:
    def call(flag: Any) -> Any:
        return call_of(filtered, (X, X, flag))

    assert call(1).same_as(call(1))
    assert not call(1).same_as(call(True))
    assert not call(1).same_as(call(1.0))
    assert call(float("nan")).same_as(call(float("nan"))) is False
    assert call(jnp.int32(1)).same_as(call(np.int32(1))), "arrays, both"


# Modules ------------------------------------------------------------------------------------------


class Gated(eqx.Module):
    """A module of a user, with leaves that are Python values of each type."""

    w: jax.Array
    gated: bool = True
    power: int = 2
    scale: float = 0.5
    phase: complex = 1 + 0j
    act: str = "tanh"

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.scale * x @ self.w
        for _ in range(self.power):
            y = getattr(jnp, self.act)(y) * self.phase.real
        return y if self.gated else -y


def attention_step(attention: Any, x: Any, key: Any) -> Any:
    keys = jax.random.split(key, x.shape[0])

    def loss(attention: Any) -> Any:
        return jnp.mean(jax.vmap(lambda x, key: attention(x, x, x, key=key))(x, keys) ** 2)

    value, grads = eqx.filter_value_and_grad(loss)(attention)
    return eqx.apply_updates(attention, jax.tree.map(lambda g: -0.1 * g, grads)), value


def gated_step(model: Any, x: Any) -> Any:
    grads = eqx.filter_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -g, grads)), model.power


def normalised_step(norm: Any, state: Any, x: Any) -> Any:
    mapped = jax.vmap(norm, axis_name="b", in_axes=(0, None), out_axes=(0, None))
    return mapped(x, state)


def attention() -> Any:
    return eqx.nn.MultiheadAttention(4, 16, dropout_p=0.1, key=jax.random.key(0))


MODULES: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("attention", attention_step, (attention(), jnp.ones((8, 4, 16)), jax.random.key(1))),
    ("own module", gated_step, (Gated(jnp.eye(4)), jnp.ones((8, 4)))),
    (
        "batch norm",
        normalised_step,
        (*eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "b", mode="batch"), jnp.ones((8, 4))),
    ),
]


@pytest.mark.parametrize(("step", "args"), [m[1:] for m in MODULES], ids=[m[0] for m in MODULES])
def test_python_values_inside_modules_stay_static_and_steps_chain(
    step: Any, args: tuple[Any, ...]
) -> None:
    jitted = eqx.filter_jit(step)
    plan = autoshard.apply(jitted, args, MESH, "dp")
    ours, theirs = plan(*args), jitted(*args)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert isinstance(a, jax.Array) == isinstance(b, jax.Array)
        if not isinstance(a, jax.Array):
            assert a == b
            continue
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)
    before = len(plan._rebound)
    if step is not normalised_step:
        plan(ours[0], *args[1:])  # the same signature: what came back has its statics
    assert len(plan._rebound) == before


def test_init_and_place_know_the_statics() -> None:
    step = eqx.filter_jit(gated_step)
    plan = autoshard.apply(step, (Gated(jnp.eye(4)), jnp.ones((8, 4))), MESH, "fsdp")
    placed = plan.place("model", Gated(jnp.eye(4)))
    assert placed.power == 2
    assert type(placed.gated) is bool
    made = autoshard.init(plan, lambda: Gated(jnp.zeros((4, 4))))
    assert (made.power, made.scale) == (2, 0.5)
    assert made.w.sharding == placed.w.sharding
