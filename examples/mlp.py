"""The two-layer MLP of the textbooks on 4 devices: column-split w1, row-split w2, one all_reduce of
32 bytes.

    python examples/mlp.py

x[2, 8] @ w1[8, 16] -> relu -> @ w2[16, 4], squared error, one SGD step. Nothing is said about
sharding but a memory budget of 1,024 bytes per device. By hand, in float32:

    arguments   w1 512, w2 256, x 64, target 32               replicated 864   split 192 + 96 = 288
    outputs     w1 512, w2 256, loss 4                        replicated 772   split 192 + 4 = 196

so replication is far over the budget before a single temporary (the compiler says 1,948 bytes with
them on jax 0.12). At this size it would win without a budget: computing everything everywhere is
faster than any collective. The batch of 2 does not divide over 4 devices; of what is left,
splitting the hidden dimension (16) is the layout that moves least: the forward pass sums the
partial predictions, 2 x 4 float32 = 32 bytes, and the backward pass moves nothing, because every
device has what its own weights need.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import autoshard

DEVICES = 4
LEARNING_RATE = 0.1
MEMORY_BUDGET_BYTES = 1024
TOLERANCE = 1e-5  # float32

Weights = dict[str, Any]


def forward(weights: Weights, x: jax.Array) -> jax.Array:
    """The network."""
    return jax.nn.relu(x @ weights["w1"]) @ weights["w2"]


def train_step(weights: Weights, x: jax.Array, target: jax.Array) -> tuple[Weights, jax.Array]:
    """One SGD step on half the squared error: the new weights, and the error before the step."""

    def error(weights: Weights) -> jax.Array:
        return 0.5 * jnp.sum(jnp.square(forward(weights, x) - target))

    loss, gradient = jax.value_and_grad(error)(weights)
    return jax.tree.map(lambda w, g: w - LEARNING_RATE * g, weights, gradient), loss


def example_args(seed: int = 0) -> tuple[Weights, np.ndarray, np.ndarray]:
    """Weights, input and target, float32."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return {"w1": normal(8, 16) / 4, "w2": normal(16, 4) / 4}, normal(2, 8), normal(2, 4)


def factory() -> dict[str, Any]:
    """The arguments of `autoshard.optimize` but for the mesh; for the command line."""
    return {
        "fn": train_step,
        "example_args": example_args(),
        "memory_budget_bytes": MEMORY_BUDGET_BYTES,
    }


def numpy_step(
    weights: Weights, x: np.ndarray, target: np.ndarray
) -> tuple[list[Weights], np.ndarray, float]:
    """The same step as DEVICES devices would do it by hand: each has a slice of the hidden units;
    one sum is shared.

    Returns:
        The new weights of each device, the prediction and the error.
    """
    pieces = [
        {"w1": w1, "w2": w2}
        for w1, w2 in zip(
            np.split(weights["w1"], DEVICES, axis=1),
            np.split(weights["w2"], DEVICES, axis=0),
            strict=True,
        )
    ]
    hidden = [np.maximum(x @ piece["w1"], 0) for piece in pieces]
    prediction = sum(
        h @ piece["w2"] for h, piece in zip(hidden, pieces, strict=True)
    )  # the all_reduce
    difference = prediction - target
    updated = [
        {
            "w1": piece["w1"] - LEARNING_RATE * x.T @ ((difference @ piece["w2"].T) * (h > 0)),
            "w2": piece["w2"] - LEARNING_RATE * h.T @ difference,
        }
        for h, piece in zip(hidden, pieces, strict=True)
    ]
    return updated, prediction, 0.5 * float(np.sum(difference**2))


def check(plan: autoshard.Plan) -> list[str]:
    """What is not as it should be: the specs, the collectives, the numbers of each shard."""
    wrong = []
    expected = {"weights/w1": PartitionSpec(None, "model"), "weights/w2": PartitionSpec("model")}
    for path, spec in expected.items():
        if plan.specs[path] != spec:
            wrong.append(f"{path} is {plan.specs[path]}, not {spec}")
    winner = next(candidate for candidate in plan.candidates if candidate.status == "winner")
    assert winner.compiled is not None
    moves = [(c.kind, c.count, c.bytes) for c in winner.compiled.collectives]
    # A device sends 2 (n - 1) / n of the 32 bytes that are summed.
    if moves != [("all_reduce", 1, 2 * (DEVICES - 1) * 32 // DEVICES)]:
        wrong.append(f"the compiled program moves {moves}, not one all_reduce of 32 bytes")
    if winner.compiled.peak_bytes > MEMORY_BUDGET_BYTES:
        wrong.append(
            f"a device needs {winner.compiled.peak_bytes} bytes, over the budget of "
            f"{MEMORY_BUDGET_BYTES}"
        )

    weights, x, target = example_args()
    by_hand, prediction_by_hand, loss_by_hand = numpy_step(weights, x, target)
    placed = plan.place(0, weights)
    prediction = jax.jit(forward, in_shardings=plan.in_shardings[:2])(placed, x)
    updated, loss = plan(placed, x, target)
    compared = [
        ("prediction", np.asarray(prediction), prediction_by_hand),
        ("loss", np.asarray(loss), loss_by_hand),
    ]
    for name, dimension in (("w1", 1), ("w2", 0)):
        for shard in updated[name].addressable_shards:
            first = shard.index[dimension].start or 0
            piece = by_hand[first * DEVICES // 16][name]
            compared.append((f"{name} on device {shard.device.id}", np.asarray(shard.data), piece))
    for name, ours, theirs in compared:
        if np.shape(ours) != np.shape(theirs) or not np.allclose(
            ours, theirs, rtol=TOLERANCE, atol=TOLERANCE
        ):
            wrong.append(f"{name} differs from the NumPy computation:\n{ours}\n{theirs}")
    return wrong


def main() -> int:
    """Searches, prints the plan and checks it."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    plan = autoshard.optimize(mesh=f"model={DEVICES}", **factory())
    print(plan)
    wrong = check(plan)
    for line in wrong:
        print(f"WRONG: {line}")
    if not wrong:
        print(
            "\nThe prediction, the error and every shard of the new weights equal the NumPy "
            "computation."
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
