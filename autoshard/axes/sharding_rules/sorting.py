"""Sorting along a dimension: that dimension is NEED_REPLICATION, the others pass."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn


def _sort_rule(eqn: Eqn, axis: int) -> ShardingRule:
    """All dimensions of all operands and results pass, but for the sorted one."""
    builder = RuleBuilder.of(eqn)
    operands, results = builder.all_operands, builder.all_results
    shape = builder.operands[0]
    for dim in range(len(shape)):
        if dim != axis % len(shape):
            builder.add_shared_dim(FactorKind.PASS_THROUGH, dim, operands, results)
        elif all(result[dim] == shape[dim] for result in builder.results):
            builder.add_shared_dim(FactorKind.NEED_REPLICATION, dim, operands, results)
        else:  # the k largest of n: not the same dimension any more
            builder.add_shared_dim(FactorKind.NEED_REPLICATION, dim, operands, ())
            builder.add_shared_dim(FactorKind.NEED_REPLICATION, dim, (), results)
    return builder.build()


def sort(eqn: Eqn) -> ShardingRule:
    """Several operands (keys and values) are sorted together."""
    return _sort_rule(eqn, int(eqn.params["dimension"]))


def top_k(eqn: Eqn) -> ShardingRule:
    """Values and positions of the k largest."""
    return _sort_rule(eqn, int(eqn.params.get("axis", -1)))


def approx_top_k(eqn: Eqn) -> ShardingRule:
    """Values and positions of about the k largest."""
    return _sort_rule(eqn, int(eqn.params["reduction_dimension"]))


RULES: Mapping[str, Rule] = MappingProxyType(
    {"approx_top_k": approx_top_k, "sort": sort, "top_k": top_k}
)
