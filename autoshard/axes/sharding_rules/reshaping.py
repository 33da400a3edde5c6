"""Reshape: which dimension of the result continues which dimension of the operand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder, Shape, ints
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn

Group = tuple[list[int], list[int]]


def groups_of_equal_size(in_shape: Shape, out_shape: Shape) -> Iterator[Group]:
    """Yields the shortest runs of dimensions of both shapes that hold equally many elements.

    In order; dimensions of size 1 are left out.

    >>> list(groups_of_equal_size((6, 5), (2, 3, 1, 5)))
    [([0], [0, 1]), ([1], [3])]
    """
    in_run, out_run = _Run(in_shape), _Run(out_shape)
    while in_run.start() and out_run.start():
        while in_run.product != out_run.product:
            shorter = in_run if in_run.product < out_run.product else out_run
            if not shorter.extend():
                return
        yield in_run.dims, out_run.dims


class _Run:
    """A run of dimensions of size > 1, which advances through a shape.

    Attributes:
        dims: The dimensions of the run.
        product: How many elements they hold.
    """

    def __init__(self, shape: Shape) -> None:
        self._rest = [(dim, size) for dim, size in enumerate(shape) if size > 1]
        self._rest.reverse()
        self.dims: list[int] = []
        self.product = 1

    def start(self) -> bool:
        """Starts a new run with the next dimension; False where there is none."""
        self.dims, self.product = [], 1
        return self.extend()

    def extend(self) -> bool:
        """Takes the next dimension into the run; False where there is none."""
        if not self._rest:
            return False
        dim, size = self._rest.pop()
        self.dims.append(dim)
        self.product *= size
        return True


def reshape_rule(
    in_shape: Shape,
    out_shape: Shape,
    skip_in: frozenset[int] = frozenset(),
    skip_out: frozenset[int] = frozenset(),
) -> ShardingRule:
    """The rule of a reshape, in which the major dimensions of each group share a factor.

    Both shapes are divided into groups of dimensions that hold equally many elements. A dimension
    that is a group by itself on both sides is unchanged and passes. Otherwise the major (first)
    dimensions of the group on either side share a PASS_THROUGH factor if one size is a multiple of
    the other: k shards of the larger are k shards of the smaller, whenever k divides the smaller.
    All others are NEED_REPLICATION.

    A skipped dimension does not take the factor of its group: the next one does. In `(B) ->
    (n_micro, b)` with `skip_out={0}`, B continues in b. Such a split is not contiguous: a shard of
    B is not a shard of b, the data moves once; but it is the layout that keeps every trip of the
    scan over n_micro busy on all devices.

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
    if 0 in in_shape or 0 in out_shape:
        return _empty_reshape_rule(in_shape, out_shape)
    builder = RuleBuilder([in_shape], [out_shape])
    for in_dims, out_dims in groups_of_equal_size(in_shape, out_shape):
        if len(in_dims) == len(out_dims) == 1:  # unchanged, be it scanned or not
            i: int | None = in_dims[0]
            j: int | None = out_dims[0]
        else:
            i, j = _major(in_dims, skip_in), _major(out_dims, skip_out)
        if i is not None and j is not None and _multiples(in_shape[i], out_shape[j]):
            builder.add_factor(FactorKind.PASS_THROUGH, [(0, i)], [(0, j)])
    return builder.build()


def _major(dims: list[int], skipped: frozenset[int]) -> int | None:
    """The first dimension of a group that is not skipped; None where all are."""
    return next((dim for dim in dims if dim not in skipped), None)


def _empty_reshape_rule(in_shape: Shape, out_shape: Shape) -> ShardingRule:
    """Of arrays without elements: the leading dimensions that are equal pass."""
    builder = RuleBuilder([in_shape], [out_shape])
    equal = 0
    for in_size, out_size in zip(in_shape, out_shape, strict=False):
        if in_size != out_size:
            break
        equal += 1
    builder.add_batch_dims(equal, (0,), (0,))
    return builder.build()


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

    # Further operands are dynamic sizes: unrelated, with factors numbered after those of the rule.
    others = RuleBuilder([v.shape for v in eqn.inputs[1:]], []).build()
    first = len(rule.kinds)
    other_factors = [tuple(first + factor for factor in row) for row in others.operands]
    return ShardingRule(rule.kinds + others.kinds, (factors, *other_factors), rule.results)


RULES: Mapping[str, Rule] = MappingProxyType({"reshape": reshape})
