"""Logical axes: decisions do not grow with depth, and their names are stable and unique."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.axes.axis_classes import NO_AXIS
from autoshard.axes.logical_axes import LogicalAxes, find_logical_axes
from tests.models import decoder_args, decoder_step
from tests.stages import Axes, array

D, HEADS, FF, VOCAB = 16, 2, 32, 64


def unrolled(layers: int) -> tuple[Any, tuple[Any, ...]]:
    """An unrolled decoder's train step (SGD), parameters in a list of layers."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["emb"][tokens]
        for w in params["layers"]:
            h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
            q, k, v = (jnp.einsum("btd,dhk->bthk", h, w[n]) for n in ("wq", "wk", "wv"))
            mixed = jnp.einsum(
                "bhqs,bshk->bqhk", jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k)), v
            )
            x = x + jnp.einsum("bqhk,hkd->bqd", mixed, w["wo"])
            x = x + jax.nn.gelu(x @ w["w1"]) @ w["w2"]
        return jax.nn.logsumexp(x @ params["emb"].T, -1).mean()

    def step(params: Any, tokens: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, tokens))

    k = D // HEADS
    attention = {name: array(D, HEADS, k) for name in ("wq", "wk", "wv")}
    layer = {**attention, "wo": array(HEADS, k, D), "w1": array(D, FF), "w2": array(FF, D)}
    return step, ({"emb": array(VOCAB, D), "layers": [layer] * layers}, array(4, 8, dtype=np.int32))


def logical_axes_of(fn: Any, *args: Any) -> LogicalAxes:
    return find_logical_axes(Axes(fn, *args).classes)


def named(logical_axes: LogicalAxes) -> dict[str, tuple[str, ...]]:
    """Names of the logical axes of each argument leaf."""
    program = logical_axes.classes.program
    return {
        path: tuple(
            "" if r == NO_AXIS else logical_axes.axes[r].name
            for r in logical_axes.of_value[value.index]
        )
        for path, value in zip(program.input_paths, program.body.inputs, strict=True)
    }


@pytest.fixture(scope="module")
def by_depth() -> dict[int, LogicalAxes]:
    made = {layers: unrolled(layers) for layers in (1, 2, 8)}
    return {layers: logical_axes_of(step, *args) for layers, (step, args) in made.items()}


def test_the_number_of_logical_axes_does_not_grow_with_depth(
    by_depth: dict[int, LogicalAxes],
) -> None:
    assert len({len(logical_axes.axes) for logical_axes in by_depth.values()}) == 1
    axes = [logical_axes.classes.count for logical_axes in by_depth.values()]
    assert axes[0] < axes[1] < axes[2]


def test_all_layers_have_the_same_logical_axes_under_the_same_names(
    by_depth: dict[int, LogicalAxes],
) -> None:
    names = {layers: named(logical_axes) for layers, logical_axes in by_depth.items()}
    for layers, leaves in names.items():
        for weight in ("wq", "wk", "wv", "wo", "w1", "w2"):
            assert {leaves[f"params/layers/{i}/{weight}"] for i in range(layers)} == {
                names[1][f"params/layers/0/{weight}"]
            }
    assert (
        len({frozenset(r.name for r in logical_axes.axes) for logical_axes in by_depth.values()})
        == 1
    )


def test_pairs_that_experts_split_together_share_a_logical_axis(
    by_depth: dict[int, LogicalAxes],
) -> None:
    leaves = named(by_depth[2])
    layer = "params/layers/1"
    d_model = leaves["params/emb"][1]
    assert leaves[f"{layer}/w1"] == (d_model, leaves[f"{layer}/w2"][0])
    heads = leaves[f"{layer}/wq"][1]
    assert leaves[f"{layer}/wk"][1] == leaves[f"{layer}/wv"][1] == leaves[f"{layer}/wo"][0] == heads
    assert (
        len({d_model, heads, leaves[f"{layer}/w1"][1], leaves["params/emb"][0], *leaves["tokens"]})
        == 6
    )


@pytest.mark.parametrize("layers", [1, 2, 8])
def test_names_are_unique_and_readable(by_depth: dict[int, LogicalAxes], layers: int) -> None:
    logical_axes = by_depth[layers].axes
    names = [logical_axis.name for logical_axis in logical_axes]
    assert len(set(names)) == len(names)
    assert not set("".join(names)) & set(" ()@"), "a rule must be able to name it"
    assert "->" not in "".join(names)
    assert {"emb.0", "emb.1", "wk.1", "w1.1", "tokens.0", "tokens.1"} <= set(names)
    assert all(logical_axis.witness for logical_axis in logical_axes)
    assert by_depth[layers].by_name("wk.1") is logical_axes[names.index("wk.1")]
    assert by_depth[layers].by_name("nothing") is None


def test_a_logical_axis_never_occurs_in_one_value_as_two_axes(
    by_depth: dict[int, LogicalAxes],
) -> None:
    logical_axes = by_depth[8]
    for axes in set(logical_axes.classes.of_value):
        present = {a for a in axes if a != NO_AXIS}
        assert len({logical_axes.of_class[a] for a in present}) == len(present)


def test_the_hidden_axes_of_a_deep_mlp_alternate() -> None:
    def mlp(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    logical_axes = logical_axes_of(mlp, [array(D, D)] * 12, array(4, D))
    leaves = named(logical_axes)
    pairs = [leaves[f"weights/{i}"] for i in range(12)]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pairs)), (
        "what one layer makes the next one reads"
    )
    assert all(rows != columns for rows, columns in pairs), (
        "so that a rule splits columns, then rows"
    )
    middle = pairs[3:-3]  # the first and last layers see an end of the chain
    assert set(middle[::2]) == {middle[0]}
    assert set(middle[1::2]) == {middle[1]} == {middle[0][::-1]}
    deeper = logical_axes_of(mlp, [array(D, D)] * 20, array(4, D))
    assert len(deeper.axes) == len(logical_axes.axes)


def test_sizes_and_scanned() -> None:
    logical_axes = logical_axes_of(decoder_step, *decoder_args(layers=3))
    layers = next(r for r in logical_axes.axes if r.name == named(logical_axes)["params/wq"][0])
    assert layers.scanned
    assert layers.sizes == (3,)
    d_model = logical_axes.by_name(named(logical_axes)["params/emb"][1])
    assert d_model is not None
    assert not d_model.scanned
    assert d_model.sizes == (64,)


ELSEWHERE = """
from tests.models import decoder_args, decoder_step
from tests.axes.test_logical_axes import logical_axes_of
print([r.name for r in logical_axes_of(decoder_step, *decoder_args()).axes])
"""


def test_names_are_the_same_in_every_process() -> None:
    root = Path(__file__).parents[2]
    env = {"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "11", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(
        [r.name for r in logical_axes_of(decoder_step, *decoder_args()).axes]
    )
