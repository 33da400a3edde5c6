"""A Llama-like decoder in Flax NNX and a model in Equinox, written as their users write them."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCABULARY, WIDTH, HEADS, KV_HEADS, HIDDEN, LENGTH, BATCH = 64, 32, 4, 2, 64, 16, 8


class Attention(nnx.Module):
    """Causal attention with grouped keys and values."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        size = WIDTH // HEADS
        self.q = nnx.Linear(WIDTH, HEADS * size, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(WIDTH, KV_HEADS * size, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(WIDTH, KV_HEADS * size, use_bias=False, rngs=rngs)
        self.o = nnx.Linear(HEADS * size, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        q = self.q(x).reshape(batch, length, KV_HEADS, HEADS // KV_HEADS, -1)
        k, v = (f(x).reshape(batch, length, KV_HEADS, -1) for f in (self.k, self.v))
        scores = jnp.einsum("bqgrk,bsgk->bgrqs", q, k) * q.shape[-1] ** -0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        mixed = jnp.einsum("bgrqs,bsgk->bqgrk", jax.nn.softmax(jnp.where(causal, scores, -1e9)), v)
        return self.o(mixed.reshape(batch, length, -1))


class Layer(nnx.Module):
    """One decoder layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = Attention(rngs)
        self.gate = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


class Llama(nnx.Module):
    """A decoder of unrolled layers, with dropout to have state that is no parameter."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 4) -> None:
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def nnx_step(model: Any, optimizer: Any, tokens: jax.Array) -> jax.Array:
    """What people give to `nnx.jit`: changes the model and the optimizer, returns the loss."""

    def loss(model: Any) -> jax.Array:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def nnx_args(layers: int = 4) -> tuple[Any, Any, np.ndarray]:
    """Arguments of `nnx_step`."""
    model = Llama(nnx.Rngs(0), layers)
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), tokens()


def tokens(seed: int = 0) -> np.ndarray:
    """A batch."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, (BATCH, LENGTH + 1)).astype(np.int32)


class Network(eqx.Module):
    """An Equinox model: a convolution, an MLP with activations inside."""

    embed: eqx.nn.Linear
    mlp: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, key: jax.Array) -> None:
        one, two = jax.random.split(key)
        self.embed = eqx.nn.Linear(16, WIDTH, key=one)
        self.mlp = eqx.nn.MLP(WIDTH, 8, HIDDEN, 2, activation=jax.nn.gelu, key=two)
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.mlp(self.norm(self.embed(x)))


EQUINOX_OPTIMIZER = optax.adam(1e-2)


@eqx.filter_jit
def equinox_step(
    model: Network, opt_state: Any, x: jax.Array, y: jax.Array
) -> tuple[Network, Any, jax.Array]:
    """A step as Equinox's documentation writes it."""

    @eqx.filter_value_and_grad
    def loss(model: Network) -> jax.Array:
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    value, grads = loss(model)
    updates, opt_state = EQUINOX_OPTIMIZER.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, value


def equinox_args() -> tuple[Network, Any, np.ndarray, np.ndarray]:
    """Arguments of `equinox_step`."""
    model = Network(jax.random.key(0))
    rng = np.random.default_rng(1)
    x, y = (
        rng.standard_normal((32, 16)).astype(np.float32),
        rng.standard_normal((32, 8)).astype(np.float32),
    )
    return model, EQUINOX_OPTIMIZER.init(eqx.filter(model, eqx.is_array)), x, y
