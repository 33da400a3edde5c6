"""Ways in: Flax NNX steps that change their modules, Linen train states, Equinox modules, optax,
plain pytrees."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import autoshard
from tests.ecosystem.library_models import (
    VOCABULARY,
    Llama,
    equinox_args,
    equinox_step,
    nnx_args,
    nnx_step,
    tokens,
)

MESH = "data=4,model=2"
STEPS = 3


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=2e-5, atol=2e-5)


# Flax NNX -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> autoshard.Plan:
    return autoshard.optimize(
        nnx_step,
        nnx_args(2),
        MESH,
        effort=autoshard.Effort(compiled=2, measured=0),
        progress=False,
        donate_argnums=(0, 1),
    )


def test_an_nnx_step_is_searched_and_changes_its_modules_as_nnx_jit_does(
    plan: autoshard.Plan,
) -> None:
    assert plan.verified
    model, optimizer, _ = nnx_args(2)
    theirs_model, theirs_optimizer, _ = nnx_args(2)
    theirs = nnx.jit(nnx_step)
    for seed in range(STEPS):
        close(
            plan(model, optimizer, tokens(seed)),
            theirs(theirs_model, theirs_optimizer, tokens(seed)),
        )
    assert int(optimizer.step[...]) == STEPS
    for (path, ours), (_, other) in zip(
        nnx.to_flat_state(nnx.state(model)), nnx.to_flat_state(nnx.state(theirs_model)), strict=True
    ):
        close(ours[...], other[...])
        assert ours[...].sharding.spec == plan.specs["/".join(["model", *map(str, path), "value"])]


def test_what_is_changed_in_place_is_carried_though_it_is_not_donated() -> None:
    plan = autoshard.apply(nnx_step, nnx_args(2), MESH, "fsdp")
    assert len(plan.carry) == len(plan.specs) - 1
    model, optimizer, batch = nnx_args(2)
    plan(model, optimizer, batch)
    compiled = plan.compile()
    plan(model, optimizer, batch)
    assert plan.compile() is compiled


def test_an_nnx_model_is_made_in_its_layout(plan: autoshard.Plan) -> None:
    model, optimizer = autoshard.init(plan, lambda: nnx_args(2)[:2])
    expected = nnx_args(2)[0]
    kernel = model.layers[0].up.kernel
    assert kernel[...].sharding.spec == plan.specs["model/layers/0/up/kernel/value"]
    close(kernel[...], expected.layers[0].up.kernel[...])
    close(plan(model, optimizer, tokens()), nnx.jit(nnx_step)(*nnx_args(2)))
    only = autoshard.init(plan, lambda key: Llama(nnx.Rngs(key), 2), jax.random.key(7))
    assert only.head.kernel[...].shape == (32, VOCABULARY)


def test_a_model_that_is_only_read_is_left_alone() -> None:
    def forward(model: Any, batch: Any) -> jax.Array:
        return model(batch)

    model = Llama(nnx.Rngs(0), 1)
    plan = autoshard.apply(forward, (model, tokens()), MESH, "dp")
    close(plan(model, tokens()), model(tokens()))
    assert list(plan.table.outputs) == ["out"]


def test_other_outputs_and_state_of_a_step() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(16, 16, rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.drop(self.norm(self.linear(x)))

    def step(scale: jax.Array, model: Net, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        y = model(x) * scale
        return y.sum(), {"y": y}

    args = (
        jnp.float32(2),
        Net(nnx.Rngs(0)),
        np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32),
    )
    plan = autoshard.apply(step, args, MESH, "dp")
    theirs = Net(nnx.Rngs(0))
    for _ in range(2):
        total, more = plan(*args)
        other, others = nnx.jit(step)(args[0], theirs, args[2])
        close(total, other)
        close(more["y"], others["y"])
    close(args[1].norm.mean[...], theirs.norm.mean[...])
    assert int(args[1].drop.rngs.count[...]) == int(theirs.drop.rngs.count[...]) == 2


def test_a_step_that_adds_variables_is_refused() -> None:
    def step(model: Any, x: Any) -> jax.Array:
        model.extra = nnx.Param(jnp.ones(3))
        return model(x).sum()

    with pytest.raises(autoshard.ArgumentError, match="changes the structure of argument 0"):
        autoshard.apply(step, (Llama(nnx.Rngs(0), 1), tokens()), MESH, "dp")


def test_modules_go_in_by_position(plan: autoshard.Plan) -> None:
    model, optimizer, batch = nnx_args(2)
    with pytest.raises(autoshard.AutoshardError, match="by position"):
        plan(model=model, optimizer=optimizer, tokens=batch)


# Names and pins that a model brings ---------------------------------------------------------------


def annotated(*names: str | None) -> nnx.Linear:
    with nnx.use_eager_sharding(False):
        start = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        return nnx.Linear(16, 32, use_bias=False, kernel_init=start, rngs=nnx.Rngs(0))


def forward(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def test_names_of_nnx_metadata_name_the_logical_axes() -> None:
    plan = autoshard.apply(
        forward, (annotated("embed", "mlp"), np.ones((8, 16), np.float32)), MESH, ["mlp->model"]
    )
    assert plan.specs["model/kernel/value"] == P(None, "model")
    assert plan.table.inputs["model/kernel/value"].logical_axes == ["embed", "mlp"]
    assert plan.table.inputs["x"].logical_axes[1] == "embed"


def test_names_of_linen_boxes_name_the_logical_axes() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            start = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            return nn.Dense(32, use_bias=False, kernel_init=start)(x)

    x = np.ones((8, 16), np.float32)
    variables = jax.eval_shape(Net().init, jax.random.key(0), x)
    plan = autoshard.apply(lambda v, x: Net().apply(v, x), (variables, x), MESH, ["mlp->model"])
    kernel = next(path for path in plan.specs if "kernel" in path)
    assert plan.specs[kernel] == P(None, "model")


def test_mesh_axes_of_metadata_can_be_kept_as_pins() -> None:
    args = annotated(None, "data"), np.ones((8, 16), np.float32)
    assert autoshard.apply(forward, args, MESH, "replicated").specs["model/kernel/value"] == P()
    plan = autoshard.apply(forward, args, MESH, "replicated", pins="metadata")
    assert plan.specs["model/kernel/value"] == P(None, "data")
    named = annotated("embed", "data"), args[1]
    assert (
        autoshard.apply(forward, named, MESH, "replicated", pins="metadata").specs[
            "model/kernel/value"
        ]
        == P()
    )


# Linen, Equinox, optax ----------------------------------------------------------------------------


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8)(nn.gelu(nn.Dense(64)(x)))


def linen_state(key: jax.Array) -> TrainState:
    params = Mlp().init(key, jnp.ones((1, 16)))["params"]
    return TrainState.create(apply_fn=Mlp().apply, params=params, tx=optax.adamw(1e-2))


def linen_step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(
        lambda p: jnp.mean((state.apply_fn({"params": p}, x) - y) ** 2)
    )(state.params)
    return state.apply_gradients(grads=grads), loss


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((32, 16)).astype(np.float32), rng.standard_normal((32, 8)).astype(
        np.float32
    )


def test_a_linen_train_state() -> None:
    state = linen_state(jax.random.key(0))
    plan = autoshard.apply(linen_step, (state, *data()), MESH, "fsdp+tp", donate_argnums=0)
    made = autoshard.init(plan, linen_state, jax.random.key(0))
    assert (
        made.params["Dense_0"]["kernel"].sharding.spec
        == plan.specs["state/params/Dense_0/kernel"]
        != P()
    )
    assert (
        made.opt_state[0].mu["Dense_0"]["kernel"].sharding.spec
        == plan.specs["state/params/Dense_0/kernel"]
    )
    other = linen_state(jax.random.key(0))
    for _ in range(STEPS):
        made, ours = plan(made, *data())
        other, theirs = jax.jit(linen_step)(other, *data())
        close(ours, theirs)
    assert int(made.step) == STEPS


def test_an_equinox_step() -> None:
    args = equinox_args()
    plan = autoshard.apply(equinox_step, args, MESH, "fsdp+tp")
    model, opt_state = autoshard.init(plan, lambda: equinox_args()[:2])
    assert model.mlp.activation is args[0].mlp.activation
    assert (
        model.mlp.layers[0].weight.sharding.spec == plan.specs["model/mlp/layers/0/weight"] != P()
    )
    other_model, other_state = args[:2]
    for _ in range(STEPS):
        model, opt_state, ours = plan(model, opt_state, *args[2:])
        other_model, other_state, theirs = equinox_step(other_model, other_state, *args[2:])
        close(ours, theirs)


def test_init_on_an_explicit_mesh_keeps_its_axis_types() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    plan = autoshard.apply(
        linen_step, (linen_state(jax.random.key(0)), *data()), mesh, "fsdp+tp", donate_argnums=0
    )
    made = autoshard.init(plan, linen_state, jax.random.key(0))
    assert made.params["Dense_0"]["kernel"].sharding.mesh.axis_types == (AxisType.Explicit,) * 2
    plan(made, *data())


def test_init_of_something_else_says_what_is_wanted() -> None:
    plan = autoshard.apply(linen_step, (linen_state(jax.random.key(0)), *data()), MESH, "fsdp+tp")
    with pytest.raises(
        autoshard.ArgumentError,
        match=r"no argument of the plan \[0, 1, 2\]: 1 arrays \(float32\[3\]",
    ):
        autoshard.init(plan, lambda: jnp.ones(3))
    with pytest.raises(autoshard.ArgumentError, match="at position 1"):
        autoshard.init(plan, lambda key: (linen_state(key), jnp.ones(3)), jax.random.key(0))


def test_abstract_arguments_have_the_shardings_of_the_plan() -> None:
    state = linen_state(jax.random.key(0))
    plan = autoshard.apply(linen_step, (state, *data()), MESH, "fsdp+tp")
    for name in (0, "state"):
        abstract = plan.abstract(name)
        assert jax.tree.structure(abstract) == jax.tree.structure(state)
        assert (
            abstract.params["Dense_0"]["kernel"].sharding.spec
            == plan.specs["state/params/Dense_0/kernel"]
        )
    with pytest.raises(autoshard.ArgumentError, match=r"abstract\('nothing'"):
        plan.abstract("nothing")


def test_none_of_those_libraries_is_imported_before_it_is_used() -> None:
    script = (
        "import sys, jax.numpy as jnp, autoshard; "
        "autoshard.apply(lambda x: x * 2, (jnp.ones(8),), 'data=1', 'replicated').table.dumps(); "
        "print([m for m in ('flax', 'equinox', 'optax', 'orbax', 'torch', 'pandas') if m in "
        "sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout.strip() == "[]"
