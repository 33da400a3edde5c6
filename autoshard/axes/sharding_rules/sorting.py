"""Sorting along a dimension: that dimension is NEED_REPLICATION, the others pass."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn


def _along(eqn: Eqn, axis: int) -> ShardingRule:
    """All but one dimension of all operands and results pass."""
    factors = RuleBuilder.of(eqn)
    rank = len(factors.operands[0])
    for dim in range(rank):
        operands = [(i, dim) for i in range(len(factors.operands))]
        results = [(i, dim) for i in range(len(factors.results))]
        if dim != axis % rank:
            factors.add(FactorKind.PASS_THROUGH, operands, results)
        elif all(shape[dim] == factors.operands[0][dim] for shape in factors.results):
            factors.add(FactorKind.NEED_REPLICATION, operands, results)
        else:
            factors.add(FactorKind.NEED_REPLICATION, operands)
            factors.add(FactorKind.NEED_REPLICATION, results=results)
    return factors.rule()


def sort(eqn: Eqn) -> ShardingRule:
    """Several operands (keys and values) are sorted together."""
    return _along(eqn, int(eqn.params["dimension"]))


def top_k(eqn: Eqn) -> ShardingRule:
    """Values and positions of the k largest."""
    return _along(eqn, int(eqn.params.get("axis", -1)))


def approx_top_k(eqn: Eqn) -> ShardingRule:
    """Values and positions of about the k largest."""
    return _along(eqn, int(eqn.params["reduction_dimension"]))


RULES: Mapping[str, Rule] = MappingProxyType(
    {"approx_top_k": approx_top_k, "sort": sort, "top_k": top_k}
)
