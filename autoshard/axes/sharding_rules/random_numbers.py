"""Random numbers, and other arrays made from nothing: a dimension that only results have passes.

Whether cutting such a dimension yields the same numbers is the generator's affair (threefry does
when partitionable).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Loops, Rule
from autoshard.axes.sharding_rules.elementwise import elementwise
from autoshard.axes.sharding_rules.rule import DimRule, LoopKind
from autoshard.tracing.program import Eqn


def made(eqn: Eqn) -> DimRule:
    """Every dimension of every result is made by each device itself; operands are WHOLE."""
    loops = Loops.of(eqn)
    for i, shape in enumerate(loops.results):
        for dim in range(len(shape)):
            loops.add(LoopKind.PASS, results=[(i, dim)])
    return loops.rule()


def made_together(eqn: Eqn) -> DimRule:
    """As `made`, for results of one shape that belong together."""
    loops = Loops.of(eqn)
    for dim in range(len(loops.results[0])):
        loops.add(LoopKind.PASS, results=[(i, dim) for i in range(len(loops.results))])
    return loops.rule()


def made_from_keys(eqn: Eqn) -> DimRule:
    """Keys of shape S -> results of shape S + shape: the keys pass, the rest is made."""
    loops = Loops.of(eqn)
    keys = len(loops.operands[0])
    for dim in range(len(loops.results[0])):
        loops.add(LoopKind.PASS, [(0, dim)] if dim < keys else [], [(0, dim)])
    return loops.rule()


def keys_and_words(eqn: Eqn) -> DimRule:
    """Keys of shape S <-> integers of shape S + words: S passes, the words of a key are WHOLE."""
    loops = Loops.of(eqn)
    loops.add_prefix(min(len(loops.operands[0]), len(loops.results[0])), (0,), (0,))
    return loops.rule()


def rng_bit_generator(eqn: Eqn) -> DimRule:
    """State -> (next state, bits): the state is WHOLE, the bits are made."""
    loops = Loops.of(eqn)
    for dim in range(len(loops.results[1])):
        loops.add(LoopKind.PASS, results=[(1, dim)])
    return loops.rule()


def random_gamma(eqn: Eqn) -> DimRule:
    """(keys, shape parameters) -> results of the parameters' shape, whose leading dimensions are
    those of the keys.
    """
    loops = Loops.of(eqn)
    for dim, size in enumerate(loops.results[0]):
        places = [
            (i, dim)
            for i, shape in enumerate(loops.operands)
            if dim < len(shape) and shape[dim] == size
        ]
        loops.add(LoopKind.PASS, places, [(0, dim)])
    return loops.rule()


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
