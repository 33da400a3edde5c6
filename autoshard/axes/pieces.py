"""Operations that run by pieces: each device applies them to its own shards, in a `shard_map`.

Some factors of these are independent by definition (the batch of a sort, of a factorisation, of a
Fourier transform; the groups of a convolution; the columns of a triangular system), yet a
partitioner gathers them, or makes the devices wait for each other in every round of a loop. Inside
a `shard_map` it has nothing to decide. What cannot be cut is gathered before, and is whole inside.

Without it XLA:CPU gathers `top_k`, grouped convolutions and the columns of solvers (jax 0.10.2 and
0.12.0.1), and the batch of an FFT (0.10.2), XLA:TPU that of `eigh`; both exchange the scanned
dimension of `cumsum` and `sort` several times over. `tests/golden/compiled_bytes.json` has what is
compiled now.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from autoshard.axes.sharding_rules import FactorKind, ShardingRule
from autoshard.tracing.primitives import BY_PIECES
from autoshard.tracing.program import Eqn

_GROUPS = ("feature_group_count", "batch_group_count")


def runs_by_pieces(eqn: Eqn) -> bool:
    """Whether an equation goes into a `shard_map` where a layout splits factors that allow it."""
    return eqn.primitive in BY_PIECES or is_grouped(eqn)


def is_grouped(eqn: Eqn) -> bool:
    """Whether an equation is a convolution in groups of features, or of the batch."""
    if eqn.primitive != "conv_general_dilated":
        return False
    return any(int(eqn.params[groups]) > 1 for groups in _GROUPS)


def can_be_cut(eqn: Eqn, rule: ShardingRule, split: Collection[int]) -> bool:
    """Whether running an equation on shards gives the shards of its results.

    Args:
        eqn: An equation that runs by pieces.
        rule: Its sharding rule.
        split: The factors that a layout splits. Neighbours of a shifted one are on other devices:
            its halos are left to the partitioner.
    """
    kinds = {rule.kinds[factor] for factor in split}
    # A product adds up; other sums may count an operand once, or combine otherwise.
    can_be = {FactorKind.PASS_THROUGH, *([FactorKind.REDUCTION] if is_grouped(eqn) else [])}
    return bool(kinds) and kinds <= can_be


def params_of_piece(eqn: Eqn, rule: ShardingRule, shard_counts: Mapping[int, int]) -> Any:
    """The parameters of an equation as one device runs it.

    Args:
        eqn: An equation that runs by pieces.
        rule: Its sharding rule.
        shard_counts: By factor, into how many shards it is cut.
    """
    params = dict(eqn.params)
    if is_grouped(eqn):
        numbers = params["dimension_numbers"]
        # A shard holds whole groups: the factor of the groups is that of the dimension they cut.
        for groups, dim in zip(_GROUPS, (numbers.lhs_spec[1], numbers.lhs_spec[0]), strict=True):
            if int(params[groups]) > 1:
                params[groups] //= shard_counts.get(rule.operands[0][dim], 1)
    return params
