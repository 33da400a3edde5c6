"""Halos against what XLA's partitioner was seen to send (jax 0.10.2, a [size, 16] array split over
4 devices)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.compiler.compile import build, compile_built
from autoshard.cost_model.hardware.backend import CPU
from autoshard.cost_model.hardware.hardware import cpu
from autoshard.cost_model.predict import Predictor
from autoshard.cost_model.program.halo import Window, halo_elements
from autoshard.layout.constraints import constraints_for
from tests.stages import QUICKLY, array, layout_of, mesh_of, prepared

SEEN = {
    "the first half": (Window(64, 32), 24),
    "the second half": (Window(64, 32, low=-32), 16),
    "the middle": (Window(64, 32, low=-16), 16),
    "all but the edges": (Window(64, 60, low=-1), 2),
    "the last quarter": (Window(64, 16, low=-48), 12),
    "the middle third": (Window(96, 32, low=-32), 32),
    "padded by few": (Window(64, 68, low=1), 2),
    "padded to twice, after": (Window(64, 128), 48),
    "padded to twice, before": (Window(64, 128, low=64), 48),
    "padded to twice, around": (Window(64, 128, low=32), 32),
    "3x3 convolution": (Window(16, 16, low=1, reach=3), 2),
    "3x3 convolution, stride 2": (Window(16, 8, stride=2, reach=3), 1),
    "5x5 convolution": (Window(16, 16, low=2, reach=5), 4),
    "gradient of stride 2": (Window(8, 16, low=1, reach=3, dilation=2), 1),
    "1x1 convolution, stride 2": (Window(16, 8, stride=2), 0),
}


@pytest.mark.parametrize("name", SEEN)
def test_halo_is_what_the_partitioner_sends(name: str) -> None:
    window, elements = SEEN[name]
    assert halo_elements(window, 4) == elements


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 64),
    start=st.integers(0, 32),
    taken=st.integers(1, 32),
    shard_count=st.sampled_from((2, 4, 8)),
)
def test_no_more_is_sent_than_a_gather_of_all_would_bring(
    size: int, start: int, taken: int, shard_count: int
) -> None:
    sent = halo_elements(Window(size, min(taken, size), low=-min(start, size - 1)), shard_count)
    shard = -(-size // shard_count)
    assert sent is None or 0 <= sent <= 2 * (shard_count - 1) * shard


def test_nothing_is_sent_where_nothing_is_shifted() -> None:
    assert halo_elements(Window(64, 64), 4) == 0


def convolution(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.square(convolution(jnp.tanh(x), w)).sum()


def test_space_of_a_kernel_gradient_is_never_open() -> None:
    """XLA adds up copies of such partial sums too; see `constrain`."""
    setup = prepared(
        jax.grad(loss), (array(3, 3, 4, 4), array(8, 16, 16, 4)), mesh_of(data=4, model=2)
    )
    space = next(
        r.name for r in setup.problem.logical_axes.axes if r.name.startswith("conv_general_dilated")
    )
    layout = layout_of(setup, f"{space}->data")
    stated = constraints_for(layout)
    for index, wanted in stated.eqns.items():
        if setup.problem.program.eqns[index].primitive == "conv_general_dilated":
            specs = [
                *wanted.operands.values(),
                *(spec for specs in wanted.results.values() for spec in specs),
            ]
            assert not any("UNCONSTRAINED" in str(spec) for spec in specs)


def test_a_convolution_split_in_space_sends_one_row_to_each_side() -> None:
    setup = prepared(convolution, (array(8, 16, 16, 4), array(3, 3, 4, 4)), mesh_of(data=4))
    space = setup.problem.logical_axes.of_value[setup.problem.program.body.outputs[0].index][1]
    name = setup.problem.logical_axes.axes[space].name
    predicted = Predictor(setup.problem, cpu, setup.traced.call.donated, CPU).predict(
        layout_of(setup, f"{name}->data")
    )
    row_bytes = 8 * 16 * 4 * np.dtype(np.float32).itemsize
    assert [(c.kind, c.bytes) for c in predicted.collectives] == [
        ("collective_permute", 2 * row_bytes)
    ]


def test_partial_sums_of_two_loops_are_two_all_reduces_on_cpu() -> None:
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum("btd,bte->de", x, y)

    setup = prepared(product, (array(8, 8, 16), array(8, 8, 32)), mesh_of(data=4, model=2))
    layout = layout_of(setup, "x.0->data", "x.1->model")
    predicted = Predictor(setup.problem, cpu, setup.traced.call.donated, CPU).predict(layout)
    assert [(c.kind, c.axes) for c in predicted.collectives] == [
        ("all_reduce", ("data",)),
        ("all_reduce", ("model",)),
    ]
    joined = Predictor(setup.problem, cpu, setup.traced.call.donated).predict(layout)
    assert [(c.kind, c.axes) for c in joined.collectives] == [("all_reduce", ("data", "model"))]


def test_a_masked_operand_that_is_read_whole_is_made_of_two_gathers_and_a_product_of_one() -> None:
    def masked(x: jax.Array, mask: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(jax.lax.select(mask, x, jnp.zeros_like(x)), w)

    def scaled(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(x * y, w)

    weight = array(64, 64)
    for function, second, gathered in (
        (masked, jax.ShapeDtypeStruct((64, 64), np.bool_), 64 * 64 * (4 + 1) * 3 // 4),
        (scaled, array(64, 64), 64 * 64 * 4 * 3 // 4),
    ):
        setup = prepared(function, (array(64, 64), second, weight), mesh_of(data=4))
        names = {"x": "x.0", "w": "w.1"}
        layout = layout_of(setup, f"{names['w']}->data", f"{names['x']}->data")
        predicted = Predictor(setup.problem, cpu, setup.traced.call.donated, CPU).predict(layout)
        assert {c.kind: c.bytes for c in predicted.collectives}.get("all_gather") == gathered


def test_of_parts_one_may_be_stored_split_without_a_halo() -> None:
    """The parts are computed whole, one is cut; the partitioner would shift what it cuts from."""

    def parts(x: jax.Array, u: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
        first, second = jnp.split(x @ w, 2, axis=1)
        return jnp.tanh(first) @ u + second @ v

    setup = prepared(
        parts, (array(8, 16), array(32, 8), array(32, 8), array(16, 64)), mesh_of(data=4)
    )
    layout = layout_of(setup, "u.0->data")
    predicted = Predictor(setup.problem, cpu, setup.traced.call.donated, CPU).predict(layout)
    built = build(setup.traced, layout, setup.request.mesh)
    compiled = compile_built(built, setup.request.mesh, compiler_options=QUICKLY).evidence
    assert {c.kind: c.bytes for c in compiled.collectives} == {"all_reduce": 2 * 8 * 8 * 4 * 3 // 4}
    assert {c.kind: c.bytes for c in predicted.collectives} == {
        c.kind: c.bytes for c in compiled.collectives
    }
