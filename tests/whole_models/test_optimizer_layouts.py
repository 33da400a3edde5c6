"""Optimizers that multiply: a layout of their own, entered and left by one reshard.

Reference: Jordan (2024), Muon: the momentum of a matrix is orthogonalised by a few products. Split
over a stack of layers these are local; split as the parameters each of them is a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import autoshard
from autoshard.axes.argument_groups import Group
from autoshard.compiler.compile import build, compile_built
from autoshard.cost_model.hardware.backend import CPU
from autoshard.cost_model.hardware.hardware import cpu
from autoshard.cost_model.predict import Predictor
from autoshard.layout.prepare import Prepared
from tests.benchmarks.evidence_store import by_kind
from tests.stages import QUICKLY, array, layout_of, prepared

LAYERS, D, HIDDEN, TOKENS = 8, 64, 128, 256
PARAMS = {"down": array(LAYERS, HIDDEN, D), "up": array(LAYERS, D, HIDDEN)}
ARGS = PARAMS, PARAMS, array(TOKENS, D), array(TOKENS, D)


def product_of(x: jax.Array) -> jax.Array:
    gram = x @ jnp.swapaxes(x, -1, -2)
    return 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x


def unrolled(x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = product_of(x)
    return x


def looped(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 3, lambda _, x: product_of(x), x)


def orthogonal(x: jax.Array, products: Callable[[jax.Array], jax.Array]) -> jax.Array:
    is_tall = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if is_tall else x
    x = products(x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7))
    return jnp.swapaxes(x, -1, -2) if is_tall else x


def muon(products: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    def loss(params: Any, x: Any, y: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return h + jnp.tanh(h @ w["up"]) @ w["down"], None

        return jnp.mean((jax.lax.scan(layer, x, params)[0] - y) ** 2)

    def step(params: Any, moment: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        moment = jax.tree.map(lambda m, g: 0.95 * m + g, moment, grads)

        def updated(p: Any, m: Any) -> Any:
            return p - 0.02 * orthogonal(m, products)

        return jax.tree.map(updated, params, moment), moment, value

    return step


def made(products: Callable[[jax.Array], jax.Array], mesh: Mesh) -> Prepared:
    return prepared(muon(products), ARGS, mesh, donate_argnums=(0, 1))


@pytest.mark.parametrize("products", [unrolled, looped])
def test_momentum_that_is_multiplied_is_optimizer_state(
    products: Callable[[jax.Array], jax.Array], mesh_4x2: Mesh
) -> None:
    groups = made(products, mesh_4x2).problem.groups.of_input
    assert groups == 2 * (Group.PARAMETER,) + 2 * (Group.OPTIMIZER,) + 2 * (Group.DATA,)


def stacks(problem: Any) -> list[str]:
    """The logical axes of the layers, and the rules that split them in the optimizer."""
    paths = problem.program.input_paths
    names = set()
    for path, value in zip(paths, problem.program.body.inputs, strict=True):
        if path.startswith("params"):
            axis = problem.logical_axes.of_value[value.index][0]
            names.add(problem.logical_axes.axes[axis].name)
    return [f"{name}->{axis} (optimizer)" for name in sorted(names) for axis in problem.mesh_axes]


@pytest.mark.parametrize(
    ("products", "rules"),
    [
        (unrolled, ["x.0->data", "x.0->model"]),
        (looped, ["x.0->data", "{hidden}->model"]),
        (unrolled, ["{hidden}->model"]),
        # XLA gathers what two dimensions are to bring into one, so that this is no good layout
        (unrolled, ["x.0->data", "{hidden}->model", "{d}->data"]),
    ],
)
def test_the_reshards_into_and_out_of_it_are_predicted(
    products: Callable[[jax.Array], jax.Array], rules: list[str], mesh_4x2: Mesh
) -> None:
    ready = made(products, mesh_4x2)
    problem = ready.problem
    down = problem.logical_axes.of_value[problem.program.body.inputs[0].index]
    _, hidden, d = (problem.logical_axes.axes[axis].name for axis in down)
    named = [rule.format(hidden=hidden, d=d) for rule in rules]
    layout = layout_of(ready, *stacks(problem), *named)
    predict = Predictor(problem, cpu, ready.traced.call.donated, CPU)
    built = build(ready.traced, layout, ready.request.mesh)
    compiled = compile_built(built, ready.request.mesh, compiler_options=QUICKLY).evidence
    assert by_kind(predict.predict(layout).collectives) == by_kind(compiled.collectives)


def test_the_search_gives_the_optimizer_a_layout_of_its_own(mesh_4x2: Mesh) -> None:
    plan = autoshard.optimize(
        muon(unrolled),
        ARGS,
        mesh_4x2,
        hardware="tpu_v5e",
        progress=False,
        donate_argnums=(0, 1),
        effort=autoshard.Effort(compiled=1, measured=0),
    )
    assert plan.verified
    assert any(str(rule.where) == "optimizer" for rule in plan.rules)
    for name in PARAMS:
        assert "data" in np.ravel(plan.specs[f"moment/{name}"][0])
