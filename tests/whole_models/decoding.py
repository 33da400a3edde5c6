"""Greedy decoding with a key-value cache in a while loop that ends when every sequence has
ended."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.whole_models.model import Array, Init, Params, WholeModel, rms_norm


def kv_cache_decoding(
    layers: int = 2,
    d: int = 64,
    heads: int = 8,
    ff: int = 256,
    vocab: int = 256,
    batch: int = 16,
    length: int = 32,
) -> WholeModel:
    """Decodes up to `length` tokens; layers stacked, cache [layer, batch, position, head, size]
    updated in place."""
    init, k, end = Init(), d // heads, 0
    params = {
        "embed": init.normal(vocab, d, scale=0.5),
        "layers": {
            "attn_norm": np.ones((layers, d), np.float32),
            **{
                name: init.normal(layers, d, heads, k, scale=d**-0.5) for name in ("wq", "wk", "wv")
            },
            "wo": init.normal(layers, heads, k, d, scale=d**-0.5),
            "mlp_norm": np.ones((layers, d), np.float32),
            "w1": init.normal(layers, d, ff, scale=d**-0.5),
            "w2": init.normal(layers, ff, d, scale=ff**-0.5),
        },
        "head": init.normal(d, vocab),
    }
    cache = {name: np.zeros((layers, batch, length, heads, k), np.float32) for name in ("k", "v")}

    def layer(x: Array, p: Params, cache: Params, position: Array) -> tuple[Array, Params]:
        h = rms_norm(p["attn_norm"], x)
        q, key, value = (jnp.einsum("bd,dhk->bhk", h, p[name]) for name in ("wq", "wk", "wv"))
        cache = {
            name: jax.lax.dynamic_update_slice_in_dim(cache[name], new[:, None], position, axis=1)
            for name, new in (("k", key), ("v", value))
        }
        scores = jnp.einsum("bhk,bshk->bhs", q, cache["k"]) * k**-0.5
        scores = jnp.where(jnp.arange(length) <= position, scores, -1e9)
        mixed = jnp.einsum("bhs,bshk->bhk", jax.nn.softmax(scores), cache["v"])
        x = x + jnp.einsum("bhk,hkd->bd", mixed, p["wo"])
        return x + jax.nn.gelu(rms_norm(p["mlp_norm"], x) @ p["w1"]) @ p["w2"], cache

    def decode(params: Params, cache: Params, prompt: Array) -> tuple[Params, Array]:
        def unfinished(state: tuple[Array, Params, Array, Array]) -> Array:
            position, _, _, done = state
            return (position < length) & ~done.all()

        def one_token(
            state: tuple[Array, Params, Array, Array],
        ) -> tuple[Array, Params, Array, Array]:
            position, cache, tokens, done = state
            x = params["embed"][jax.lax.dynamic_index_in_dim(tokens, position, 1, keepdims=False)]
            x, cache = jax.lax.scan(
                lambda x, pc: layer(x, *pc, position), x, (params["layers"], cache)
            )
            chosen = jnp.where(done, end, (x @ params["head"]).argmax(-1).astype(jnp.int32))
            tokens = jax.lax.dynamic_update_slice_in_dim(
                tokens, chosen[:, None], position + 1, axis=1
            )
            return position + 1, cache, tokens, done | (chosen == end)

        tokens = jnp.zeros((prompt.shape[0], length + 1), jnp.int32).at[:, 0].set(prompt)
        start = (jnp.int32(0), cache, tokens, jnp.zeros(prompt.shape[0], bool))
        _, cache, tokens, _ = jax.lax.while_loop(unfinished, one_token, start)
        return cache, tokens

    return WholeModel(decode, (params, cache, init.integers(vocab - 1, batch) + 1), donate=(1,))
