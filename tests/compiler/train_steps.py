"""Small train steps with the layouts that experts use, for the tests of evidence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, D_MODEL, D_FF, BATCH = 3, 32, 64, 256


def mlp_step(mesh: Mesh, layout: str, scan: bool = True) -> jax.stages.Lowered:
    """Lowers a train step of an MLP, gradients and weights constrained to their specs, activations
    to the batch's.

    Args:
        mesh: With the axes `data` and `model`.
        layout: "dp" (batch over both axes), "tp" (hidden units over `model`) or "fsdp" (all over
            `data`).
        scan: Whether the layers are scanned or unrolled.
    """
    batch = {"dp": ("data", "model"), "tp": None, "fsdp": "data"}[layout]
    hidden = "model" if layout == "tp" else None
    shard = "data" if layout == "fsdp" else None
    specs = {"up": P(None, shard, hidden), "down": P(None, hidden, shard)}

    def pin(value: Any, *spec: Any) -> Any:
        return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, P(*spec)))

    def block(h: Any, w: Any) -> Any:
        h = pin(h, batch, None)
        u = pin(jnp.tanh(pin(h @ w["up"], batch, hidden)), batch, hidden)
        return h + pin(u @ w["down"], batch, None)

    def loss(weights: Any, x: Any) -> Any:
        if scan:
            x = jax.lax.scan(lambda h, w: (block(h, w), None), x, weights)[0]
        else:
            for layer in range(LAYERS):
                x = block(x, jax.tree.map(lambda w: w[layer], weights))  # noqa: B023
        return jnp.sum(x * x)

    def step(weights: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x)
        grads = {name: pin(grad, *specs[name]) for name, grad in grads.items()}
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    shapes = {"up": (LAYERS, D_MODEL, D_FF), "down": (LAYERS, D_FF, D_MODEL)}
    placed = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    weights = {
        name: jax.ShapeDtypeStruct(shapes[name], jnp.float32, sharding=placed[name])
        for name in shapes
    }
    x = jax.ShapeDtypeStruct((BATCH, D_MODEL), jnp.float32, sharding=NamedSharding(mesh, P(batch)))
    out: Any = (placed, NamedSharding(mesh, P()))
    return jax.jit(step, out_shardings=out).lower(weights, x)


def lower(
    mesh: Mesh, fn: Callable[..., Any], *args: tuple[tuple[int, ...], P], out: P | None = None
) -> Any:
    """Lowers `fn` on f32 arguments given as (shape, spec)."""
    arrays = [
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, spec)) for s, spec in args
    ]
    kwargs: dict[str, Any] = {} if out is None else {"out_shardings": NamedSharding(mesh, out)}
    return jax.jit(fn, **kwargs).lower(*arrays)
