"""What the partitioner carries on into values of which nothing is stated, against the compiled
program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from autoshard.compiler.compile import build, compile_built
from autoshard.cost_model.hardware.backend import CPU
from autoshard.cost_model.hardware.hardware import h100
from autoshard.cost_model.predict import Predictor
from autoshard.cost_model.program.propagation import propagated
from autoshard.layout.placements import Placements
from tests.stages import array, layout_of, mesh_of, prepared

BATCH, LENGTH, D, VOCAB = 4, 64, 16, 512


def next_tokens(w: jax.Array, x: jax.Array, tokens: jax.Array) -> jax.Array:
    """The loss of a language model: logits of all but the last position, whose count no mesh axis
    divides."""
    logits = jnp.einsum("bsd,dv->bsv", x, w)[:, :-1]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()


def loss_step(w: jax.Array, x: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, gradient = jax.value_and_grad(next_tokens)(w, x, tokens)
    return w - 0.1 * gradient, loss


LOSS_ARGS = (array(D, VOCAB), array(BATCH, LENGTH, D), array(BATCH, LENGTH, dtype=np.int32))


def peaks(step: Any, args: Any, mesh: Mesh, *rules: str) -> tuple[int, int]:
    """(predicted, compiled) peak bytes of a layout."""
    setup = prepared(step, args, mesh, donate_argnums=0)
    layout = layout_of(setup, *rules)
    predictor = Predictor(setup.problem, h100, setup.traced.call.donated, CPU)
    compiled = compile_built(build(setup.traced, layout, setup.request.mesh), setup.request.mesh)
    return predictor.predict(layout).peak_bytes, compiled.evidence.peak_bytes


@pytest.mark.parametrize("rules", [(), ("x.1->data",), ("x.1->data", "x.1->model"), ("x.0->data",)])
def test_a_slice_of_a_split_sequence_that_the_axis_does_not_divide(
    mesh_4x2: Mesh, rules: tuple[str, ...]
) -> None:
    predicted, compiled = peaks(loss_step, LOSS_ARGS, mesh_4x2, *rules)
    assert predicted == pytest.approx(compiled, rel=0.25)


def test_nothing_is_inherited_that_the_own_logical_axes_say(mesh_4x2: Mesh) -> None:
    setup = prepared(
        lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w), (array(64, 64), array(64, 64)), mesh_4x2
    )
    assert not any(propagated(setup.problem, Placements(setup.problem)))


def test_arguments_and_what_anchors_write_inherit_nothing(mesh_4x2: Mesh) -> None:
    setup = prepared(loss_step, LOSS_ARGS, mesh_4x2)
    inherited = propagated(setup.problem, Placements(setup.problem))
    program = setup.traced.program
    stated = [*program.body.inputs, *program.body.outputs]
    stated += [
        v
        for eqn in program.eqns
        if eqn.primitive in ("dot_general", "gather", "slice")
        for v in eqn.outputs
    ]
    assert not any(inherited[v.index] for v in stated)


def test_optimizer_rules_split_gradients_too(mesh_4x2: Mesh) -> None:
    """ZeRO-1: the moments are split, and the partitioner splits the gradients of stacked layers
    with them."""

    def step(ws: jax.Array, moments: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(ws: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0] ** 2)

        moments = 0.9 * moments + jax.grad(loss)(ws)
        return ws - 0.1 * moments, moments

    setup = prepared(
        step, (array(4, 64, 64), array(4, 64, 64), array(32, 64)), mesh_4x2, donate_argnums=(0, 1)
    )
    placements = Placements(setup.problem)
    program, inherited = setup.traced.program, propagated(setup.problem, Placements(setup.problem))
    gradients = [
        v
        for eqn in program.eqns
        if eqn.primitive == "scan"
        for v in eqn.outputs
        if v.shape == (4, 64, 64)
    ]
    moments_column = placements.value_column(program.body.inputs[1])
    assert [(moments_column, dim, dim) for dim in range(3)] == list(inherited[gradients[-1].index])


def test_an_axis_that_does_not_divide_the_heads_is_split_into_factors() -> None:
    """4 heads on 8 devices: the partitioner cuts the scores in 4, if any of the logical axis is
    split at all."""

    def attention(x: jax.Array, w: jax.Array) -> jax.Array:
        q = jnp.tensordot(x, w, 1).reshape(2, 64, 4, 8)
        scores = jnp.einsum("bqhk,bshk->bhqs", q, q)
        scores = jnp.exp(scores) * jnp.tanh(scores)
        return jnp.einsum("bhqs,bshk->bqhk", scores, q).reshape(2, 64, *w.shape[1:])

    for shape, least, most in (((32, 32), 0.2, 0.5), ((32, 4, 8), 1.0, 1.0)):
        setup = prepared(attention, (array(2, 64, 32), array(*shape)), mesh_of(data=8))
        predictor = Predictor(setup.problem, h100, setup.traced.call.donated, CPU)
        predicted, compiled = [], []
        for rules in ((), ("w.1->data",)):
            layout, mesh = layout_of(setup, *rules), setup.request.mesh
            predicted.append(predictor.predict(layout).peak_bytes)
            compiled.append(
                compile_built(build(setup.traced, layout, mesh), mesh).evidence.peak_bytes
            )
        for whole, split in (predicted, compiled):
            assert least <= split / whole <= most
