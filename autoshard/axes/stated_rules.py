"""The sharding rule of a primitive, composed of those that Shardy states for its lowering.

A dimension follows its major factor through the operations. One that is reduced on the way and
reaches a result all the same (a fused softmax) passes, the all_reduce of the smaller inner value
being left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from autoshard.axes.sharding_rules import FactorKind, ShardingRule
from autoshard.axes.sharding_rules.builder import RuleBuilder
from autoshard.shardy.op_rules import LoweredOp, LoweredOps, OpRule
from autoshard.tracing.program import Eqn, Value

CREATING_OPS = frozenset({"stablehlo.broadcast_in_dim", "stablehlo.iota"})
"""Operations that create new dimensions of which every device can compute its own shard."""


def stated_rule(eqn: Eqn, ops: LoweredOps) -> ShardingRule | None:
    """The rules of the operations composed.

    Args:
        eqn: The equation.
        ops: Its lowering.

    Returns:
        None where an operation that reads anything has no rule (loops, branches, calls).
    """
    composition = _Composition(ops.ranks)
    for op in ops.ops:
        if op.rule is not None:
            composition.add(op, op.rule)
        elif op.operands:  # what reads nothing is a constant
            return None
    return _composed_rule(eqn, ops, composition)


class _Composition:
    """The dimensions of all values of a lowering, united where they run over one factor.

    Attributes:
        combine: How the last reduction combines.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        """Starts with every dimension by itself.

        Args:
            ranks: By number of a value of the lowering, the number of its dimensions.
        """
        self._first_node = [0, *accumulate(ranks)]
        self._parent = list(range(self._first_node[-1]))  # union-find
        self._marks: list[tuple[int, FactorKind]] = []
        self.combine = "add"

    def node(self, value: int, dim: int) -> int:
        """The node of a dimension."""
        return self._first_node[value] + dim

    def root(self, node: int) -> int:
        """The node that stands for all that are united with this one."""
        while self._parent[node] != node:
            node = self._parent[node]
        return node

    def mark(self, node: int, kind: FactorKind) -> None:
        """States that what is united with a node does not simply pass."""
        self._marks.append((node, kind))

    def kinds(self) -> dict[int, set[FactorKind]]:
        """By root, what it was marked as."""
        kinds = defaultdict(set)
        for node, kind in self._marks:
            kinds[self.root(node)].add(kind)
        return kinds

    def add(self, op: LoweredOp, rule: OpRule) -> None:
        """Unites what an operation links, and marks what does not pass."""
        major_nodes = self._nodes_by_major_factor(op, rule)
        kinds = _kinds_that_do_not_pass(op, rule, major_nodes)
        for factor, nodes in major_nodes.items():
            for node in nodes:
                self._parent[self.root(node)] = self.root(nodes[0])
            if factor in kinds:
                self.mark(nodes[0], kinds[factor])
                if kinds[factor] is FactorKind.REDUCTION:
                    self.combine = op.combine

    def _nodes_by_major_factor(self, op: LoweredOp, rule: OpRule) -> dict[str, list[int]]:
        """By factor, the dimensions that have it as their major one."""
        major_nodes: dict[str, list[int]] = {}
        sides = (
            *zip(op.operands, rule.operands, strict=True),
            *zip(op.results, rule.results, strict=True),
        )
        for value, dims in sides:
            for dim, factors in enumerate(dims):
                if factors:
                    major_nodes.setdefault(factors[0], []).append(self.node(value, dim))
        return major_nodes


def _kinds_that_do_not_pass(
    op: LoweredOp, rule: OpRule, majors: Iterable[str]
) -> dict[str, FactorKind]:
    """By factor, how it splits; of two statements on one factor the last counts."""
    need_replication = [
        *rule.kinds.get("need_replication", ()),
        *rule.kinds.get("blocked_propagation", ()),
        *_minor_factors(rule),
    ]
    # A dimension that an operation creates otherwise depends on where it is.
    if op.name not in CREATING_OPS:
        read = {factor for dims in rule.operands for factors in dims for factor in factors}
        need_replication += set(majors) - read
    return {
        **dict.fromkeys(rule.kinds.get("reduction", ()), FactorKind.REDUCTION),
        **dict.fromkeys(rule.kinds.get("permutation", ()), FactorKind.PERMUTATION),
        **dict.fromkeys(need_replication, FactorKind.NEED_REPLICATION),
    }


def _minor_factors(rule: OpRule) -> Iterator[str]:
    """Factors that are minor in some dimension: a split of one is no contiguous cut of it."""
    for dims in (*rule.operands, *rule.results):
        for factors in dims:
            yield from factors[1:]


def _composed_rule(eqn: Eqn, ops: LoweredOps, composition: _Composition) -> ShardingRule:
    """The rule of an equation, from what its operands and results are united with."""
    operand_dims = _dims_by_root(eqn.inputs, ops.arguments, composition)
    result_dims = _dims_by_root(eqn.outputs, ops.results, composition)
    for values, numbers in ((eqn.inputs, ops.arguments), (eqn.outputs, ops.results)):
        for value, number in zip(values, numbers, strict=True):
            for dim in range(len(value.shape), ops.ranks[number]):  # the words of a typed key
                composition.mark(composition.node(number, dim), FactorKind.NEED_REPLICATION)

    kinds = composition.kinds()
    builder = RuleBuilder.of(eqn)
    for root in dict.fromkeys((*operand_dims, *result_dims)):
        results = result_dims.get(root, {})
        kind = _kind(kinds.get(root, set()), reaches_result=bool(results))
        if kind is not None:
            builder.add_factor(kind, operand_dims.get(root, {}).items(), results.items())
    return builder.build(composition.combine)


def _dims_by_root(
    values: Sequence[Value], numbers: Sequence[int], composition: _Composition
) -> dict[int, dict[int, int]]:
    """By root, the dimension by position of the operand or result.

    The first dimension of an array that runs over a factor is it: no array has two of one factor.
    """
    dims: dict[int, dict[int, int]] = {}
    for position, (value, number) in enumerate(zip(values, numbers, strict=True)):
        for dim in range(len(value.shape)):
            root = composition.root(composition.node(number, dim))
            dims.setdefault(root, {}).setdefault(position, dim)
    return dims


def _kind(marks: set[FactorKind], *, reaches_result: bool) -> FactorKind | None:
    """The kind of a composed factor; None where it cannot be split."""
    if FactorKind.NEED_REPLICATION in marks:
        return None
    if FactorKind.PERMUTATION in marks:
        return FactorKind.PERMUTATION
    if reaches_result:
        return FactorKind.PASS_THROUGH
    return FactorKind.REDUCTION if FactorKind.REDUCTION in marks else None
