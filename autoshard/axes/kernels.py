"""Opaque kernels in shards: along which dimensions a `pallas_call` can be cut, and a kernel as one
device runs it.

The partitioner runs a kernel whole on every device. Where its results can be had by running it on
shards of its arrays, the kernel goes into a `shard_map` instead. For a `pallas_call` that is proved
from what the equation states, for one axis of its grid at a time and N shards of that axis:

1. the kernel does not ask where it is along the axis (`program_id`), has no side effect, and
   carries nothing in scratch memory from one step along the axis to the next (it has none, or the
   axis is declared `parallel`, or it is a vmap's);
2. the blocks that an operand or result takes in shard p are those of shard 0, moved by p / N of one
   dimension, the same for all steps, or not moved at all; this is evaluated for every step of the
   grid axes that the index map reads;
3. each result moves, so that no two shards write one block, and blocks divide the dimensions that
   move.

`h -> h // 4` (grouped-query attention) and `b * heads + h` (batch and heads in one axis) pass this
test as well.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.axes.sharding_rules import FactorKind, ShardingRule
from autoshard.axes.sharding_rules.builder import RuleBuilder, Shape, replicated_rule
from autoshard.jax_internals import jaxprs
from autoshard.tracing.program import Eqn

MOST_STEPS = 2**18
"""An index map that needs more steps to be evaluated is not looked at, and its kernel stays whole.
Chosen by hand, to bound the time: so many steps take 0.04 s here. No test depends on it."""

_DATA = -1
"""Stands for "depends on the data of a prefetched operand" among the grid axes that a block index
depends on."""

UNCERTAIN = -1
"""Stands for the dimension that moves where the proof fails."""


@dataclass(frozen=True, slots=True)
class GridFactor:
    """One axis of a kernel's grid that can be cut.

    Attributes:
        grid_axis: Which.
        max_shards: Into how many shards at most; each divisor is possible too.
        operands: By position of an operand that moves, its dimension.
        results: By position of each result, its dimension.
    """

    grid_axis: int
    max_shards: int
    operands: Mapping[int, int]
    results: Mapping[int, int]

    def places(self) -> set[tuple[str, int, int]]:
        """(side, position, dimension) of all that moves."""
        places = {("operand", *place) for place in self.operands.items()}
        return places | {("result", *place) for place in self.results.items()}


def grid_rule(eqn: Eqn) -> ShardingRule:
    """The sharding rule of a `pallas_call`: what can be cut passes, the rest does not; no raise."""
    factors = grid_factors(eqn)
    if not factors:
        return replicated_rule(eqn)
    builder = RuleBuilder.of(eqn)
    for factor in factors:
        builder.add_factor(
            FactorKind.PASS_THROUGH,
            factor.operands.items(),
            factor.results.items(),
            max_shards=factor.max_shards,
        )
    return builder.build()


def grid_factors(eqn: Eqn) -> tuple[GridFactor, ...]:
    """The axes of a `pallas_call`'s grid that can be cut, none if its parameters are unexpected."""
    try:
        return tuple(_grid_factors(eqn))
    except Exception:  # parameters of another jax: nothing is proved, so nothing is cut
        return ()


def _grid_factors(eqn: Eqn) -> Iterator[GridFactor]:
    if not _is_plain(eqn):
        return
    mapping = eqn.params["grid_mapping"]
    blocks = [_BlockMap(block, mapping.grid) for block in mapping.block_mappings]
    asked = _axes_asked_for(eqn)
    taken: set[tuple[str, int, int]] = set()
    for axis, steps in enumerate(mapping.grid):
        if axis in asked or _may_carry(eqn, axis):
            continue
        for shards in range(int(steps), 1, -1):
            if steps % shards:
                continue
            factor = _proved_factor(eqn, blocks, axis, shards)
            if factor is not None and taken.isdisjoint(factor.places()):
                taken |= factor.places()
                yield factor
                break


def _is_plain(eqn: Eqn) -> bool:
    """Whether a kernel only computes its results, on a grid of sizes that are not operands."""
    params, mapping = eqn.params, eqn.params["grid_mapping"]
    if jaxprs.has_effects(eqn.origin):
        return False
    if params.get("mesh") is not None or mapping.local_grid_env is not None:
        return False
    if getattr(params.get("compiler_params"), "has_side_effects", False):
        return False
    # Dynamic sizes of the grid are operands too, before those that index maps read.
    return bool(len(eqn.inputs) - mapping.num_inputs == mapping.num_index_operands)


def _axes_asked_for(eqn: Eqn) -> set[int]:
    """Grid axes whose position or size the kernel asks for."""
    mapping = eqn.params["grid_mapping"]
    # The kernel does not count the axes that a vmap added.
    own = [axis for axis in range(len(mapping.grid)) if axis not in mapping.vmapped_dims]
    return {own[axis] for axis in set(_asked(eqn.params["jaxpr"]))}


def _asked(jaxpr: Any) -> Iterator[int]:
    """The grid axes, as the kernel counts them, whose position or size it asks for."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("program_id", "num_programs"):
            yield int(eqn.params["axis"])
        for inner in jaxprs.jaxprs_in(eqn.params):
            yield from _asked(inner)


def _may_carry(eqn: Eqn, axis: int) -> bool:
    """True where scratch memory might carry something from one step along the axis to the next."""
    mapping = eqn.params["grid_mapping"]
    if axis in mapping.vmapped_dims or not mapping.scratch_avals:
        return False
    semantics = getattr(eqn.params.get("compiler_params"), "dimension_semantics", None) or ()
    own = axis - sum(vmapped < axis for vmapped in mapping.vmapped_dims)
    if own >= len(semantics):
        return True
    declared = getattr(semantics[own], "value", semantics[own])
    return "parallel" not in str(declared).lower()


def _proved_factor(
    eqn: Eqn, blocks: Sequence[_BlockMap], axis: int, shards: int
) -> GridFactor | None:
    """What moves with N shards of a grid axis; None where running it in shards is not proved."""
    mapping = eqn.params["grid_mapping"]
    first_operand = len(eqn.inputs) - mapping.num_inputs
    moved = [block.moved_dim(axis, shards) for block in blocks]
    operands: dict[int, int] = {}
    results: dict[int, int] = {}
    for i, dim in enumerate(moved):
        is_result = i >= mapping.num_inputs
        if dim == UNCERTAIN or (is_result and dim is None):
            return None
        if dim is not None and is_result:
            results[i - mapping.num_inputs] = dim
        elif dim is not None:
            operands[first_operand + i] = dim
    factor = GridFactor(axis, shards, operands, results)
    return factor if _aliases_agree(eqn, factor) else None


def _aliases_agree(eqn: Eqn, factor: GridFactor) -> bool:
    """An operand that becomes a result is written while others read it: both must move alike."""
    aliases = eqn.params.get("input_output_aliases") or ()
    return all(factor.operands.get(i) == factor.results.get(j) for i, j in aliases)


class _Movement(enum.Enum):
    """What the blocks of one dimension do from shard to shard of a grid axis."""

    STAYS = enum.auto()
    EVEN = enum.auto()
    UNCERTAIN = enum.auto()


class _BlockMap:
    """Which block of one array each step of the grid takes."""

    def __init__(self, block: Any, grid: Sequence[Any]) -> None:
        self._grid = [int(steps) for steps in grid]
        self._shape = tuple(block.array_aval.shape)
        self._index_map = block.index_map_jaxpr
        self._sizes = [_block_size(dim) for dim in block.block_shape]
        self._reads = _dependences(jaxprs.open_jaxpr(self._index_map), len(grid))
        self._evaluated: dict[int, np.ndarray | None] = {}

    def moved_dim(self, axis: int, shards: int) -> int | None:
        """The dimension that moves evenly with N shards of a grid axis.

        None where none does, `UNCERTAIN` where that is not proved.
        """
        if len(self._reads) != len(self._shape):
            return UNCERTAIN if any(axis in reads for reads in self._reads) else None
        moved = None
        for dim, reads in enumerate(self._reads):
            movement = self._movement(dim, axis, shards) if axis in reads else _Movement.STAYS
            if movement is _Movement.STAYS:
                continue
            if movement is _Movement.UNCERTAIN or moved is not None:
                return UNCERTAIN
            moved = dim
        return moved

    def _movement(self, dim: int, axis: int, shards: int) -> _Movement:
        indices = self._indices_of_dim(dim)
        if indices is None:
            return _Movement.UNCERTAIN
        # [shards, steps of one shard]: the block index along the dimension
        position = sorted(self._reads[dim]).index(axis)
        by_shard = np.moveaxis(indices, position, 0).reshape(shards, -1)
        first = by_shard[0]
        if (by_shard == first).all():
            return _Movement.STAYS

        blocks_of_shard, rest = divmod(self._shape[dim] // self._sizes[dim], shards)
        start = np.arange(shards)[:, None] * blocks_of_shard  # [shards, 1]: first block of each
        even = rest == 0 and bool((by_shard - start == first).all())
        inside = first.min() >= 0 and first.max() < blocks_of_shard
        return _Movement.EVEN if even and inside else _Movement.UNCERTAIN

    def _indices_of_dim(self, dim: int) -> np.ndarray | None:
        """`_indices`, evaluated once; None where blocks depend on data or do not fill the array."""
        reads, size = self._reads[dim], self._sizes[dim]
        if _DATA in reads or not size or self._shape[dim] % size:
            return None
        if dim not in self._evaluated:
            self._evaluated[dim] = self._indices(dim, tuple(sorted(reads)))
        return self._evaluated[dim]

    def _indices(self, dim: int, reads: tuple[int, ...]) -> np.ndarray | None:
        """[steps of each grid axis that it depends on]: the block index along a dimension."""
        ranges = [self._grid[axis] for axis in reads]
        if math.prod(ranges) > MOST_STEPS:
            return None
        points = np.indices(ranges).reshape(len(reads), -1)  # [axes read, points]
        steps = np.zeros((len(self._grid), points.shape[1]), np.int32)  # [grid axes, points]
        steps[list(reads)] = points
        return jaxprs.evaluate_result(self._index_map, steps, dim).reshape(ranges)


def _block_size(dim: Any) -> int:
    """Elements of a block along a dimension; 0 where the index does not count blocks."""
    name = type(dim).__name__
    if isinstance(dim, int):
        return dim
    if dim is None or name == "Squeezed":
        return 1
    return int(dim.block_size) if name == "Blocked" else 0


def _dependences(jaxpr: Any, grid_axes: int) -> list[frozenset[int]]:
    """By result of an index map, the grid axes it depends on, and `_DATA` for prefetched data."""
    depends_on: dict[Any, frozenset[int]] = {}
    for position, var in enumerate(jaxpr.invars):
        depends_on[var] = frozenset({position if position < grid_axes else _DATA})

    def axes_of(atoms: Sequence[Any]) -> frozenset[int]:
        variables = [atom for atom in atoms if not jaxprs.is_literal(atom)]
        return frozenset(itertools.chain(*(depends_on.get(var, ()) for var in variables)))

    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            depends_on[var] = axes_of(eqn.invars)
    return [axes_of([var]) for var in jaxpr.outvars]


def params_of_shard(
    eqn: Eqn,
    shard_counts: Mapping[int, int],
    operands: Sequence[Shape],
    results: Sequence[Shape],
) -> Any:
    """The parameters of a kernel as one device runs it.

    Args:
        eqn: A kernel: a `pallas_call` or `ffi_call`.
        shard_counts: By factor of its sharding rule, into how many shards it is cut.
        operands: Shapes of the operands' shards.
        results: Shapes of the results' shards.
    """
    params = dict(eqn.params)
    if eqn.primitive != "pallas_call":
        params["result_avals"] = _resized(params["result_avals"], results)
        return params

    mapping = params["grid_mapping"]
    grid = list(mapping.grid)
    for number, factor in enumerate(grid_factors(eqn)):
        grid[factor.grid_axis] //= shard_counts.get(number, 1)
    shapes = [*operands[len(operands) - mapping.num_inputs :], *results]
    avals = _resized([block.array_aval for block in mapping.block_mappings], shapes)
    blocks = zip(mapping.block_mappings, avals, strict=True)
    params["grid_mapping"] = mapping.replace(
        grid=tuple(grid),
        block_mappings=tuple(block.replace(array_aval=aval) for block, aval in blocks),
    )
    params["out_avals"] = _resized(params["out_avals"], results)
    return params


def _resized(avals: Sequence[Any], shapes: Sequence[Shape]) -> tuple[Any, ...]:
    """The abstract values with these shapes."""
    pairs = zip(avals, shapes, strict=True)
    return tuple(aval.update(shape=tuple(shape)) for aval, shape in pairs)
