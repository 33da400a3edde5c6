"""Reductions and scans along a dimension."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder, ints
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


def _keep(factors: RuleBuilder, operands: int, axes: tuple[int, ...]) -> None:
    """States PASS_THROUGH loops over the dimensions that the reduction keeps."""
    kept = [dim for dim in range(len(factors.operands[0])) if dim not in axes]
    for position, dim in enumerate(kept):
        factors.add(
            FactorKind.PASS_THROUGH,
            [(i, dim) for i in range(operands)],
            [(i, position) for i in range(len(factors.results))],
        )


def reduce_axes(eqn: Eqn) -> ShardingRule:
    """Reduces `axes` with an operator that combines partial results; the other dimensions pass."""
    factors = RuleBuilder.of(eqn)
    axes = ints(eqn.params["axes"])
    _keep(factors, 1, axes)
    for dim in axes:
        factors.add(FactorKind.REDUCTION, [(0, dim)])
    return factors.rule(_COMBINE[eqn.primitive])


def arg_reduce(eqn: Eqn) -> ShardingRule:
    """Argmax and argmin: of the partial results, which come with their values, the best is
    picked.
    """
    factors = RuleBuilder.of(eqn)
    axes = ints(eqn.params["axes"])
    _keep(factors, 1, axes)
    for dim in axes:
        factors.add(FactorKind.REDUCTION, [(0, dim)])
    return factors.rule(ARG_REDUCTION)


def reduce(eqn: Eqn) -> ShardingRule:
    """The general form: operands, then as many scalar initial values.

    If the body is one operator that combines (add, max, ...) for every operand, the reduced
    dimensions are REDUCTION, and the initial values count on one device only; else they are NEED_REPLICATION.
    """
    factors = RuleBuilder.of(eqn)
    count = len(eqn.outputs)
    axes = ints(eqn.params["dimensions"])
    _keep(factors, count, axes)
    combine = _monoid(eqn.params.get("jaxpr"), count)
    kind = FactorKind.NEED_REPLICATION if combine is None else FactorKind.REDUCTION
    for dim in axes:
        factors.add(kind, [(i, dim) for i in range(count)])
    return factors.rule(combine or "add")


def _monoid(jaxpr: Any, count: int) -> str | None:
    """The operator that `jaxpr` applies to each pair (accumulator i, element i); None if it is
    anything else.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    if jaxpr is None or len(jaxpr.eqns) != count:
        return None
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    if len(names) != 1 or not names <= _MONOIDS:
        return None
    for i, (eqn, out) in enumerate(zip(jaxpr.eqns, jaxpr.outvars, strict=True)):
        pair = jaxpr.invars[i], jaxpr.invars[i + count]
        straight = all(a is b for a, b in zip(eqn.invars, pair, strict=True))
        swapped = all(a is b for a, b in zip(eqn.invars, reversed(pair), strict=True))
        if not (straight or swapped) or eqn.outvars[0] is not out:
            return None
    return str(names.pop())


def scan_axis(eqn: Eqn) -> ShardingRule:
    """Cumsum and its like: the dimension scanned is NEED_REPLICATION, the others pass."""
    factors = RuleBuilder.of(eqn)
    axis = int(eqn.params["axis"])
    for dim in range(len(factors.operands[0])):
        factors.add(
            FactorKind.NEED_REPLICATION if dim == axis else FactorKind.PASS_THROUGH,
            [(0, dim)],
            [(0, dim)],
        )
    return factors.rule()


RULES: Mapping[str, Rule] = MappingProxyType(
    dict.fromkeys(_COMBINE, reduce_axes)
    | {"argmax": arg_reduce, "argmin": arg_reduce, "reduce": reduce}
    | dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), scan_axis)
)
