"""Inputs made for verifying and measuring: the same for every layout, in range, and never the
person's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from autoshard.evaluate.verification.inputs import Inputs, inputs_for
from tests.models import decoder_args, decoder_loss
from tests.stages import array, mesh_of, traced


def inputs_of(fn: Any, *args: Any) -> Inputs:
    found = traced(fn, *args)
    return inputs_for(found.call, found.program)


def host(leaf: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def shardings() -> list[Sharding]:
    mesh = mesh_of(data=4, model=2)
    specs = (P(), P("data"), P("model", "data"), P(("data", "model")), P(None, ("model", "data")))
    return [SingleDeviceSharding(jax.devices()[0]), *(NamedSharding(mesh, spec) for spec in specs)]


KINDS = [np.float32, jnp.bfloat16, np.float16, np.int32, np.uint8, np.bool_, jnp.float8_e4m3fn]


@pytest.mark.parametrize("dtype", KINDS, ids=lambda d: np.dtype(d).name)
def test_made_values_do_not_depend_on_the_layout(dtype: Any) -> None:
    made = inputs_of(lambda x, y: (x, y), array(16, 8, dtype=dtype), array(16, 8, dtype=dtype))
    assert made.generated
    first = [host(leaf) for leaf in made.place([shardings()[0]] * 2)]
    for sharding in shardings()[1:]:
        for leaf, want in zip(made.place([sharding] * 2), first, strict=True):
            assert leaf.sharding == sharding
            np.testing.assert_array_equal(host(leaf), want)
    assert not np.array_equal(first[0], first[1]), "two leaves are not the same numbers"


def test_made_floats_are_small_and_positive() -> None:
    (x,) = inputs_of(jnp.sqrt, array(64, 64)).place([SingleDeviceSharding(jax.devices()[0])])
    assert 0.0099 < float(x.min()) < 0.02
    assert 0.10 < float(x.max()) < 0.1101


def test_made_integers_stay_within_what_is_indexed() -> None:
    params, _, tokens = decoder_args(vocab=96, d=16, heads=2, ff=16)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, tokens))
    made = inputs_of(decoder_loss, *abstract)
    assert made.integer_bound <= 96
    tokens = host(made.place([SingleDeviceSharding(jax.devices()[0])] * 9)[-1])
    assert tokens.dtype == np.int32
    assert tokens.min() >= 0
    assert tokens.max() < 96
    assert len(np.unique(tokens)) > 10


def test_keys_are_made_too_and_alike() -> None:
    args = (
        jax.ShapeDtypeStruct((), jax.random.key(0).dtype),
        jax.ShapeDtypeStruct((8,), jax.random.key(0).dtype),
    )
    made = inputs_of(
        lambda one, many: jax.random.normal(one, (3,)) + jax.random.normal(many[0], (3,)), *args
    )
    mesh = mesh_of(data=4)
    alone = made.place([SingleDeviceSharding(jax.devices()[0])] * 2)
    split = made.place([NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))])
    for a, b in zip(alone, split, strict=True):
        np.testing.assert_array_equal(host(a), host(b))


@pytest.mark.parametrize("where", range(3))
def test_a_placed_copy_can_be_donated_and_the_persons_array_lives(where: int) -> None:
    sharding = [SingleDeviceSharding(jax.devices()[0]), *shardings()[1:3]][where]
    own = jax.device_put(np.arange(128.0, dtype=np.float32).reshape(16, 8), sharding)
    plain = np.arange(128.0, dtype=np.float32).reshape(16, 8)
    placed = inputs_of(lambda a, b: (a, b), own, plain).place([sharding, sharding])
    step = jax.jit(
        lambda a, b: (a * 0, b * 0), donate_argnums=(0, 1), out_shardings=(sharding, sharding)
    )
    jax.block_until_ready(step(*placed))
    assert all(leaf.is_deleted() for leaf in placed)
    np.testing.assert_array_equal(np.asarray(own), np.arange(128.0).reshape(16, 8))
    np.testing.assert_array_equal(plain, np.arange(128.0).reshape(16, 8))


@pytest.mark.parametrize("value", [1, 2.5, True, 1j, np.float32(3), np.int8(4)])
def test_scalars_keep_value_and_dtype(value: Any) -> None:
    (leaf,) = inputs_of(lambda x: x, value).place([SingleDeviceSharding(jax.devices()[0])])
    assert leaf.dtype == jnp.asarray(value).dtype
    assert leaf == value


def test_wide_numpy_arrays_become_what_jax_takes() -> None:
    (leaf,) = inputs_of(lambda x: x, np.arange(8.0)).place([SingleDeviceSharding(jax.devices()[0])])
    assert leaf.dtype == jnp.asarray(np.arange(8.0)).dtype
    np.testing.assert_array_equal(host(leaf), np.arange(8.0))


def test_arrays_on_other_devices_are_moved() -> None:
    own = jax.device_put(np.arange(8.0, dtype=np.float32), jax.devices()[5])
    (leaf,) = inputs_of(lambda x: x, own).place([NamedSharding(mesh_of(data=4), P("data"))])
    np.testing.assert_array_equal(host(leaf), np.arange(8.0))
