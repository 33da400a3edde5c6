"""What an argument leaf is for, from the data flow alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.axes.argument_groups import Group
from autoshard.layout.layout import Layout
from autoshard.search.presets import presets
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
    assert [groups[f"state/{name}"] for name in ("w", "m", "count")] == [
        PARAMETER,
        OPTIMIZER,
        OPTIMIZER,
    ]


def test_a_linear_model_has_no_hidden_axis_that_tells_parameters_from_data() -> None:
    def step(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: optax.softmax_cross_entropy(x @ w, labels).mean())(w)

    groups = groups_of(step, array(16, 8), array(32, 16), array(32, 8), donate_argnums=0)
    assert list(groups.values()) == [PARAMETER, DATA, DATA]


def test_in_a_forward_pass_parameters_are_what_has_no_batch() -> None:
    groups = groups_of(decoder_loss, decoder_args()[0], decoder_args()[2])
    assert under(groups, "params") == {PARAMETER}
    assert under(groups, "tokens") == {DATA}
    groups = groups_of(
        lambda x, w1, w2: jnp.tanh(x @ w1) @ w2, array(64, 16), array(16, 32), array(32, 16)
    )
    assert list(groups.values()) == [DATA, PARAMETER, PARAMETER]


def decode_step(params: Any, cache: Any, token: jax.Array, position: jax.Array) -> Any:
    x = params["emb"][token]
    q, new_k, new_v = (jnp.einsum("bd,dhk->bhk", x, params[n]) for n in ("q", "k", "v"))
    keys = jax.lax.dynamic_update_slice(cache["k"], new_k[:, None], (0, position, 0, 0))
    values = jax.lax.dynamic_update_slice(cache["v"], new_v[:, None], (0, position, 0, 0))
    weights = jax.nn.softmax(jnp.einsum("bhk,bshk->bhs", q, keys))
    x = x + jnp.einsum("bhs,bshk,hkd->bd", weights, values, params["o"])
    return x @ params["emb"].T, {"k": keys, "v": values}


def test_a_decode_step_has_a_cache_and_parameters() -> None:
    batch, length, heads, k, d, vocab = 16, 32, 4, 8, 32, 64
    projections = {name: array(d, heads, k) for name in "qkv"}
    params = {"emb": array(vocab, d), "o": array(heads, k, d), **projections}
    cache = {name: array(batch, length, heads, k) for name in "kv"}
    token, position = array(batch, dtype=np.int32), array(dtype=np.int32)
    made = prepared(
        decode_step, (params, cache, token, position), mesh_of(data=4, model=2), donate_argnums=1
    )
    program, logical_axes = made.traced.program, made.problem.logical_axes
    assert {program.input_paths[i] for i, _ in made.carry} == {"cache/k", "cache/v"}
    groups = dict(zip(program.input_paths, made.problem.groups.of_input, strict=True))
    assert under(groups, "params") == {PARAMETER}
    assert under(groups, "cache") == {DATA}
    dims = [logical_axes.of_value[value.index] for value in program.body.inputs]
    axes = dict(zip(program.input_paths, dims, strict=True))
    assert axes["cache/k"][0] == axes["token"][0], "the batch"
    assert axes["cache/k"][2] == axes["params/q"][1], "the heads"


def lora_step(adapters: Any, base: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss(adapters: Any) -> jax.Array:
        h = x
        for w, scale, (a, b) in zip(base["w"], base["scale"], adapters, strict=True):
            h = jnp.tanh((h @ w + (h @ a) @ b) * scale)
        return jnp.mean((h - y) ** 2)

    value, grads = jax.value_and_grad(loss)(adapters)
    return jax.tree.map(lambda p, g: p - 0.1 * g, adapters, grads), value


@pytest.mark.parametrize("batch", [32, 1])
def test_frozen_weights_are_parameters(batch: int) -> None:
    base = {"w": [array(16, 16)] * 2, "scale": [array(16)] * 2}
    adapters = [(array(16, 2), array(2, 16))] * 2
    x = array(batch, 8, 16)
    groups = groups_of(lora_step, adapters, base, x, x, donate_argnums=0)
    assert under(groups, "adapters") == under(groups, "base") == {PARAMETER}
    assert groups["x"] is groups["y"] is DATA


def test_a_frozen_table_that_is_looked_up_is_a_parameter_and_a_graph_is_not() -> None:
    def step(w: Any, table: jax.Array, tokens: jax.Array) -> Any:
        return {"w": w["w"] - jax.grad(lambda w: jnp.sin(table[tokens] @ w).sum())(w["w"])}

    groups = groups_of(
        step, {"w": array(16, 8)}, array(64, 16), array(32, 4, dtype=np.int32), donate_argnums=0
    )
    assert list(groups.values()) == [PARAMETER, PARAMETER, DATA]

    def graph_step(w: Any, graph: Any) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            messages = graph["nodes"][graph["senders"]] @ w
            return jax.ops.segment_sum(messages, graph["receivers"], graph["nodes"].shape[0]).sum()

        return {"w": w["w"] - jax.grad(loss)(w["w"])}

    edges = array(96, dtype=np.int32)
    graph = {"nodes": array(40, 16), "receivers": edges, "senders": edges}
    groups = groups_of(graph_step, {"w": array(16, 8)}, graph, donate_argnums=0)
    assert under(groups, "graph") == {DATA}


def forward(params: Any, x: jax.Array) -> jax.Array:
    x = x * params["scale"]
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[n]) for n in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    x = x + jnp.einsum("bhts,bshk,hkd->btd", weights, v, params["o"])
    return (x + jnp.tanh(x @ params["up"]) @ params["down"]) @ params["head"]


FORWARD = {
    **{name: array(32, 4, 8) for name in "qkv"},
    "o": array(4, 8, 32),
    "up": array(32, 64),
    "down": array(64, 32),
    "head": array(32, 128),
    "scale": array(32),
}


@pytest.mark.parametrize("shape", [(8, 16, 32), (1, 16, 32), (1, 1, 32)])
def test_a_forward_pass_at_any_batch(shape: tuple[int, ...]) -> None:
    groups = groups_of(forward, FORWARD, array(*shape))
    assert under(groups, "params") == {PARAMETER}
    assert groups["x"] is DATA


def test_gradients_in_another_structure() -> None:
    def grads(params: Any, x: jax.Array) -> Any:
        gradients = jax.grad(lambda p: forward(p, x).mean())(params)
        return list(gradients.values()), sum(jnp.sum(g**2) for g in gradients.values())

    groups = groups_of(grads, FORWARD, array(8, 16, 32))
    assert under(groups, "params") == {PARAMETER}
    assert groups["x"] is DATA


def test_decoding_one_sequence() -> None:
    def decode(params: Any, cache: Any, x: jax.Array, position: jax.Array) -> Any:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[n]) for n in "qkv")
        cache = {
            name: jax.lax.dynamic_update_slice(cache[name], new, (0, position, 0, 0))
            for name, new in (("k", k), ("v", v))
        }
        weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, cache["k"]))
        x = x + jnp.einsum("bhts,bshk,hkd->btd", weights, cache["v"], params["o"])
        return x + jnp.tanh(x @ params["up"]) @ params["down"], cache

    cache = {name: array(1, 64, 4, 8) for name in "kv"}
    groups = groups_of(
        decode, FORWARD, cache, array(1, 1, 32), array(dtype=np.int32), donate_argnums=1
    )
    assert {groups[f"params/{n}"] for n in ("q", "k", "v", "o", "up", "down")} == {PARAMETER}
    assert under(groups, "cache") == {DATA}
    assert groups["x"] is groups["position"] is DATA


def test_values_of_the_optimizer_state_reach_up_to_the_update() -> None:
    made = prepared(decoder_step, decoder_args(), mesh_of(data=4, model=2), donate_argnums=(0, 1))
    program, groups = made.traced.program, made.problem.groups
    inside = groups.optimizer_values
    for path, value in zip(program.input_paths, program.body.inputs, strict=True):
        assert (value.index in inside) == path.startswith("moment")
    for path, value in zip(program.output_paths, program.body.outputs, strict=True):
        if value.shape:
            assert (value.index in inside) == path.startswith("out/1"), path


# State and data in one argument


def adam_state(params: Any) -> Any:
    return jax.eval_shape(optax.adam(1e-3).init, params)


def actor_critic(params: Any, observed: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden = jnp.tanh(observed @ params["w1"] + params["b1"])
    return hidden @ params["policy"], (hidden @ params["value"])[..., 0]


def reinforce(runner: Any) -> Any:
    """Parameters, optimizer state, environments and observations, all in one runner state."""
    params, opt_state, environment, observed, count = runner

    def act(carried: Any, _: None) -> Any:
        environment, observed = carried
        logits, value = actor_critic(params, observed)
        environment = environment + 0.1 * jnp.argmax(logits, -1)[:, None]
        return (environment, jnp.tanh(environment)), (observed, environment.sum(-1), value)

    (environment, observed), seen = jax.lax.scan(act, (environment, observed), None, 8)

    def loss(params: Any) -> jax.Array:
        logits, value = actor_critic(params, seen[0])
        return ((value - seen[1]) ** 2).mean() + jax.nn.logsumexp(logits, -1).mean()

    grads = jax.grad(loss)(params)
    updates, opt_state = optax.adam(1e-3).update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, environment, observed, count + 1)


def decode_all(state: Any) -> Any:
    """The decode step, with parameters, cache and token in one argument."""
    params, cache, token, position = state
    logits, cache = decode_step(params, cache, token, position)
    return params, cache, jnp.argmax(logits, -1).astype(jnp.int32), position + 1


def resident(state: Any) -> Any:
    """A train step that keeps its data."""
    params, moment, x, y = state
    grads = jax.grad(lambda p: ((jax.nn.relu(x @ p["up"]) @ p["down"] - y) ** 2).mean())(params)
    moment = jax.tree.map(lambda m, g: 0.9 * m + g, moment, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moment), moment, x, y


POLICY = {"w1": array(8, 32), "b1": array(32), "policy": array(32, 4), "value": array(32, 1)}
DECODER = {"emb": array(48, 32), "o": array(4, 8, 32)} | {n: array(32, 4, 8) for n in "qkv"}
CACHE = {name: array(16, 24, 4, 8) for name in "kv"}
UP_DOWN = {"up": array(32, 64), "down": array(64, 32)}


@pytest.mark.parametrize(
    ("step", "state", "expected"),
    [
        (
            reinforce,
            (POLICY, adam_state(POLICY), array(64, 8), array(64, 8), array(dtype=np.int32)),
            {0: PARAMETER, 1: OPTIMIZER, 2: DATA, 3: DATA},
        ),
        (
            resident,
            (UP_DOWN, UP_DOWN, array(128, 32), array(128, 32)),
            {0: PARAMETER, 1: OPTIMIZER, 2: DATA, 3: DATA},
        ),
        (
            decode_all,
            (DECODER, CACHE, array(16, dtype=np.int32), array(dtype=np.int32)),
            {0: PARAMETER, 1: DATA, 2: DATA},
        ),
    ],
)
def test_state_with_the_batch_is_data(step: Any, state: Any, expected: dict[int, Group]) -> None:
    made = prepared(step, (state,), mesh_of(data=4, model=2), donate_argnums=0)
    groups = dict(zip(made.traced.program.input_paths, made.problem.groups.of_input, strict=True))
    for part, group in expected.items():
        assert {g for path, g in groups.items() if path.split("/")[1] == str(part)} == {group}
    named = {preset.name: preset.rules for preset in presets(made.problem)[0]}
    assert {"dp", "fsdp", "tp", "fsdp+tp"} <= named.keys()
    assert ("zero1" in named) == (OPTIMIZER in expected.values())
    specs = dict(zip(groups, Layout(made.problem, named["dp"]).input_specs(), strict=True))
    for path, group in groups.items():
        is_data = group is DATA
        assert any(specs[path]) == is_data, path
        assert not is_data or specs[path][0] == ("data", "model")
