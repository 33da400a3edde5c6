"""Arrays from the host, or from one layout, to another layout; also across processes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from autoshard.errors import ArgumentError


def whole(leaf: jax.Array) -> np.ndarray:
    """An array on the host; what other processes have of it is gathered by all of them."""
    if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        mesh = getattr(leaf.sharding, "mesh", None)
        if mesh is None:
            raise ArgumentError(
                f"an array with {leaf.sharding} spans processes; give it a NamedSharding."
            )
        leaf = move(leaf, NamedSharding(mesh, PartitionSpec()))
    return np.asarray(leaf if leaf.is_fully_addressable else leaf.addressable_data(0))


def move(leaf: jax.Array, sharding: Sharding) -> jax.Array:
    """A copy with another sharding over the same devices, made by all processes that hold parts."""
    copy: jax.Array = jax.jit(jnp.copy, out_shardings=sharding)(leaf)
    return copy


def same_devices(a: Sharding, b: Sharding) -> bool:
    """True if one program may take both: they are over the same devices in the same order."""
    one, two = getattr(a, "mesh", None), getattr(b, "mesh", None)
    return one is not None and two is not None and list(one.devices.flat) == list(two.devices.flat)


def put_host(host: np.ndarray, aval: Any, sharding: Sharding) -> jax.Array:
    """An array of the host, which every process has the whole of, with this sharding."""
    if aval.dtype == jax.dtypes.float0:
        # It has no device buffer: jax takes the NumPy array itself.
        return host  # type: ignore[return-value]
    # A copy: on CPU jax may alias NumPy memory, and a donated buffer must not be the user's.
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: np.array(host[index], copy=True)
    )


def put_keys(data: np.ndarray, impl: str, sharding: Sharding) -> jax.Array:
    """Random keys made of their data on the host, with this sharding."""
    if sharding.is_fully_addressable:
        keys: jax.Array = jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
        placed: jax.Array = jax.device_put(keys, sharding)
        return placed
    # jax moves no keys to devices of other processes; their data's last dimension is whole.
    parts = jax.make_array_from_callback(
        data.shape, sharding, lambda index: np.array(data[index], copy=True)
    )
    spread: jax.Array = jax.random.wrap_key_data(parts, impl=impl)
    return spread


def put(leaf: Any, sharding: Sharding) -> jax.Array:
    """`jax.device_put`, also onto devices of several processes for what each has the whole of."""
    spans_processes = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    if sharding.is_fully_addressable or spans_processes:
        placed: jax.Array = jax.device_put(leaf, sharding)
        return placed
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data, impl = jax.random.key_data(leaf), str(jax.random.key_impl(leaf))
        return put_keys(np.asarray(data), impl, sharding)
    host = np.asarray(leaf)
    return put_host(host.astype(jax.dtypes.canonicalize_dtype(host.dtype)), host, sharding)
