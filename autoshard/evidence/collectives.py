"""Collectives as evidence: what one device sends, by Shardy's output or the compiled program.

`shardy.partition` and `compiler.hlo_collectives` each return a tuple of `CollectiveOp`, one per
collective instruction; `summarise` folds them into a few `Collective`s for people and tables. Bytes
follow one rule everywhere, the ring of Thakur, Rabenseifner, Gropp (2005): see `ring_bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute")


@dataclass(frozen=True, slots=True)
class Collective:
    """All collectives of one kind over one set of mesh axes.

    Attributes:
        kind: One of `KINDS`.
        axes: Mesh axes spanned, in mesh order; () if the groups match no set of mesh axes.
        count: Executions per call, loop trip counts included.
        bytes: Bytes one device sends on a ring, loop trip counts included.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class CollectiveOp:
    """One collective instruction.

    Attributes:
        kind: One of `KINDS`.
        axes: Mesh axes spanned, in mesh order; () if the groups match no set of mesh axes. An axis
            of which only a part is spanned (a sub-axis such as `"model":(1)2`) is named too:
            `group_size` tells.
        group_size: Devices in one group; for a collective_permute the devices among which the
            values move.
        trip_count: Executions per call.
        full_bytes: B, the bytes of the full value (`ring_bytes`), of one execution.
        sent_bytes: Bytes one device sends in one execution.
        shape: The result as the source prints it: of one device in compiled programs and in
            shard_map (`f32[16,16]`), else the global one (`tensor<8x16xf32>`).
        source: `file.py:line` of the user's code, or "".
        op_name: The name stack (`jit(step)/while/body/dot_general`), or "".
        trip_count_known: False if some enclosing loop's trip count could not be read and counts as
            1.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    trip_count: int
    full_bytes: int
    sent_bytes: int
    shape: str = ""
    source: str = ""
    op_name: str = ""
    trip_count_known: bool = True

    @property
    def total_bytes(self) -> int:
        """Bytes one device sends per call, loop trip counts included."""
        return self.trip_count * self.sent_bytes


def ring_bytes(kind: str, full_bytes: int, group_size: int) -> int:
    """Bytes one device sends in one collective on a ring.

    With n devices and B = full_bytes: all_gather and reduce_scatter `(n-1)/n * B`, all_reduce twice
    that, all_to_all `(n-1)/n * B/n`, collective_permute `B`. B is the gathered result (all_gather),
    the operand of one device (reduce_scatter, all_reduce), n times the operand of one device
    (all_to_all), the operand (collective_permute).

    Args:
        kind: One of `KINDS`.
        full_bytes: B, >= 0.
        group_size: n, >= 1; n == 1 sends nothing.

    Returns:
        Bytes, rounded down.

    >>> [ring_bytes(kind, 1024, 4) for kind in ("all_gather", "all_reduce", "all_to_all")]
    [768, 1536, 192]
    """
    n = group_size
    if n <= 1:
        return 0
    if kind in ("all_gather", "reduce_scatter"):
        return (n - 1) * full_bytes // n
    if kind == "all_reduce":
        return 2 * (n - 1) * full_bytes // n
    if kind == "all_to_all":
        return (n - 1) * full_bytes // (n * n)
    if kind == "collective_permute":
        return full_bytes
    raise AssertionError(f"no such collective: {kind!r}")


def summarise(ops: Iterable[CollectiveOp]) -> tuple[Collective, ...]:
    """One `Collective` per kind and set of axes, in the order of `KINDS`, then by axes."""
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    sent_bytes: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for op in ops:
        counts[op.kind, op.axes] += op.trip_count
        sent_bytes[op.kind, op.axes] += op.total_bytes
    collectives = []
    for kind, axes in sorted(counts, key=lambda key: (KINDS.index(key[0]), key[1])):
        collectives.append(Collective(kind, axes, counts[kind, axes], sent_bytes[kind, axes]))
    return tuple(collectives)


def collective_bytes(ops: Iterable[CollectiveOp]) -> int:
    """Bytes one device sends per call, over all collectives."""
    return sum(op.total_bytes for op in ops)
