"""Sums in another order: what a layout does to a sum, on one device.

Mathematically nothing changes. Contracted dimensions are permuted, on all operands alike, and a
sum is made whole or, by chance, of partial sums, as shards make it (the rounding of equal terms has
a direction that no permutation changes). Of a running sum, what lies on either side of a drawn
position is summed for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.jax_internals import jaxprs

STEPS = 16
"""Strides that permutations are drawn from, each with any start. `test_sum_order.py` has a sum of
noise that must change its sign under some."""

PARTS = 8
"""Partial sums that one is made of. A sum of equal terms rounds in one direction, an eighth of it
an eighth as far; with more shards little changes. `test_sum_order.py` has such a sum."""

_GOLDEN = 0x9E3779B9
"""2^32 over the golden ratio: multiples are spread evenly (Knuth, vol. 3, 6.4)."""


class SumOrder:
    """An order for the sums of one evaluation, by how many terms they have.

    Seed 0 leaves every sum as it is written.
    """

    def __init__(self, seed: Any, sizes: Sequence[int]) -> None:
        """Draws the orders, outside of all loops.

        Args:
            seed: A uint32, or a traced one.
            sizes: Of all dimensions that are summed over.
        """
        seed = jnp.asarray(seed, jnp.uint32)
        self._as_written = seed == 0
        self._bits = {size: _mixed(seed + jnp.uint32(size * _GOLDEN % 2**32)) for size in sizes}
        self._orders = {size: self._order(size) for size in sizes}

    def _order(self, size: int) -> Any:
        bits, steps = self._bits[size], jnp.asarray(_steps(size))
        counted = jnp.arange(size, dtype=jnp.uint32)
        step, start = steps[bits % len(steps)], (bits >> 8) % jnp.uint32(size)
        drawn = (counted * step + start) % jnp.uint32(size)
        return jnp.where(self._as_written, counted, drawn)

    def permuted(self, operands: Sequence[Any], dims: Sequence[int]) -> list[Any]:
        """The operands with one dimension of each in the drawn order, the same for all."""
        size = operands[0].shape[dims[0]]
        if size < 2:
            return list(operands)
        moved = []
        for operand, dim in zip(operands, dims, strict=True):
            index = (*(slice(None),) * dim, self._orders[size])
            moved.append(operand.at[index].get(mode="promise_in_bounds", unique_indices=True))
        return moved

    def in_parts(self, size: int, always: bool) -> Any:
        """Whether a sum is made of partial sums: by chance, or always but for seed 0."""
        return ~self._as_written & (jnp.bool_(always) | (self._bits[size] >> 31 == 0))

    def position(self, size: int) -> Any:
        """A drawn position below `size`; 0 for seed 0."""
        return jnp.where(self._as_written, jnp.uint32(0), self._bits[size] % jnp.uint32(size))


def _mixed(x: Any) -> Any:
    """Random bits; the finaliser of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def summed_sizes(jaxpr: Any) -> list[int]:
    """Sizes of all dimensions that a jaxpr and those inside it sum over, and a few more."""
    sizes: set[int] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in SUMS:
            for atom in eqn.invars:
                sizes.update(atom.aval.shape)
        for inner in jaxprs.jaxprs_in(eqn.params):
            sizes.update(summed_sizes(inner))
    return sorted(size for size in sizes if size > 1)


@lru_cache
def _steps(size: int) -> np.ndarray:
    """Strides coprime to a size, so that `step * i + start` visits every index once."""
    most = min(size, (2**32 - size) // size)  # so that the products stay below 2^32
    drawn = np.random.default_rng(size).integers(1, max(most, 2), 8 * STEPS)
    steps = [int(step) for step in drawn if math.gcd(int(step), size) == 1]
    return np.array([*steps[:STEPS], 1][:STEPS], np.uint32)


def in_drawn_order(eqn: Any, operands: Sequence[Any], order: SumOrder) -> tuple[Any, ...]:
    """The results of an equation, its sums in the next order."""
    evaluate = SUMS.get(eqn.primitive.name)
    if evaluate is None or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        return jaxprs.as_call(eqn)(*operands)
    return evaluate(eqn, list(operands), order)


def _reduction(eqn: Any, operands: list[Any], order: SumOrder) -> tuple[Any, ...]:
    axes = eqn.params["axes"]
    for axis in axes:
        operands = order.permuted(operands, [axis])
    if eqn.primitive.name != "reduce_sum" or not axes:
        return jaxprs.as_call(eqn)(*operands)
    return _sum(eqn, operands, axes[:1], order)


def _dot(eqn: Any, operands: list[Any], order: SumOrder) -> tuple[Any, ...]:
    (of_left, of_right), _ = eqn.params["dimension_numbers"]
    contracted = list(zip(of_left, of_right, strict=True))
    for dims in contracted:
        operands = order.permuted(operands, dims)
    return _sum(eqn, operands, contracted[0] if contracted else (), order)


def _convolution(eqn: Any, operands: list[Any], order: SumOrder) -> tuple[Any, ...]:
    numbers = eqn.params["dimension_numbers"]
    features = numbers.lhs_spec[1], numbers.rhs_spec[1]
    if eqn.params["feature_group_count"] > 1:
        return jaxprs.as_call(eqn)(*operands)
    return _sum(eqn, order.permuted(operands, features), features, order)


def _scatter_add(eqn: Any, operands: list[Any], order: SumOrder) -> tuple[Any, ...]:
    operand, indices, updates = operands
    numbers = eqn.params["dimension_numbers"]
    scattered = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    for of_indices, of_updates in enumerate(scattered):
        if of_indices not in numbers.scatter_indices_batching_dims:
            indices, updates = order.permuted([indices, updates], (of_indices, of_updates))
    unsorted = eqn.replace(params={**eqn.params, "indices_are_sorted": False})
    return jaxprs.as_call(unsorted)(operand, indices, updates)


def _running_sum(eqn: Any, operands: list[Any], order: SumOrder) -> tuple[Any, ...]:
    (x,), axis = operands, eqn.params["axis"]
    before = lax.broadcasted_iota(jnp.uint32, x.shape, axis) < order.position(x.shape[axis])
    call, zero = jaxprs.as_call(eqn), jnp.zeros_like(x)
    (one,), (other,) = call(jnp.where(before, x, zero)), call(jnp.where(before, zero, x))
    return (one + other,)


SUMS: dict[str, Callable[[Any, list[Any], SumOrder], tuple[Any, ...]]] = {
    "conv_general_dilated": _convolution,
    "cumsum": _running_sum,
    "dot_general": _dot,
    "reduce_prod": _reduction,
    "reduce_sum": _reduction,
    "scatter-add": _scatter_add,
}
"""By primitive, how it is evaluated in another order."""


def _sum(eqn: Any, operands: list[Any], dims: Sequence[int], order: SumOrder) -> tuple[Any, ...]:
    """A sum along a dimension of each operand, whole or made of partial sums, as is drawn."""
    call = jaxprs.as_call(eqn)
    size = operands[0].shape[dims[0]] if dims else 1
    if size < 2 * PARTS:
        return call(*operands)
    low_precision = eqn.outvars[0].aval.dtype.itemsize < 4
    return tuple(
        lax.cond(
            order.in_parts(size, low_precision),
            lambda *operands: _sum_of_parts(call, operands, dims),
            call,
            *operands,
        )
    )


def _sum_of_parts(
    call: Callable[..., tuple[Any, ...]], operands: Sequence[Any], dims: Sequence[int]
) -> tuple[Any, ...]:
    """The same sum of partial sums, each as precise as the whole."""
    size = operands[0].shape[dims[0]]
    width = -(-size // PARTS)
    padded = []
    for operand, dim in zip(operands, dims, strict=True):
        missing = [(0, 0)] * operand.ndim
        missing[dim] = (0, width * PARTS - size)
        padded.append(jnp.pad(operand, missing))  # zeros add nothing

    def partial(number: Any) -> Any:
        parts = [
            lax.dynamic_slice_in_dim(operand, number * width, width, axis=dim)
            for operand, dim in zip(padded, dims, strict=True)
        ]
        return call(*parts)[0]

    total = lax.fori_loop(1, PARTS, lambda number, total: total + partial(number), partial(0))
    return (total,)
