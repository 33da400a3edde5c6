"""Argmax over a split dimension (greedy decoding with the vocabulary split): every device gets each
one's best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.compile import build, compile_built
from autoshard.cost_model.hardware.backend import CPU
from autoshard.cost_model.hardware.hardware import cpu
from autoshard.cost_model.predict import Prediction, Predictor
from autoshard.evidence.candidate import CompiledEvidence
from tests.stages import QUICKLY, array, layout_of, mesh_of, prepared

BATCH, WIDTH, VOCABULARY = 16, 32, 64


def greedy(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.argmax(x @ w, axis=-1)


def both_ways(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = x @ w
    return jnp.argmin(logits, axis=-1), logits.max(-1)


def over_the_batch(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.argmax(x @ w, axis=0)


@pytest.mark.parametrize(
    "rules",
    [
        ("w.1->data",),
        ("w.1->model", "w.1->data"),
        ("x.0->data", "w.1->model"),
        ("x.0->data", "x.0->model"),
    ],
)
@pytest.mark.parametrize("fn", [greedy, both_ways, over_the_batch])
def test_what_is_sent_is_what_the_compiled_program_sends(
    fn: Callable[..., Any], rules: tuple[str, ...]
) -> None:
    setup = prepared(fn, (array(BATCH, WIDTH), array(WIDTH, VOCABULARY)), mesh_of(data=4, model=2))
    layout = layout_of(setup, *rules)
    predicted = Predictor(setup.problem, cpu, setup.traced.call.donated, CPU).predict(layout)
    built = build(setup.traced, layout, setup.request.mesh)
    compiled = compile_built(built, setup.request.mesh, compiler_options=QUICKLY).evidence

    def sent(program: Prediction | CompiledEvidence) -> set[tuple[str, tuple[str, ...], int]]:
        return {(c.kind, c.axes, c.bytes) for c in program.collectives}

    assert sent(predicted) == sent(compiled)


def test_the_logits_are_not_gathered() -> None:
    setup = prepared(greedy, (array(BATCH, WIDTH), array(WIDTH, VOCABULARY)), mesh_of(model=8))
    predicted = Predictor(setup.problem, cpu, setup.traced.call.donated).predict(
        layout_of(setup, "w.1->model")
    )
    value_and_index = 4 + 4
    assert [(c.kind, c.bytes) for c in predicted.collectives] == [
        ("all_gather", BATCH * 7 * value_and_index)
    ]
