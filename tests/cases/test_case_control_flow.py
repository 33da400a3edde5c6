"""Loops, branches, rematerialisation, custom gradients, and regions that bring shardings of their
own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
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
    replicated_bytes,
    search,
    search_and_compare,
    split_leaves,
    winner,
)

import autoshard

# Scans over stacked layers


def layer(x, p):
    h = jax.nn.gelu(x @ p["up"]) @ p["down"]
    return x + h / (1e-6 + jnp.sqrt((h * h).mean(-1, keepdims=True)))


def stack_of(layers, width=16, hidden=32):
    return {
        "up": floats(layers, width, hidden, scale=0.1),
        "down": floats(layers, hidden, width, scale=0.1),
    }


def deep(stack, x):
    return lax.scan(lambda c, p: (layer(c, p), None), x, stack)[0]


@pytest.mark.parametrize("layers", [8, 3])
def test_scan_over_stacked_layers(layers):
    mesh, args = mesh_of(fsdp=4, tp=2), (stack_of(layers), floats(8, 16))
    budget = replicated_bytes(deep, args, mesh) // 2
    plan = search_and_compare(deep, args, mesh, memory_budget_bytes=budget)
    assert winner(plan).compiled.peak_bytes <= budget
    assert split_leaves(plan)
    assert all(spec[0] is None for path, spec in plan.specs.items() if "stack" in path and spec), (
        "the layer dimension is left whole: each step would fetch its layer from elsewhere"
    )


@pytest.mark.parametrize(
    "pins",
    [
        {"stack/up": P("fsdp"), "stack/down": P("fsdp")},
        {"stack/up": P(None, "fsdp", "tp"), "stack/down": P(None, "tp", "fsdp"), "x": P("fsdp")},
    ],
)
def test_layouts_of_stacked_layers(pins):
    pin_and_compare(deep, (stack_of(8), floats(8, 16)), mesh_of(fsdp=4, tp=2), pins)


def test_gradient_of_a_rematerialised_scan():
    def value_and_grad(stack, x, y):
        def loss(stack):
            nothing = jax.checkpoint_policies.nothing_saveable
            body = jax.checkpoint(lambda c, p: (layer(c, p), None), policy=nothing)
            return ((lax.scan(body, x, stack)[0] - y) ** 2).mean()

        return jax.value_and_grad(loss)(stack)

    mesh, args = mesh_of(fsdp=4, tp=2), (stack_of(4), floats(8, 16), floats(8, 16, seed=5))
    budget = replicated_bytes(value_and_grad, args, mesh) // 2
    plan = search_and_compare(value_and_grad, args, mesh, memory_budget_bytes=budget)
    assert split_leaves(plan)
    pins = {
        "stack/up": P(None, "fsdp", "tp"),
        "stack/down": P(None, "tp", "fsdp"),
        "x": P("fsdp"),
        "y": P("fsdp"),
    }
    pin_and_compare(value_and_grad, args, mesh, pins)


def test_reversed_scan_with_stacked_outputs_and_an_integer_carry():
    def suffix_sums(x, start):
        def body(carry, row):
            total, count = carry
            return (total + row, count + 1), (total, count)

        return lax.scan(body, (start, 0), x, reverse=True)

    search_and_compare(suffix_sums, (floats(6, 8, 4), floats(8, 4)), mesh_of(a=4, b=2))


@pytest.mark.parametrize("micro", [2, 4])
def test_accumulated_gradients_still_split_the_batch(micro):
    def loss(w, x, y):
        return ((jnp.tanh(x @ w["in"]) @ w["out"] - y) ** 2).mean()

    def step(w, x, y):
        def body(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(w, *batch)), None

        split = jax.tree.map(lambda a: a.reshape(micro, -1, *a.shape[1:]), (x, y))
        grads = lax.scan(body, jax.tree.map(jnp.zeros_like, w), split)[0]
        return jax.tree.map(lambda p, g: p - 0.1 * g / micro, w, grads)

    w = {"in": floats(32, 64, scale=0.1), "out": floats(64, 32, scale=0.1)}
    args, mesh = (w, floats(64, 32), floats(64, 32, seed=1)), mesh_of(data=8)
    alone = autoshard.apply(step, args, mesh, "replicated").compile().evidence.flops
    plan = autoshard.apply(step, args, mesh, "dp")
    assert plan.specs["x"] == P("data")
    assert plan.compile().evidence.flops < alone / 4, (
        "each device does its share of every micro-batch"
    )
    assert_same(plan(*args), plain(step, args))
    search_and_compare(step, args, mesh, hardware=free_collectives())


# Loops whose length depends on data, branches


def power_iteration(a, x, mode):
    def body(state):
        v, i, _ = state
        w = a @ v
        norm = jnp.linalg.norm(w)
        return w / norm, i + 1, norm

    start = (x, 0, jnp.float32(1))
    v, steps, norm = lax.while_loop(lambda s: s[1] < jnp.minimum(mode + 5, 12), body, start)
    v = lax.cond(norm > 1.0, lambda t: t * 2, lambda t: -t, v)
    return lax.switch(mode, [lambda t: t, jnp.flip, lambda t: jnp.roll(t, 1)], v), steps, norm


def power_args(mode):
    a = floats(16, 16)
    return a @ a.T, np.ones(16, np.float32), np.int32(mode)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_while_cond_and_switch(mode):
    mesh, args = mesh_of(a=4, b=2), power_args(mode)
    budget = replicated_bytes(power_iteration, args, mesh) // 2
    plan = search_and_compare(power_iteration, args, mesh, memory_budget_bytes=budget)
    assert split_leaves(plan)


@pytest.mark.parametrize(
    "pins", [{"a": P("a", None)}, {"a": P("a", "b"), "x": P("b")}, {"x": P(("a", "b"))}]
)
def test_layouts_of_a_while_loop(pins):
    pins = {
        path: P(*spec[: max((i + 1 for i, e in enumerate(spec) if e), default=0)])
        for path, spec in pins.items()
    }
    pin_and_compare(power_iteration, power_args(2), mesh_of(a=4, b=2), pins)


def test_while_inside_scan_inside_cond():
    def nested(x, flag):
        def halve(v):
            return lax.while_loop(lambda v: jnp.abs(v).max() > 1.0, lambda v: v * 0.5, v)

        def scanned(x):
            return lax.scan(lambda c, row: (c + halve(row), c.sum()), jnp.zeros_like(x[0]), x)

        return lax.cond(flag, scanned, lambda x: (x.sum(0), x.sum((1, 2))), x)

    for flag in (True, False):
        search_and_compare(nested, (floats(4, 8, 16, scale=3.0), flag), mesh_of(a=4, b=2))


def test_associative_scan_of_a_state_space():
    def recurrence(decay, x):
        def combine(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        return lax.associative_scan(combine, (jax.nn.sigmoid(decay) * jnp.ones_like(x), x), axis=1)[
            1
        ]

    search_and_compare(recurrence, (floats(8), floats(4, 16, 8)), mesh_of(a=4, b=2))


# Custom gradients


@jax.custom_vjp
def scale_rows(x, k):
    return x * (k[:, None] + 1)


scale_rows.defvjp(
    lambda x, k: (scale_rows(x, k), k),
    lambda k, g: (g * (k[:, None] + 1), np.zeros(k.shape, jax.dtypes.float0)),
)


def integer_gradient(p, x):
    return jax.grad(lambda q: scale_rows(x @ q["w"], q["k"]).sum(), allow_int=True)(p)


def test_float0_outputs():
    args = {"w": floats(8, 8), "k": np.arange(8, dtype=np.int32)}, floats(8, 8, seed=1)
    plan = search_and_compare(integer_gradient, args, mesh_of(a=4, b=2))
    assert plan(*args)["k"].dtype == jax.dtypes.float0
    pins = {"p/k": P("a"), "x": P("a"), "p/w": P(None, "b")}
    pin_and_compare(integer_gradient, args, mesh_of(a=4, b=2), pins)


def test_float0_arguments():
    def apply_update(p, g):
        return jax.tree.map(lambda a, b: a if b.dtype == jax.dtypes.float0 else a - 0.1 * b, p, g)

    p = {"w": floats(8, 8), "k": np.arange(8, dtype=np.int32)}
    g = jax.tree.map(np.asarray, integer_gradient(p, floats(8, 8, seed=1)))
    search_and_compare(apply_update, (p, g), mesh_of(a=4, b=2))


def test_custom_gradients_survive_in_the_plans_own_function():
    @jax.custom_vjp
    def double_gradient(x):
        return jnp.sin(x)

    double_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))

    def forward(x, w):
        return double_gradient(x @ w).sum()

    args = floats(8, 16), floats(16, 8)
    plan = search_and_compare(forward, args, mesh_of(a=4, b=2))
    assert_same(jax.jit(jax.grad(plan.fn))(*args), jax.jit(jax.grad(forward))(*args))


# Shardings of the function's own


def nested_jit(mesh):
    inner = jax.jit(lambda u, v: jnp.tanh(u @ v), out_shardings=NamedSharding(mesh, P("a", None)))
    return lambda x, w1, w2: inner(inner(x, w1), w2).sum(0)


@pytest.mark.parametrize(
    "own",
    [{"a": 4, "b": 2}, {"a": 2, "b": 4}, {"p": 8, "a": 1}],
    ids=["same", "same names", "others"],
)
def test_nested_jit_with_its_own_shardings(own):
    mesh, fn = mesh_of(a=4, b=2), nested_jit(mesh_of(**own))
    args = floats(8, 16), floats(16, 16, scale=0.3), floats(16, 16, scale=0.3, seed=1)
    plan = search_and_compare(fn, args, mesh)
    assert "replicated" in plan.verified.reason, "it cannot run on one device"
    for pins in ({"x": P("b", "a"), "w1": P("a", "b")}, {"x": P("a")}):
        pin_and_compare(fn, args, mesh, pins)


@pytest.mark.parametrize(
    "own",
    [{"a": 4, "b": 2}, {"a": 2, "b": 4}, {"r": 2, "s": 2, "t": 2}],
    ids=["same", "same names", "others"],
)
@pytest.mark.parametrize("user_constraints", ["pin", "ignore"])
def test_constraints_on_any_mesh_over_the_devices(own, user_constraints):
    first, *_, last = own
    sharding = NamedSharding(mesh_of(**own), P(first, last))

    def forward(x, w):
        return lax.with_sharding_constraint(jnp.tanh(x @ w), sharding).sum(0)

    plan = search_and_compare(
        forward,
        (floats(8, 16), floats(16, 8)),
        mesh_of(a=4, b=2),
        user_constraints=user_constraints,
    )
    pins = plan.layout.problem.pins
    assert bool(pins) == (own == {"a": 4, "b": 2} and user_constraints == "pin"), (
        "only this mesh's words are pins"
    )


def test_bare_specs_mean_the_given_mesh():
    def forward(x, w):
        return lax.with_sharding_constraint(x @ w, P("a", None)) * 2

    plan = search_and_compare(
        forward,
        (floats(8, 16), floats(16, 8)),
        mesh_of(a=4, b=2),
        reference=jax.jit(lambda x, w: x @ w * 2),
    )
    assert plan.layout.problem.pins


def summed(mesh, check):
    def inner(a, b):
        return lax.psum(a @ b, "y")

    def fn(a, b):
        specs = {"in_specs": (P("x", "y"), P("y", None)), "out_specs": P("x", None)}
        return jax.nn.softmax(jax.shard_map(inner, mesh=mesh, check_vma=check, **specs)(a, b) * 0.1)

    return fn


@pytest.mark.parametrize("check", [True, False])
def test_shard_map_inside(check):
    mesh, args = mesh_of(x=4, y=2), (floats(8, 16), floats(16, 8))
    fn = summed(mesh, check)
    search_and_compare(fn, args, mesh)
    pin_and_compare(fn, args, mesh, {"a": P("x", "y"), "b": P("y")})
    pin_and_compare(fn, args, mesh, {"a": P("y", "x")})


def test_shard_map_that_is_manual_over_one_axis_only():
    mesh = mesh_of(x=4, y=2)

    def fn(a, b):
        part = jax.shard_map(
            lambda a, b: lax.psum(a @ b, "y"),
            mesh=mesh,
            in_specs=(P(None, "y"), P("y")),
            out_specs=P(),
            axis_names={"y"},
        )
        return jnp.tanh(part(a, b))

    search_and_compare(fn, (floats(8, 16), floats(16, 8)), mesh)


def batched_rows(mesh):
    def row(v, w):
        return jnp.tanh(lax.with_sharding_constraint(v, NamedSharding(mesh, P("y"))) @ w)

    return jax.vmap(row, in_axes=(0, None), spmd_axis_name="x")


def test_vmap_with_a_mesh_axis():
    mesh, args = mesh_of(x=2, y=4), (floats(8, 16), floats(16, 8))
    fn = batched_rows(mesh)
    search_and_compare(fn, args, mesh)
    pin_and_compare(fn, args, mesh, {"v": P("x", "y"), "w": P("y")})
    pin_and_compare(fn, args, mesh, {"v": P("y", "x")})


# Checks that are data


@pytest.mark.parametrize("index", [3, 99])
def test_checkify_outputs(index):
    def look(x, i):
        x = jnp.asarray(x)
        checkify.check(jnp.all(x > -100), "x too small: {m}", m=x.min())
        return jnp.sqrt(jnp.abs(x))[i]

    fn = checkify.checkify(look, errors=checkify.index_checks | checkify.user_checks)
    args = floats(16, 4), np.int32(index)

    def look_at(out):
        return out[1], (out[0].get() or "")[:20]

    plan = search_and_compare(fn, args, mesh_of(a=4, b=2), look_at=look_at)
    assert bool(plan(*args)[0].get()) == (index == 99)
    pinned = autoshard.apply(fn, args, mesh_of(a=4, b=2), [], pins={"args/0": P("a", "b")})
    assert_same(look_at(pinned(*args)), look_at(plain(fn, args)))


def test_one_helper_called_twice_stays_two_places():
    @jax.jit
    def helper(x, w):
        return jnp.tanh(x @ w)

    def fn(x, y, w, v):
        return helper(x, w).sum() + helper(y, v).sum(), integers(8, 4)

    plan = search_and_compare(
        fn, (floats(8, 16), floats(32, 16), floats(16, 4), floats(16, 4)), mesh_of(a=4, b=2)
    )
    axes = plan.layout.problem.logical_axes.classes
    (x, y, *_) = plan.traced.program.body.inputs
    assert axes.of_value[x.index][0] != axes.of_value[y.index][0]


def test_functions_that_are_jitted_already_bring_their_donation():
    step = jax.jit(lambda s, x: (s + x.sum(0), s.sum()), donate_argnums=0)
    plan = search(step, (floats(16), floats(8, 16)), mesh_of(a=4, b=2))
    assert plan.traced.call.donated == (True, False)
    assert_same(plan(floats(16), floats(8, 16)), step(floats(16), floats(8, 16)))
