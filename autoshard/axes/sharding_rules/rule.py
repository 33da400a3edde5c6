"""What a sharding rule says: the factors of an equation, and which factor each dimension of its
arrays runs over.

A rule is a claim that can be checked by running it: *cut all dimensions of one factor into shards
together, run the primitive on the shards, and the shards of the results follow* -- by concatenation
(`PASS_THROUGH`), or by combining them (`REDUCTION`). `PERMUTATION` and `NEED_REPLICATION` factors
are those of which this is not true.

The words are Shardy's (`sdy.op_sharding_rule`). Its factors are finer, though: there a reshaped
dimension has several, here it has one, the major of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.tracing.program import Eqn, Value


class FactorKind(enum.StrEnum):
    """How a factor behaves when it is split over devices (the four kinds of Shardy's own rules).

    PASS_THROUGH: the same dimension in all its operands and results; a split costs nothing. A
    factor that occurs in results only (iota, the new dimensions of a broadcast, random bits) is
    PASS_THROUGH too: every device can compute its own shard.

    REDUCTION: occurs in operands only; a split leaves a partial result on each device (all_reduce
    or reduce_scatter).

    PERMUTATION: can be split at the price of a halo exchange or a reshard (slice, pad, concatenate,
    reverse, spatial convolution). The dimensions of operands and results that it covers are *not*
    the same axis class.

    NEED_REPLICATION: must be gathered first (the sorted or transformed dimension, the index
    vector).

    Text, because rules are hashed often, and a plain Enum's hash is computed in Python.
    """

    PASS_THROUGH = "pass_through"
    REDUCTION = "reduction"
    PERMUTATION = "permutation"
    NEED_REPLICATION = "need_replication"


ARG_REDUCTION = "arg_reduction"
"""How the partial results of argmax and argmin are combined: all devices get all of them, with the
values that they stand for, and take the best. XLA's partitioner does the same with reductions of
several operands."""


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """The factors of one equation.

    A dimension always has a factor. A dimension that is related to nothing has a NEED_REPLICATION
    factor of its own.

    Attributes:
        kinds: The kind of each factor.
        operands: For each operand, the factor of each of its dimensions.
        results: For each result, the factor of each of its dimensions.
        combine: For REDUCTION factors, how partial results are combined: `add`, `max`, `min`,
            `mul`, `and`, `or`, `xor`, or `ARG_REDUCTION`.
        max_shards: (factor, N): its shard count must divide N. The shard count of any other factor
            must divide the sizes of its dimensions.
    """

    kinds: tuple[FactorKind, ...]
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    combine: str = "add"
    max_shards: tuple[tuple[int, int], ...] = ()

    def places(self, eqn: Eqn) -> Iterator[tuple[Value, tuple[int, ...]]]:
        """Each operand, then each result of an equation, with the factor of each dimension."""
        yield from zip(eqn.inputs, self.operands, strict=True)
        yield from zip(eqn.outputs, self.results, strict=True)
