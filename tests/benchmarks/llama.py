"""Llama-3-8B as a train step with AdamW, layers written out, arguments abstract: the deep program
of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model; the defaults are Llama-3-8B's."""

    layers: int = 32
    d: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ff: int = 14336
    vocab: int = 128256
    batch: int = 32
    length: int = 4096

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.d // self.heads


def _rms(x: Any, scale: Any) -> Any:
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-5).astype(x.dtype) * scale


def _rotary(x: Any) -> Any:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
    c, s = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * c - second * s, second * c + first * s], -1)


def _block(x: Any, w: Any, groups: int) -> Any:
    h = _rms(x, w["n1"])
    q, k = (_rotary(jnp.einsum("bsd,dhk->bshk", h, w[name])) for name in ("wq", "wk"))
    v = jnp.einsum("bsd,dhk->bshk", h, w["wv"])
    q = q.reshape(*q.shape[:2], -1, groups, q.shape[-1])
    scores = jnp.einsum("bsgrk,btgk->bgrst", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), scores, -1e9)
    mixed = jnp.einsum(
        "bgrst,btgk->bsgrk", jax.nn.softmax(scores.astype(jnp.float32), -1).astype(x.dtype), v
    )
    x = x + jnp.einsum("bshk,hkd->bsd", mixed.reshape(*x.shape[:2], *w["wo"].shape[:2]), w["wo"])
    h = _rms(x, w["n2"])
    return x + (jax.nn.silu(h @ w["w1"]) * (h @ w["w3"])) @ w["w2"]


def train_step(sizes: Sizes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step and its abstract arguments (parameters, optimizer state, tokens); donate the first
    two."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    d, k, ff = sizes.d, sizes.head_size, sizes.ff
    layer = {
        "wq": array(d, sizes.heads, k),
        "wk": array(d, sizes.kv_heads, k),
        "wv": array(d, sizes.kv_heads, k),
        "wo": array(sizes.heads, k, d),
        "w1": array(d, ff),
        "w3": array(d, ff),
        "w2": array(ff, d),
        "n1": array(d),
        "n2": array(d),
    }
    params = {
        "emb": array(sizes.vocab, d), "out": array(d, sizes.vocab), "norm": array(d),
        "layers": [dict(layer) for _ in range(sizes.layers)],
    }  # fmt: skip
    optimizer = optax.adamw(1e-3)
    block = jax.checkpoint(_block, static_argnums=2)

    def loss(params: Any, tokens: Any) -> Any:
        x = params["emb"][tokens[:, :-1]]
        for w in params["layers"]:
            x = block(x, w, sizes.heads // sizes.kv_heads)
        logits = (_rms(x, params["norm"]) @ params["out"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.length + 1), np.int32)
    return step, (params, jax.eval_shape(optimizer.init, params), tokens)
