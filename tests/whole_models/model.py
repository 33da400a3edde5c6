"""What a whole model is to the tests, and the pieces that several of them are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = Any
Array = jax.Array


@dataclass(frozen=True)
class WholeModel:
    """A train or decode step with concrete arguments.

    Attributes:
        step: The step, as a person would write it.
        args: Its arguments, NumPy leaves.
        donate: What it replaces.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...]


class Init:
    """Draws parameters one after the other from one seed."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float | None = None) -> np.ndarray:
        """Normal numbers, of variance 1 / fan-in unless a scale is given."""
        fan_in = int(np.prod(shape[:-1])) if len(shape) > 1 else 1
        return (
            self._rng.standard_normal(shape) * (fan_in**-0.5 if scale is None else scale)
        ).astype(np.float32)

    def dense(self, fan_in: int, fan_out: int) -> dict[str, np.ndarray]:
        """A weight and a bias."""
        return {"w": self.normal(fan_in, fan_out), "b": np.zeros(fan_out, np.float32)}

    def norm(self, size: int) -> dict[str, np.ndarray]:
        """Scale and shift of a layer, group or batch norm."""
        return {"scale": np.ones(size, np.float32), "shift": np.zeros(size, np.float32)}

    def integers(self, high: int, *shape: int) -> np.ndarray:
        """Tokens, labels, indices."""
        return self._rng.integers(0, high, shape).astype(np.int32)


def training(
    loss: Callable[..., Array], optimizer: optax.GradientTransformation, params: Params, *batch: Any
) -> WholeModel:
    """The train step of `loss(params, *batch)`: gradient, optimizer, new parameters."""

    def train_step(params: Params, opt_state: Any, *batch: Any) -> tuple[Params, Any, Array]:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    state = jax.tree.map(np.asarray, optimizer.init(params))
    return WholeModel(train_step, (params, state, *batch), donate=(0, 1))


def dense(p: Params, x: Array) -> Array:
    """x @ w + b."""
    return x @ p["w"] + p["b"]


def layer_norm(p: Params, x: Array) -> Array:
    """Over the last dimension, with scale and shift."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["shift"]


def rms_norm(scale: Array, x: Array) -> Array:
    """Over the last dimension, with a scale."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def attention(q: Array, k: Array, v: Array, bias: Array | float = 0.0) -> Array:
    """Softmax attention; q, k, v are [batch, length, heads, size], the bias is added to the
    scores."""
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * q.shape[-1] ** -0.5 + bias
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v)


def causal_bias(length: int) -> Array:
    """0 where a position may look, very negative where it may not."""
    return jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -1e9)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Mean over all labels."""
    logp = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logp, labels[..., None], -1).mean()
