"""What is neither a transformer nor a convolution: a state-space model, a graph network, a
recommender."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.whole_models.model import (
    Array,
    Init,
    Params,
    WholeModel,
    cross_entropy,
    dense,
    rms_norm,
    training,
)


def state_space(
    layers: int = 1,
    d: int = 64,
    inner: int = 128,
    states: int = 8,
    vocab: int = 256,
    batch: int = 16,
    length: int = 32,
) -> WholeModel:
    """Gu and Dao (2023), Mamba: gated blocks, depthwise convolution, selective scan as an
    associative scan; AdamW."""
    init, rank, width = Init(), 4, 4

    def block_params() -> Params:
        return {
            "norm": np.ones(d, np.float32),
            "in_x": init.normal(d, inner), "in_gate": init.normal(d, inner),
            "conv": init.normal(width, inner),
            "to_delta": init.normal(inner, rank),
            "to_b": init.normal(inner, states), "to_c": init.normal(inner, states),
            "delta": init.dense(rank, inner),
            "a_log": np.log(np.tile(np.arange(1.0, states + 1, dtype=np.float32), (inner, 1))),
            "skip": np.ones(inner, np.float32),
            "out": init.normal(inner, d),
        }  # fmt: skip

    params = {
        "embed": init.normal(vocab, d, scale=0.05),
        "blocks": [block_params() for _ in range(layers)],
        "norm": np.ones(d, np.float32),
    }

    def selective_scan(p: Params, x: Array) -> Array:
        delta = jax.nn.softplus(dense(p["delta"], x @ p["to_delta"]))  # [b, t, inner]
        decay = jnp.exp(-delta[..., None] * jnp.exp(p["a_log"]))  # [b, t, inner, states]
        push = (delta * x)[..., None] * (x @ p["to_b"])[:, :, None, :]

        def combine(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, state = jax.lax.associative_scan(combine, (decay, push), axis=1)
        return jnp.einsum("btin,btn->bti", state, x @ p["to_c"]) + p["skip"] * x

    def block(p: Params, x: Array) -> Array:
        h = rms_norm(p["norm"], x)
        u = jnp.pad(h @ p["in_x"], ((0, 0), (width - 1, 0), (0, 0)))
        u = sum(p["conv"][i] * u[:, i : i + x.shape[1]] for i in range(width))
        return x + (selective_scan(p, jax.nn.silu(u)) * jax.nn.silu(h @ p["in_gate"])) @ p["out"]

    def loss(params: Params, tokens: Array) -> Array:
        x = params["embed"][tokens]
        for p in params["blocks"]:
            x = block(p, x)
        logits = rms_norm(params["norm"], x) @ params["embed"].T
        return cross_entropy(logits[:, :-1], tokens[:, 1:])

    return training(loss, optax.adamw(1e-3, eps=1e-5), params, init.integers(vocab, batch, length))


def graph_network(
    rounds: int = 2,
    d: int = 32,
    nodes: int = 128,
    edges: int = 512,
    classes: int = 8,
    features: int = 16,
) -> WholeModel:
    """Battaglia et al. (2018): edge and node MLPs, messages summed at their receivers
    (segment_sum); Adam."""
    init = Init()

    def mlp_params(fan_in: int) -> Params:
        return [init.dense(fan_in, 2 * d), init.dense(2 * d, d)]

    params = {
        "nodes": init.dense(features, d),
        "edges": init.dense(4, d),
        "rounds": [{"edge": mlp_params(3 * d), "node": mlp_params(2 * d)} for _ in range(rounds)],
        "head": init.dense(d, classes),
    }

    def mlp(p: Params, x: Array) -> Array:
        return dense(p[1], jax.nn.relu(dense(p[0], x)))

    def loss(
        params: Params, x: Array, e: Array, senders: Array, receivers: Array, labels: Array
    ) -> Array:
        x, e = dense(params["nodes"], x), dense(params["edges"], e)
        for p in params["rounds"]:
            e = e + mlp(p["edge"], jnp.concatenate([e, x[senders], x[receivers]], -1))
            heard = jax.ops.segment_sum(e, receivers, num_segments=x.shape[0])
            x = x + mlp(p["node"], jnp.concatenate([x, heard], -1))
        return cross_entropy(dense(params["head"], x), labels)

    return training(
        loss, optax.adam(1e-3, eps=1e-5), params, init.normal(nodes, features, scale=1.0),
        init.normal(edges, 4, scale=1.0), init.integers(nodes, edges), init.integers(nodes, edges),
        init.integers(classes, nodes),
    )  # fmt: skip


def recommender(
    tables: int = 4,
    rows: int = 4096,
    d: int = 16,
    dense_features: int = 16,
    bag: int = 4,
    batch: int = 64,
) -> WholeModel:
    """Naumov et al. (2019), DLRM: embedding bags, bottom MLP, pairwise products, top MLP;
    Adagrad."""
    init = Init()
    pairs = [(i, j) for i in range(tables + 1) for j in range(i)]
    params = {
        "tables": [init.normal(rows, d, scale=0.05) for _ in range(tables)],
        "bottom": [init.dense(dense_features, 32), init.dense(32, d)],
        "top": [init.dense(d + len(pairs), 32), init.dense(32, 1)],
    }

    def loss(params: Params, numbers: Array, ids: Array, clicked: Array) -> Array:
        first, second = params["bottom"]
        x = jax.nn.relu(dense(second, jax.nn.relu(dense(first, numbers))))
        bags = [table[ids[:, i]].sum(1) for i, table in enumerate(params["tables"])]
        features = jnp.stack([x, *bags], 1)
        products = jnp.einsum("bid,bjd->bij", features, features)
        crossed = jnp.stack([products[:, i, j] for i, j in pairs], 1)
        first, second = params["top"]
        logits = dense(second, jax.nn.relu(dense(first, jnp.concatenate([x, crossed], 1))))[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, clicked).mean()

    return training(
        loss, optax.adagrad(1e-2), params, init.normal(batch, dense_features, scale=1.0),
        init.integers(rows, batch, tables, bag), init.integers(2, batch).astype(np.float32),
    )  # fmt: skip
