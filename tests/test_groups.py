"""What an argument leaf is for, from the data flow alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autoshard.groups import Group
from tests.models import decoder_args, decoder_loss, decoder_step, mlp_args, mlp_step
from tests.stages import array, mesh_of, prepared

PARAMETER, OPTIMIZER, DATA = Group.PARAMETER, Group.OPTIMIZER, Group.DATA


def groups_of(fn: Any, *args: Any, **options: Any) -> dict[str, Group]:
    made = prepared(fn, args, mesh_of(data=4, model=2), **options)
    return dict(zip(made.traced.program.input_paths, made.problem.groups.of_input, strict=True))


def under(groups: dict[str, Group], name: str) -> set[Group]:
    return {group for path, group in groups.items() if path.split("/")[0] == name}


def test_parameters_come_back_and_are_contracted() -> None:
    groups = groups_of(mlp_step, *mlp_args())
    assert groups["params/w1"] is groups["params/w2"] is groups["params/b1"] is PARAMETER
    assert groups["x"] is groups["y"] is DATA


def test_momentum_is_optimizer_state_with_and_without_donation() -> None:
    for options in ({}, {"donate_argnums": (0, 1)}):
        groups = groups_of(decoder_step, *decoder_args(), **options)
        assert under(groups, "params") == {PARAMETER}
        assert under(groups, "moment") == {OPTIMIZER}
        assert under(groups, "tokens") == {DATA}


def test_adam_state_is_optimizer_state_whatever_it_is_called() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    params = {"kernel": array(16, 8), "bias": array(8)}

    def step(s: Any, p: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.tanh(x @ p["kernel"] + p["bias"]).sum())(p)
        updates, s = optimizer.update(grads, s, p)
        return s, optax.apply_updates(p, updates)

    groups = groups_of(step, jax.eval_shape(optimizer.init, params), params, array(32, 16))
    assert under(groups, "s") == {OPTIMIZER}
    assert under(groups, "p") == {PARAMETER}
    assert under(groups, "x") == {DATA}


def test_one_state_object_is_told_apart_by_leaf() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda w: jnp.sin(x @ w).sum())(state["w"])
        m = 0.9 * state["m"] + grads
        return {"w": state["w"] - m, "m": m, "count": state["count"] + 1}

    state = {"w": array(16, 8), "m": array(16, 8), "count": array(dtype=np.int32)}
    groups = groups_of(step, state, array(32, 16), donate_argnums=0)
    assert [groups[f"state/{name}"] for name in ("w", "m", "count")] == [PARAMETER, OPTIMIZER, OPTIMIZER]


def test_a_linear_model_has_no_hidden_axis_that_tells_parameters_from_data() -> None:
    def step(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: optax.softmax_cross_entropy(x @ w, labels).mean())(w)

    groups = groups_of(step, array(16, 8), array(32, 16), array(32, 8), donate_argnums=0)
    assert list(groups.values()) == [PARAMETER, DATA, DATA]


def test_in_a_forward_pass_parameters_are_what_has_no_batch() -> None:
    groups = groups_of(decoder_loss, decoder_args()[0], decoder_args()[2])
    assert under(groups, "params") == {PARAMETER}
    assert under(groups, "tokens") == {DATA}
    groups = groups_of(lambda x, w1, w2: jnp.tanh(x @ w1) @ w2, array(64, 16), array(16, 32), array(32, 16))
    assert list(groups.values()) == [DATA, PARAMETER, PARAMETER]


def test_a_decode_step_has_a_cache_and_parameters() -> None:
    batch, length, heads, k, d, vocab = 16, 32, 4, 8, 32, 64

    def decode(params: Any, cache: Any, token: jax.Array, position: jax.Array) -> Any:
        x = params["emb"][token]
        q, new_k, new_v = (jnp.einsum("bd,dhk->bhk", x, params[n]) for n in ("q", "k", "v"))
        keys = jax.lax.dynamic_update_slice(cache["k"], new_k[:, None], (0, position, 0, 0))
        values = jax.lax.dynamic_update_slice(cache["v"], new_v[:, None], (0, position, 0, 0))
        weights = jax.nn.softmax(jnp.einsum("bhk,bshk->bhs", q, keys))
        x = x + jnp.einsum("bhs,bshk,hkd->bd", weights, values, params["o"])
        return x @ params["emb"].T, {"k": keys, "v": values}

    params = {"emb": array(vocab, d), "o": array(heads, k, d), **{n: array(d, heads, k) for n in "qkv"}}
    cache = {n: array(batch, length, heads, k) for n in "kv"}
    token, position = array(batch, dtype=np.int32), array(dtype=np.int32)
    made = prepared(decode, (params, cache, token, position), mesh_of(data=4, model=2), donate_argnums=1)
    assert {made.traced.program.input_paths[i] for i, _ in made.carry} == {"cache/k", "cache/v"}
    roles, program = made.problem.roles, made.traced.program
    groups = dict(zip(program.input_paths, made.problem.groups.of_input, strict=True))
    assert under(groups, "params") == {PARAMETER}
    assert under(groups, "cache") == {DATA}
    specs = dict(zip(program.input_paths, (roles.of_value[v.index] for v in program.body.inputs), strict=True))
    assert specs["cache/k"][0] == specs["token"][0], "the batch"
    assert specs["cache/k"][2] == specs["params/q"][1], "the heads"


def test_values_of_the_optimizer_state_reach_up_to_the_update() -> None:
    made = prepared(decoder_step, decoder_args(), mesh_of(data=4, model=2), donate_argnums=(0, 1))
    program, groups = made.traced.program, made.problem.groups
    inside = groups.optimizer_values
    for path, value in zip(program.input_paths, program.body.inputs, strict=True):
        assert (value.index in inside) == path.startswith("moment")
    for path, value in zip(program.output_paths, program.body.outputs, strict=True):
        if value.shape:
            assert (value.index in inside) == path.startswith("out/1"), path
