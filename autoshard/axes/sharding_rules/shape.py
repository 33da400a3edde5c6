"""Primitives that move, cut or join dimensions without arithmetic."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import (
    Rule,
    RuleBuilder,
    ints,
    other_dims,
    replicated_rule,
)
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.axes.sharding_rules.windows import tiles_exactly
from autoshard.tracing.program import Eqn


def transpose(eqn: Eqn) -> ShardingRule:
    """Every dimension passes."""
    builder = RuleBuilder.of(eqn)
    for position, dim in enumerate(ints(eqn.params["permutation"])):
        builder.add_factor(FactorKind.PASS_THROUGH, [(0, dim)], [(0, position)])
    return builder.build()


def broadcast_in_dim(eqn: Eqn) -> ShardingRule:
    """Kept dimensions pass; each device makes its own shard of new ones.

    A dimension of size 1 that becomes a larger one is new as well.
    """
    builder = RuleBuilder.of(eqn)
    positions = ints(eqn.params["broadcast_dimensions"])
    operand_dim = {position: dim for dim, position in enumerate(positions)}
    for position, size in enumerate(builder.results[0]):
        dim = operand_dim.get(position)
        kept = [] if dim is None or builder.operands[0][dim] != size else [(0, dim)]
        builder.add_factor(FactorKind.PASS_THROUGH, kept, [(0, position)])
    return builder.build()


def squeeze(eqn: Eqn) -> ShardingRule:
    """All dimensions but those removed (of size 1) pass."""
    builder = RuleBuilder.of(eqn)
    rank = len(builder.operands[0])
    removed = {dim % rank for dim in ints(eqn.params["dimensions"])}
    for position, dim in enumerate(other_dims(rank, removed)):
        builder.add_factor(FactorKind.PASS_THROUGH, [(0, dim)], [(0, position)])
    return builder.build()


def expand_dims(eqn: Eqn) -> ShardingRule:
    """All dimensions but those inserted (of size 1) pass."""
    builder = RuleBuilder.of(eqn)
    rank = len(builder.results[0])
    inserted = {dim % rank for dim in ints(eqn.params["dimensions"])}
    for dim, position in enumerate(other_dims(rank, inserted)):
        builder.add_factor(FactorKind.PASS_THROUGH, [(0, dim)], [(0, position)])
    return builder.build()


def _permuting(eqn: Eqn, permuted: Collection[int]) -> ShardingRule:
    """Dimension d of operands and results of one rank correspond: PERMUTATION where permuted.

    The other dimensions pass. Operands of another rank (scalars, indices) have none of them.
    """
    builder = RuleBuilder.of(eqn)
    rank = len(builder.operands[0])
    operands = [i for i in builder.all_operands if len(builder.operands[i]) == rank]
    for dim in range(rank):
        builder.add_shared_dim(_kind(dim in permuted), dim, operands, builder.all_results)
    return builder.build()


def _kind(permuted: bool) -> FactorKind:
    return FactorKind.PERMUTATION if permuted else FactorKind.PASS_THROUGH


def rev(eqn: Eqn) -> ShardingRule:
    """Reversed dimensions are PERMUTATION."""
    return _permuting(eqn, ints(eqn.params["dimensions"]))


def concatenate(eqn: Eqn) -> ShardingRule:
    """The joined dimension is PERMUTATION, unless there is one operand only."""
    joined = int(eqn.params["dimension"])
    return _permuting(eqn, {joined} if len(eqn.inputs) > 1 else ())


def split(eqn: Eqn) -> ShardingRule:
    """The divided dimension is PERMUTATION, unless there is one result only."""
    divided = int(eqn.params["axis"])
    return _permuting(eqn, {divided} if len(eqn.outputs) > 1 else ())


def pad(eqn: Eqn) -> ShardingRule:
    """Dimensions that are padded (or cut, or dilated) are PERMUTATION.

    Operand 1 is the scalar to pad with.
    """
    builder = RuleBuilder.of(eqn)
    for dim, edges in enumerate(eqn.params["padding_config"]):
        builder.add_factor(_kind(any(ints(edges))), [(0, dim)], [(0, dim)])
    return builder.build()


def slice_(eqn: Eqn) -> ShardingRule:
    """Dimensions of which all, or one of every so many, is taken pass; others are PERMUTATION."""
    starts = ints(eqn.params["start_indices"])
    strides = ints(eqn.params["strides"] or (1,) * len(starts))
    sizes, taken = eqn.inputs[0].shape, eqn.outputs[0].shape
    permuted = set()
    for dim, (start, stride) in enumerate(zip(starts, strides, strict=True)):
        # Shards of the operand hold whole strides, each with the element that is taken from it.
        every_stride = tiles_exactly(sizes[dim], taken[dim], window=1, stride=stride)
        if start >= stride or not every_stride:
            permuted.add(dim)
    return _permuting(eqn, permuted)


def dynamic_slice(eqn: Eqn) -> ShardingRule:
    """As for slice: the start of a full slice can only be 0. The start indices are scalars."""
    builder = RuleBuilder.of(eqn)
    sizes = zip(builder.operands[0], builder.results[0], strict=True)
    for dim, (size, taken) in enumerate(sizes):
        builder.add_factor(_kind(size != taken), [(0, dim)], [(0, dim)])
    return builder.build()


def dynamic_update_slice(eqn: Eqn) -> ShardingRule:
    """The operand continues in the result; the update joins where it is as large.

    Where it is not, it is NEED_REPLICATION: a device keeps its shard of the operand and writes what
    of the update falls into it.
    """
    builder = RuleBuilder.of(eqn)
    sizes = zip(builder.operands[0], builder.operands[1], strict=True)
    for dim, (size, update) in enumerate(sizes):
        operands = (0, 1) if size == update else (0,)
        builder.add_shared_dim(FactorKind.PASS_THROUGH, dim, operands, (0,))
    return builder.build()


def tile(eqn: Eqn) -> ShardingRule:
    """Repeated dimensions are PERMUTATION, and never cut."""
    reps = ints(eqn.params["reps"])
    rank = len(eqn.outputs[0].shape)
    if len(eqn.inputs[0].shape) != rank:  # repetition makes new dimensions as well
        return replicated_rule(eqn)
    builder = RuleBuilder.of(eqn)
    for dim, n in enumerate(reps[-rank:]):
        builder.add_factor(_kind(n != 1), [(0, dim)], [(0, dim)], max_shards=1 if n != 1 else None)
    return builder.build()


def stack(eqn: Eqn) -> ShardingRule:
    """Operands of one shape along a new dimension, which is PERMUTATION, and never cut."""
    builder = RuleBuilder.of(eqn)
    axis = int(eqn.params["axis"])
    for dim in range(len(builder.operands[0])):
        operands = [(i, dim) for i in builder.all_operands]
        position = dim + (dim >= axis)
        builder.add_factor(FactorKind.PASS_THROUGH, operands, [(0, position)])
    builder.add_factor(FactorKind.PERMUTATION, results=[(0, axis)], max_shards=1)
    return builder.build()


def unstack(eqn: Eqn) -> ShardingRule:
    """The inverse of stack."""
    builder = RuleBuilder.of(eqn)
    axis = int(eqn.params["axis"])
    for position, dim in enumerate(other_dims(len(builder.operands[0]), (axis,))):
        results = [(i, position) for i in builder.all_results]
        builder.add_factor(FactorKind.PASS_THROUGH, [(0, dim)], results)
    builder.add_factor(FactorKind.PERMUTATION, [(0, axis)], max_shards=1)
    return builder.build()


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "broadcast_in_dim": broadcast_in_dim,
        "concatenate": concatenate,
        "dynamic_slice": dynamic_slice,
        "dynamic_update_slice": dynamic_update_slice,
        "expand_dims": expand_dims,
        "pad": pad,
        "rev": rev,
        "slice": slice_,
        "split": split,
        "squeeze": squeeze,
        "stack": stack,
        "tile": tile,
        "transpose": transpose,
        "unstack": unstack,
    }
)
