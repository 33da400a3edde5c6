"""Arguments with elements of a byte or less run, sharded, whatever jax's own check of them says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.compiler.compile import bits_of, build, compile_built
from autoshard.evaluate.verification.inputs import inputs_for
from tests.stages import layout_of, mesh_of, prepared

NAMES = ["int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2"]
X = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)


def weights(name: str) -> jax.Array:
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(0, 2, (32, 8)).astype(np.int32)).astype(getattr(jnp, name))


def product(w: jax.Array, x: jax.Array) -> Any:
    """The weights come back, as those that a step updates."""
    return x @ w.astype(jnp.float32), w


@pytest.mark.parametrize("options", [None, {"xla_cpu_enable_fast_min_max": True}])
@pytest.mark.parametrize("name", NAMES)
def test_a_layout_runs_on_its_own_outputs(name: str, options: dict[str, Any] | None) -> None:
    w = weights(name)
    made = prepared(product, (w, X), mesh_of(data=4, model=2), donate_argnums=0)
    layout = layout_of(made, "w.0->data", "w.1->model")
    built = build(made.traced, layout, made.request.mesh)
    compiled = compile_built(built, made.request.mesh, compiler_options=options)

    leaves: Any = inputs_for(made.traced.call, made.traced.program).place(built.in_shardings)
    for _ in range(2):
        result, leaves[0] = compiled.run(*leaves)
        np.testing.assert_allclose(result, product(w, X)[0], rtol=1e-5, atol=1e-6)
    assert leaves[0].sharding.spec == P("data", "model")


@pytest.mark.parametrize("abstract", [False, True])
def test_a_search_compiles_verifies_measures_and_runs_them(abstract: bool) -> None:
    w = weights("int4")
    example = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (w, X))
    plan = autoshard.optimize(
        product,
        example if abstract else (w, X),
        "data=4,model=2",
        pins={"w": P("model", "data")},
        effort=autoshard.Effort(compiled=2, measured=2),
        progress=False,
    )
    assert plan.verified
    assert not [c for c in plan.candidates if c.status == "rejected"]
    np.testing.assert_allclose(plan(w, X)[0], product(w, X)[0], rtol=1e-5, atol=1e-6)
    assert plan(*plan.place(0, [w]), X)[1].dtype == jnp.int4


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(np.int8, 8), (jnp.int4, 4), (jnp.uint2, 2), (jnp.float4_e2m1fn, 4), (jnp.bfloat16, 16)],
)
def test_bits_of_numbers(dtype: Any, bits: int) -> None:
    assert bits_of(dtype) == bits


def test_what_is_no_number_has_whole_bytes() -> None:
    for dtype in (jnp.bool_, jax.random.key(0).dtype, jax.dtypes.float0):
        assert bits_of(dtype) >= 8
