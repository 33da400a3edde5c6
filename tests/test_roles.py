"""Roles: decisions do not grow with depth, and their names are stable and unique."""

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
from autoshard.axes.logical_axes import Roles, find_roles
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


def roles_of(fn: Any, *args: Any) -> Roles:
    return find_roles(Axes(fn, *args).found)


def named(roles: Roles) -> dict[str, tuple[str, ...]]:
    """Names of the roles of each argument leaf."""
    program = roles.axes.program
    return {
        path: tuple(
            "" if r == NO_AXIS else roles.roles[r].name for r in roles.of_value[value.index]
        )
        for path, value in zip(program.input_paths, program.body.inputs, strict=True)
    }


@pytest.fixture(scope="module")
def by_depth() -> dict[int, Roles]:
    made = {layers: unrolled(layers) for layers in (1, 2, 8)}
    return {layers: roles_of(step, *args) for layers, (step, args) in made.items()}


def test_the_number_of_roles_does_not_grow_with_depth(by_depth: dict[int, Roles]) -> None:
    assert len({len(roles.roles) for roles in by_depth.values()}) == 1
    axes = [roles.axes.count for roles in by_depth.values()]
    assert axes[0] < axes[1] < axes[2]


def test_all_layers_have_the_same_roles_under_the_same_names(by_depth: dict[int, Roles]) -> None:
    names = {layers: named(roles) for layers, roles in by_depth.items()}
    for layers, leaves in names.items():
        for weight in ("wq", "wk", "wv", "wo", "w1", "w2"):
            assert {leaves[f"params/layers/{i}/{weight}"] for i in range(layers)} == {
                names[1][f"params/layers/0/{weight}"]
            }
    assert len({frozenset(r.name for r in roles.roles) for roles in by_depth.values()}) == 1


def test_pairs_that_experts_split_together_share_a_role(by_depth: dict[int, Roles]) -> None:
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
def test_names_are_unique_and_readable(by_depth: dict[int, Roles], layers: int) -> None:
    roles = by_depth[layers].roles
    names = [role.name for role in roles]
    assert len(set(names)) == len(names)
    assert not any(set(name) & set(" ()@") or "->" in name for name in names), (
        "a rule must be able to name it"
    )
    assert {"emb.0", "emb.1", "wk.1", "w1.1", "tokens.0", "tokens.1"} <= set(names)
    assert all(role.witness for role in roles)
    assert by_depth[layers].by_name("wk.1") is roles[names.index("wk.1")]
    assert by_depth[layers].by_name("nothing") is None


def test_a_role_never_occurs_in_one_value_as_two_axes(by_depth: dict[int, Roles]) -> None:
    roles = by_depth[8]
    for axes in set(roles.axes.of_value):
        present = {a for a in axes if a != NO_AXIS}
        assert len({roles.of_axis[a] for a in present}) == len(present)


def test_the_hidden_axes_of_a_deep_mlp_alternate() -> None:
    def mlp(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    roles = roles_of(mlp, [array(D, D)] * 12, array(4, D))
    leaves = named(roles)
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
    deeper = roles_of(mlp, [array(D, D)] * 20, array(4, D))
    assert len(deeper.roles) == len(roles.roles)


def test_sizes_and_scanned_are_told() -> None:
    roles = roles_of(decoder_step, *decoder_args(layers=3))
    layers = next(r for r in roles.roles if r.name == named(roles)["params/wq"][0])
    assert layers.scanned
    assert layers.sizes == (3,)
    d_model = roles.by_name(named(roles)["params/emb"][1])
    assert d_model is not None
    assert not d_model.scanned
    assert d_model.sizes == (64,)


ELSEWHERE = """
from tests.models import decoder_args, decoder_step
from tests.test_roles import roles_of
print([r.name for r in roles_of(decoder_step, *decoder_args()).roles])
"""


def test_names_are_the_same_in_every_process() -> None:
    root = Path(__file__).parents[1]
    env = {"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "11", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(
        [r.name for r in roles_of(decoder_step, *decoder_args()).roles]
    )
