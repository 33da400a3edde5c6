"""Layouts that experts know to be right: each wins the search on an input on which it is.

Bytes are what one device of n sends on a ring (all_gather (n-1)/n * B, all_reduce twice that,
all_to_all (n-1)/n * B/n), by hand from the shapes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autoshard
from tests.models import decoder_args, decoder_step
from tests.whole_models.mixture_of_experts import one_hot_experts
from tests.whole_models.model import WholeModel
from tests.whole_models.search import SCALE_MODEL, mesh_of, search, winner_of

F32 = 4
N = 8


@pytest.fixture(scope="module")
def eight() -> Mesh:
    """One mesh axis of 8 devices."""
    return mesh_of((N,), ("x",))


def sent(plan: autoshard.Plan) -> dict[str, int]:
    """Compiled bytes by kind of collective; what is too small to matter (flags, losses) left
    out."""
    compiled = winner_of(plan).compiled
    assert compiled is not None
    total: dict[str, int] = {}
    for c in compiled.collectives:
        total[c.kind] = total.get(c.kind, 0) + c.bytes
    return {kind: size for kind, size in total.items() if size >= 64}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.1).astype(np.float32)


def sgd(loss: Any) -> Any:
    def step(params: Any, *batch: Any) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def test_megatron_pairing(eight: Mesh) -> None:
    """Shoeybi et al. (2019), section 3: the first weight of a pair by columns, the second by rows,
    heads together.

    Serving a short prompt: reading the weights takes the time, so every weight must be split, and
    gathering any of them would move more than the activations are. Split in pairs, a block needs
    one all_reduce of its activations after attention and one after the MLP, and nothing else. Each
    of these waits for what comes before it: nothing overlaps, or else more collectives would pay
    for splitting the norms between the blocks as well.
    """
    d, heads, k, ff, batch, length, layers = 128, 8, 16, 512, 1, 4, 2

    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def serve(params: Any, x: jax.Array) -> jax.Array:
        for p in params:
            h = norm(x)
            q, keys, v = (jnp.einsum("btd,dhk->bthk", h, p[name]) for name in ("wq", "wk", "wv"))
            weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, keys) * k**-0.5)
            x = x + jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", weights, v), p["wo"])
            x = x + jax.nn.gelu(norm(x) @ p["w1"]) @ p["w2"]
        return x

    shapes = {"wq": (d, heads, k), "wk": (d, heads, k), "wv": (d, heads, k), "wo": (heads, k, d)}
    shapes |= {"w1": (d, ff), "w2": (ff, d)}
    params = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(layers)]
    plan = search(
        WholeModel(serve, (params, normal(batch, length, d)), ()),
        None,
        eight,
        hardware=replace(SCALE_MODEL, overlap=0.0),
    )
    assert plan.verified
    for i in range(layers):
        column, row = P(None, "x"), P("x")
        for name, spec in {
            "wq": column,
            "wk": column,
            "wv": column,
            "wo": row,
            "w1": column,
            "w2": row,
        }.items():
            assert plan.specs[f"params/{i}/{name}"] == spec
    activations = batch * length * d * F32
    assert sent(plan) == {"all_reduce": layers * 2 * 2 * (N - 1) * activations // N}


def test_fsdp_gathers_weights_and_scatters_gradients(eight: Mesh) -> None:
    """Rajbhandari et al. (2020), ZeRO stage 3: the batch and all parameters over the same axis.

    Many tokens a device, so splitting the batch is right; a memory budget that leaves no room to
    keep any weight whole, so parameters must be split as well. A layer gathers its weights in the
    forward pass and again in the rematerialised backward pass, and sums its gradients once (CPU
    does that as an all_reduce, where TPU scatters: half the bytes).
    """
    layers, d, ff, vocab = 4, 64, 256, 64
    model = WholeModel(
        decoder_step, decoder_args(64, 32, layers=layers, d=d, ff=ff, vocab=vocab), (0, 1)
    )
    fsdp = (
        autoshard.apply(decoder_step, model.args, eight, "fsdp", donate_argnums=(0, 1))
        .compile()
        .evidence
    )
    budget = fsdp.peak_bytes + fsdp.peak_bytes // 100
    plan = search(model, budget, eight, compiled=6)
    assert plan.verified
    assert plan.specs["tokens"] == P("x")
    for path, spec in plan.specs.items():
        if "/w" in path:  # norm scales and the embedding weigh nothing here
            assert "x" in spec, path
    weights = layers * (4 * d * d + 2 * d * ff) * F32
    embedding = vocab * d * F32
    found = sent(plan)
    assert found["all_gather"] == pytest.approx((2 * weights + embedding) * (N - 1) / N, rel=0.02)
    assert found["all_reduce"] == pytest.approx(
        2 * (weights + 2 * embedding) * (N - 1) / N, rel=0.02
    )
    assert set(found) == {"all_gather", "all_reduce"}


def test_vocabulary_parallel_loss(eight: Mesh) -> None:
    """Shoeybi et al. (2019), section 3: logits stay split over the vocabulary, the loss needs sums
    per token only.

    A wide head and few tokens: replicated, the logits and the head's gradient would cost 8 times
    the time; split over the batch, the gradient of the head would be summed over all devices. Split
    over the vocabulary, each token needs a maximum, a sum of exponentials, its own logit, and in
    the backward pass the sum of the incoming gradient.
    """
    tokens, d, vocab = 64, 32, 4096

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(x @ params["head"])
        return -jnp.take_along_axis(logp, labels[:, None], -1).mean()

    labels = np.random.default_rng(0).integers(0, vocab, tokens).astype(np.int32)
    args = ({"head": normal(d, vocab)}, normal(tokens, d), labels)
    plan = search(WholeModel(sgd(loss), args, (0,)), None, eight)
    assert plan.verified
    assert plan.specs["params/head"] == P(None, "x")
    assert sent(plan) == {"all_reduce": 4 * 2 * (N - 1) * tokens * F32 // N}


def test_expert_parallelism_on_the_axis_of_the_batch(eight: Mesh) -> None:
    """Lepikhin et al. (2021), GShard: one mesh axis splits the batch and the experts; tokens travel
    to their experts.

    Expert weights are most of the bytes, so summing their gradients over the devices (data
    parallelism) moves far more than the tokens are; the router and everything per token wants the
    batch split. No order of unconditional rules says both; "experts here, the batch there" does,
    and gives the all_to_all.
    """
    batch, length, d, ff, experts = 16, 16, 32, 128, 8
    params = {
        "router": normal(d, experts),
        "w1": normal(experts, d, ff),
        "w2": normal(experts, ff, d),
    }

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return ((x + one_hot_experts(params, x) - y) ** 2).mean()

    args = (params, normal(batch, length, d, seed=1), normal(batch, length, d, seed=2))
    plan = search(WholeModel(sgd(loss), args, (0,)), None, eight)
    assert plan.verified
    assert plan.specs["params/w1"] == plan.specs["params/w2"] == plan.specs["batch/0"] == P("x")
    slots = 2 * length // experts
    travelling = batch * experts * slots * d * F32
    found = sent(plan)
    # To the experts, back, and the gradient of what came back; the inputs are no parameters and get
    # no gradient.
    assert found["all_to_all"] == pytest.approx(3 * (N - 1) * travelling / N / N, rel=0.4)
    data_parallel = 2 * (N - 1) / N * 2 * experts * d * ff * F32
    assert sum(found.values()) < data_parallel / 10


def test_row_sharded_embedding(eight: Mesh) -> None:
    """Naumov et al. (2019), DLRM: a table of many rows that are too short to split is split by
    rows.

    Splitting the batch would sum the table's gradient over all devices. Split by rows, each device
    looks up the rows it holds and the rest come as zeros: one all_reduce of what was looked up, and
    nothing of the table's size, as each device updates its own rows. Splitting the batch after the
    look-up costs and saves next to nothing.
    """
    rows, d, batch, bag = 8192, 4, 32, 4

    def loss(params: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
        return ((params["table"][ids].sum(1) @ params["w"] - y) ** 2).mean()

    ids = np.random.default_rng(0).integers(0, rows, (batch, bag)).astype(np.int32)
    plan = search(
        WholeModel(
            sgd(loss), ({"table": normal(rows, d), "w": normal(d, 1)}, ids, normal(batch, 1)), (0,)
        ),
        None,
        eight,
    )
    assert plan.verified
    assert plan.specs["params/table"] == P("x")
    looked_up = 2 * (N - 1) * batch * bag * d * F32 // N
    found = sent(plan)
    assert looked_up <= found["all_reduce"] < 1.02 * looked_up
    assert sum(found.values()) < 1.5 * looked_up
