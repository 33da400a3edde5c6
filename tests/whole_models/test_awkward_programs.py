"""Programs on which the obvious axis is the wrong one: accumulated gradients, shared keys, square
and fused weights.

Each is searched, verified, and held against the presets by what was compiled.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autoshard
from tests.whole_models.model import WholeModel, causal_bias
from tests.whole_models.search import mesh_of, search, winner_of
from tests.whole_models.test_known_winners import normal, sgd


@pytest.fixture(scope="module")
def eight() -> Mesh:
    """One mesh axis of 8 devices."""
    return mesh_of((8,), ("x",))


def evidence(plan: autoshard.Plan) -> Any:
    """The compiled program of the winner; right, and no slower than any compiled preset that
    fits."""
    compiled = winner_of(plan).compiled
    assert plan.verified
    assert compiled is not None
    for candidate in plan.candidates:
        if (
            candidate.is_preset
            and candidate.compiled is not None
            and candidate.status != "rejected"
        ):
            assert compiled.time_s <= 1.005 * candidate.compiled.time_s, candidate.name
    return compiled


def accumulating(n_micro: int, batch: int, d: int, hidden: int) -> WholeModel:
    """Gradients of `n_micro` slices of the batch, summed by a scan: `(batch) -> (n_micro, batch /
    n_micro)`."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return ((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2).mean()

    def step(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        def one(total: Any, micro: Any) -> tuple[Any, jax.Array]:
            value, grads = jax.value_and_grad(loss)(params, *micro)
            return jax.tree.map(jnp.add, total, grads), value

        micros = tuple(a.reshape(n_micro, batch // n_micro, d) for a in (x, y))
        grads, values = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), micros)
        return jax.tree.map(lambda p, g: p - 0.1 * g / n_micro, params, grads), values.mean()

    params = {"w1": normal(d, hidden), "w2": normal(hidden, d)}
    return WholeModel(step, (params, normal(batch, d, seed=1), normal(batch, d, seed=2)), (0,))


def test_data_parallelism_splits_the_work_of_accumulated_gradients(eight: Mesh) -> None:
    """Were the scanned dimension taken for the batch, every device would do all of every micro
    batch."""
    model = accumulating(n_micro=4, batch=512, d=16, hidden=32)
    whole, split = (
        autoshard.apply(model.step, model.args, eight, layout, donate_argnums=0).compile().evidence
        for layout in ([], "dp")
    )
    assert split.flops < whole.flops / 6  # an eighth, and the update of the parameters
    plan = search(model, None, eight)
    assert evidence(plan).flops < whole.flops / 6
    assert any(
        "dp (arguments): its compiled program does" in note for note in plan.notes
    )  # it leaves the work whole


def multi_query_decode(batch: int, length: int, d: int, heads: int, k: int) -> WholeModel:
    """Shazeer (2019): all query heads share one key and one value head; one token."""

    def decode(params: Any, cache: Any, x: jax.Array, position: jax.Array) -> tuple[Any, jax.Array]:
        q = jnp.einsum("bd,dhk->bhk", x, params["wq"])
        cache = {
            name: jax.lax.dynamic_update_slice_in_dim(
                cache[name], (x @ params[f"w{name}"])[:, None], position, 1
            )
            for name in ("k", "v")
        }
        scores = jnp.einsum("bhk,bsk->bhs", q, cache["k"]) * k**-0.5
        scores = jnp.where(jnp.arange(length) <= position, scores, -1e9)
        mixed = jnp.einsum("bhs,bsk->bhk", jax.nn.softmax(scores), cache["v"])
        x = x + jnp.einsum("bhk,hkd->bd", mixed, params["wo"])
        return cache, x + jax.nn.gelu(x @ params["w1"]) @ params["w2"]

    shapes = {
        "wq": (d, heads, k),
        "wk": (d, k),
        "wv": (d, k),
        "wo": (heads, k, d),
        "w1": (d, 4 * d),
        "w2": (4 * d, d),
    }
    params = {name: normal(*shape) for name, shape in shapes.items()}
    cache = {name: normal(batch, length, k) for name in ("k", "v")}
    return WholeModel(decode, (params, cache, normal(batch, d), np.int32(5)), (1,))


def test_multi_query_decoding_splits_the_cache_by_batch_and_the_weights_by_heads(
    eight: Mesh,
) -> None:
    """Pope et al. (2022), section 3.3: the one key head cannot be split, so the cache goes by
    batch, the rest by heads.

    Neither fits when it is whole on every device. Changing between the two costs an all_to_all of
    one token's queries.
    """
    model = multi_query_decode(batch=32, length=256, d=128, heads=16, k=16)
    params, cache, *_ = model.args
    weights, cached = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (params, cache)
    )
    plan = search(model, (weights + cached) // 3, eight)
    compiled = evidence(plan)
    assert plan.specs["cache/k"] == plan.specs["cache/v"] == P("x")
    assert "x" in plan.specs["params/w1"]
    assert "x" in plan.specs["params/w2"]
    assert compiled.collective_bytes < cached / 20


@pytest.mark.parametrize("shape", [(8,), (4, 2)])
def test_recurrent_square_weights(shape: tuple[int, ...]) -> None:
    """`h @ w` with h and the result of one axis: whichever dimension of w is split, h changes hands
    every step."""
    batch, length, d = 32, 16, 64

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ params["wh"] + x @ params["wx"]), None

        h, _ = jax.lax.scan(cell, jnp.zeros((x.shape[0], d)), jnp.moveaxis(x, 1, 0))
        return ((h @ params["wo"] - y) ** 2).mean()

    params = {"wh": normal(d, d), "wx": normal(d, d), "wo": normal(d, 8)}
    model = WholeModel(sgd(loss), (params, normal(batch, length, d), normal(batch, 8)), (0,))
    evidence(search(model, None, mesh_of(shape, ("data", "model")[: len(shape)])))


def test_optimizer_that_multiplies_a_weight_with_its_transpose() -> None:
    """Muon (Jordan 2024): `w @ w.T` has both dimensions of one axis, and a split of it must choose
    which."""
    batch, d = 64, 64

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return ((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2).mean()

    def orthogonal(x: jax.Array) -> jax.Array:
        x = x / (jnp.linalg.norm(x) + 1e-6)
        for _ in range(3):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x

    def step(params: Any, moment: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        moment = jax.tree.map(lambda m, g: 0.9 * m + g, moment, grads)
        return jax.tree.map(lambda p, m: p - 0.02 * orthogonal(m), params, moment), moment, value

    params = {"w1": normal(d, 2 * d), "w2": normal(2 * d, d)}
    args = (params, jax.tree.map(np.zeros_like, params), normal(batch, d), normal(batch, d, seed=1))
    plan = search(WholeModel(step, args, (0, 1)), None)
    evidence(plan)
    for name in params:
        assert plan.specs[f"params/{name}"] == plan.specs[f"moment/{name}"]


def test_fused_qkv_moves_no_more_than_the_presets_that_split_the_work() -> None:
    """Split over its fused dimension, a QKV weight must be moved to be cut in three; the search
    finds a way around."""
    batch, length, d, heads = 16, 32, 64, 4

    def loss(params: Any, x: jax.Array) -> jax.Array:
        shape = (*x.shape[:2], heads, d // heads)
        for p in params:
            q, k, v = (a.reshape(shape) for a in jnp.split(x @ p["qkv"], 3, -1))
            scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * shape[-1] ** -0.5 + causal_bias(
                x.shape[1]
            )
            x = (
                x
                + jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v).reshape(x.shape) @ p["o"]
            )
            x = x + jax.nn.gelu(x @ p["w1"]) @ p["w2"]
        return (x * x).mean()

    shapes = {"qkv": (d, 3 * d), "o": (d, d), "w1": (d, 4 * d), "w2": (4 * d, d)}
    params = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(2)]
    plan = search(WholeModel(sgd(loss), (params, normal(batch, length, d)), (0,)), None, compiled=6)
    compiled = evidence(plan)
    presets = [t.compiled for t in plan.candidates if t.preset in ("tp", "fsdp+tp") and t.compiled]
    assert presets
    assert all(compiled.collective_bytes <= preset.collective_bytes for preset in presets)
