"""Reshape: which dimension of the result continues which dimension of the operand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder, Shape, ints
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn

Group = tuple[list[int], list[int]]


def groups_of_equal_size(in_shape: Shape, out_shape: Shape) -> Iterator[Group]:
    """Yields the shortest runs of dimensions (size > 1) of both shapes that hold equally many
    elements, in order.

    >>> list(groups_of_equal_size((6, 5), (2, 3, 1, 5)))
    [([0], [0, 1]), ([1], [3])]
    """
    sizes_in = [(dim, size) for dim, size in enumerate(in_shape) if size > 1]
    sizes_out = [(dim, size) for dim, size in enumerate(out_shape) if size > 1]
    i = j = 0
    while i < len(sizes_in) and j < len(sizes_out):
        dims_in, product_in = [sizes_in[i][0]], sizes_in[i][1]
        dims_out, product_out = [sizes_out[j][0]], sizes_out[j][1]
        i, j = i + 1, j + 1
        while product_in != product_out:
            if product_in < product_out:
                if i == len(sizes_in):
                    return
                dims_in.append(sizes_in[i][0])
                product_in *= sizes_in[i][1]
                i += 1
            else:
                if j == len(sizes_out):
                    return
                dims_out.append(sizes_out[j][0])
                product_out *= sizes_out[j][1]
                j += 1
        yield dims_in, dims_out


def reshape_rule(
    in_shape: Shape,
    out_shape: Shape,
    skip_in: frozenset[int] = frozenset(),
    skip_out: frozenset[int] = frozenset(),
) -> ShardingRule:
    """The rule of a reshape, in which the major dimensions of a group of factors are one loop.

    Both shapes are divided into groups of dimensions that hold equally many elements. A dimension
    that is a group by itself on both sides is unchanged and passes. Otherwise the major (first)
    dimension of the group on either side share a PASS_THROUGH loop if one size is a multiple of the other:
    k pieces of the larger are k pieces of the smaller, whenever k divides the smaller. All others
    are NEED_REPLICATION.

    A skipped dimension does not take the loop of its group: the next one does. In `(B) -> (n_micro,
    b)` with `skip_out={0}`, B continues in b. Such a split is not contiguous: a piece of B is not a
    piece of b, the data moves once; but it is the layout that keeps every trip of the scan over
    n_micro busy on all devices.

    Args:
        in_shape: Shape of the operand.
        out_shape: Shape of the result; as many elements.
        skip_in: Dimensions of the operand that are scanned.
        skip_out: Dimensions of the result that are scanned.

    Returns:
        A rule with one operand and one result.

    >>> reshape_rule((8, 5), (4, 2, 5)).results
    ((0, 2, 1),)
    >>> reshape_rule((8, 5), (4, 2, 5), skip_out=frozenset({0})).results
    ((2, 0, 1),)
    """
    factors = RuleBuilder([in_shape], [out_shape])
    if 0 in in_shape or 0 in out_shape:
        for dim, (a, b) in enumerate(zip(in_shape, out_shape, strict=False)):
            if a != b:
                break
            factors.add(FactorKind.PASS_THROUGH, [(0, dim)], [(0, dim)])
        return factors.rule()
    for dims_in, dims_out in groups_of_equal_size(in_shape, out_shape):
        unchanged = len(dims_in) == len(dims_out) == 1
        i = next((dim for dim in dims_in if unchanged or dim not in skip_in), None)
        j = next((dim for dim in dims_out if unchanged or dim not in skip_out), None)
        if i is not None and j is not None and _multiples(in_shape[i], out_shape[j]):
            factors.add(FactorKind.PASS_THROUGH, [(0, i)], [(0, j)])
    return factors.rule()


def _multiples(a: int, b: int) -> bool:
    """Whether one of two sizes is a multiple of the other."""
    return a % b == 0 or b % a == 0


def reshape(eqn: Eqn) -> ShardingRule:
    """A reshape, perhaps of the transposed operand (`dimensions`)."""
    in_shape, out_shape = eqn.inputs[0].shape, eqn.outputs[0].shape
    order = eqn.params.get("dimensions")
    if order is None:
        rule = reshape_rule(in_shape, out_shape)
        factors = rule.operands[0]
    else:
        rule = reshape_rule(tuple(in_shape[int(dim)] for dim in order), out_shape)
        factor_of = dict(zip(ints(order), rule.operands[0], strict=True))
        factors = tuple(factor_of[dim] for dim in range(len(in_shape)))
    others = RuleBuilder([v.shape for v in eqn.inputs[1:]], []).rule()
    first = len(rule.kinds)
    return ShardingRule(
        rule.kinds + others.kinds,
        (factors, *(tuple(factor + first for factor in row) for row in others.operands)),
        rule.results,
    )


RULES: Mapping[str, Rule] = MappingProxyType({"reshape": reshape})
