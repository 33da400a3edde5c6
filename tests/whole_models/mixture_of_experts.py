"""A transformer block with top-2 routed experts, written twice: dispatch as one-hot einsums, and by
sort and gather.

Both are the same model (GShard, Lepikhin et al. 2021): every sequence is a group with its own
capacity, first choices go before second ones, what overflows is dropped. Their losses are equal.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.whole_models.model import (
    Array,
    Init,
    Params,
    WholeModel,
    attention,
    causal_bias,
    cross_entropy,
    rms_norm,
    training,
)

CHOICES = 2


def one_hot_experts(p: Params, x: Array) -> Array:
    """Dispatch and combine as contractions with one-hot masks [batch, length, expert, slot]."""
    experts = p["router"].shape[-1]
    slots = CHOICES * x.shape[1] // experts
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), CHOICES)
    gates = gates / gates.sum(-1, keepdims=True)
    mask = jax.nn.one_hot(chosen, experts)  # [b, t, choice, e]
    first_come = jnp.moveaxis(mask, 2, 1).reshape(x.shape[0], -1, experts)
    place = (jnp.cumsum(first_come, 1) - first_come).reshape(x.shape[0], CHOICES, -1, experts)
    place = (jnp.moveaxis(place, 1, 2) * mask).sum(-1)  # [b, t, choice]
    slot = jax.nn.one_hot(place.astype(jnp.int32), slots)  # all zeros where it overflows
    dispatch = jnp.einsum("btke,btkc->btec", mask, slot)
    combine = jnp.einsum("btk,btke,btkc->btec", gates, mask, slot)
    inputs = jnp.einsum("btec,btd->ebcd", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", inputs, p["w1"]))
    outputs = jnp.einsum("ebcf,efd->ebcd", hidden, p["w2"])
    return jnp.einsum("btec,ebcd->btd", combine, outputs)


def sorted_experts(p: Params, x: Array) -> Array:
    """Dispatch by a stable sort of the choices and a gather, combine by a scatter."""
    experts = p["router"].shape[-1]
    _, length, d = x.shape
    slots = CHOICES * length // experts
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), CHOICES)
    gates = gates / gates.sum(-1, keepdims=True)

    def one_group(x: Array, gates: Array, chosen: Array) -> tuple[Array, Array, Array]:
        expert, gate = chosen.T.reshape(-1), gates.T.reshape(-1)  # first choices first
        order = jnp.argsort(expert, stable=True)
        expert, gate, token = expert[order], gate[order], order % length
        start = jnp.searchsorted(expert, jnp.arange(experts))
        place = jnp.arange(CHOICES * length) - start[expert]
        where = jnp.where(
            place < slots, expert * slots + place, experts * slots
        )  # the last slot collects overflow
        sent = jnp.zeros((experts * slots + 1, d)).at[where].set(x[token])[:-1]
        return sent.reshape(experts, slots, d), where, jnp.stack([token.astype(jnp.float32), gate])

    inputs, where, back = jax.vmap(one_group)(x, gates, chosen)
    hidden = jax.nn.gelu(jnp.einsum("becd,edf->becf", inputs, p["w1"]))
    outputs = jnp.einsum("becf,efd->becd", hidden, p["w2"])

    def combine(outputs: Array, where: Array, back: Array) -> Array:
        rows = jnp.concatenate([outputs.reshape(experts * slots, d), jnp.zeros((1, d))])[where]
        token, gate = back[0].astype(jnp.int32), back[1]
        return jnp.zeros((length, d)).at[token].add(rows * gate[:, None])

    return jax.vmap(combine)(outputs, where, back)


def _moe(
    mixture: Callable[[Params, Array], Array], layers: int = 2, d: int = 64, heads: int = 4, ff: int = 128,
    experts: int = 8, vocab: int = 256, batch: int = 16, length: int = 32,
) -> WholeModel:  # fmt: skip
    init, k = Init(), d // heads

    def block_params() -> Params:
        return {
            "attn_norm": np.ones(d, np.float32),
            **{name: init.normal(d, heads, k, scale=d**-0.5) for name in ("q", "k", "v")},
            "o": init.normal(heads, k, d, scale=d**-0.5),
            "moe_norm": np.ones(d, np.float32),
            "router": init.normal(d, experts),
            "w1": init.normal(experts, d, ff, scale=d**-0.5),
            "w2": init.normal(experts, ff, d, scale=ff**-0.5),
        }

    params = {
        "embed": init.normal(vocab, d, scale=0.05),
        "blocks": [block_params() for _ in range(layers)],
        "head": init.normal(d, vocab),
    }

    def loss(params: Params, tokens: Array) -> Array:
        x = params["embed"][tokens]
        for p in params["blocks"]:
            h = rms_norm(p["attn_norm"], x)
            q, keys, v = (jnp.einsum("btd,dhk->bthk", h, p[name]) for name in ("q", "k", "v"))
            x = x + jnp.einsum(
                "bthk,hkd->btd", attention(q, keys, v, causal_bias(x.shape[1])), p["o"]
            )
            x = x + mixture(p, rms_norm(p["moe_norm"], x))
        return cross_entropy((x @ params["head"])[:, :-1], tokens[:, 1:])

    return training(loss, optax.adamw(1e-3, eps=1e-5), params, init.integers(vocab, batch, length))


def moe_one_hot() -> WholeModel:
    """Dispatch as one-hot einsums; AdamW."""
    return _moe(one_hot_experts)


def moe_sorted() -> WholeModel:
    """Dispatch by sort, gather and scatter; AdamW."""
    return _moe(sorted_experts)
