"""Random numbers, and other arrays made from nothing: a dimension that only results have passes.

Whether cutting such a dimension yields the same numbers is the generator's affair (threefry does
when partitionable).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder
from autoshard.axes.sharding_rules.elementwise import elementwise
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn


def made(eqn: Eqn) -> ShardingRule:
    """Every dimension of every result is made by each device itself; operands are NEED_REPLICATION."""
    factors = RuleBuilder.of(eqn)
    for i, shape in enumerate(factors.results):
        for dim in range(len(shape)):
            factors.add(FactorKind.PASS_THROUGH, results=[(i, dim)])
    return factors.rule()


def made_together(eqn: Eqn) -> ShardingRule:
    """As `made`, for results of one shape that belong together."""
    factors = RuleBuilder.of(eqn)
    for dim in range(len(factors.results[0])):
        factors.add(
            FactorKind.PASS_THROUGH, results=[(i, dim) for i in range(len(factors.results))]
        )
    return factors.rule()


def made_from_keys(eqn: Eqn) -> ShardingRule:
    """Keys of shape S -> results of shape S + shape: the keys pass, the rest is made."""
    factors = RuleBuilder.of(eqn)
    keys = len(factors.operands[0])
    for dim in range(len(factors.results[0])):
        factors.add(FactorKind.PASS_THROUGH, [(0, dim)] if dim < keys else [], [(0, dim)])
    return factors.rule()


def keys_and_words(eqn: Eqn) -> ShardingRule:
    """Keys of shape S <-> integers of shape S + words: S passes, the words of a key are NEED_REPLICATION."""
    factors = RuleBuilder.of(eqn)
    factors.add_prefix(min(len(factors.operands[0]), len(factors.results[0])), (0,), (0,))
    return factors.rule()


def rng_bit_generator(eqn: Eqn) -> ShardingRule:
    """State -> (next state, bits): the state is NEED_REPLICATION, the bits are made."""
    factors = RuleBuilder.of(eqn)
    for dim in range(len(factors.results[1])):
        factors.add(FactorKind.PASS_THROUGH, results=[(1, dim)])
    return factors.rule()


def random_gamma(eqn: Eqn) -> ShardingRule:
    """(keys, shape parameters) -> results of the parameters' shape, whose leading dimensions are
    those of the keys.
    """
    factors = RuleBuilder.of(eqn)
    for dim, size in enumerate(factors.results[0]):
        places = [
            (i, dim)
            for i, shape in enumerate(factors.operands)
            if dim < len(shape) and shape[dim] == size
        ]
        factors.add(FactorKind.PASS_THROUGH, places, [(0, dim)])
    return factors.rule()


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "empty": made,
        "empty2": made,
        "iota": made,
        "iota_2x32_shape": made_together,
        "philox2x32": elementwise,
        "philox4x32": elementwise,
        "random_bits": made_from_keys,
        "random_clone": elementwise,
        "random_fold_in": elementwise,
        "random_gamma": random_gamma,
        "random_seed": elementwise,
        "random_split": made_from_keys,
        "random_unwrap": keys_and_words,
        "random_wrap": keys_and_words,
        "rng_bit_generator": rng_bit_generator,
        "rng_uniform": made,
        "threefry2x32": elementwise,
        "threefry4x32": elementwise,
    }
)
