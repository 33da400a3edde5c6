"""Builds a `DimRule`: loops are stated one by one, and what no loop was stated for becomes
WHOLE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from autoshard.axes.sharding_rules.rule import DimRule, LoopKind
from autoshard.tracing.program import Eqn

Shape = tuple[int, ...]
Place = tuple[int, int]
"""(position of the operand or result, dimension)."""

Rule = Callable[[Eqn], DimRule]

_UNSTATED = -1


class Loops:
    """The loops of one equation while they are being stated; a dimension has at most one."""

    def __init__(self, operands: Sequence[Shape], results: Sequence[Shape]) -> None:
        """Starts with no loop.

        Args:
            operands: Shape of each operand.
            results: Shape of each result.
        """
        self.operands = tuple(tuple(shape) for shape in operands)
        self.results = tuple(tuple(shape) for shape in results)
        self._kinds: list[LoopKind] = []
        self._pieces: list[tuple[int, int]] = []
        self._operand_loops = [[_UNSTATED] * len(shape) for shape in self.operands]
        self._result_loops = [[_UNSTATED] * len(shape) for shape in self.results]

    @classmethod
    def of(cls, eqn: Eqn) -> Loops:
        """No loops yet, over the operands and results of an equation."""
        return cls([v.shape for v in eqn.inputs], [v.shape for v in eqn.outputs])

    def add(
        self,
        kind: LoopKind,
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
        loop = len(self._kinds)
        if pieces is not None:
            self._pieces.append((loop, pieces))
        self._kinds.append(kind)
        for places, table in ((operands, self._operand_loops), (results, self._result_loops)):
            for position, dim in places:
                assert table[position][dim] == _UNSTATED, "a dimension has one loop"
                table[position][dim] = loop

    def add_prefix(self, count: int, operands: Iterable[int], results: Iterable[int]) -> None:
        """States PASS loops over the first `count` dimensions of these operands and results (batch
        dimensions).

        Args:
            count: Number of leading dimensions.
            operands: Positions of operands with at least `count` dimensions.
            results: Positions of results with at least `count` dimensions.
        """
        operands, results = tuple(operands), tuple(results)
        for dim in range(count):
            self.add(LoopKind.PASS, [(i, dim) for i in operands], [(i, dim) for i in results])

    def rule(self, combine: str = "add") -> DimRule:
        """The rule; each dimension that no loop was stated for has a WHOLE loop of its own.

        Args:
            combine: How partial results of REDUCED loops are combined.

        Returns:
            The rule; its loops are numbered as they were stated.
        """
        kinds = list(self._kinds)

        def own_loop() -> int:
            kinds.append(LoopKind.WHOLE)
            return len(kinds) - 1

        def complete(table: list[list[int]]) -> tuple[tuple[int, ...], ...]:
            return tuple(
                tuple(own_loop() if loop == _UNSTATED else loop for loop in row) for row in table
            )

        operands, results = complete(self._operand_loops), complete(self._result_loops)
        return DimRule(tuple(kinds), operands, results, combine, tuple(self._pieces))


def whole_rule(eqn: Eqn) -> DimRule:
    """The rule that links nothing: a WHOLE loop for every dimension."""
    return Loops.of(eqn).rule()


def ints(numbers: Iterable[object]) -> tuple[int, ...]:
    """Plain integers of a parameter that may hold NumPy integers."""
    return tuple(int(n) for n in numbers)  # type: ignore[call-overload]
