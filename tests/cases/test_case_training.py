"""Steps whose outputs feed their inputs, memory budgets, pins that cannot be, and layouts known to
be right."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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


def mlp_params(width=16, hidden=32):
    return {
        "l1": {"w": floats(width, hidden, scale=0.2), "b": np.zeros(hidden, np.float32)},
        "l2": {"w": floats(hidden, width, scale=0.2), "b": np.zeros(width, np.float32)},
    }


def mlp(p, x):
    return jax.nn.relu(x @ p["l1"]["w"] + p["l1"]["b"]) @ p["l2"]["w"] + p["l2"]["b"]


def mlp_loss(p, x, y):
    return ((mlp(p, x) - y) ** 2).mean()


# Optimizers


def masked_adam():
    transforms = {"adam": optax.adamw(1e-2), "frozen": optax.set_to_zero()}
    labels = {"l1": "adam", "l2": {"w": "adam", "b": "frozen"}}
    return optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(transforms, labels))


def step_of(optimizer):
    def step(params, opt, x, y):
        loss, grads = jax.value_and_grad(mlp_loss)(params, x, y)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    return step


@pytest.mark.parametrize(
    "optimizer", [masked_adam(), optax.adafactor(1e-2, min_dim_size_to_factor=8), optax.lion(1e-3)]
)
def test_optimizer_state_mirrors_its_parameters(optimizer):
    params = mlp_params()
    args = params, optimizer.init(params), floats(8, 16), floats(8, 16, seed=1)
    step, mesh = step_of(optimizer), mesh_of(fsdp=4, tp=2)
    budget = replicated_bytes(step, args, mesh, donate_argnums=(0, 1)) // 2
    plan = search_and_compare(step, args, mesh, donate_argnums=(0, 1), memory_budget_bytes=budget)
    assert split_leaves(plan)
    shapes = {path: tuple(leaf.shape) for path, leaf in plan.table.inputs.items()}
    for path, spec in plan.specs.items():
        ending = re.search(r"(l\d/[wb])$", path)
        if path.startswith("opt") and ending and shapes[path] == shapes[f"params/{ending[1]}"]:
            used = {
                axis
                for entry in plan.specs[f"params/{ending[1]}"]
                for axis in np.atleast_1d(entry or [])
            }
            assert used <= {axis for entry in spec for axis in np.atleast_1d(entry or [])}, (
                f"{path} is split at least as its parameter is"
            )


def test_parameters_split_with_the_optimizer_state_replicated_is_legal():
    optimizer, params = masked_adam(), mlp_params()
    args = params, optimizer.init(params), floats(8, 16), floats(8, 16, seed=1)
    pins = {
        "params/l1/w": P("fsdp", "tp"),
        "params/l2/w": P("tp", "fsdp"),
        "x": P("fsdp"),
        "y": P("fsdp"),
    }
    pin_and_compare(step_of(optimizer), args, mesh_of(fsdp=4, tp=2), pins)


# Steps that feed themselves


def momentum_step(state, batch):
    loss, grads = jax.value_and_grad(mlp_loss)(state["p"], batch["x"], batch["y"])
    m = jax.tree.map(lambda a, b: 0.9 * a + b, state["m"], grads)
    p = jax.tree.map(lambda a, b: a - 0.1 * b, state["p"], m)
    return {"p": p, "m": m, "step": state["step"] + 1, "lr": state["lr"] * 0.99}, loss


def momentum_args():
    p = mlp_params()
    state = {
        "p": p,
        "m": jax.tree.map(np.zeros_like, p),
        "step": np.int32(0),
        "lr": np.float32(0.1),
    }
    return state, {"x": floats(8, 16), "y": floats(8, 16, seed=2)}


@pytest.mark.parametrize("carry", [None, {0: 0}, {"state": 0}, (0, 0), [(0, 0)]])
def test_a_step_is_a_fixed_point(carry):
    mesh, args = mesh_of(fsdp=4, tp=2), momentum_args()
    budget = replicated_bytes(momentum_step, args, mesh, donate_argnums=0) // 2
    plan = search_and_compare(
        momentum_step, args, mesh, donate_argnums=0, carry=carry, memory_budget_bytes=budget
    )
    inside = {
        path.removeprefix("state/"): leaf.spec
        for path, leaf in plan.table.inputs.items()
        if "state/" in path
    }
    outside = {
        path.removeprefix("out/0/"): leaf.spec
        for path, leaf in plan.table.outputs.items()
        if "/0/" in path
    }
    assert inside == outside
    state, batch = plan.place(0, args[0]), plan.place(1, args[1])
    want, before = args[0], plan.precompiled
    for _ in range(3):
        state, _ = plan(state, batch)
        want, _ = jax.jit(momentum_step)(want, args[1])
    assert_same(state, want)
    assert plan.compile() is before, "it compiles once, in the search"


def test_a_layout_of_one_step_by_hand():
    layers = ("p/l1/w", "m/l1/w", "p/l2/w", "m/l2/w")
    pins = {f"state/{leaf}": P("fsdp") for leaf in layers} | {
        "batch/x": P("fsdp"),
        "batch/y": P("fsdp"),
    }
    pin_and_compare(momentum_step, momentum_args(), mesh_of(fsdp=4, tp=2), pins)


@pytest.mark.parametrize("carry", [{0: 5}, {3: 0}, {"state": 1}, {"batch": 0}])
def test_a_carry_that_cannot_be_says_what_there_is(carry):
    with pytest.raises(autoshard.ArgumentError, match="carry="):
        search(momentum_step, momentum_args(), mesh_of(fsdp=4, tp=2), carry=carry)


# Budgets


def test_a_budget_that_nothing_fits_names_the_smallest_peak_and_the_leaf():
    args = floats(256, 256), floats(8, 256)
    with pytest.raises(autoshard.NoFeasiblePlanError) as caught:
        search(lambda w, x: x @ w, args, mesh_of(a=4, b=2), memory_budget_bytes=16 * 1024)
    text = str(caught.value)
    assert "budget of 16.00 KiB per device" in text
    assert re.search(r"smallest predicted peak is \d\d\.\d\d KiB", text)
    assert re.search(r"smallest compiled peak of \d+ is \d\d\.\d\d KiB", text)
    assert "most in w, 32.00 KiB" in text
    assert "Raise memory_budget_bytes" in text


def test_replicated_pins_that_do_not_fit_the_budget():
    args = floats(256, 256), floats(8, 256)
    with pytest.raises(autoshard.NoFeasiblePlanError, match=r"most in w, 256.00 KiB"):
        search(
            lambda w, x: x @ w,
            args,
            mesh_of(a=4, b=2),
            memory_budget_bytes="100KiB",
            pins={"w": P()},
        )


def test_batch_on_every_axis_is_infeasible_where_weights_are_big():
    def chain(p, x):
        for w in p:
            x = jnp.tanh(x @ w)
        return x

    args, mesh = (
        ([floats(256, 256, seed=i, scale=0.06) for i in range(3)], floats(8, 256)),
        mesh_of(dp=4, tp=2),
    )
    plan = search_and_compare(chain, args, mesh, memory_budget_bytes=400 * 1024)
    assert winner(plan).compiled.peak_bytes <= 400 * 1024
    assert split_leaves(plan) & {"p/0", "p/1", "p/2"}
    pin_and_compare(chain, args, mesh, {"x": P(("dp", "tp"))})
    pin_and_compare(
        chain,
        args,
        mesh,
        {"p/0": P(None, "tp"), "p/1": P("tp"), "p/2": P(None, "tp"), "x": P("dp")},
    )


# Pins that cannot be


@pytest.mark.parametrize(
    ("pins", "error", "text"),
    [
        (
            {"p/l1/w": P("a", None)},
            autoshard.SpecError,
            r"p/l1/w is float32\[10, 12\].*dimension 0 \(size 10\).*'a' \(size 4\)",
        ),
        (
            {"p/l1/w": P(("a", "b"))},
            autoshard.SpecError,
            r"dimension 0 \(size 10\).*\('a', 'b'\) \(size 8\)",
        ),
        ({"p/l1/u": P("b")}, autoshard.PathError, r"'p/l1/u'.*Nearest: p/l1/"),
        ({re.compile("l7"): P("b")}, autoshard.PathError, "matches none of the 5"),
        ({"p/l1/w": P("c")}, autoshard.SpecError, "names mesh axis 'c'; the mesh has"),
        ({"p/l1/b": P(None, "b")}, autoshard.SpecError, "has 2 entries for 1 dimensions"),
        ({"p/l1/w": P("b", "b")}, autoshard.SpecError, "uses mesh axis 'b' twice"),
        ({"p/l1/w": ("b",)}, autoshard.ArgumentError, "values jax.sharding.PartitionSpec"),
    ],
)
def test_pins_that_cannot_be(pins, error, text):
    with pytest.raises(error, match=text):
        search(mlp, (mlp_params(10, 12), floats(8, 10)), mesh_of(a=4, b=2), pins=pins)


def test_pins_by_pattern_hold():
    plan = search_and_compare(
        mlp,
        (mlp_params(), floats(8, 16)),
        mesh_of(a=4, b=2),
        pins={re.compile("l1/.*"): P("b"), "p/l1/w": P()},
    )
    assert (plan.specs["p/l1/b"], plan.specs["p/l1/w"]) == (P("b"), P())


# Where sharding is known to win


def experts(p, x):
    scores = jax.nn.softmax(x @ p["gate"], -1)
    chosen = jax.nn.one_hot(scores.argmax(-1), 8, dtype=x.dtype) * scores.max(-1, keepdims=True)
    spread = jnp.einsum("td,te->etd", x, chosen)
    h = jax.nn.gelu(jnp.einsum("etd,edf->etf", spread, p["up"]))
    return jnp.einsum("etf,efd->td", h, p["down"])


def test_experts_are_split_where_their_weights_do_not_fit():
    p = {
        "gate": floats(16, 8),
        "up": floats(8, 16, 64, scale=0.2),
        "down": floats(8, 64, 16, scale=0.2),
    }
    args, mesh = (p, floats(32, 16)), mesh_of(data=8)
    budget = replicated_bytes(experts, args, mesh) // 3
    plan = search_and_compare(
        experts, args, mesh, memory_budget_bytes=budget, hardware=free_collectives()
    )
    assert {"p/up", "p/down"} <= split_leaves(plan)
    pin_and_compare(experts, args, mesh, {"p/up": P("data"), "p/down": P("data"), "x": P("data")})


def test_replication_loses_where_latency_is_left_out():
    args = mlp_params(64, 256), floats(64, 64), floats(64, 64, seed=1)
    plan = search_and_compare(
        jax.value_and_grad(mlp_loss), args, mesh_of(data=4, model=2), hardware=free_collectives()
    )
    assert split_leaves(plan)
    assert winner(plan).predicted.time_s > 0


def test_embedding_rows_split_where_the_table_does_not_fit():
    def forward(table, ids, w):
        return jax.nn.relu(table[ids].sum(1)) @ w

    args, mesh = (floats(512, 16), integers(512, 16, 4), floats(16, 8)), mesh_of(a=4, b=2)
    budget = replicated_bytes(forward, args, mesh) // 2
    plan = search_and_compare(forward, args, mesh, memory_budget_bytes=budget)
    assert "table" in split_leaves(plan)
    for spec in (P("a"), P(("a", "b")), P(None, "b")):
        pin_and_compare(forward, args, mesh, {"table": spec})


def test_the_same_rules_serve_another_batch_size():
    plan = search_and_compare(
        mlp, (mlp_params(), floats(8, 16)), mesh_of(a=4, b=2), hardware=free_collectives()
    )
    for batch in (16, 6):
        assert_same(
            plan(mlp_params(), floats(batch, 16)), plain(mlp, (mlp_params(), floats(batch, 16)))
        )
