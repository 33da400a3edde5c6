"""Element by element: every dimension passes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder, Shape
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn


def elementwise(eqn: Eqn) -> ShardingRule:
    """Dimension d of every operand of the result's rank, and of every result, is one factor.

    It passes. A scalar operand (a predicate, a bound, a literal) has no dimension. An operand
    dimension of size 1 against a larger one is broadcast and has a factor of its own.
    """
    return _elementwise(tuple(v.shape for v in eqn.inputs), tuple(v.shape for v in eqn.outputs))


@functools.lru_cache(maxsize=4096)  # most equations of a program are elementwise, of few shapes
def _elementwise(operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> ShardingRule:
    builder = RuleBuilder(operands, results)
    shapes = results or operands
    if not shapes:
        return builder.build()
    shape = max(shapes, key=len)

    def aligned(others: tuple[Shape, ...], dim: int) -> list[int]:
        """Positions of the shapes of this rank that agree in a dimension."""
        return [
            i
            for i, other in enumerate(others)
            if len(other) == len(shape) and other[dim] == shape[dim]
        ]

    for dim in range(len(shape)):
        builder.add_shared_dim(
            FactorKind.PASS_THROUGH, dim, aligned(operands, dim), aligned(results, dim)
        )
    return builder.build()


def operand_by_operand(eqn: Eqn) -> ShardingRule:
    """Operand i is result i: each of its dimensions passes, unrelated to the other operands."""
    builder = RuleBuilder.of(eqn)
    for i, (operand, result) in enumerate(zip(builder.operands, builder.results, strict=True)):
        if operand == result:
            for dim in range(len(operand)):
                builder.add_factor(FactorKind.PASS_THROUGH, [(i, dim)], [(i, dim)])
    return builder.build()


_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc
    exp exp2 expm1 floor from_edtype ge gt igamma igamma_grad_a igammac imag integer_pow is_finite
    le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi multiple_of name ne neg
    nextafter not one_minus_square or polygamma polynomial population_count pow real reciprocal
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    to_edtype xla_metadata_value xor zeta
"""

_OPERAND_BY_OPERAND = """
    device_put layout_constraint mesh_cast optimization_barrier pvary reduced_vary_cast
    reduced_vary_cast_p relayout reshard sharding_constraint vary_unreduced_cast
    vary_unreduced_cast_p with_memory_space_constraint
"""

RULES: Mapping[str, Rule] = MappingProxyType(
    dict.fromkeys(_ELEMENTWISE.split(), elementwise)
    | dict.fromkeys(_OPERAND_BY_OPERAND.split(), operand_by_operand)
)
