"""Element by element: every dimension passes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder, Shape
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn


def elementwise(eqn: Eqn) -> ShardingRule:
    """Dimension d of every operand of the result's rank, and of every result, is one PASS_THROUGH loop.

    A scalar operand (a predicate, a bound, a literal) has no dimension. An operand dimension of
    size 1 against a larger one is broadcast and has its own loop.
    """
    return _elementwise(tuple(v.shape for v in eqn.inputs), tuple(v.shape for v in eqn.outputs))


@functools.lru_cache(maxsize=4096)
def _elementwise(operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> ShardingRule:
    factors = RuleBuilder(operands, results)
    shapes = factors.results or factors.operands
    if not shapes:
        return factors.rule()
    shape = max(shapes, key=len)
    for dim, size in enumerate(shape):
        factors.add(
            FactorKind.PASS_THROUGH,
            [
                (i, dim)
                for i, s in enumerate(factors.operands)
                if len(s) == len(shape) and s[dim] == size
            ],
            [
                (i, dim)
                for i, s in enumerate(factors.results)
                if len(s) == len(shape) and s[dim] == size
            ],
        )
    return factors.rule()


def operand_by_operand(eqn: Eqn) -> ShardingRule:
    """Operand i is result i: each of its dimensions is a PASS_THROUGH loop, unrelated to the other
    operands.
    """
    factors = RuleBuilder.of(eqn)
    for i, (operand, result) in enumerate(zip(factors.operands, factors.results, strict=True)):
        if operand == result:
            for dim in range(len(operand)):
                factors.add(FactorKind.PASS_THROUGH, [(i, dim)], [(i, dim)])
    return factors.rule()


_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
    convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor from_edtype ge
    gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min
    mul mulhi multiple_of name ne neg nextafter not one_minus_square or polygamma polynomial population_count pow real
    reciprocal reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh to_edtype xla_metadata_value xor zeta
"""

_OPERAND_BY_OPERAND = """
    device_put layout_constraint mesh_cast optimization_barrier pvary reduced_vary_cast reduced_vary_cast_p relayout
    reshard sharding_constraint vary_unreduced_cast vary_unreduced_cast_p with_memory_space_constraint
"""

RULES: Mapping[str, Rule] = MappingProxyType(
    dict.fromkeys(_ELEMENTWISE.split(), elementwise)
    | dict.fromkeys(_OPERAND_BY_OPERAND.split(), operand_by_operand)
)
