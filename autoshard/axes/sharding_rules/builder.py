"""Builds a `ShardingRule`: factors are added one by one, and each dimension that none was added for
becomes NEED_REPLICATION.
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
"""Stands for the factor of a dimension that has none yet; factors count from 0."""


class RuleBuilder:
    """The factors of one equation while they are being added; a dimension has at most one.

    Attributes:
        operands: Shape of each operand.
        results: Shape of each result.
        all_operands: Positions of the operands.
        all_results: Positions of the results.
    """

    def __init__(self, operands: Sequence[Shape], results: Sequence[Shape]) -> None:
        """Starts with no factor.

        Args:
            operands: Shape of each operand.
            results: Shape of each result.
        """
        self.operands = tuple(tuple(shape) for shape in operands)
        self.results = tuple(tuple(shape) for shape in results)
        self.all_operands = range(len(self.operands))
        self.all_results = range(len(self.results))
        self._kinds: list[FactorKind] = []
        self._max_shards: list[tuple[int, int]] = []
        self._operand_factors = [[_UNSTATED] * len(shape) for shape in self.operands]
        self._result_factors = [[_UNSTATED] * len(shape) for shape in self.results]

    @classmethod
    def of(cls, eqn: Eqn) -> RuleBuilder:
        """No factors yet, over the operands and results of an equation."""
        return cls([v.shape for v in eqn.inputs], [v.shape for v in eqn.outputs])

    def add_factor(
        self,
        kind: FactorKind,
        operands: Iterable[Place] = (),
        results: Iterable[Place] = (),
        max_shards: int | None = None,
    ) -> None:
        """States that these dimensions run over one factor.

        Args:
            kind: Kind of the factor.
            operands: (operand, dimension) pairs without a factor so far.
            results: (result, dimension) pairs without a factor so far.
            max_shards: What its shard count must divide; None for the sizes of its dimensions.
        """
        factor = len(self._kinds)
        self._kinds.append(kind)
        if max_shards is not None:
            self._max_shards.append((factor, max_shards))
        _assign(self._operand_factors, operands, factor)
        _assign(self._result_factors, results, factor)

    def is_free(self, operands: Iterable[Place], results: Iterable[Place]) -> bool:
        """Whether none of these dimensions has a factor yet."""
        factors = [self._operand_factors[i][dim] for i, dim in operands]
        factors += [self._result_factors[i][dim] for i, dim in results]
        return all(factor == _UNSTATED for factor in factors)

    def add_shared_dim(
        self, kind: FactorKind, dim: int, operands: Iterable[int], results: Iterable[int]
    ) -> None:
        """States one factor over dimension `dim` of each of these operands and results.

        Args:
            kind: Kind of the factor.
            dim: The dimension.
            operands: Positions of operands.
            results: Positions of results.
        """
        self.add_factor(kind, [(i, dim) for i in operands], [(i, dim) for i in results])

    def add_batch_dims(self, count: int, operands: Iterable[int], results: Iterable[int]) -> None:
        """States that the first `count` dimensions of these operands and results pass.

        Args:
            count: Number of leading dimensions.
            operands: Positions of operands with at least `count` dimensions.
            results: Positions of results with at least `count` dimensions.
        """
        operands, results = tuple(operands), tuple(results)
        for dim in range(count):
            self.add_shared_dim(FactorKind.PASS_THROUGH, dim, operands, results)

    def build(self, combine: str = "add") -> ShardingRule:
        """The rule; each dimension without a factor gets a NEED_REPLICATION factor of its own.

        Args:
            combine: How partial results of REDUCTION factors are combined.

        Returns:
            The rule; its factors are numbered as they were added.
        """
        kinds = list(self._kinds)
        operands = _completed(self._operand_factors, kinds)
        results = _completed(self._result_factors, kinds)
        return ShardingRule(tuple(kinds), operands, results, combine, tuple(self._max_shards))


def _assign(table: list[list[int]], places: Iterable[Place], factor: int) -> None:
    """Writes the factor at its places."""
    for position, dim in places:
        assert table[position][dim] == _UNSTATED, "a dimension has one factor"
        table[position][dim] = factor


def _completed(table: list[list[int]], kinds: list[FactorKind]) -> tuple[tuple[int, ...], ...]:
    """The table with a NEED_REPLICATION factor, appended to `kinds`, wherever there is none."""
    rows = []
    for row in table:
        factors = []
        for factor in row:
            if factor == _UNSTATED:
                factor = len(kinds)
                kinds.append(FactorKind.NEED_REPLICATION)
            factors.append(factor)
        rows.append(tuple(factors))
    return tuple(rows)


def replicated_rule(eqn: Eqn) -> ShardingRule:
    """The rule that links nothing: a NEED_REPLICATION factor for every dimension."""
    return RuleBuilder.of(eqn).build()


def leading_dims(eqn: Eqn) -> ShardingRule:
    """The rule of an element that is seen as several: the dimensions that both sides have pass.

    A last one that only one side has (words of a key, parts of an element) is NEED_REPLICATION.
    """
    builder = RuleBuilder.of(eqn)
    shared_rank = min(len(builder.operands[0]), len(builder.results[0]))
    builder.add_batch_dims(shared_rank, (0,), (0,))
    return builder.build()


def ints(numbers: Iterable[object]) -> tuple[int, ...]:
    """Plain integers of a parameter that may hold NumPy integers."""
    return tuple(int(n) for n in numbers)  # type: ignore[call-overload]


def other_dims(rank: int, *taken: Iterable[int]) -> list[int]:
    """Dimensions of a rank that are in none of the collections, ascending."""
    return sorted(set(range(rank)).difference(*taken))
