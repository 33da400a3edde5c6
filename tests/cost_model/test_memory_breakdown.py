"""What memory is for at the peak: the formula of the textbooks, and that the parts are the
whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from autoshard.cli.app import app
from autoshard.cost_model.hardware.backend import ACCELERATOR, CPU, Backend
from autoshard.cost_model.hardware.hardware import h100
from autoshard.cost_model.memory_breakdown import Purpose, breakdown
from autoshard.cost_model.predict import Predictor
from tests.stages import array, layout_of, mesh_of, prepared

SIDE, BATCH = 512, 8
COUNT = 3 * SIDE * SIDE
P = COUNT  # bytes are counted in units of one byte a parameter
NAMES = ("w1", "w2", "w3")


def adam_step(params: Any, first: Any, second: Any, x: jax.Array) -> Any:
    """Parameters, gradients and both moments in two bytes."""

    def loss(p: Any) -> jax.Array:
        return jnp.sum(jnp.tanh(jnp.tanh(x @ p["w1"]) @ p["w2"]) @ p["w3"]).astype(jnp.float32)

    grads = jax.grad(loss)(params)
    scale = sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)) ** -0.5
    grads = jax.tree.map(
        lambda g: g * scale.astype(g.dtype), grads
    )  # a norm over all: every gradient is alive
    first = jax.tree.map(lambda m, g: m * 0.9 + g * 0.1, first, grads)
    second = jax.tree.map(lambda v, g: v * 0.99 + g * g * 0.01, second, grads)
    return (
        jax.tree.map(lambda p, m, v: p - m * jax.lax.rsqrt(v + 1e-4), params, first, second),
        first,
        second,
    )


def parts(*rules: str, backend: Backend = ACCELERATOR) -> Mapping[Purpose, int]:
    params = {name: array(SIDE, SIDE, dtype=jnp.bfloat16) for name in NAMES}
    args = (params, params, params, array(BATCH, SIDE, dtype=jnp.bfloat16))
    setup = prepared(adam_step, args, mesh_of(data=4), donate_argnums=(0, 1, 2))
    layout, donated = layout_of(setup, *rules), setup.traced.call.donated
    by_purpose = breakdown(layout, h100, donated, backend)
    whole = Predictor(setup.problem, h100, donated, backend).predict(layout).peak_bytes
    assert sum(by_purpose.values()) == pytest.approx(whole, abs=8)
    return by_purpose


FSDP = ("x.0->data", "w1.0->data", "w1.1->data", "w2.1->data")


def test_one_device_holds_2p_of_parameters_2p_of_gradients_and_4p_of_moments() -> None:
    by_purpose = parts()
    assert by_purpose[Purpose.PARAMETERS] == 2 * P
    assert by_purpose[Purpose.OPTIMIZER] == pytest.approx(
        4 * P, abs=2 * SIDE * SIDE
    )  # one new moment beside its old self
    assert 2 * P <= by_purpose[Purpose.GRADIENTS] <= 2 * P + 2 * SIDE * SIDE
    activations = by_purpose[Purpose.ACTIVATIONS] + by_purpose[Purpose.OTHER]
    assert activations <= 0.05 * P
    assert sum(by_purpose.values()) == pytest.approx(
        2 * P + 2 * P + 4 * P + activations, abs=4 * SIDE * SIDE
    )


def test_fully_sharded_over_4_holds_a_quarter_of_that() -> None:
    one, each = parts(), parts(*FSDP)
    for purpose in (Purpose.PARAMETERS, Purpose.OPTIMIZER, Purpose.GRADIENTS):
        assert each[purpose] == pytest.approx(one[purpose] / 4, abs=SIDE * SIDE), purpose


def test_data_parallelism_splits_activations_only() -> None:
    one, each = parts(), parts("x.0->data")
    assert each[Purpose.PARAMETERS] == one[Purpose.PARAMETERS]
    assert each[Purpose.OPTIMIZER] == pytest.approx(one[Purpose.OPTIMIZER], abs=2 * SIDE * SIDE)


@pytest.mark.parametrize("backend", [CPU, ACCELERATOR])
def test_the_parts_are_the_whole(backend: Backend) -> None:
    for rules in ((), ("x.0->data",), FSDP):
        assert all(count >= 0 for count in parts(*rules, backend=backend).values())


def test_the_command_prints_the_classic_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def step(w, x):\n"
        "    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)\n"
        "def factory():\n"
        "    return {'fn': step, 'example_args': (jnp.ones((64, 64)), jnp.ones((32, 64))), "
        "'donate_argnums': 0}\n"
    )
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(
        app, ["memory", "model.py:factory", "--mesh", "data=8", "--cpu-devices", "8"]
    )
    assert outcome.exit_code == 0, outcome.output
    rows = {line[:18].strip(): line[18:].split() for line in outcome.output.splitlines()[2:]}
    assert rows["parameters"] == ["32.00", "KiB", "2.00", "KiB"], (
        "old and new; split over 8 the old, gathered"
    )
    assert set(rows) == {
        "parameters",
        "gradients",
        "optimizer state",
        "activations",
        "other",
        "total",
    }


def test_gradients_are_told_where_layers_are_scanned_and_fully_sharded() -> None:
    """Where every gradient is alive at the peak, they are as large as their parameters, a share on
    each device."""

    def step(ws: jax.Array, moments: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(ws: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0] ** 2)

        grads = jax.grad(loss)(ws)
        moments = 0.9 * moments + grads * jnp.sum(grads**2) ** -0.5
        return ws - 0.1 * moments, moments

    layers, side, batch = 4, 64, 512
    setup = prepared(
        step,
        (*(array(layers, side, side),) * 2, array(batch, side)),
        mesh_of(data=4),
        donate_argnums=(0, 1),
    )
    donated, size = setup.traced.call.donated, 4 * layers * side * side
    for backend in (CPU, ACCELERATOR):
        by_purpose = breakdown(layout_of(setup, "x.0->data", "ws.1->data"), h100, donated, backend)
        assert by_purpose[Purpose.PARAMETERS] == pytest.approx(size / 4, rel=0.3)
        assert by_purpose[Purpose.GRADIENTS] == pytest.approx(size / 4, rel=0.3)
        assert by_purpose[Purpose.OPTIMIZER] == pytest.approx(size / 4, rel=0.3)
        assert by_purpose[Purpose.ACTIVATIONS] >= layers * batch * side
