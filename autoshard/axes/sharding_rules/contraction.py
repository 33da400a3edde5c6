"""Products that sum over shared dimensions: dot_general, its ragged and scaled forms,
symmetric_product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder, ints
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn

Pairs = tuple[tuple[int, ...], tuple[int, ...]]


def _pairs(dimension_numbers: Sequence[Sequence[Sequence[int]]]) -> tuple[Pairs, Pairs]:
    """Contracting and batch dimensions, each (of the left, of the right operand)."""
    (contract_left, contract_right), (batch_left, batch_right) = dimension_numbers
    return (ints(contract_left), ints(contract_right)), (ints(batch_left), ints(batch_right))


def _free(rank: int, *taken: tuple[int, ...]) -> list[int]:
    """Dimensions of a rank that are in none of the tuples, ascending."""
    return [dim for dim in range(rank) if not any(dim in dims for dims in taken)]


def dot_general(eqn: Eqn) -> ShardingRule:
    """Batch and free dimensions pass, contracting ones are reduced.

    The result holds the batch dimensions, then the free ones of the left operand, then those of the
    right.
    """
    factors = RuleBuilder.of(eqn)
    contract, batch = _pairs(eqn.params["dimension_numbers"])
    _dot(factors, contract, batch, scales=_scales(factors))
    return factors.rule()


def _scales(factors: RuleBuilder) -> dict[int, int]:
    """For block-scaled products, which operand (2, 3) scales which (0, 1); ordinary products have
    two operands.
    """
    return {
        side: side + 2
        for side in (0, 1)
        if len(factors.operands) > side + 2 and len(factors.operands[side + 2]) > 1
    }


def _dot(factors: RuleBuilder, contract: Pairs, batch: Pairs, scales: Mapping[int, int]) -> None:
    """States the loops of a dense product of operands 0 and 1, with the scales of their blocks."""
    left, right = factors.operands[:2]

    def places(side: int, dim: int) -> list[tuple[int, int]]:
        found = [(side, dim)]
        if side in scales:
            blocks = factors.operands[scales[side]][dim]
            if blocks > 1 and factors.operands[side][dim] % blocks == 0:
                found.append((scales[side], dim))
        return found

    for i, j in zip(*contract, strict=True):
        factors.add(FactorKind.REDUCTION, places(0, i) + places(1, j))
    position = 0
    for i, j in zip(*batch, strict=True):
        factors.add(FactorKind.PASS_THROUGH, places(0, i) + places(1, j), [(0, position)])
        position += 1
    for side, shape in enumerate((left, right)):
        for dim in _free(len(shape), contract[side], batch[side]):
            factors.add(FactorKind.PASS_THROUGH, places(side, dim), [(0, position)])
            position += 1


def ragged_dot_general(eqn: Eqn) -> ShardingRule:
    """One dimension of the left operand is divided into groups, whose sizes are the third operand.

    The ragged dimension behaves as in a dense product: rows that are cut go with the group sizes
    that are left of them on each side of the cut, which every device can work out from all group
    sizes; so these are NEED_REPLICATION. The groups of the right operand are REDUCTION: each device multiplies
    the rows of its own groups and has zeros elsewhere. The group dimension of the result (ragged
    contraction) passes: each device makes its own groups.
    """
    factors = RuleBuilder.of(eqn)
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contract, batch = _pairs(numbers.dot_dimension_numbers)
    (ragged,) = ints(numbers.lhs_ragged_dimensions)
    groups = ints(numbers.rhs_group_dimensions)
    left, right, sizes = factors.operands[:3]
    free_left = _free(len(left), contract[0], batch[0])
    free_right = _free(len(right), contract[1], batch[1], groups)
    prefix = _ragged_prefix(ragged, contract[0], batch[0], free_left) if len(sizes) > 1 else ()

    def group_sizes(dim: int) -> list[tuple[int, int]]:
        return [(2, prefix.index(dim))] if dim in prefix else []

    position = 0
    if ragged in contract[0]:
        factors.add(FactorKind.PASS_THROUGH, results=[(0, 0)])
        position = 1
    for dim in groups:
        factors.add(FactorKind.REDUCTION, [(1, dim)])
    for i, j in zip(*contract, strict=True):
        factors.add(FactorKind.REDUCTION, [(0, i), (1, j), *group_sizes(i)])
    for i, j in zip(*batch, strict=True):
        factors.add(FactorKind.PASS_THROUGH, [(0, i), (1, j), *group_sizes(i)], [(0, position)])
        position += 1
    for dim in free_left:
        factors.add(FactorKind.PASS_THROUGH, [(0, dim), *group_sizes(dim)], [(0, position)])
        position += 1
    for dim in free_right:
        factors.add(FactorKind.PASS_THROUGH, [(1, dim)], [(0, position)])
        position += 1
    return factors.rule()


def _ragged_prefix(
    ragged: int, contract: tuple[int, ...], batch: tuple[int, ...], free: Sequence[int]
) -> tuple[int, ...]:
    """Dimensions of the left operand for each of which there is a row of group sizes."""
    if ragged in batch:
        return batch[: batch.index(ragged)]
    if ragged in contract:
        return batch + contract[: contract.index(ragged)]
    return batch + tuple(free)[: free.index(ragged)]


def scaled_matmul(eqn: Eqn) -> ShardingRule:
    """(B, M, K) x (B, N, K) -> (B, M, N) with a scale for each block along K."""
    factors = RuleBuilder.of(eqn)
    _dot(factors, contract=((2,), (2,)), batch=((0,), (0,)), scales=_scales(factors))
    return factors.rule()


def symmetric_product(eqn: Eqn) -> ShardingRule:
    """Of alpha * A @ A.T + beta * C the columns of A are reduced (C counts on one device only);
    rows meet all rows.
    """
    factors = RuleBuilder.of(eqn)
    rank = len(factors.operands[0])
    factors.add_prefix(rank - 2, operands=(0, 1), results=(0,))
    factors.add(FactorKind.REDUCTION, [(0, rank - 1)])
    return factors.rule()


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "dot_general": dot_general,
        "ragged_dot_general": ragged_dot_general,
        "scaled_dot": dot_general,
        "scaled_matmul": scaled_matmul,
        "scaled_matmul_wrapper": scaled_matmul,
        "symmetric_product": symmetric_product,
    }
)
