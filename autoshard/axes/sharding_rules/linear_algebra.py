"""Factorisations, solvers and Fourier transforms: batch dimensions pass, the matrix is NEED_REPLICATION."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Rule, RuleBuilder
from autoshard.axes.sharding_rules.rule import FactorKind, ShardingRule
from autoshard.tracing.program import Eqn


def _batched(eqn: Eqn, core_rank: int) -> RuleBuilder:
    """PASS loops over the leading dimensions of all operands and results, the first operand having
    `core_rank` more.
    """
    factors = RuleBuilder.of(eqn)
    factors.add_prefix(
        len(factors.operands[0]) - core_rank,
        range(len(factors.operands)),
        range(len(factors.results)),
    )
    return factors


def batched(eqn: Eqn, core_rank: int) -> ShardingRule:
    """Leading dimensions pass.

    Args:
        eqn: The equation.
        core_rank: Trailing dimensions of the first operand that are not batch dimensions.
    """
    return _batched(eqn, core_rank).rule()


def triangular_solve(eqn: Eqn) -> ShardingRule:
    """(a, b): each column of b is solved by itself (each row, if a is on the right)."""
    factors = _batched(eqn, 2)
    free = len(factors.operands[1]) - (1 if eqn.params["left_side"] else 2)
    factors.add(FactorKind.PASS_THROUGH, [(1, free)], [(0, free)])
    return factors.rule()


def tridiagonal_solve(eqn: Eqn) -> ShardingRule:
    """(lower, main and upper diagonal, b): each column of b is solved by itself."""
    factors = _batched(eqn, 1)
    columns = len(factors.operands[3]) - 1
    factors.add(FactorKind.PASS_THROUGH, [(3, columns)], [(0, columns)])
    return factors.rule()


def ormqr(eqn: Eqn) -> ShardingRule:
    """(reflectors, their scales, c): each column of c is multiplied by itself (each row, if Q is on
    the right).
    """
    factors = _batched(eqn, 2)
    free = len(factors.operands[2]) - (1 if eqn.params["left"] else 2)
    factors.add(FactorKind.PASS_THROUGH, [(2, free)], [(0, free)])
    return factors.rule()


def fft(eqn: Eqn) -> ShardingRule:
    """The transformed (last) dimensions are NEED_REPLICATION."""
    return batched(eqn, len(eqn.params["fft_lengths"]))


_MATRIX = """
    cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu qr schur svd tridiagonal
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
