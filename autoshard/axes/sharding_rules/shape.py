"""Primitives that move, cut or join dimensions without arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder, ints
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.axes.sharding_rules.windows import tiles_exactly
from autoshard.tracing.program import Eqn


def transpose(eqn: Eqn) -> ShardingRule:
    """Every dimension passes."""
    factors = RuleBuilder.of(eqn)
    for position, dim in enumerate(ints(eqn.params["permutation"])):
        factors.add(FactorKind.PASS_THROUGH, [(0, dim)], [(0, position)])
    return factors.rule()


def broadcast_in_dim(eqn: Eqn) -> ShardingRule:
    """Kept dimensions pass; new ones, and those made of a dimension of size 1, are made by each
    device itself.
    """
    factors = RuleBuilder.of(eqn)
    source = {
        position: dim for dim, position in enumerate(ints(eqn.params["broadcast_dimensions"]))
    }
    for position, size in enumerate(factors.results[0]):
        dim = source.get(position)
        kept = dim is not None and factors.operands[0][dim] == size
        factors.add(
            FactorKind.PASS_THROUGH, [(0, dim)] if kept and dim is not None else [], [(0, position)]
        )
    return factors.rule()


def squeeze(eqn: Eqn) -> ShardingRule:
    """All dimensions but those removed (of size 1) pass."""
    factors = RuleBuilder.of(eqn)
    rank = len(factors.operands[0])
    removed = {dim % rank for dim in ints(eqn.params["dimensions"])}
    for position, dim in enumerate(dim for dim in range(rank) if dim not in removed):
        factors.add(FactorKind.PASS_THROUGH, [(0, dim)], [(0, position)])
    return factors.rule()


def expand_dims(eqn: Eqn) -> ShardingRule:
    """All dimensions but those inserted (of size 1) pass."""
    factors = RuleBuilder.of(eqn)
    rank = len(factors.results[0])
    inserted = {dim % rank for dim in ints(eqn.params["dimensions"])}
    for dim, position in enumerate(
        position for position in range(rank) if position not in inserted
    ):
        factors.add(FactorKind.PASS_THROUGH, [(0, dim)], [(0, position)])
    return factors.rule()


def _changed(eqn: Eqn, changed: frozenset[int]) -> ShardingRule:
    """Dimension d of operands and results of the same rank correspond: PERMUTATION where changed, else
    PASS_THROUGH.
    """
    factors = RuleBuilder.of(eqn)
    for dim in range(len(factors.operands[0])):
        factors.add(
            FactorKind.PERMUTATION if dim in changed else FactorKind.PASS_THROUGH,
            [
                (i, dim)
                for i, shape in enumerate(factors.operands)
                if len(shape) == len(factors.operands[0])
            ],
            [(i, dim) for i in range(len(factors.results))],
        )
    return factors.rule()


def _resized(eqn: Eqn) -> frozenset[int]:
    """Dimensions in which operand 0 and result 0 differ in size."""
    sizes = zip(eqn.inputs[0].shape, eqn.outputs[0].shape, strict=True)
    return frozenset(dim for dim, (a, b) in enumerate(sizes) if a != b)


def rev(eqn: Eqn) -> ShardingRule:
    """Reversed dimensions are PERMUTATION."""
    return _changed(eqn, frozenset(ints(eqn.params["dimensions"])))


def concatenate(eqn: Eqn) -> ShardingRule:
    """The joined dimension is PERMUTATION, unless there is one operand only."""
    return _changed(
        eqn, frozenset({int(eqn.params["dimension"])}) if len(eqn.inputs) > 1 else frozenset()
    )


def split(eqn: Eqn) -> ShardingRule:
    """The divided dimension is PERMUTATION, unless there is one result only."""
    return _changed(
        eqn, frozenset({int(eqn.params["axis"])}) if len(eqn.outputs) > 1 else frozenset()
    )


def pad(eqn: Eqn) -> ShardingRule:
    """Dimensions that are padded (or cut, or dilated) are PERMUTATION; operand 1 is the scalar to pad
    with.
    """
    factors = RuleBuilder.of(eqn)
    for dim, edges in enumerate(eqn.params["padding_config"]):
        kind = FactorKind.PERMUTATION if any(ints(edges)) else FactorKind.PASS_THROUGH
        factors.add(kind, [(0, dim)], [(0, dim)])
    return factors.rule()


def slice_(eqn: Eqn) -> ShardingRule:
    """Dimensions of which all, or one of every so many, is taken pass; others are PERMUTATION."""
    starts = ints(eqn.params["start_indices"])
    strides = ints(eqn.params["strides"] or (1,) * len(starts))
    sizes = zip(eqn.inputs[0].shape, eqn.outputs[0].shape, starts, strides, strict=True)
    changed = {
        dim
        for dim, (size, taken, start, stride) in enumerate(sizes)
        if start >= stride or not tiles_exactly(size, taken, window=1, stride=stride)
    }
    return _changed(eqn, frozenset(changed))


def dynamic_slice(eqn: Eqn) -> ShardingRule:
    """As for slice: the start of a full slice can only be 0. The start indices are scalars."""
    factors = RuleBuilder.of(eqn)
    changed = _resized(eqn)
    for dim in range(len(factors.operands[0])):
        factors.add(
            FactorKind.PERMUTATION if dim in changed else FactorKind.PASS_THROUGH,
            [(0, dim)],
            [(0, dim)],
        )
    return factors.rule()


def dynamic_update_slice(eqn: Eqn) -> ShardingRule:
    """The operand continues in the result; the update joins where it is as large, else it is needed
    NEED_REPLICATION.

    A device keeps its piece of the operand and writes what of the update falls into it.
    """
    factors = RuleBuilder.of(eqn)
    for dim, (size, update) in enumerate(
        zip(factors.operands[0], factors.operands[1], strict=True)
    ):
        joined = [(0, dim), (1, dim)] if size == update else [(0, dim)]
        factors.add(FactorKind.PASS_THROUGH, joined, [(0, dim)])
    return factors.rule()


def tile(eqn: Eqn) -> ShardingRule:
    """Repeated dimensions are PERMUTATION."""
    reps = ints(eqn.params["reps"])
    rank = len(eqn.outputs[0].shape)
    if len(eqn.inputs[0].shape) != rank:
        return RuleBuilder.of(eqn).rule()
    return _changed(eqn, frozenset(dim for dim, n in enumerate(reps[-rank:]) if n != 1))


def stack(eqn: Eqn) -> ShardingRule:
    """Operands of one shape along a new dimension, which is PERMUTATION as in concatenate."""
    factors = RuleBuilder.of(eqn)
    axis = int(eqn.params["axis"])
    for dim in range(len(factors.operands[0])):
        position = dim + (dim >= axis)
        factors.add(
            FactorKind.PASS_THROUGH,
            [(i, dim) for i in range(len(factors.operands))],
            [(0, position)],
        )
    factors.add(FactorKind.PERMUTATION, results=[(0, axis)])
    return factors.rule()


def unstack(eqn: Eqn) -> ShardingRule:
    """The inverse of stack."""
    factors = RuleBuilder.of(eqn)
    axis = int(eqn.params["axis"])
    for dim in range(len(factors.operands[0])):
        if dim != axis:
            position = dim - (dim > axis)
            factors.add(
                FactorKind.PASS_THROUGH,
                [(0, dim)],
                [(i, position) for i in range(len(factors.results))],
            )
    factors.add(FactorKind.PERMUTATION, [(0, axis)])
    return factors.rule()


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
