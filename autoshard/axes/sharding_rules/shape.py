"""Primitives that move, cut or join dimensions without arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Loops, Rule, ints
from autoshard.axes.sharding_rules.rule import DimRule, LoopKind
from autoshard.axes.sharding_rules.windows import tiles_exactly
from autoshard.tracing.program import Eqn


def transpose(eqn: Eqn) -> DimRule:
    """Every dimension passes."""
    loops = Loops.of(eqn)
    for position, dim in enumerate(ints(eqn.params["permutation"])):
        loops.add(LoopKind.PASS, [(0, dim)], [(0, position)])
    return loops.rule()


def broadcast_in_dim(eqn: Eqn) -> DimRule:
    """Kept dimensions pass; new ones, and those made of a dimension of size 1, are made by each
    device itself.
    """
    loops = Loops.of(eqn)
    source = {
        position: dim for dim, position in enumerate(ints(eqn.params["broadcast_dimensions"]))
    }
    for position, size in enumerate(loops.results[0]):
        dim = source.get(position)
        kept = dim is not None and loops.operands[0][dim] == size
        loops.add(LoopKind.PASS, [(0, dim)] if kept and dim is not None else [], [(0, position)])
    return loops.rule()


def squeeze(eqn: Eqn) -> DimRule:
    """All dimensions but those removed (of size 1) pass."""
    loops = Loops.of(eqn)
    rank = len(loops.operands[0])
    removed = {dim % rank for dim in ints(eqn.params["dimensions"])}
    for position, dim in enumerate(dim for dim in range(rank) if dim not in removed):
        loops.add(LoopKind.PASS, [(0, dim)], [(0, position)])
    return loops.rule()


def expand_dims(eqn: Eqn) -> DimRule:
    """All dimensions but those inserted (of size 1) pass."""
    loops = Loops.of(eqn)
    rank = len(loops.results[0])
    inserted = {dim % rank for dim in ints(eqn.params["dimensions"])}
    for dim, position in enumerate(
        position for position in range(rank) if position not in inserted
    ):
        loops.add(LoopKind.PASS, [(0, dim)], [(0, position)])
    return loops.rule()


def _changed(eqn: Eqn, changed: frozenset[int]) -> DimRule:
    """Dimension d of operands and results of the same rank correspond: PERMUTED where changed, else
    PASS.
    """
    loops = Loops.of(eqn)
    for dim in range(len(loops.operands[0])):
        loops.add(
            LoopKind.PERMUTED if dim in changed else LoopKind.PASS,
            [
                (i, dim)
                for i, shape in enumerate(loops.operands)
                if len(shape) == len(loops.operands[0])
            ],
            [(i, dim) for i in range(len(loops.results))],
        )
    return loops.rule()


def _resized(eqn: Eqn) -> frozenset[int]:
    """Dimensions in which operand 0 and result 0 differ in size."""
    sizes = zip(eqn.inputs[0].shape, eqn.outputs[0].shape, strict=True)
    return frozenset(dim for dim, (a, b) in enumerate(sizes) if a != b)


def rev(eqn: Eqn) -> DimRule:
    """Reversed dimensions are PERMUTED."""
    return _changed(eqn, frozenset(ints(eqn.params["dimensions"])))


def concatenate(eqn: Eqn) -> DimRule:
    """The joined dimension is PERMUTED, unless there is one operand only."""
    return _changed(
        eqn, frozenset({int(eqn.params["dimension"])}) if len(eqn.inputs) > 1 else frozenset()
    )


def split(eqn: Eqn) -> DimRule:
    """The divided dimension is PERMUTED, unless there is one result only."""
    return _changed(
        eqn, frozenset({int(eqn.params["axis"])}) if len(eqn.outputs) > 1 else frozenset()
    )


def pad(eqn: Eqn) -> DimRule:
    """Dimensions that are padded (or cut, or dilated) are PERMUTED; operand 1 is the scalar to pad
    with.
    """
    loops = Loops.of(eqn)
    for dim, edges in enumerate(eqn.params["padding_config"]):
        kind = LoopKind.PERMUTED if any(ints(edges)) else LoopKind.PASS
        loops.add(kind, [(0, dim)], [(0, dim)])
    return loops.rule()


def slice_(eqn: Eqn) -> DimRule:
    """Dimensions of which all, or one of every so many, is taken pass; others are PERMUTED."""
    starts = ints(eqn.params["start_indices"])
    strides = ints(eqn.params["strides"] or (1,) * len(starts))
    sizes = zip(eqn.inputs[0].shape, eqn.outputs[0].shape, starts, strides, strict=True)
    changed = {
        dim
        for dim, (size, taken, start, stride) in enumerate(sizes)
        if start >= stride or not tiles_exactly(size, taken, window=1, stride=stride)
    }
    return _changed(eqn, frozenset(changed))


def dynamic_slice(eqn: Eqn) -> DimRule:
    """As for slice: the start of a full slice can only be 0. The start indices are scalars."""
    loops = Loops.of(eqn)
    changed = _resized(eqn)
    for dim in range(len(loops.operands[0])):
        loops.add(LoopKind.PERMUTED if dim in changed else LoopKind.PASS, [(0, dim)], [(0, dim)])
    return loops.rule()


def dynamic_update_slice(eqn: Eqn) -> DimRule:
    """The operand continues in the result; the update joins where it is as large, else it is needed
    WHOLE.

    A device keeps its piece of the operand and writes what of the update falls into it.
    """
    loops = Loops.of(eqn)
    for dim, (size, update) in enumerate(zip(loops.operands[0], loops.operands[1], strict=True)):
        joined = [(0, dim), (1, dim)] if size == update else [(0, dim)]
        loops.add(LoopKind.PASS, joined, [(0, dim)])
    return loops.rule()


def tile(eqn: Eqn) -> DimRule:
    """Repeated dimensions are PERMUTED."""
    reps = ints(eqn.params["reps"])
    rank = len(eqn.outputs[0].shape)
    if len(eqn.inputs[0].shape) != rank:
        return Loops.of(eqn).rule()
    return _changed(eqn, frozenset(dim for dim, n in enumerate(reps[-rank:]) if n != 1))


def stack(eqn: Eqn) -> DimRule:
    """Operands of one shape along a new dimension, which is PERMUTED as in concatenate."""
    loops = Loops.of(eqn)
    axis = int(eqn.params["axis"])
    for dim in range(len(loops.operands[0])):
        position = dim + (dim >= axis)
        loops.add(LoopKind.PASS, [(i, dim) for i in range(len(loops.operands))], [(0, position)])
    loops.add(LoopKind.PERMUTED, results=[(0, axis)])
    return loops.rule()


def unstack(eqn: Eqn) -> DimRule:
    """The inverse of stack."""
    loops = Loops.of(eqn)
    axis = int(eqn.params["axis"])
    for dim in range(len(loops.operands[0])):
        if dim != axis:
            position = dim - (dim > axis)
            loops.add(LoopKind.PASS, [(0, dim)], [(i, position) for i in range(len(loops.results))])
    loops.add(LoopKind.PERMUTED, [(0, axis)])
    return loops.rule()


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
