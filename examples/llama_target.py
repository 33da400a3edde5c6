"""A Llama-shaped train step planned for hardware that is not here.

    python examples/llama_target.py tpu:v5e:4x4 data=4,model=4
    autoshard search examples.llama_target:factory --target gpu:h100:4x8 --mesh data=4,model=8 --out specs/llama.json

The step is compiled by the target's real compiler on this machine (`pip install 'autoshard[tpu]'`
or `[gpu]`); nothing is run, no array is made. The table says what FSDP, Megatron's tensor
parallelism and their mixture come to when the same compiler compiles them.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import autoshard

LAYERS, D_MODEL, HEADS, KV_HEADS, D_FF, VOCAB, LENGTH = 8, 2048, 16, 8, 5632, 32_000, 2048
SEQUENCES_PER_DEVICE = 2

Params = Any
Array = jax.Array
optimizer = optax.adamw(3e-4, weight_decay=0.1)


def rms_norm(scale: Array, x: Array) -> Array:
    """Root mean square norm, in float32."""
    wide = x.astype(jnp.float32)
    return scale * (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(
        x.dtype
    )


def rope(x: Array) -> Array:
    """Rotary positions of [batch, length, heads, size]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def layer(x: Array, p: Params) -> tuple[Array, None]:
    """Grouped-query attention and SwiGLU, both with a norm before."""
    batch, length, _ = x.shape
    size, group = D_MODEL // HEADS, HEADS // KV_HEADS
    h = rms_norm(p["attn_norm"], x)
    q = rope(jnp.einsum("btd,dhk->bthk", h, p["wq"])).reshape(batch, length, KV_HEADS, group, size)
    k, v = rope(jnp.einsum("btd,dhk->bthk", h, p["wk"])), jnp.einsum("btd,dhk->bthk", h, p["wv"])
    scores = jnp.einsum("bqgrk,bsgk->bgrqs", q, k).astype(jnp.float32) * size**-0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(x.dtype)
    mixed = jnp.einsum("bgrqs,bsgk->bqgrk", weights, v).reshape(batch, length, HEADS, size)
    x = x + jnp.einsum("bthk,hkd->btd", mixed, p["wo"])
    h = rms_norm(p["mlp_norm"], x)
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None


def loss(params: Params, tokens: Array) -> Array:
    """Mean cross entropy of the next token."""
    x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][tokens[:, :-1]], params["layers"])
    logits = (rms_norm(params["norm"], x) @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(params: Params, opt_state: Any, tokens: Array) -> tuple[Params, Any, Array]:
    """One step of AdamW."""
    value, grads = jax.value_and_grad(loss)(params, tokens)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def example_args(devices: int) -> tuple[Any, Any, jax.ShapeDtypeStruct]:
    """Shapes of parameters, optimizer state and tokens."""
    size = D_MODEL // HEADS

    def weight(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    layers = {
        "attn_norm": weight(LAYERS, D_MODEL),
        "wq": weight(LAYERS, D_MODEL, HEADS, size),
        "wk": weight(LAYERS, D_MODEL, KV_HEADS, size),
        "wv": weight(LAYERS, D_MODEL, KV_HEADS, size),
        "wo": weight(LAYERS, HEADS, size, D_MODEL),
        "mlp_norm": weight(LAYERS, D_MODEL),
        "gate": weight(LAYERS, D_MODEL, D_FF),
        "up": weight(LAYERS, D_MODEL, D_FF),
        "down": weight(LAYERS, D_FF, D_MODEL),
    }
    params = {
        "embed": weight(VOCAB, D_MODEL),
        "layers": layers,
        "norm": weight(D_MODEL),
        "head": weight(D_MODEL, VOCAB),
    }
    tokens = jax.ShapeDtypeStruct((SEQUENCES_PER_DEVICE * devices, LENGTH + 1), jnp.int32)
    return params, jax.eval_shape(optimizer.init, params), tokens


def factory(devices: int = 32) -> dict[str, Any]:
    """The arguments of `autoshard.optimize` but for the mesh; for the command line."""
    return {"fn": train_step, "example_args": example_args(devices), "donate_argnums": (0, 1)}


def main() -> int:
    """Searches and prints the plan."""
    target, axes = (sys.argv[1:] + ["tpu:v5e:4x4", "data=4,model=4"][len(sys.argv) - 1 :])[:2]
    mesh = autoshard.target(target, axes)
    started = time.monotonic()
    plan = autoshard.optimize(mesh=mesh, **factory(math.prod(mesh.shape.values())))
    print(plan)
    print(f"\n{time.monotonic() - started:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
