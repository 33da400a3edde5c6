"""Factorisations, solvers and Fourier transforms: batch dimensions pass, the matrix is WHOLE."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from autoshard.axes.sharding_rules.builder import Loops, Rule
from autoshard.axes.sharding_rules.rule import DimRule, LoopKind
from autoshard.tracing.program import Eqn


def _batched(eqn: Eqn, core_rank: int) -> Loops:
    """PASS loops over the leading dimensions of all operands and results, the first operand having
    `core_rank` more.
    """
    loops = Loops.of(eqn)
    loops.add_prefix(
        len(loops.operands[0]) - core_rank, range(len(loops.operands)), range(len(loops.results))
    )
    return loops


def batched(eqn: Eqn, core_rank: int) -> DimRule:
    """Leading dimensions pass.

    Args:
        eqn: The equation.
        core_rank: Trailing dimensions of the first operand that are not batch dimensions.
    """
    return _batched(eqn, core_rank).rule()


def triangular_solve(eqn: Eqn) -> DimRule:
    """(a, b): each column of b is solved by itself (each row, if a is on the right)."""
    loops = _batched(eqn, 2)
    free = len(loops.operands[1]) - (1 if eqn.params["left_side"] else 2)
    loops.add(LoopKind.PASS, [(1, free)], [(0, free)])
    return loops.rule()


def tridiagonal_solve(eqn: Eqn) -> DimRule:
    """(lower, main and upper diagonal, b): each column of b is solved by itself."""
    loops = _batched(eqn, 1)
    columns = len(loops.operands[3]) - 1
    loops.add(LoopKind.PASS, [(3, columns)], [(0, columns)])
    return loops.rule()


def ormqr(eqn: Eqn) -> DimRule:
    """(reflectors, their scales, c): each column of c is multiplied by itself (each row, if Q is on
    the right).
    """
    loops = _batched(eqn, 2)
    free = len(loops.operands[2]) - (1 if eqn.params["left"] else 2)
    loops.add(LoopKind.PASS, [(2, free)], [(0, free)])
    return loops.rule()


def fft(eqn: Eqn) -> DimRule:
    """The transformed (last) dimensions are WHOLE."""
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
