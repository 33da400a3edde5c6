"""A Flax NNX model: the step is searched as it is written for `nnx.jit`, and the model is made in
its shards.

python examples/nnx_llama.py
"""

import functools

import jax
import numpy as np
import optax
from flax import nnx

import autoshard

WIDTH, HIDDEN, VOCABULARY = 64, 256, 128


class Layer(nnx.Module):
    """Gated MLP with a residual connection."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.down = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.gate, self.up = (nnx.Linear(WIDTH, HIDDEN, rngs=rngs) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        return x + self.down(jax.nn.silu(self.gate(self.norm(x))) * self.up(self.norm(x)))


class Model(nnx.Module):
    """Embedding, layers, head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:  # noqa: D102
        return self.embedding.attend(
            functools.reduce(lambda x, layer: layer(x), self.layers, self.embedding(tokens))
        )


def train_step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """Changes the model and the optimizer, returns the loss."""
    entropy, x, y = optax.softmax_cross_entropy_with_integer_labels, tokens[:, :-1], tokens[:, 1:]
    loss, grads = nnx.value_and_grad(lambda m: entropy(m(x), y).mean())(model)
    optimizer.update(model, grads)
    return loss


def start() -> tuple[Model, nnx.Optimizer]:
    """A model and its optimizer."""
    return (model := Model(nnx.Rngs(0))), nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (32, 33)).astype(np.int32)
    plan = autoshard.apply(
        train_step, (*nnx.eval_shape(start), tokens), "data=4,model=2", "fsdp+tp"
    )
    model, optimizer = autoshard.init(plan, start)  # no device ever holds the whole
    losses = [round(float(plan(model, optimizer, tokens)), 3) for _ in range(5)]
    print(losses, model.layers[0].up.kernel[...].sharding.spec)
