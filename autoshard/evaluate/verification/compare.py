"""Outputs held against others, element by element, on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.compiler.transfer import whole


def shards_of(leaf: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """(index, value) of what this process has of a leaf: every shard, and every copy of it, since
    copies that should be equal may not be.
    """
    if not isinstance(leaf, jax.Array) or len(leaf.addressable_shards) == 1:
        yield ..., to_numpy(leaf)
        return
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    for shard in leaf.addressable_shards:
        yield shard.index, to_numpy(shard.data)


def shape_of(leaf: Any) -> tuple[int, ...]:
    """The shape of a leaf as it is compared: of keys, that of their data."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return tuple(np.shape(leaf))


def to_numpy(leaf: Any) -> np.ndarray:
    """A leaf on the host; keys as their data, low-precision floats as float32.

    One that other processes have a part of is gathered by all of them: they must all come here.
    """
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    host = whole(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if host.dtype == jax.dtypes.float0:
        return np.zeros(host.shape, np.int8)
    if jnp.issubdtype(host.dtype, jnp.inexact) and host.dtype.itemsize < 4:
        return host.astype(np.float32)
    return host


def distances(wanted: np.ndarray, output: np.ndarray) -> np.ndarray:
    """By element, how far an output is from what is wanted.

    Infinity where only one of them is finite, or they are not the same infinity; everywhere where
    the shapes differ. Numbers that are not equal are never at distance 0.
    """
    if wanted.shape != output.shape:
        return np.full(wanted.shape or (1,), np.inf)
    if not np.issubdtype(wanted.dtype, np.inexact):
        distance = np.abs(wanted.astype(np.float64) - output.astype(np.float64))
        # large integers may be equal as floats
        return np.asarray(np.where(wanted != output, np.maximum(distance, 1.0), 0.0))
    same = (wanted == output) | (np.isnan(wanted) & np.isnan(output))
    finite = np.isfinite(wanted) & np.isfinite(output)
    accurate: Any = np.complex128 if np.iscomplexobj(wanted) else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(wanted.astype(accurate) - output.astype(accurate))
    return np.asarray(np.where(same, 0.0, np.where(finite, distance, np.inf)))
