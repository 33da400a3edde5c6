"""Factorisations, solvers and Fourier transforms: batch dimensions pass, the matrix does not."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn


def _batch_builder(eqn: Eqn, core_rank: int) -> RuleBuilder:
    """A builder in which the batch dimensions pass: all but `core_rank` of the first operand's."""
    builder = RuleBuilder.of(eqn)
    batch_rank = len(builder.operands[0]) - core_rank
    builder.add_batch_dims(batch_rank, builder.all_operands, builder.all_results)
    return builder


def batched(eqn: Eqn, core_rank: int) -> ShardingRule:
    """Leading dimensions pass.

    Args:
        eqn: The equation.
        core_rank: Trailing dimensions of the first operand that are not batch dimensions.
    """
    return _batch_builder(eqn, core_rank).build()


def triangular_solve(eqn: Eqn) -> ShardingRule:
    """(a, b): each column of b is solved by itself (each row, if a is on the right)."""
    builder = _batch_builder(eqn, 2)
    free = len(builder.operands[1]) - (1 if eqn.params["left_side"] else 2)
    builder.add_factor(FactorKind.PASS_THROUGH, [(1, free)], [(0, free)])
    return builder.build()


def tridiagonal_solve(eqn: Eqn) -> ShardingRule:
    """(lower, main and upper diagonal, b): each column of b is solved by itself."""
    builder = _batch_builder(eqn, 1)
    columns = len(builder.operands[3]) - 1
    builder.add_factor(FactorKind.PASS_THROUGH, [(3, columns)], [(0, columns)])
    return builder.build()


def ormqr(eqn: Eqn) -> ShardingRule:
    """(reflectors, their scales, c): each column of c is multiplied by itself.

    If Q is on the right, each row is.
    """
    builder = _batch_builder(eqn, 2)
    free = len(builder.operands[2]) - (1 if eqn.params["left"] else 2)
    builder.add_factor(FactorKind.PASS_THROUGH, [(2, free)], [(0, free)])
    return builder.build()


def fft(eqn: Eqn) -> ShardingRule:
    """The transformed (last) dimensions are NEED_REPLICATION."""
    return batched(eqn, len(eqn.params["fft_lengths"]))


_MATRIX = """
    cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu qr schur svd
    tridiagonal
"""

RULES: Mapping[str, Rule] = MappingProxyType(
    dict.fromkeys(_MATRIX.split(), partial(batched, core_rank=2))
    | {
        "fft": fft,
        "lu_pivots_to_permutation": partial(batched, core_rank=1),
        "ormqr": ormqr,
        "triangular_solve": triangular_solve,
        "tridiagonal_solve": tridiagonal_solve,
    }
)
