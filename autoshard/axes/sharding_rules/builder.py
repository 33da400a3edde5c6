"""Builds a `ShardingRule`: loops are stated one by one, and what no loop was stated for becomes
NEED_REPLICATION.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn

Shape = tuple[int, ...]
Place = tuple[int, int]
"""(position of the operand or result, dimension)."""

Rule = Callable[[Eqn], ShardingRule]

_UNSTATED = -1


class RuleBuilder:
    """The loops of one equation while they are being stated; a dimension has at most one."""

    def __init__(self, operands: Sequence[Shape], results: Sequence[Shape]) -> None:
        """Starts with no loop.

        Args:
            operands: Shape of each operand.
            results: Shape of each result.
        """
        self.operands = tuple(tuple(shape) for shape in operands)
        self.results = tuple(tuple(shape) for shape in results)
        self._kinds: list[FactorKind] = []
        self._pieces: list[tuple[int, int]] = []
        self._operand_factors = [[_UNSTATED] * len(shape) for shape in self.operands]
        self._result_factors = [[_UNSTATED] * len(shape) for shape in self.results]

    @classmethod
    def of(cls, eqn: Eqn) -> RuleBuilder:
        """No loops yet, over the operands and results of an equation."""
        return cls([v.shape for v in eqn.inputs], [v.shape for v in eqn.outputs])

    def add(
        self,
        kind: FactorKind,
        operands: Iterable[Place] = (),
        results: Iterable[Place] = (),
        pieces: int | None = None,
    ) -> None:
        """States that these dimensions run over one loop.

        Args:
            kind: Kind of the loop.
            operands: (operand, dimension) pairs without a loop so far.
            results: (result, dimension) pairs without a loop so far.
            pieces: It can be cut into a divisor of so many pieces only.
        """
        factor = len(self._kinds)
        if pieces is not None:
            self._pieces.append((factor, pieces))
        self._kinds.append(kind)
        for places, table in ((operands, self._operand_factors), (results, self._result_factors)):
            for position, dim in places:
                assert table[position][dim] == _UNSTATED, "a dimension has one loop"
                table[position][dim] = factor

    def add_prefix(self, count: int, operands: Iterable[int], results: Iterable[int]) -> None:
        """States PASS_THROUGH loops over the first `count` dimensions of these operands and results (batch
        dimensions).

        Args:
            count: Number of leading dimensions.
            operands: Positions of operands with at least `count` dimensions.
            results: Positions of results with at least `count` dimensions.
        """
        operands, results = tuple(operands), tuple(results)
        for dim in range(count):
            self.add(
                FactorKind.PASS_THROUGH, [(i, dim) for i in operands], [(i, dim) for i in results]
            )

    def rule(self, combine: str = "add") -> ShardingRule:
        """The rule; each dimension that no loop was stated for has a NEED_REPLICATION loop of its own.

        Args:
            combine: How partial results of REDUCTION loops are combined.

        Returns:
            The rule; its loops are numbered as they were stated.
        """
        kinds = list(self._kinds)

        def own_factor() -> int:
            kinds.append(FactorKind.NEED_REPLICATION)
            return len(kinds) - 1

        def complete(table: list[list[int]]) -> tuple[tuple[int, ...], ...]:
            return tuple(
                tuple(own_factor() if factor == _UNSTATED else factor for factor in row)
                for row in table
            )

        operands, results = complete(self._operand_factors), complete(self._result_factors)
        return ShardingRule(tuple(kinds), operands, results, combine, tuple(self._pieces))


def whole_rule(eqn: Eqn) -> ShardingRule:
    """The rule that links nothing: a NEED_REPLICATION loop for every dimension."""
    return RuleBuilder.of(eqn).rule()


def ints(numbers: Iterable[object]) -> tuple[int, ...]:
    """Plain integers of a parameter that may hold NumPy integers."""
    return tuple(int(n) for n in numbers)  # type: ignore[call-overload]
