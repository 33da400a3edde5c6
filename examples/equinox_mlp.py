"""An Equinox model: an `eqx.filter_jit` step is searched as it is, its module is made in its
shards.

python examples/equinox_mlp.py
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import autoshard

OPTIMIZER = optax.adam(1e-3)


@eqx.filter_jit
def train_step(
    model: eqx.nn.MLP, opt_state: Any, x: jax.Array, y: jax.Array
) -> tuple[eqx.nn.MLP, Any, jax.Array]:
    """One step on the squared error."""
    loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def start(key: jax.Array) -> tuple[eqx.nn.MLP, Any]:
    """A model and the state of its optimizer."""
    model = eqx.nn.MLP(32, 8, 256, depth=2, activation=jax.nn.gelu, key=key)
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((64, n)).astype(np.float32) for n in (32, 8))
    key = jax.random.key(0)
    example = eqx.filter_eval_shape(start, key)
    effort = autoshard.Effort(compiled=2, measured=0)
    plan = autoshard.optimize(
        train_step, (*example, x, y), "data=4,model=2", effort=effort, progress=False
    )
    model, opt_state = autoshard.init(plan, start, key)
    for _ in range(5):
        model, opt_state, loss = plan(model, opt_state, x, y)
        print(f"{float(loss):.4f}")
    print(plan.specs["model/layers/0/weight"], plan.verified)
