"""Sizes that do not fit the mesh: they are replicated or left open, never an error of the
compiler's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from same import (
    floats,
    mesh_of,
    pin_and_compare,
    replicated_bytes,
    search,
    search_and_compare,
    split_leaves,
    winner,
)

import autoshard

# Batch 10, features 6: only the two-way axis divides anything


def uneven(params, x):
    return jax.nn.relu(x @ params["w"] + params["b"]).sum(axis=0)


def uneven_args(batch=10, features=6):
    return {"w": floats(features, features), "b": floats(features)}, floats(batch, features)


@pytest.mark.parametrize(("data", "model"), [(4, 2), (2, 4), (8, 1)])
def test_sizes_that_the_mesh_does_not_divide(data, model):
    plan = search_and_compare(uneven, uneven_args(), mesh_of(data=data, model=model))
    for path, spec in plan.specs.items():
        assert "data" not in str(spec) or data == 2, f"{path} cannot be split by {data}"


@pytest.mark.parametrize(
    "pins",
    [
        {"x": P("model")},
        {"params/w": P(None, "model"), "params/b": P("model")},
        {"x": P(None, "model")},
    ],
)
def test_the_layouts_that_do_divide(pins):
    pin_and_compare(uneven, uneven_args(), mesh_of(data=4, model=2), pins)


def test_a_pin_that_does_not_divide_names_leaf_dimension_size_and_axis():
    with pytest.raises(
        autoshard.SpecError,
        match=r"x is float32\[10, 6\].*dimension 0 \(size 10\).*'data' \(size 4\)",
    ):
        search(uneven, uneven_args(), mesh_of(data=4, model=2), pins={"x": P("data", None)})


def test_prime_sizes_leave_nothing_to_split():
    plan = search_and_compare(uneven, uneven_args(7, 5), mesh_of(data=4, model=2))
    assert not split_leaves(plan)


# Batch of one, long sequence


def causal_attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


def qkv(*shape, dtype=np.float32):
    return tuple(jnp.asarray(floats(*shape, seed=i), dtype) for i in range(3))


def test_batch_of_one_goes_to_the_sequence():
    mesh, args = mesh_of(dp=1, fsdp=8, tp=1, sp=1), qkv(1, 64, 2, 8)
    budget = replicated_bytes(causal_attention, args, mesh) // 2
    plan = search_and_compare(causal_attention, args, mesh, memory_budget_bytes=budget)
    assert split_leaves(plan)
    assert all(spec in (P(), P(None, "fsdp")) for spec in plan.specs.values()), (
        "8 divides the sequence only"
    )


def test_batch_of_one_with_the_sequence_of_all_three_pinned():
    mesh = mesh_of(dp=1, fsdp=8, tp=1, sp=1)
    pin_and_compare(
        causal_attention, qkv(1, 64, 2, 8), mesh, {name: P(None, "fsdp") for name in "qkv"}
    )
    with pytest.raises(autoshard.SpecError, match="size 1"):
        search(causal_attention, qkv(1, 64, 2, 8), mesh, pins={"q": P(("dp", "fsdp"))})


def test_batch_of_one_in_bfloat16_on_two_axes():
    mesh, args = mesh_of(a=4, b=2), qkv(1, 64, 2, 8, dtype=jnp.bfloat16)
    search_and_compare(causal_attention, args, mesh, lowest=jnp.bfloat16)


# Grouped queries: fewer kv heads than devices on the axis


def grouped_attention(params, x):
    batch, seq, _ = x.shape
    groups = params["k"].shape[1]
    q = jnp.einsum("bsd,dhk->bshk", x, params["q"]).reshape(
        batch, seq, groups, -1, params["q"].shape[-1]
    )
    k = jnp.einsum("bsd,dhk->bshk", x, params["k"])
    v = jnp.einsum("bsd,dhk->bshk", x, params["v"])
    scores = jax.nn.softmax(jnp.einsum("bsgrk,btgk->bgrst", q, k), -1)
    out = jnp.einsum("bgrst,btgk->bsgrk", scores, v).reshape(batch, seq, -1, v.shape[-1])
    return jnp.einsum("bshk,hkd->bsd", out, params["o"])


def grouped_args(heads=8, groups=2):
    params = {
        "q": floats(16, heads, 4, scale=0.2),
        "k": floats(16, groups, 4, scale=0.2),
        "v": floats(16, groups, 4, scale=0.2, seed=3),
        "o": floats(heads, 4, 16, scale=0.2),
    }
    return params, floats(4, 8, 16)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_kv_heads_fewer_than_the_axis(groups):
    mesh, args = mesh_of(data=2, model=4), grouped_args(groups=groups)
    budget = replicated_bytes(grouped_attention, args, mesh) // 2
    plan = search_and_compare(grouped_attention, args, mesh, memory_budget_bytes=budget)
    assert split_leaves(plan)
    assert winner(plan).compiled.peak_bytes <= budget


@pytest.mark.parametrize(
    "pins",
    [
        {"params/q": P(None, "model"), "params/o": P("model"), "x": P("data")},
        {"params/k": P(None, None, "model"), "params/v": P(None, None, "model"), "x": P("data")},
    ],
)
def test_query_heads_and_kv_head_sizes_can_be_pinned(pins):
    pin_and_compare(grouped_attention, grouped_args(), mesh_of(data=2, model=4), pins)


def test_kv_heads_cannot_be_pinned():
    with pytest.raises(autoshard.SpecError, match=r"params/k .*dimension 1 \(size 2\)"):
        search(
            grouped_attention,
            grouped_args(),
            mesh_of(data=2, model=4),
            pins={"params/k": P(None, "model")},
        )


# Mesh axes of one device


def concatenated(w, x):
    y = (x @ w).reshape(x.shape[0], 4, 8)
    return jnp.concatenate([y, y[..., :0], 2 * y], axis=-1)


def test_axes_of_one_device_never_appear_in_specs():
    args = floats(16, 32), floats(8, 16)
    plan = search_and_compare(concatenated, args, mesh_of(data=1, model=8, stage=1))
    used = {axis for spec in plan.specs.values() for axis in spec if axis is not None}
    assert used <= {"model"}
    assert len({candidate.key for candidate in plan.candidates}) == len(plan.candidates), (
        "equal layouts are one candidate"
    )


@pytest.mark.parametrize(
    "pins", [{"w": P("data", "model"), "x": P("stage")}, {"w": P("model", "stage")}]
)
def test_pins_may_name_axes_of_one_device(pins):
    mesh, args = mesh_of(data=1, model=8, stage=1), (floats(16, 32), floats(8, 16))
    plan = autoshard.apply(concatenated, args, mesh, [], pins=pins)
    np.testing.assert_allclose(plan(*args), jax.jit(concatenated)(*args), atol=1e-5)
    assert "stage" not in str(plan.specs), "they are dropped in the canonical form"
    assert "data" not in str(plan.specs)
