"""Bytes through memory: an elementwise chain reads its inputs once and writes its outputs once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost_model.hardware.backend import ACCELERATOR, CPU, Backend
from autoshard.cost_model.hardware.hardware import h100
from autoshard.cost_model.predict import Predictor
from tests.stages import array, layout_of, mesh_of, prepared

N = 4 * 256 * 256
M = array(256, 256)
MEMORY_ONLY = replace(
    h100, peak_flops_per_s={"float32": 1e30}, efficiency=1.0, memory_bytes_per_s=1.0, op_s=0.0
)
"""One second a byte, arithmetic for nothing."""


def moved_bytes(
    fn: Callable[..., Any], *args: Any, rules: tuple[str, ...] = (), backend: Backend = ACCELERATOR
) -> float:
    """Bytes that one device reads and writes."""
    setup = prepared(fn, args, mesh_of(data=4), donate_argnums=0)
    predictor = Predictor(setup.problem, MEMORY_ONLY, setup.traced.call.donated, backend)
    return predictor.predict(layout_of(setup, *rules)).compute_s


@pytest.mark.parametrize("backend", [ACCELERATOR, CPU])
def test_a_chain_reads_and_writes_once_however_long(backend: Backend) -> None:
    assert moved_bytes(lambda x: x * 2, M, backend=backend) == 2 * N
    assert moved_bytes(lambda x: jnp.abs((x * 2 + 1) * 3 - 4), M, backend=backend) == 2 * N
    assert moved_bytes(lambda x, y: (x + y) * y - y, M, M, backend=backend) == 3 * N, (
        "y is read once"
    )


def test_splitting_divides_it() -> None:
    assert moved_bytes(lambda x: x * 2 + 1, M, rules=("x.0->data",)) == 2 * N / 4


def test_an_optimizer_update_is_not_free() -> None:
    def adam(state: Any, g: jax.Array) -> Any:
        p, m, v = state
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - 0.1 * m * jax.lax.rsqrt(v + 1e-8), m, v

    lower, upper = (
        7 * N,
        10 * N,
    )  # p, m, v, g in, p, m, v out; the new m and v are outputs and may be read again
    assert lower <= moved_bytes(adam, (M, M, M), M) <= upper


def test_contractions_and_what_they_read() -> None:
    assert moved_bytes(lambda x, w: x @ w, M, M) == 3 * N
    assert moved_bytes(lambda x, w: jnp.abs(x @ w) * 2, M, M) == 3 * N + 2 * N


def test_a_reduction_computes_what_it_reads_on_accelerators() -> None:
    assert moved_bytes(lambda x: jnp.sum(x * 2 + 1, 1), M) == N + 4 * 256


def test_a_lookup_moves_what_it_finds_and_an_update_what_it_puts_in() -> None:
    rows = 16
    assert moved_bytes(lambda x, i: x[i], M, array(rows, dtype=jnp.int32)) < 4 * rows * 256 * 4
    update = moved_bytes(
        lambda x, u: jax.lax.dynamic_update_slice(x, u, (3, 0)), M, array(rows, 256)
    )
    assert update == 2 * 4 * rows * 256


def test_a_reshape_moves_nothing() -> None:
    assert moved_bytes(lambda x: x.reshape(-1), M) == pytest.approx(0, abs=1e-9)
