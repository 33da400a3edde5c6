"""A rule file in the manner of MaxText: ordered `logical_axis_rules`, and the logical axes of each
parameter.

    python examples/logical_rules.py

The file is YAML (and JSON). MaxText, t5x and Flax read the rules as they are; here Flax turns them
into shardings.
"""

from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.table.export import export

RULES = Path("specs/logical_rules.yml")


def train_step(
    params: dict[str, jax.Array], x: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """One step of an MLP that should reproduce its input."""
    loss, grads = jax.value_and_grad(
        lambda p: jnp.mean((jax.nn.gelu(x @ p["up"]) @ p["down"] - x) ** 2)
    )(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    params = {
        "up": np.ones((64, 256), np.float32) / 64,
        "down": np.ones((256, 64), np.float32) / 256,
    }
    x = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    plan = autoshard.apply(train_step, (params, x), "data=4,model=2", "fsdp+tp", donate_argnums=0)
    RULES.parent.mkdir(exist_ok=True)
    RULES.write_text(export(plan.table, "logical-axis-rules", argument="params"))
    print(RULES.read_text())

    # From here on autoshard is not needed.
    config = yaml.safe_load(RULES.read_text())
    rules = [(name, tuple(axes) or None) for name, axes in config["logical_axis_rules"]]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    logical = {name: P(*axes) for name, axes in config["logical_axes"].items()}
    shardings = nn.logical_to_mesh_sharding(logical, mesh, rules)
    placed = jax.device_put(params, shardings)
    print({name: value.sharding.spec for name, value in placed.items()})
