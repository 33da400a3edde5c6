"""Opaque kernels by pieces: along which dimensions a `pallas_call` can be cut, and a kernel as one
device runs it.

The partitioner runs a kernel whole on every device. Where its results can be had by running it on
pieces of its arrays, the kernel goes into a `shard_map` instead. For a `pallas_call` that is proved
from what the equation states, for one axis of its grid at a time and N pieces of that axis:

1. the kernel does not ask where it is along the axis (`program_id`), has no side effect, and
carries nothing in scratch
   memory from one step along the axis to the next (it has none, or the axis is declared `parallel`,
   or it is a vmap's);
2. the blocks that an operand or result takes in piece p are those of piece 0, moved by p / N of one
dimension, the
   same for all steps, or not moved at all; this is evaluated for every step of the grid axes that
   the index map reads;
3. each result moves, so that no two pieces write one block, and blocks divide the dimensions that
move.

`h -> h // 4` (grouped-query attention) and `b * heads + h` (batch and heads in one axis) pass this
test as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.axes.sharding_rules import FactorKind, ShardingRule
from autoshard.axes.sharding_rules.builder import RuleBuilder, replicated_rule
from autoshard.jax_internals import jaxprs
from autoshard.tracing.program import Eqn

MOST_STEPS = 2**18
"""An index map that needs more steps to be evaluated is not looked at."""

_DATA = -1
"""Stands for "depends on the data of a prefetched operand" among the grid axes that a block index
depends on."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GridDimension:
    """One axis of a kernel's grid that can be cut.

    Attributes:
        grid_axis: Which.
        pieces: Into how many pieces at most; each divisor is possible too.
        operands: By position of an operand that moves, its dimension.
        results: By position of each result, its dimension.
    """

    grid_axis: int
    pieces: int
    operands: Mapping[int, int]
    results: Mapping[int, int]


def grid_rule(eqn: Eqn) -> ShardingRule:
    """The sharding rule of a `pallas_call`: what can be cut passes, the rest is whole. Never
    raises.
    """
    found = grid_dimensions(eqn)
    if not found:
        return replicated_rule(eqn)
    builder = RuleBuilder.of(eqn)
    for factor in found:
        builder.add_factor(
            FactorKind.PASS_THROUGH,
            factor.operands.items(),
            factor.results.items(),
            max_shards=factor.pieces,
        )
    return builder.build()


def grid_dimensions(eqn: Eqn) -> tuple[GridDimension, ...]:
    """The axes of a `pallas_call`'s grid that can be cut; none where its parameters are not as
    expected.
    """
    try:
        return tuple(_grid_dimensions(eqn))
    except Exception:  # parameters of another jax: nothing is known, so nothing is cut
        return ()


def _grid_dimensions(eqn: Eqn) -> Iterator[GridDimension]:
    params, mapping = eqn.params, eqn.params["grid_mapping"]
    if (
        jaxprs.has_effects(eqn.origin)
        or params.get("mesh") is not None
        or mapping.local_grid_env is not None
    ):
        return
    if getattr(params.get("compiler_params"), "has_side_effects", False):
        return
    first = len(eqn.inputs) - mapping.num_inputs
    if first != mapping.num_index_operands:  # dynamic sizes of the grid are operands too
        return
    arrays = [
        *((True, first + i) for i in range(mapping.num_inputs)),
        *((False, i) for i in range(mapping.num_outputs)),
    ]
    asked = set(_asked(params["jaxpr"]))
    taken: set[tuple[bool, int, int]] = set()
    maps = [_BlockMap(block, mapping.grid) for block in mapping.block_mappings]
    for axis, steps in enumerate(mapping.grid):
        if axis in _seen_from_kernel(mapping, asked) or _carries(params, mapping, axis):
            continue
        for pieces in (n for n in range(int(steps), 1, -1) if steps % n == 0):
            moves = [block.moved_dim(axis, pieces) for block in maps]
            places = {
                (*array, dim)
                for array, dim in zip(arrays, moves, strict=True)
                if dim is not None and dim >= 0
            }
            whole_result = any(
                dim is None for (operand, _), dim in zip(arrays, moves, strict=True) if not operand
            )
            if -1 in moves or whole_result or places & taken or not _aliases_agree(params, places):
                continue
            taken |= places
            operands = {position: dim for operand, position, dim in places if operand}
            yield GridDimension(
                axis,
                pieces,
                operands,
                {position: dim for operand, position, dim in places if not operand},
            )
            break


def _asked(jaxpr: Any) -> Iterator[int]:
    """The grid axes, as the kernel counts them, whose position or size it asks for."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("program_id", "num_programs"):
            yield int(eqn.params["axis"])
        for inner in jaxprs.jaxprs_in(eqn.params):
            yield from _asked(inner)


def _seen_from_kernel(mapping: Any, asked: set[int]) -> set[int]:
    """Grid axes that the kernel asks for; it does not count those that a vmap added."""
    own = [axis for axis in range(len(mapping.grid)) if axis not in mapping.vmapped_dims]
    return {own[axis] for axis in asked}


def _carries(params: Mapping[str, Any], mapping: Any, axis: int) -> bool:
    """True where scratch memory might carry something from one step along the axis to the next."""
    if axis in mapping.vmapped_dims or not mapping.scratch_avals:
        return False
    semantics = getattr(params.get("compiler_params"), "dimension_semantics", None) or ()
    own = axis - sum(vmapped < axis for vmapped in mapping.vmapped_dims)
    return (
        own >= len(semantics)
        or "parallel" not in str(getattr(semantics[own], "value", semantics[own])).lower()
    )


def _aliases_agree(params: Mapping[str, Any], places: set[tuple[bool, int, int]]) -> bool:
    """An operand that becomes a result is written while others read it: both must move alike."""
    for operand, result in params.get("input_output_aliases") or ():
        before = {dim for is_operand, i, dim in places if is_operand and i == operand}
        after = {dim for is_operand, i, dim in places if not is_operand and i == result}
        if before != after:
            return False
    return True


class _BlockMap:
    """Which block of one array each step of the grid takes."""

    def __init__(self, block: Any, grid: Sequence[Any]) -> None:
        self._grid = [int(steps) for steps in grid]
        self._shape = tuple(block.array_aval.shape)
        self._index_map = block.index_map_jaxpr
        self._sizes = [_block_size(dim) for dim in block.block_shape]
        self._reads = _dependences(jaxprs.open_jaxpr(self._index_map), len(grid))
        self._seen: dict[int, np.ndarray | None] = {}

    def moved_dim(self, axis: int, pieces: int) -> int | None:
        """The dimension that moves with N pieces of a grid axis, None where none does, -1 where
        that is not certain.
        """
        moved: int | None = None
        if len(self._reads) != len(self._shape):
            return -1 if any(axis in reads for reads in self._reads) else None
        for dim, reads in enumerate(self._reads):
            if axis not in reads:
                continue
            size, length = self._sizes[dim], self._shape[dim]
            if _DATA in reads or size is None or length % size:
                return -1
            if dim not in self._seen:
                self._seen[dim] = self._indices(dim, tuple(sorted(reads)))
            at = self._seen[dim]
            if at is None:
                return -1
            at = np.moveaxis(at, sorted(reads).index(axis), 0)
            at = at.reshape(pieces, -1)
            blocks = length // size
            if (at == at[:1]).all():
                continue
            step = np.arange(pieces)[:, None] * (blocks // pieces)
            if (
                blocks % pieces
                or (at - step != at[:1]).any()
                or at[0].min() < 0
                or at[0].max() >= blocks // pieces
            ):
                return -1
            if moved is not None:
                return -1
            moved = dim
        return moved

    def _indices(self, dim: int, reads: tuple[int, ...]) -> np.ndarray | None:
        """The block index along a dimension, by position along the grid axes that it depends on."""
        ranges = [self._grid[axis] for axis in reads]
        if math.prod(ranges) > MOST_STEPS:
            return None
        points = np.indices(ranges).reshape(len(reads), -1)
        steps = np.zeros((len(self._grid), points.shape[1]), np.int32)
        steps[list(reads)] = points
        return jaxprs.evaluate_result(self._index_map, steps, dim).reshape(ranges)


def _block_size(dim: Any) -> int | None:
    """Elements of a block along a dimension; None where the index counts something else than
    blocks.
    """
    name = type(dim).__name__
    if isinstance(dim, int):
        return dim
    if dim is None or name == "Squeezed":
        return 1
    return int(dim.block_size) if name == "Blocked" else None


def _dependences(jaxpr: Any, grid_axes: int) -> list[frozenset[int]]:
    """By result of an index map, the grid axes that it depends on, and `_DATA` where prefetched
    data enters.
    """
    on: dict[Any, frozenset[int]] = {}
    for position, var in enumerate(jaxpr.invars):
        on[var] = frozenset({position if position < grid_axes else _DATA})

    def of(atoms: Sequence[Any]) -> frozenset[int]:
        return frozenset(
            itertools.chain.from_iterable(on.get(a, ()) for a in atoms if not jaxprs.is_literal(a))
        )

    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            on[var] = of(eqn.invars)
    return [of([var]) for var in jaxpr.outvars]


def params_of_shard(
    eqn: Eqn, cut: Mapping[int, int], operands: Sequence[Shape], results: Sequence[Shape]
) -> Any:
    """The parameters of a kernel as one device runs it.

    Args:
        eqn: A kernel: a `pallas_call` or `ffi_call`.
        cut: By loop of its sharding rule, into how many pieces.
        operands: Shapes of the operands' pieces.
        results: Shapes of the results' pieces.
    """
    params = dict(eqn.params)
    if eqn.primitive != "pallas_call":
        avals = zip(params["result_avals"], results, strict=True)
        return {
            **params,
            "result_avals": tuple(aval.update(shape=tuple(shape)) for aval, shape in avals),
        }
    mapping = params["grid_mapping"]
    grid = list(mapping.grid)
    for number, factor in enumerate(grid_dimensions(eqn)):
        grid[factor.grid_axis] //= cut.get(number, 1)
    shapes = [*operands[len(operands) - mapping.num_inputs :], *results]
    blocks = tuple(
        block.replace(array_aval=block.array_aval.update(shape=tuple(shape)))
        for block, shape in zip(mapping.block_mappings, shapes, strict=True)
    )
    params["grid_mapping"] = mapping.replace(grid=tuple(grid), block_mappings=blocks)
    params["out_avals"] = tuple(
        aval.update(shape=tuple(shape))
        for aval, shape in zip(params["out_avals"], results, strict=True)
    )
    return params
