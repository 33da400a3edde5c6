"""A byte-level decoder language model on the sources of Python's standard library: search, then
train with the plan.

    python examples/transformer.py
    autoshard search examples.transformer:factory --mesh data=4,model=2 --cpu-devices 8 --out specs/transformer.json

The model is written as one would for a single device: scan over layers, `jax.checkpoint`, AdamW
from optax, no sharding anywhere. autoshard finds the layout for 8 (fake CPU) devices; 30 steps with
it are compared with 30 steps without.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autoshard

MESH_SHAPE = {"data": 4, "model": 2}
STEPS = 30
RELATIVE_TOLERANCE = 1e-5  # float32, sums in another order
TABLE = Path("specs/transformer.json")
EFFORT = autoshard.Effort(compiled=14, measured=7)


@dataclass(frozen=True)
class Config:
    """Sizes. Tokens per device (batch * length / 8 = 256) are at least d_model, as in real
    training.

    Attributes:
        layers: Decoder layers.
        d_model: Width of the residual stream.
        heads: Attention heads.
        d_ff: Width of the hidden layer of the MLP.
        length: Tokens of one sequence.
        batch: Sequences in a batch.
        vocabulary: Bytes.
    """

    layers: int = 4
    d_model: int = 128
    heads: int = 4
    d_ff: int = 512
    length: int = 128
    batch: int = 16
    vocabulary: int = 256


CONFIG = Config()
OPTIMIZER = optax.adamw(learning_rate=1e-3, weight_decay=0.01)

Params = dict[str, Any]


def init_params(key: jax.Array, config: Config = CONFIG) -> Params:
    """Normal weights, scaled by fan-in; layers are stacked on the leading dimension."""
    layers, d, f = config.layers, config.d_model, config.d_ff
    head = d // config.heads
    shapes = {
        "wq": (d, config.heads, head),
        "wk": (d, config.heads, head),
        "wv": (d, config.heads, head),
        "wo": (config.heads, head, d),
        "w_up": (d, f),
        "w_down": (f, d),
    }
    fan_in = dict.fromkeys(shapes, d) | {"w_down": f}
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    weights = {
        n: jax.random.normal(keys[n], (layers, *shape)) * fan_in[n] ** -0.5
        for n, shape in shapes.items()
    }
    norms = {"norm_attention": jnp.ones((layers, d)), "norm_mlp": jnp.ones((layers, d))}
    embedding = jax.random.normal(jax.random.fold_in(key, 1), (config.vocabulary, d)) * d**-0.5
    return {"embedding": embedding, "layers": {**weights, **norms}, "norm_final": jnp.ones((d,))}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root mean square normalisation over the last dimension."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale


def positions(length: int, d_model: int) -> jax.Array:
    """Sinusoidal position vectors, [length, d_model]."""
    frequency = 1e4 ** (-jnp.arange(0, d_model, 2) / d_model)
    angle = jnp.arange(length)[:, None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def layer(x: jax.Array, weights: Params) -> jax.Array:
    """One decoder layer: causal attention, then the MLP, each with a residual connection."""
    h = rms_norm(x, weights["norm_attention"])
    q = jnp.einsum("bsd,dhk->bshk", h, weights["wq"])
    k = jnp.einsum("bsd,dhk->bshk", h, weights["wk"])
    v = jnp.einsum("bsd,dhk->bshk", h, weights["wv"])
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), dtype=bool))
    attention = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhqs,bshk->bqhk", attention, v)
    x = x + jnp.einsum("bshk,hkd->bsd", mixed, weights["wo"])
    h = rms_norm(x, weights["norm_mlp"])
    return x + jax.nn.gelu(h @ weights["w_up"]) @ weights["w_down"]


def loss_fn(params: Params, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next byte, nats."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    embedding = params["embedding"]
    x = embedding[inputs] * embedding.shape[1] ** 0.5 + positions(
        inputs.shape[1], embedding.shape[1]
    )

    @jax.checkpoint
    def body(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        return layer(x, weights), None

    x, _ = jax.lax.scan(body, x, params["layers"])
    logits = rms_norm(x, params["norm_final"]) @ embedding.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train_step(params: Params, opt_state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
    """One AdamW step; what autoshard is given."""
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


@functools.cache
def text() -> np.ndarray:
    """The sources of the standard library's top-level modules, one after another, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)


def batches(config: Config = CONFIG, seed: int = 0) -> Iterator[np.ndarray]:
    """Endless int32[batch, length + 1], cut from random places of the text; the same for the same
    seed.
    """
    rng = np.random.default_rng(seed)
    data = text()
    while True:
        starts = rng.integers(0, len(data) - config.length, size=config.batch)
        yield np.stack([data[s : s + config.length + 1] for s in starts]).astype(np.int32)


def initial(seed: int = 0) -> tuple[Params, Any]:
    """Parameters and optimizer state to start from."""
    params = init_params(jax.random.key(seed))
    return params, OPTIMIZER.init(params)


def factory() -> dict[str, Any]:
    """The arguments of `autoshard.optimize` but for the mesh; for the command line."""
    return {
        "fn": train_step,
        "example_args": (*initial(), next(batches())),
        "donate_argnums": (0, 1),
    }


def train(step: Any, params: Params, opt_state: Any) -> tuple[list[float], float]:
    """Trains STEPS steps; the losses, and the median seconds of a step."""
    losses, seconds = [], []
    for _, tokens in zip(range(STEPS), batches(seed=1), strict=False):
        start = time.perf_counter()
        params, opt_state, loss = step(params, opt_state, tokens)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    return losses, float(np.median(seconds))


def main() -> int:
    """Searches, saves the table, trains with and without the plan, compares the losses."""
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh(tuple(MESH_SHAPE.values()), tuple(MESH_SHAPE))
    arguments = factory()
    count = sum(leaf.size for leaf in jax.tree.leaves(arguments["example_args"][0]))
    print(
        f"{count:,} parameters, {len(text()):,} bytes of text, mesh {MESH_SHAPE}, jax "
        f"{jax.__version__}\n"
    )

    start = time.perf_counter()
    plan = autoshard.optimize(mesh=mesh, effort=EFFORT, **arguments)
    print(plan)
    plan.table.save(TABLE)
    print(f"\nsearched in {time.perf_counter() - start:.0f} s; spec table saved to {TABLE}\n")

    params, opt_state = initial()
    with_plan, plan_s = train(plan, plan.place(0, params), plan.place(1, opt_state))
    without, unsharded_s = train(jax.jit(train_step, donate_argnums=(0, 1)), *initial())

    print(
        f"step   loss with the plan   loss unsharded   ({plan_s * 1e3:.0f} and "
        f"{unsharded_s * 1e3:.0f} ms a step)"
    )
    for number, (ours, theirs) in enumerate(zip(with_plan, without, strict=True)):
        if number % 5 == 0 or number == STEPS - 1:
            print(f"{number:4d}   {ours:18.6f}   {theirs:14.6f}")
    worst = max(
        abs(ours - theirs) / abs(theirs) for ours, theirs in zip(with_plan, without, strict=True)
    )
    agree = worst <= RELATIVE_TOLERANCE
    print(
        f"largest relative difference {worst:.1e}: {'equal' if agree else 'DIFFERENT'} within "
        f"{RELATIVE_TOLERANCE:.0e}"
    )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
