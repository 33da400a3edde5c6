"""Inputs for verifying and measuring: the user's arrays (copied, never donated) or arrays generated
here, shard by shard.

Generated floats are uniform in [0.01, 0.11) (positive, so that square roots of second moments and
logarithms stay finite); generated integers are uniform in [0, bound), where bound is the smallest
dimension that the program indexes with integers, so that look-ups stay in range. Values depend on
the leaf and the global position only, so every layout gets the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from autoshard.compiler.transfer import move, put_host, put_keys, same_devices, whole
from autoshard.tracing.primitives import INDEXING
from autoshard.tracing.program import Program
from autoshard.tracing.signature import Call

DEFAULT_BOUND = 100
"""Integers that are made up are below this where the program indexes no dimension, which would say
how large they may be."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """Where the values of the argument leaves come from.

    Attributes:
        call: The call.
        integer_bound: Generated integers are below this.
    """

    call: Call
    integer_bound: int

    @property
    def generated(self) -> bool:
        """True if some leaf is abstract, so that its values are generated here."""
        return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in self.call.leaves)

    def place(self, shardings: Sequence[Sharding]) -> list[jax.Array]:
        """Fresh arrays with these shardings, each in its own memory; the user's own arrays are
        never handed out.

        Arrays that several processes have parts of are moved by all of them: they must all come
        here.
        """
        kinds = self.call.memory_kinds
        arrays = []
        for number, (sharding, kind) in enumerate(zip(shardings, kinds, strict=True)):
            own = sharding if kind is None else sharding.with_memory_kind(kind)
            arrays.append(self._place(number, own))
        return arrays

    def _place(self, number: int, sharding: Sharding) -> jax.Array:
        leaf, aval = self.call.leaves[number], self.call.avals[number]
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return self._make(number, aval, sharding)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return put_keys(
                whole(jax.random.key_data(leaf)), str(jax.random.key_impl(leaf)), sharding
            )
        if (
            isinstance(leaf, jax.Array)
            and not leaf.is_fully_addressable
            and same_devices(leaf.sharding, sharding)
        ):
            return move(leaf, sharding)
        host = whole(leaf) if isinstance(leaf, jax.Array) else np.asarray(leaf)
        if host.dtype != aval.dtype:
            host = host.astype(aval.dtype)
        return put_host(host, aval, sharding)

    def _make(self, number: int, aval: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            key = jax.random.key(number, impl=aval.dtype._impl.name)
            data = np.asarray(jax.random.key_data(key))
            return put_keys(
                np.broadcast_to(data, (*aval.shape, *data.shape)), aval.dtype._impl.name, sharding
            )
        fill = self._filler(number, aval)
        return jax.make_array_from_callback(aval.shape, sharding, fill)

    def _filler(self, number: int, aval: jax.ShapeDtypeStruct) -> Callable[[Any], np.ndarray]:
        dtype = np.dtype(aval.dtype)

        def fill(index: tuple[slice, ...]) -> np.ndarray:
            position = np.zeros((), np.uint64)
            for part, size in zip(index, aval.shape, strict=True):
                steps = np.arange(*part.indices(size), dtype=np.uint64)
                position = position[..., None] * np.uint64(size) + steps
            mixed = _mix(position + np.uint64(number * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF))
            if jnp.issubdtype(dtype, jnp.integer):
                return (mixed % np.uint64(self.integer_bound)).astype(dtype)
            if dtype == np.bool_:
                return (mixed & np.uint64(1)).astype(np.bool_)
            unit = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
            return (0.01 + 0.1 * unit).astype(dtype)

        return fill


def _mix(numbers: np.ndarray) -> np.ndarray:
    """SplitMix64 finaliser (Steele, Lea, Flood 2014)."""
    x: np.ndarray = numbers
    with np.errstate(over="ignore"):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x


def inputs_for(call: Call, program: Program) -> Inputs:
    """Inputs of a call; the module's docstring says what is generated for abstract leaves."""
    sizes = []
    for eqn in program.eqns:
        if eqn.primitive not in INDEXING:
            continue
        shape = eqn.inputs[0].shape
        if "dimension_numbers" in eqn.params:
            numbers = eqn.params["dimension_numbers"]
            indexed: Sequence[int] = (
                getattr(numbers, "start_index_map", None)
                or getattr(numbers, "scatter_dims_to_operand_dims", None)
                or ()
            )
        else:
            indexed = range(len(shape))
        sizes += [shape[d] for d in indexed if shape[d] > 1]
    return Inputs(call, min(sizes, default=DEFAULT_BOUND))
