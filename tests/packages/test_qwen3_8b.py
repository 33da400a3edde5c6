"""tunix's Qwen3-8B on 64 H100: presets are what people write by hand, whatever the depth.

One step of supervised fine-tuning in bfloat16 at fsdp=16, tp=4, arguments abstract; predicted, and
at 2 layers compiled as well. It needs google-tunix (0.1.7; Python 3.12 or newer), and runs in a
process with 64 CPU devices:

    pip install google-tunix && pytest -m packages tests/packages/test_qwen3_8b.py
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

if importlib.util.find_spec("tunix") is None:
    pytest.skip("google-tunix is not installed", allow_module_level=True)

pytestmark = [pytest.mark.packages, pytest.mark.slow]

MESH = {"fsdp": 16, "tp": 4}
BUDGET_BYTES = 76 * 2**30
BATCH, LENGTH = 128, 2048

BY_HAND = {
    "tokens.0": "fsdp",
    "embedder/input_embedding.0": "tp",
    "embedder/input_embedding.1": "fsdp",
    "layers/0/attn/q_proj/w.1": "tp",
    "layers/0/attn/k_proj/w.1": "tp",
    "layers/0/mlp/gate_proj/kernel.1": "tp",
    "lm_head/w.1": "tp",
}
"""Where a person sends which dimension of which leaf; those that are the same go along."""


# In the process with 64 devices -------------------------------------------------------------------


def make_step(layers: int) -> tuple[Any, tuple[Any, ...]]:
    """A train step of Qwen3-8B with so many of its 36 layers, and abstract arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3

    config = dataclasses.replace(
        qwen3.ModelConfig.qwen3_8b(),
        num_layers=layers,
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
        remat_config=qwen3.RematConfig.DECODER,
    )

    def make() -> Any:
        model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-5), wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(make))

    def step(state: Any, tokens: jax.Array, mask: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)

        def loss(model: Any) -> jax.Array:
            logits, _ = model(tokens, positions, None, mask)
            each = optax.softmax_cross_entropy_with_integer_labels
            return each(logits[:, :-1], tokens[:, 1:]).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), np.int32)
    mask = jax.ShapeDtypeStruct((BATCH, LENGTH, LENGTH), np.bool_)
    return step, (state, tokens, mask)


def measure(layers: int) -> dict[str, Any]:
    """Predictions of the preset, of the rules by hand and of the plan that is searched."""
    from autoshard.axes.axis_classes import NO_AXIS
    from autoshard.compiler.compile import build, compile_built
    from autoshard.cost_model.hardware.hardware import hardware_for
    from autoshard.cost_model.predict import Predictor
    from autoshard.layout.axis_rule import AxisRule
    from autoshard.layout.layout import Layout
    from autoshard.search.presets import presets
    from autoshard.search.proposer import propose
    from tests.stages import mesh_of, prepared

    step, args = make_step(layers)
    made = prepared(step, args, mesh_of(**MESH), donate_argnums=0)
    problem, program = made.problem, made.traced.program

    def axis_of(place: str) -> str:
        path, dim = place.rsplit(".", 1)
        (leaf,) = (
            value
            for name, value in zip(program.input_paths, program.body.inputs, strict=True)
            if name.removeprefix("state/0/").removesuffix("/value") == path
        )
        axis = problem.logical_axes.of_value[leaf.index][int(dim)]
        assert axis != NO_AXIS
        return problem.logical_axes.axes[axis].name

    rules = tuple(AxisRule(axis_of(place), over) for place, over in BY_HAND.items())
    preset = {p.name: p.rules for p in presets(problem)[0]}["fsdp+tp"]
    layouts = {"by_hand": Layout(problem, rules), "preset": Layout(problem, preset)}
    predictor = Predictor(problem, hardware_for("h100"), made.traced.call.donated)
    proposals = propose(problem, predictor, budget_bytes=BUDGET_BYTES)
    results: dict[str, Any] = {"rules": sorted(map(str, preset))}
    for name, layout in {**layouts, "searched": proposals.ranked[0].layout}.items():
        predicted = predictor.predict(layout)
        results[name] = {
            "time_s": predicted.time_s,
            "peak_bytes": predicted.peak_bytes,
            "collective_bytes": predicted.collective_bytes,
        }
    if layers == min(DEPTHS):
        mesh = made.request.mesh
        for name, layout in layouts.items():
            evidence = compile_built(build(made.traced, layout, mesh), mesh).evidence
            results[name]["compiled_bytes"] = evidence.collective_bytes
    return results


# The tests ----------------------------------------------------------------------------------------

DEPTHS = (2, 8, 36)


@cache
def measured(layers: int) -> Mapping[str, Any]:
    """What the process with 64 devices says."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.packages.test_qwen3_8b", str(layers)],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "64",
            "XLA_FLAGS": "--xla_backend_optimization_level=0 "
            "--xla_llvm_disable_expensive_passes=true",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    results: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    print(layers, results)
    return results


@pytest.mark.parametrize("layers", DEPTHS)
def test_the_preset_is_what_people_write(layers: int) -> None:
    results = measured(layers)
    by_hand, preset = results["by_hand"], results["preset"]
    for figure in by_hand:
        assert preset[figure] == pytest.approx(by_hand[figure], rel=0.01), figure


@pytest.mark.parametrize("layers", DEPTHS)
def test_what_is_searched_is_faster(layers: int) -> None:
    results = measured(layers)
    assert results["searched"]["time_s"] <= 0.96 * results["preset"]["time_s"]
    assert results["searched"]["peak_bytes"] <= BUDGET_BYTES


def test_the_rules_are_the_same_at_every_depth() -> None:
    assert len({tuple(measured(layers)["rules"]) for layers in DEPTHS}) == 1


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
