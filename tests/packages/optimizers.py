"""optax's optimizers, each in the train step of a small residual network, for the layout that people
use with all of them: `fsdp+tp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from tests.packages.program import Program

WIDTH, HIDDEN, LAYERS, BATCH = 64, 256, 2, 32


def matrices(tree: Any) -> Any:
    """True for each leaf that is a matrix."""
    return jax.tree.map(lambda leaf: leaf.ndim == 2, tree)


def kinds(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "vector", tree)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=32),
    "muon": lambda: optax.contrib.muon(1e-3),
    "masked": lambda: optax.masked(optax.adamw(1e-3), matrices),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adamw(1e-3), "vector": optax.sgd(1e-3)}, kinds
    ),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-3),
    "lamb": lambda: optax.lamb(1e-3),
    "lion": lambda: optax.lion(1e-3),
    "novograd": lambda: optax.novograd(1e-3),
    "prodigy": optax.contrib.prodigy,
    "dowg": optax.contrib.dowg,
    "sm3": lambda: optax.sm3(1e-3),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.adam(1e-3)),
    "ema": lambda: optax.chain(optax.adam(1e-3), optax.ema(0.9)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), max_consecutive_errors=3),
    "lbfgs": lambda: optax.lbfgs(memory_size=3),
}
"""By name; each is made when it is asked for. (optax 0.2.8 has no soap.)"""


def parameters(dtype: Any) -> Any:
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return (shape[0] ** -0.5 * rng.standard_normal(shape)).astype(dtype)

    layers = []
    for _ in range(LAYERS):
        layer = {"up": weight(WIDTH, HIDDEN), "down": weight(HIDDEN, WIDTH)}
        layers.append({**layer, "bias": np.zeros(HIDDEN, dtype)})
    return layers


def loss(params: Any, x: Any, y: Any) -> Any:
    for layer in params:
        x = x + jax.nn.gelu(x @ layer["up"] + layer["bias"]) @ layer["down"]
    return jnp.mean((x - y) ** 2)


def train(name: str, dtype: Any = np.float32) -> Program:
    """The train step with one of the optimizers."""
    optimizer = OPTIMIZERS[name]()

    def train_step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        extra = {}
        if name == "lbfgs":
            extra = {"value": value, "grad": grads, "value_fn": lambda p: loss(p, x, y)}
        updates, opt_state = optimizer.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state, value

    params = jax.tree.map(jnp.asarray, parameters(dtype))
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal((BATCH, WIDTH)).astype(dtype) for _ in range(2))
    return Program(
        "optax",
        train_step,
        (params, optimizer.init(params), x, y),
        rival=RIVALS.get(name, {}) | WEIGHTS,
        donate=(0, 1),
    )


WEIGHTS = {
    "up$": P("data", "model"),
    "down$": P("model", "data"),
    "bias$": P("model"),
    "^[xy]$": P("data"),
}

RIVALS: dict[str, dict[str, P]] = {
    # rows and columns of factored moments have other shapes than the weights
    "adafactor": {"v_(row|col)": P(), "/v/": P()},
    "sm3": {"/mu/": P(), "diagonal": P()},
    "novograd": {"/nu/": P()},
    # [history, ...]: as the weights, one dimension further
    "lbfgs": {
        "diff_(params|updates)_memory/.*up$": P(None, "data", "model"),
        "diff_(params|updates)_memory/.*down$": P(None, "model", "data"),
        "diff_(params|updates)_memory/.*bias$": P(None, "model"),
    },
}
"""By optimizer, rules for states that are not shaped as their weights; they go before `WEIGHTS`."""
