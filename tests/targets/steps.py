"""A small train step, and how the tests compile it for a target."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import autoshard

LAYERS, D_MODEL, D_FF, BATCH = 5, 1024, 4096, 4096


def step(params: Any, x: Any) -> Any:
    """SGD on a scanned two-layer MLP, bfloat16."""

    def block(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w["up"]) @ w["down"], None

    def loss(params: Any) -> Any:
        return jnp.sum(jax.lax.scan(block, x, params)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def args(scale: int = 1, batch: int = BATCH) -> tuple[Any, Any]:
    """Shapes; every width is `scale` times as large."""
    d, f = scale * D_MODEL, scale * D_FF
    params = {
        "up": jax.ShapeDtypeStruct((LAYERS, d, f), jnp.bfloat16),
        "down": jax.ShapeDtypeStruct((LAYERS, f, d), jnp.bfloat16),
    }
    return params, jax.ShapeDtypeStruct((batch, d), jnp.bfloat16)


def plan(target: str, mesh: str, preset: str, **more: Any) -> autoshard.Plan:
    """A preset bound to the step on a target."""
    return autoshard.apply(
        step, args(**more), autoshard.target(target, mesh), preset, donate_argnums=0
    )
