"""Programs of thousands of equations: what a search of minutes is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


# A rollout ----------------------------------------------------------------------------------------


def _forces(places: jax.Array) -> jax.Array:
    """Contacts of every pair of bodies, written out as physics engines do."""
    forces = jnp.zeros_like(places)
    for i in range(places.shape[1]):
        for j in range(i):
            apart = places[:, i] - places[:, j]
            distance = jnp.sqrt(jnp.sum(apart * apart, -1, keepdims=True) + 1e-3)
            force = jnp.where(distance < 1.0, (1.0 - distance) / distance, 0.0) * apart
            forces = forces.at[:, i].add(force).at[:, j].add(-force)
    return forces


def _policy(weights: Params, places: jax.Array, speeds: jax.Array) -> jax.Array:
    batch = places.shape[0]
    seen = jnp.concatenate([places.reshape(batch, -1), speeds.reshape(batch, -1)], -1)
    return jnp.tanh(jnp.tanh(seen @ weights["in"]) @ weights["out"]).reshape(places.shape)


def rollout_step(weights: Params, places: jax.Array, speeds: jax.Array) -> tuple[Params, jax.Array]:
    """A train step through four steps of a simulation, each of two substeps."""

    def loss(weights: Params) -> jax.Array:
        def step(state: tuple[jax.Array, jax.Array], _: None) -> Any:
            places, speeds = state
            action = _policy(weights, places, speeds)
            for _ in range(2):
                speeds = 0.99 * speeds + 0.01 * (_forces(places) + action)
                places = places + 0.01 * speeds
            return (places, speeds), jnp.mean(places**2)

        _, costs = jax.lax.scan(step, (places, speeds), None, length=4)
        return jnp.mean(costs)

    cost, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), cost


def rollout_args(bodies: int = 9, batch: int = 64, hidden: int = 64) -> tuple[Any, ...]:
    """Abstract arguments of `rollout_step`; nine bodies give 4,000 equations."""
    size = 3 * bodies
    weights = {"in": _array(2 * size, hidden), "out": _array(hidden, size)}
    return weights, _array(batch, bodies, 3), _array(batch, bodies, 3)


# A U-Net ------------------------------------------------------------------------------------------


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=dims)


def _norm(x: jax.Array, scale: jax.Array, groups: int = 4) -> jax.Array:
    *rest, channels = x.shape
    y = x.reshape(*rest, groups, channels // groups)
    y = y - y.mean((1, 2, 4), keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean((1, 2, 4), keepdims=True) + 1e-5)
    return y.reshape(x.shape) * scale


def _block(weights: Params, x: jax.Array, time: jax.Array) -> jax.Array:
    """A residual block, told the time, and self-attention over all places."""
    h = _conv(jax.nn.silu(_norm(x, weights["norm1"])), weights["conv1"])
    h = h + (time @ weights["time"])[:, None, None]
    h = _conv(jax.nn.silu(_norm(h, weights["norm2"])), weights["conv2"])
    x = h + _conv(x, weights["skip"])
    batch, height, width, channels = x.shape
    y = _norm(x, weights["norm3"]).reshape(batch, height * width, channels)
    q, k, v = jnp.split(y @ weights["qkv"], 3, -1)
    mixed = jax.nn.softmax(q @ k.swapaxes(1, 2) * channels**-0.5) @ v
    return x + (mixed @ weights["mix"]).reshape(x.shape)


def _block_weights(before: int, after: int) -> Params:
    return {
        "norm1": _array(before),
        "conv1": _array(3, 3, before, after),
        "time": _array(32, after),
        "norm2": _array(after),
        "conv2": _array(3, 3, after, after),
        "skip": _array(1, 1, before, after),
        "norm3": _array(after),
        "qkv": _array(after, 3 * after),
        "mix": _array(after, after),
    }


def unet_step(weights: Params, x: jax.Array, time: jax.Array, noise: jax.Array) -> Any:
    """A train step of a denoising U-Net of three levels."""

    def loss(weights: Params) -> jax.Array:
        angles = time[:, None] * jnp.exp(-jnp.arange(16) / 3.0)
        told = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        h = _conv(x, weights["in"])
        kept: list[jax.Array] = []
        for level in weights["down"]:
            for block in level:
                h = _block(block, h, told)
                kept.append(h)
            h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        for level in weights["up"]:
            batch, height, width, channels = h.shape
            h = jax.image.resize(h, (batch, 2 * height, 2 * width, channels), "nearest")
            for block in level:
                h = _block(block, jnp.concatenate([h, kept.pop()], -1), told)
        return jnp.mean((_conv(jax.nn.silu(h), weights["out"]) - noise) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients), value


def unet_args(widths: Sequence[int] = (16, 32, 64), batch: int = 8, size: int = 16) -> Any:
    """Abstract arguments of `unet_step`."""
    down, up = [], []
    before = widths[0]
    for width in widths:
        down.append([_block_weights(before, width), _block_weights(width, width)])
        before = width
    for width in reversed(widths):
        up.append([_block_weights(before + width, width), _block_weights(2 * width, width)])
        before = width
    weights = {
        "in": _array(3, 3, 4, widths[0]),
        "down": down,
        "up": up,
        "out": _array(3, 3, widths[0], 4),
    }
    image = _array(batch, size, size, 4)
    return weights, image, _array(batch), image
