"""What a sharding rule says: the loops of an equation, and over which loop each dimension of its
arrays runs.

A rule is a claim that can be checked by running it: *cut all dimensions of one loop into pieces
together, run the primitive on the pieces, and the pieces of the results follow* -- by concatenation
(`PASS_THROUGH`), or by combining them (`REDUCTION`). `PERMUTATION` and `NEED_REPLICATION` loops are those of which this is
not true.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.tracing.program import Eqn, Value


class FactorKind(enum.StrEnum):
    """How a loop dimension behaves when it is split over devices (the four kinds of Shardy's own
    rules).

    PASS_THROUGH: the same dimension in all its operands and results; a split costs nothing. A loop that
    occurs in results only (iota, the new dimensions of a broadcast, random bits) is PASS_THROUGH too: every
    device can make its own part. REDUCTION: occurs in operands only; a split leaves a partial result
    on each device (all_reduce or reduce_scatter). PERMUTATION: can be split at the price of a halo or
    reshard (slice, pad, concatenate, reverse, spatial convolution). The dimensions of operands and
    results that it covers are *not* the same axis class. NEED_REPLICATION: must be gathered first (the
    sorted or transformed dimension, the index vector).

    Text, because rules are hashed often, and a plain Enum's hash is computed in Python.
    """

    PASS_THROUGH = "pass_through"
    REDUCTION = "reduction"
    PERMUTATION = "permutation"
    NEED_REPLICATION = "need_replication"


ARG_REDUCTION = "arg_reduction"
"""How the partial results of argmax and argmin are combined: all devices get all of them, with the
values that they stand for, and take the best (so does XLA's partitioner with reductions of several
operands)."""


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """The loops of one equation.

    Attributes:
        kinds: The kind of each loop.
        operands: For each operand, the loop of each of its dimensions.
        results: For each result, the loop of each of its dimensions.
        combine: For REDUCTION loops, how partial results are combined: `add`, `max`, `min`, `mul`,
            `and`, `or`, `xor`, or `ARG_REDUCTION`.
        pieces: (loop, N): it can be cut into a divisor of N pieces only; other loops into any that
            divide their sizes.

    A dimension always has a loop. A dimension that is related to nothing has a NEED_REPLICATION loop of its
    own.
    """

    kinds: tuple[FactorKind, ...]
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    combine: str = "add"
    pieces: tuple[tuple[int, int], ...] = ()

    def places(self, eqn: Eqn) -> Iterator[tuple[Value, tuple[int, ...]]]:
        """Each operand, then each result of an equation, with the factor of each dimension."""
        yield from zip(eqn.inputs, self.operands, strict=True)
        yield from zip(eqn.outputs, self.results, strict=True)
