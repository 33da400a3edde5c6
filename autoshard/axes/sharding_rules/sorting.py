"""Sorting along a dimension: that dimension is WHOLE, the others pass."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Loops, Rule
from autoshard.axes.sharding_rules.rule import DimRule, LoopKind
from autoshard.tracing.program import Eqn


def _along(eqn: Eqn, axis: int) -> DimRule:
    """All but one dimension of all operands and results pass."""
    loops = Loops.of(eqn)
    rank = len(loops.operands[0])
    for dim in range(rank):
        operands = [(i, dim) for i in range(len(loops.operands))]
        results = [(i, dim) for i in range(len(loops.results))]
        if dim != axis % rank:
            loops.add(LoopKind.PASS, operands, results)
        elif all(shape[dim] == loops.operands[0][dim] for shape in loops.results):
            loops.add(LoopKind.WHOLE, operands, results)
        else:
            loops.add(LoopKind.WHOLE, operands)
            loops.add(LoopKind.WHOLE, results=results)
    return loops.rule()


def sort(eqn: Eqn) -> DimRule:
    """Several operands (keys and values) are sorted together."""
    return _along(eqn, int(eqn.params["dimension"]))


def top_k(eqn: Eqn) -> DimRule:
    """Values and positions of the k largest."""
    return _along(eqn, int(eqn.params.get("axis", -1)))


def approx_top_k(eqn: Eqn) -> DimRule:
    """Values and positions of about the k largest."""
    return _along(eqn, int(eqn.params["reduction_dimension"]))


RULES: Mapping[str, Rule] = MappingProxyType(
    {"approx_top_k": approx_top_k, "sort": sort, "top_k": top_k}
)
