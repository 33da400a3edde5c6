"""Reductions and scans along a dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder, ints, other_dims
from autoshard.axes.sharding_rules.rule import ARG_REDUCTION, FactorKind, ShardingRule
from autoshard.tracing.program import Eqn

_COMBINE = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}

_MONOIDS = frozenset(_COMBINE.values())


def _add_reduction(
    builder: RuleBuilder, axes: tuple[int, ...], kind: FactorKind, operand_count: int = 1
) -> None:
    """Adds factors of this kind over the reduced axes; the dimensions that are left pass."""
    operands = range(operand_count)
    for position, dim in enumerate(other_dims(len(builder.operands[0]), axes)):
        builder.add_factor(
            FactorKind.PASS_THROUGH,
            [(i, dim) for i in operands],
            [(i, position) for i in builder.all_results],
        )
    for dim in axes:
        builder.add_shared_dim(kind, dim, operands, ())


def reduce_axes(eqn: Eqn) -> ShardingRule:
    """Reduces `axes` with an operator that combines partial results; the other dimensions pass."""
    builder = RuleBuilder.of(eqn)
    _add_reduction(builder, ints(eqn.params["axes"]), FactorKind.REDUCTION)
    return builder.build(_COMBINE[eqn.primitive])


def arg_reduce(eqn: Eqn) -> ShardingRule:
    """Argmax and argmin: of the partial results, with the values they stand for, the best."""
    builder = RuleBuilder.of(eqn)
    _add_reduction(builder, ints(eqn.params["axes"]), FactorKind.REDUCTION)
    return builder.build(ARG_REDUCTION)


def reduce(eqn: Eqn) -> ShardingRule:
    """The general form: operands, then as many scalar initial values.

    If the body is one operator that combines (add, max, ...) for every operand, the reduced
    dimensions are REDUCTION, and the initial values count on one device only; else they are
    NEED_REPLICATION.
    """
    builder = RuleBuilder.of(eqn)
    count = len(eqn.outputs)
    combine = _monoid(eqn.params.get("jaxpr"), count)
    kind = FactorKind.NEED_REPLICATION if combine is None else FactorKind.REDUCTION
    _add_reduction(builder, ints(eqn.params["dimensions"]), kind, count)
    return builder.build(combine or "add")


def _monoid(jaxpr: Any, count: int) -> str | None:
    """The operator that `jaxpr` applies to each pair (accumulator i, element i), None if no one."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    if jaxpr is None or len(jaxpr.eqns) != count:
        return None
    # One equation a pair, all of one operator, and nothing else.
    operators = {eqn.primitive.name for eqn in jaxpr.eqns}
    if len(operators) != 1 or not operators <= _MONOIDS:
        return None
    for i, (eqn, out) in enumerate(zip(jaxpr.eqns, jaxpr.outvars, strict=True)):
        accumulator, element = jaxpr.invars[i], jaxpr.invars[i + count]
        straight = _are(eqn.invars, (accumulator, element))
        swapped = _are(eqn.invars, (element, accumulator))
        if not (straight or swapped) or eqn.outvars[0] is not out:
            return None
    return str(operators.pop())


def _are(variables: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are the same variables, in this order."""
    return all(a is b for a, b in zip(variables, others, strict=True))


def scan_axis(eqn: Eqn) -> ShardingRule:
    """Cumsum and its like: the dimension scanned is NEED_REPLICATION, the others pass."""
    builder = RuleBuilder.of(eqn)
    axis = int(eqn.params["axis"])
    for dim in range(len(builder.operands[0])):
        kind = FactorKind.NEED_REPLICATION if dim == axis else FactorKind.PASS_THROUGH
        builder.add_shared_dim(kind, dim, (0,), (0,))
    return builder.build()


RULES: Mapping[str, Rule] = MappingProxyType(
    dict.fromkeys(_COMBINE, reduce_axes)
    | {"argmax": arg_reduce, "argmin": arg_reduce, "reduce": reduce}
    | dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), scan_axis)
)
