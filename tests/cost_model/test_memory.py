"""Peak memory by liveness, against sums done by hand (P: all parameters, in bytes)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost_model.hardware.hardware import h100
from autoshard.cost_model.memory.liveness import memory_table
from autoshard.cost_model.predict import Prediction, Predictor
from tests.stages import array, layout_of, mesh_of, prepared, traced

N = 4 * 256 * 256
"""Bytes of one 256 x 256 matrix."""
M = array(256, 256)


def peak(fn: Callable[..., Any], *args: Any, **options: Any) -> int:
    """Peak bytes of a function on one device."""
    trace = traced(fn, *args, **options)
    table = memory_table(trace.program, trace.call.donated, 1, lambda _: 0)
    return int(table.alive_bytes.max(initial=0))


def test_arguments_live_to_the_end_and_outputs_from_where_they_are_made() -> None:
    assert peak(lambda x: x @ x, M) == 2 * N
    assert peak(lambda x, unused: x @ x, M, M) == 3 * N


def test_donation_lowers_the_peak() -> None:
    def chain(x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ x) @ jnp.ones((256, 256)))

    assert peak(chain, M, donate_argnums=0) == peak(chain, M) - N


def test_what_only_fusing_primitives_read_is_never_stored() -> None:
    assert peak(lambda x: jnp.tanh(x * 2 + 1) * 3, M) == 2 * N
    assert peak(lambda x: jnp.sum(x * 2, 1), M) == N + 4 * 256
    chain = peak(lambda x: (x * 2) @ jnp.ones((256, 1)), M)
    assert chain >= 2 * N, "a contraction reads memory"


def test_a_temporary_dies_after_its_last_reader() -> None:
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = x @ x
        return x

    assert peak(chain, M) == 3 * N


def test_a_scan_stacks_its_residuals() -> None:
    layers = 5

    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0])

    stacked = peak(jax.grad(loss), array(layers, 256, 256), M)
    forward = peak(loss, array(layers, 256, 256), M)
    assert forward <= (layers + 1) * N + 4 * N
    assert stacked >= (2 * layers + 1) * N + (layers - 1) * N, (
        "weights, their gradients, and one residual a layer"
    )


def test_rematerialisation_holds_less() -> None:
    def loss(wrap: Callable[..., Any]) -> Callable[..., Any]:
        def block(c: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            for _ in range(4):
                c = jnp.tanh(c @ w)
            return c, None

        return jax.grad(lambda ws, x: jnp.sum(jax.lax.scan(wrap(block), x, ws)[0]))

    args = (array(6, 256, 256), M)
    assert peak(loss(jax.checkpoint), *args) < peak(loss(lambda f: f), *args) - 6 * N


def test_a_loop_updates_its_carry_in_place() -> None:
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 10, lambda _, c: jnp.tanh(c @ c), x)

    counters = 16
    assert peak(loop, M, donate_argnums=0) <= 3 * N + counters
    assert peak(loop, M) <= 4 * N + counters


def test_one_branch_runs_at_a_time() -> None:
    def branches(p: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.switch(p, [lambda x: x @ x @ x] * 8, x)

    assert peak(branches, array(dtype=np.int32), M) <= 4 * N + 8


# Per device, textbook: what each layout holds


def momentum_step(params: Any, moment: Any, x: jax.Array) -> Any:
    def loss(p: Any) -> jax.Array:
        return (jax.nn.gelu(x @ p["w1"]) @ p["w2"]).sum()

    moment = jax.tree.map(lambda m, g: 0.9 * m + g, moment, jax.grad(loss)(params))
    return jax.tree.map(lambda w, m: w - 0.1 * m, params, moment), moment


SIDE = 512
P = 4 * 2 * SIDE * SIDE
DP, FSDP = ("x.0->data",), ("x.0->data", "w1.0->data", "w1.1->data")
ZERO1 = ("x.0->data", "w1.0->data (optimizer)", "w1.1->data (optimizer)")


def predicted(*rules: str, donate: bool = True, batch: int = 8) -> Prediction:
    params = {"w1": array(SIDE, SIDE), "w2": array(SIDE, SIDE)}
    options = {"donate_argnums": (0, 1)} if donate else {}
    setup = prepared(
        momentum_step, (params, params, array(batch, SIDE)), mesh_of(data=4), **options
    )
    return Predictor(setup.problem, h100, setup.traced.call.donated).predict(
        layout_of(setup, *rules)
    )


@pytest.mark.parametrize(
    ("rules", "parameters", "optimizer"), [(DP, P, P), (ZERO1, P, P // 4), (FSDP, P // 4, P // 4)]
)
def test_what_the_arguments_hold(rules: tuple[str, ...], parameters: int, optimizer: int) -> None:
    argument_bytes = predicted(*rules).argument_bytes
    assert argument_bytes == {
        "parameters": parameters,
        "optimizer": optimizer,
        "data": 2 * 4 * SIDE,
    }


def test_the_peak_of_data_parallelism_is_parameters_moments_and_gradients() -> None:
    assert 3 * P <= predicted(*DP).peak_bytes <= 3.6 * P


def test_fully_sharded_holds_a_quarter_of_that_and_gathered_copies() -> None:
    copies = P  # both weights, brought together
    assert 3 * P / 4 <= predicted(*FSDP).peak_bytes <= 3.6 * P / 4 + copies
    assert predicted(*FSDP).peak_bytes < predicted(*ZERO1).peak_bytes < predicted(*DP).peak_bytes


@pytest.mark.parametrize("rules", [(), DP])
def test_donating_the_state_saves_its_new_copy(rules: tuple[str, ...]) -> None:
    saved = predicted(*rules, donate=False).peak_bytes - predicted(*rules).peak_bytes
    assert 0.4 * P <= saved <= 2.1 * P


def test_splitting_the_batch_splits_the_activations() -> None:
    batch = 64 * SIDE
    whole, split = predicted(batch=batch).peak_bytes, predicted(*DP, batch=batch).peak_bytes
    assert whole / 4 < split < whole / 4 + 4 * P
