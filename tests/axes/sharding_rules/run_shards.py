"""How one shard of an equation is run: primitives that address absolute positions are told where it
starts, those that state shapes get those of the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.axes.sharding_rules import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn

Array = Any
Mode = lax.GatherScatterMode


@dataclass(frozen=True)
class Application:
    """One primitive applied to concrete operands.

    Attributes:
        primitive: The jax primitive.
        operands: Concrete arrays.
        eqn: The same equation in the words of autoshard.
    """

    primitive: Any
    operands: tuple[Array, ...]
    eqn: Eqn


@dataclass(frozen=True)
class Shard:
    """One of `count` equal shards of an equation along one factor."""

    app: Application
    rule: ShardingRule
    factor: int
    index: int
    count: int

    def dims(self, operand: int) -> list[int]:
        """Dimensions of an operand that are cut."""
        factors = self.rule.operands[operand]
        return [dim for dim, factor in enumerate(factors) if factor == self.factor]

    def start(self, size: int) -> int:
        """Where the shard of a dimension of this size starts."""
        return self.index * size // self.count

    def of(self, array: Array, factors: Sequence[int]) -> Array:
        """This shard of an array whose dimensions run over these factors."""
        if self.factor not in factors:
            return array
        slices = [slice(None)] * len(factors)
        for dim, factor in enumerate(factors):
            if factor == self.factor:
                size = array.shape[dim]
                start = self.start(size)
                slices[dim] = slice(start, start + size // self.count)
        return array[tuple(slices)]

    def operands(self, arrays: Sequence[Array]) -> list[Array]:
        """This shard of all operands."""
        return [
            self.of(array, factors)
            for array, factors in zip(arrays, self.rule.operands, strict=True)
        ]

    def shape(self, result: int) -> tuple[int, ...]:
        """Shape of this shard of a result."""
        sizes = list(self.app.eqn.outputs[result].shape)
        for dim, factor in enumerate(self.rule.results[result]):
            if factor == self.factor:
                sizes[dim] //= self.count
        return tuple(sizes)

    def bind(self, operands: Sequence[Array], **changed: Any) -> list[Array]:
        """Results of the primitive on these operands, with some parameters changed."""
        return run(self.app.primitive, operands, {**self.app.eqn.params, **changed})

    @property
    def params(self) -> Any:
        """Parameters of the whole."""
        return self.app.eqn.params

    @property
    def is_reduced(self) -> bool:
        """Whether the results of the shards are combined."""
        return self.rule.kinds[self.factor] is FactorKind.REDUCTION


def run(primitive: Any, operands: Sequence[Array], params: Any) -> list[Array]:
    """Results of a primitive."""
    results = primitive.bind(*operands, **primitive.get_bind_params(dict(params)))
    return list(results) if primitive.multiple_results else [results]


def run_shard(shard: Shard, arrays: list[Array]) -> list[Array]:
    """Results of one shard of an equation.

    Args:
        shard: Which shard.
        arrays: All operands, whole.
    """
    return _RUN.get(shard.app.eqn.primitive, _plain)(shard, arrays)


def _identity(combine: str, array: Array) -> Array:
    """What stands for an operand that another shard counts already."""
    if combine in ("add", "xor", "or"):
        return jnp.zeros_like(array)
    if combine == "mul":
        return jnp.ones_like(array)
    return array


def _plain(shard: Shard, arrays: list[Array]) -> list[Array]:
    return shard.bind(shard.operands(arrays))


def _with_result_shape(name: str) -> Callable[[Shard, list[Array]], list[Array]]:
    def runner(shard: Shard, arrays: list[Array]) -> list[Array]:
        return shard.bind(shard.operands(arrays), **{name: shard.shape(0)})

    return runner


def _iota(shard: Shard, arrays: list[Array]) -> list[Array]:
    (counted,) = shard.bind(arrays, shape=shard.shape(0))
    dim = shard.params["dimension"]
    is_cut = shard.rule.results[0][dim] == shard.factor
    start = shard.start(shard.app.eqn.outputs[0].shape[dim]) if is_cut else 0
    return [counted + jnp.asarray(start, counted.dtype)]


def _slice(shard: Shard, arrays: list[Array]) -> list[Array]:
    ends = list(shard.params["limit_indices"])
    for dim in shard.dims(0):
        ends[dim] = arrays[0].shape[dim] // shard.count
    return shard.bind(shard.operands(arrays), limit_indices=tuple(ends))


def _split(shard: Shard, arrays: list[Array]) -> list[Array]:
    axis = shard.params["axis"]
    sizes = tuple(shard.shape(i)[axis] for i in range(len(shard.app.eqn.outputs)))
    return shard.bind(shard.operands(arrays), sizes=sizes)


def _conv(shard: Shard, arrays: list[Array]) -> list[Array]:
    image = shard.params["dimension_numbers"].lhs_spec
    changed = {}
    for name, dim in (("feature_group_count", image[1]), ("batch_group_count", image[0])):
        if shard.params[name] > 1 and dim in shard.dims(0):
            changed[name] = shard.params[name] // shard.count
    return shard.bind(shard.operands(arrays), **changed)


def _counted_once(*operands: int) -> Callable[[Shard, list[Array]], list[Array]]:
    """Shards of a REDUCTION factor of which all but the first have the identity for these
    operands."""

    def runner(shard: Shard, arrays: list[Array]) -> list[Array]:
        own = shard.operands(arrays)
        if shard.index and shard.is_reduced:
            for i in operands:
                own[i] = _identity(shard.rule.combine, own[i])
        return shard.bind(own)

    return runner


def _reduce(shard: Shard, arrays: list[Array]) -> list[Array]:
    count = len(shard.app.eqn.outputs)
    return _counted_once(*range(count, 2 * count))(shard, arrays)


def _dynamic_update_slice(shard: Shard, arrays: list[Array]) -> list[Array]:
    """A shard with margins as large as the update: what falls outside the shard is written to the
    margins."""
    operand, update, *starts = shard.operands(arrays)
    for dim in set(shard.dims(0)) - set(shard.dims(1)):
        size, width = arrays[0].shape[dim], update.shape[dim]
        operand = _with_margins(operand, dim, width)
        start = jnp.clip(starts[dim], 0, size - width) - shard.start(size) + width
        starts[dim] = jnp.clip(start, 0, size // shard.count + width)
    (result,) = shard.bind([operand, update, *starts])
    for dim in set(shard.dims(0)) - set(shard.dims(1)):
        width = update.shape[dim]
        result = lax.slice_in_dim(result, width, result.shape[dim] - width, axis=dim)
    return [result]


def _with_margins(array: Array, dim: int, width: int) -> Array:
    return jnp.pad(array, [(width, width) if d == dim else (0, 0) for d in range(array.ndim)])


def _gather(shard: Shard, arrays: list[Array]) -> list[Array]:
    """Indices are shifted by the start of the shard; what another shard holds counts as 0."""
    operands = shard.operands(arrays)
    if not shard.is_reduced:
        return shard.bind(operands, slice_sizes=_local_slice_sizes(shard, arrays[0].ndim))
    (dim,) = shard.dims(0)
    if dim in shard.params["dimension_numbers"].start_index_map:
        return _gather_own_rows(shard, operands, dim, arrays[0].shape[dim])
    (result,) = shard.bind(operands)
    return [result if shard.index == 0 else jnp.zeros_like(result)]


def _local_slice_sizes(shard: Shard, rank: int) -> tuple[int, ...]:
    """Slice sizes, smaller where the factor runs through a window."""
    numbers = shard.params["dimension_numbers"]
    sizes = list(shard.params["slice_sizes"])
    without_window = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [dim for dim in range(rank) if dim not in without_window]
    for dim, position in zip(window, numbers.offset_dims, strict=True):
        if shard.rule.results[0][position] == shard.factor:
            sizes[dim] //= shard.count
    return tuple(sizes)


def _gather_own_rows(shard: Shard, operands: list[Array], dim: int, size: int) -> list[Array]:
    """The rows of an indexed dimension that lie in this shard, zeros in the place of others."""
    numbers = shard.params["dimension_numbers"]
    operand, indices = operands
    local = operand.shape[dim]
    column = numbers.start_index_map.index(dim)
    index = indices[..., column]
    outside = jnp.zeros(index.shape, bool)
    if shard.params["mode"] == Mode.FILL_OR_DROP:
        outside = (index < 0) | (index >= size)
    # What is out of bounds for all is left to the first shard.
    index = jnp.clip(index, 0, size - 1) - shard.start(size)
    here = (index >= 0) & (index < local)
    out_of_bounds = -1 if shard.index == 0 else 0
    shifted = jnp.where(outside, out_of_bounds, jnp.clip(index, 0, local - 1))
    (result,) = shard.bind([operand, indices.at[..., column].set(shifted)])

    mine = jnp.where(outside, shard.index == 0, here)
    batch = [d for d in range(result.ndim) if d not in numbers.offset_dims]
    mine = lax.broadcast_in_dim(mine, result.shape, batch)
    return [jnp.where(mine, result, jnp.zeros_like(result))]


def _scatter(shard: Shard, arrays: list[Array]) -> list[Array]:
    """Indices are shifted by the start of the shard, which has margins for windows that cross its
    ends."""
    if shard.is_reduced:
        return _counted_once(0)(shard, arrays)
    numbers, mode = shard.params["dimension_numbers"], shard.params["mode"]
    operand, indices, updates = shard.operands(arrays)
    alone = [d for d in shard.dims(0) if not shard.dims(1) and not shard.dims(2)]
    if not alone:
        return shard.bind([operand, indices, updates])
    (dim,) = alone
    widths = _window_sizes(numbers, operand.ndim, updates.shape)
    if mode == Mode.CLIP:
        for column, d in enumerate(numbers.scatter_dims_to_operand_dims):
            last = arrays[0].shape[d] - widths[d]
            indices = indices.at[..., column].set(jnp.clip(indices[..., column], 0, last))
    column = numbers.scatter_dims_to_operand_dims.index(dim)
    size, width, index = arrays[0].shape[dim], widths[dim], indices[..., column]
    dropped = (index < 0) | (index > size - width)
    index = jnp.clip(index, 0, size - width) - shard.start(size) + width
    outside = dropped | (index < 0) | (index > size // shard.count + width)
    indices = indices.at[..., column].set(jnp.where(outside, -1, index))
    (result,) = shard.bind(
        [_with_margins(operand, dim, width), indices, updates], mode=Mode.FILL_OR_DROP
    )
    return [lax.slice_in_dim(result, width, result.shape[dim] - width, axis=dim)]


def _window_sizes(numbers: Any, rank: int, updates: Sequence[int]) -> list[int]:
    """Extent of an update window along each dimension of the operand."""
    inner = iter(numbers.update_window_dims)
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    return [1 if d in gone else updates[next(inner)] for d in range(rank)]


def _ragged_dot(shard: Shard, arrays: list[Array]) -> list[Array]:
    """A cut of the ragged dimension clips each group's extent; groups of another shard multiply by
    0."""
    numbers = shard.params["ragged_dot_dimension_numbers"]
    left, right, sizes = shard.operands(arrays)
    (ragged,) = numbers.lhs_ragged_dimensions
    groups = [d for d in shard.dims(1) if d in numbers.rhs_group_dimensions]
    if groups:
        held = np.arange(arrays[1].shape[groups[0]]) // right.shape[groups[0]] == shard.index
        mask = held.reshape([-1 if d == groups[0] else 1 for d in range(arrays[1].ndim)])
        right = arrays[1] * jnp.asarray(mask, arrays[1].dtype)
    if ragged in shard.dims(0):
        start = shard.start(arrays[0].shape[ragged])
        ends = jnp.clip(jnp.cumsum(sizes, axis=-1) - start, 0, left.shape[ragged])
        sizes = jnp.diff(ends, axis=-1, prepend=0)
    results = shard.bind([left, right, sizes])
    if not any(shard.dims(i) for i in range(3)):
        return [shard.of(results[0], shard.rule.results[0])]
    return results


_RUN: dict[str, Callable[[Shard, list[Array]], list[Array]]] = {
    "broadcast_in_dim": _with_result_shape("shape"),
    "conv_general_dilated": _conv,
    "dynamic_slice": _with_result_shape("slice_sizes"),
    "dynamic_update_slice": _dynamic_update_slice,
    "empty": _with_result_shape("shape"),
    "gather": _gather,
    "iota": _iota,
    "ragged_dot_general": _ragged_dot,
    "reduce": _reduce,
    "reshape": _with_result_shape("new_sizes"),
    "slice": _slice,
    "split": _split,
    "symmetric_product": _counted_once(1),
} | dict.fromkeys(
    ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _scatter
)
