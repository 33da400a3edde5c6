"""Products that sum over shared dimensions: dot_general, ragged, scaled and symmetric products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Place, Rule, RuleBuilder, ints, other_dims
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn

Pairs = tuple[tuple[int, ...], tuple[int, ...]]


def _pairs(dimension_numbers: Sequence[Sequence[Sequence[int]]]) -> tuple[Pairs, Pairs]:
    """Contracting and batch dimensions, each (of the left, of the right operand)."""
    (contract_left, contract_right), (batch_left, batch_right) = dimension_numbers
    return (ints(contract_left), ints(contract_right)), (ints(batch_left), ints(batch_right))


def dot_general(eqn: Eqn) -> ShardingRule:
    """Batch and free dimensions pass, contracting ones are reduced.

    The result holds the batch dimensions, then the free ones of the left operand, then those of the
    right.
    """
    builder = RuleBuilder.of(eqn)
    contract, batch = _pairs(eqn.params["dimension_numbers"])
    _add_dot(builder, contract, batch)
    return builder.build()


def _add_dot(builder: RuleBuilder, contract: Pairs, batch: Pairs) -> None:
    """Adds the factors of a dense product of operands 0 and 1, with the scales of their blocks."""
    position = 0  # in the result
    for i, j in zip(*contract, strict=True):
        operands = _with_scales(builder, 0, i) + _with_scales(builder, 1, j)
        builder.add_factor(FactorKind.REDUCTION, operands)

    for i, j in zip(*batch, strict=True):
        operands = _with_scales(builder, 0, i) + _with_scales(builder, 1, j)
        builder.add_factor(FactorKind.PASS_THROUGH, operands, [(0, position)])
        position += 1

    for side in (0, 1):
        for dim in other_dims(len(builder.operands[side]), contract[side], batch[side]):
            operands = _with_scales(builder, side, dim)
            builder.add_factor(FactorKind.PASS_THROUGH, operands, [(0, position)])
            position += 1


def _with_scales(builder: RuleBuilder, side: int, dim: int) -> list[Place]:
    """A dimension of operand 0 or 1, and that of its scales where it consists of whole blocks.

    Operands 2 and 3 of a block-scaled product scale operands 0 and 1; they may be absent (ordinary
    products), or scalars.
    """
    places = [(side, dim)]
    scales = side + 2
    if len(builder.operands) > scales and len(builder.operands[scales]) > 1:
        blocks = builder.operands[scales][dim]
        if blocks > 1 and builder.operands[side][dim] % blocks == 0:
            places.append((scales, dim))
    return places


def ragged_dot_general(eqn: Eqn) -> ShardingRule:
    """One dimension of the left operand is divided into groups, whose sizes are the third operand.

    The ragged dimension behaves as in a dense product: rows that are cut go with the group sizes
    that are left of them on each side of the cut, which every device can work out from all group
    sizes; so these are NEED_REPLICATION. The groups of the right operand are REDUCTION: each device
    multiplies the rows of its own groups and has zeros elsewhere. The group dimension of the result
    (ragged contraction) passes: each device computes its own groups.
    """
    builder = RuleBuilder.of(eqn)
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contract, batch = _pairs(numbers.dot_dimension_numbers)
    (ragged,) = ints(numbers.lhs_ragged_dimensions)
    groups = ints(numbers.rhs_group_dimensions)
    left, right, sizes = builder.operands[:3]
    free_left = other_dims(len(left), contract[0], batch[0])
    free_right = other_dims(len(right), contract[1], batch[1], groups)
    prefix = _ragged_prefix(ragged, contract[0], batch[0], free_left) if len(sizes) > 1 else ()

    # Group sizes may differ by row of the dimensions before the ragged one.
    def group_sizes(dim: int) -> list[Place]:
        return [(2, prefix.index(dim))] if dim in prefix else []

    position = 0  # in the result
    if ragged in contract[0]:  # the result has a product for each group, along its first dimension
        builder.add_factor(FactorKind.PASS_THROUGH, results=[(0, 0)])
        position = 1
    for dim in groups:
        builder.add_factor(FactorKind.REDUCTION, [(1, dim)])
    for i, j in zip(*contract, strict=True):
        builder.add_factor(FactorKind.REDUCTION, [(0, i), (1, j), *group_sizes(i)])
    for i, j in zip(*batch, strict=True):
        operands = [(0, i), (1, j), *group_sizes(i)]
        builder.add_factor(FactorKind.PASS_THROUGH, operands, [(0, position)])
        position += 1
    for dim in free_left:
        operands = [(0, dim), *group_sizes(dim)]
        builder.add_factor(FactorKind.PASS_THROUGH, operands, [(0, position)])
        position += 1
    for dim in free_right:
        builder.add_factor(FactorKind.PASS_THROUGH, [(1, dim)], [(0, position)])
        position += 1
    return builder.build()


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
    builder = RuleBuilder.of(eqn)
    _add_dot(builder, contract=((2,), (2,)), batch=((0,), (0,)))
    return builder.build()


def symmetric_product(eqn: Eqn) -> ShardingRule:
    """Of alpha * A @ A.T + beta * C the columns of A are reduced; rows meet all rows.

    C counts on one device only.
    """
    builder = RuleBuilder.of(eqn)
    rank = len(builder.operands[0])
    builder.add_batch_dims(rank - 2, operands=(0, 1), results=(0,))
    builder.add_factor(FactorKind.REDUCTION, [(0, rank - 1)])
    return builder.build()


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
