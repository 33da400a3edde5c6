"""Random numbers, and other arrays made from nothing: a dimension that only results have passes.

Whether each device then draws the numbers that one device would have drawn is the generator's
affair (threefry does when partitionable).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder, leading_dims
from autoshard.axes.sharding_rules.elementwise import elementwise
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn


def generated(eqn: Eqn) -> ShardingRule:
    """Each device generates its shard of every result; operands are NEED_REPLICATION."""
    builder = RuleBuilder.of(eqn)
    for i, shape in enumerate(builder.results):
        for dim in range(len(shape)):
            builder.add_factor(FactorKind.PASS_THROUGH, results=[(i, dim)])
    return builder.build()


def generated_together(eqn: Eqn) -> ShardingRule:
    """As `generated`, for results of one shape that belong together."""
    builder = RuleBuilder.of(eqn)
    for dim in range(len(builder.results[0])):
        builder.add_shared_dim(FactorKind.PASS_THROUGH, dim, (), builder.all_results)
    return builder.build()


def generated_from_keys(eqn: Eqn) -> ShardingRule:
    """Keys of shape S -> results of shape S + shape: S passes, the rest is generated."""
    builder = RuleBuilder.of(eqn)
    key_rank = len(builder.operands[0])
    for dim in range(len(builder.results[0])):
        keys = (0,) if dim < key_rank else ()
        builder.add_shared_dim(FactorKind.PASS_THROUGH, dim, keys, (0,))
    return builder.build()


def rng_bit_generator(eqn: Eqn) -> ShardingRule:
    """State -> (next state, bits): the state is NEED_REPLICATION, the bits are generated."""
    builder = RuleBuilder.of(eqn)
    for dim in range(len(builder.results[1])):
        builder.add_factor(FactorKind.PASS_THROUGH, results=[(1, dim)])
    return builder.build()


def random_gamma(eqn: Eqn) -> ShardingRule:
    """(keys, shape parameters) -> results of the parameters' shape, which begins with the keys'."""
    builder = RuleBuilder.of(eqn)
    for dim, size in enumerate(builder.results[0]):
        operands = []
        for i, shape in enumerate(builder.operands):
            if dim < len(shape) and shape[dim] == size:
                operands.append(i)
        builder.add_shared_dim(FactorKind.PASS_THROUGH, dim, operands, (0,))
    return builder.build()


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "empty": generated,
        "empty2": generated,
        "iota": generated,
        "iota_2x32_shape": generated_together,
        "philox2x32": elementwise,
        "philox4x32": elementwise,
        "random_bits": generated_from_keys,
        "random_clone": elementwise,
        "random_fold_in": elementwise,
        "random_gamma": random_gamma,
        "random_seed": elementwise,
        "random_split": generated_from_keys,
        "random_unwrap": leading_dims,
        "random_wrap": leading_dims,
        "rng_bit_generator": rng_bit_generator,
        "rng_uniform": generated,
        "threefry2x32": elementwise,
        "threefry4x32": elementwise,
    }
)
