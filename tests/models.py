"""Small train steps that several tests share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]


def mlp_params(d: int = 32, h: int = 64, seed: int = 0) -> Params:
    """Two layers with biases."""
    rng = np.random.default_rng(seed)
    return {
        "w1": rng.standard_normal((d, h)).astype(np.float32) * 0.1,
        "b1": np.zeros(h, np.float32),
        "w2": rng.standard_normal((h, d)).astype(np.float32) * 0.1,
    }


def mlp_step(params: Params, x: Any, y: Any) -> tuple[Params, jax.Array]:
    """One SGD step on the squared error."""

    def loss(p: Params) -> jax.Array:
        return ((jax.nn.gelu(x @ p["w1"] + p["b1"]) @ p["w2"] - y) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def mlp_args(batch: int = 16, d: int = 32, h: int = 64) -> tuple[Params, np.ndarray, np.ndarray]:
    """Arguments of `mlp_step`."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, batch, d)).astype(np.float32)
    return mlp_params(d, h), x, y


def decoder_params(
    layers: int = 2, d: int = 64, heads: int = 4, ff: int = 128, vocab: int = 128
) -> Params:
    """A decoder with layers stacked for a scan, tied embedding."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.05).astype(np.float32)

    k = d // heads
    return {
        "emb": normal(vocab, d),
        "wq": normal(layers, d, heads, k),
        "wk": normal(layers, d, heads, k),
        "wv": normal(layers, d, heads, k),
        "wo": normal(layers, heads, k, d),
        "w1": normal(layers, d, ff),
        "w2": normal(layers, ff, d),
        "scale": np.ones((layers, 2, d), np.float32),
    }


def decoder_loss(params: Params, tokens: Any) -> jax.Array:
    """Next-token cross-entropy of a scanned, rematerialised decoder."""
    length = tokens.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool))

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        h = norm(x, w["scale"][0])
        q, k, v = (jnp.einsum("btd,dhk->bthk", h, w[n]) for n in ("wq", "wk", "wv"))
        scores = jnp.where(mask, jnp.einsum("bqhk,bshk->bhqs", q, k) * q.shape[-1] ** -0.5, -1e9)
        mixed = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("bqhk,hkd->bqd", mixed, w["wo"])
        h = norm(x, w["scale"][1])
        return x + jax.nn.gelu(h @ w["w1"]) @ w["w2"], None

    stacked = {name: value for name, value in params.items() if name != "emb"}
    x, _ = jax.lax.scan(jax.checkpoint(layer), params["emb"][tokens], stacked)
    logp = jax.nn.log_softmax(x @ params["emb"].T)
    return -jnp.mean(jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1))


def decoder_step(params: Params, moment: Params, tokens: Any) -> tuple[Params, Params, jax.Array]:
    """One step of SGD with momentum."""
    loss, grads = jax.value_and_grad(decoder_loss)(params, tokens)
    moment = jax.tree.map(lambda m, g: 0.9 * m + g, moment, grads)
    return jax.tree.map(lambda w, m: w - 0.01 * m, params, moment), moment, loss


def decoder_args(
    batch: int = 8, length: int = 32, **sizes: int
) -> tuple[Params, Params, np.ndarray]:
    """Arguments of `decoder_step`."""
    params = decoder_params(**sizes)
    tokens = (
        np.random.default_rng(2)
        .integers(0, params["emb"].shape[0], (batch, length))
        .astype(np.int32)
    )
    return params, jax.tree.map(np.zeros_like, params), tokens


def unrolled_step(
    layers: list[dict[str, Any]], x: Any, y: Any
) -> tuple[list[dict[str, Any]], jax.Array]:
    """One step of gradient descent on residual layers that are written out, not scanned."""

    def loss(layers: list[dict[str, Any]]) -> jax.Array:
        h = x
        for layer in layers:
            h = h + jnp.tanh(h @ layer["up"]) @ layer["down"]
        return jnp.mean((h - y) ** 2)

    value, grads = jax.value_and_grad(loss)(layers)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads), value


def unrolled_args(layers: int, batch: int = 16, d: int = 32, h: int = 64) -> tuple[Any, ...]:
    """Abstract arguments of `unrolled_step`."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.float32)

    return (
        [{"up": array(d, h), "down": array(h, d)} for _ in range(layers)],
        array(batch, d),
        array(batch, d),
    )
