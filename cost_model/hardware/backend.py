"""What differs between XLA's backends in memory and collectives: mechanisms, not fitted factors.

XLA:CPU as of jax 0.10 and 0.12, read off its buffer assignments and schedules (`--xla_dump_to`):

- its scheduler runs whatever is ready first in, first out (breadth first), so that thunks can run
  concurrently;
- a reduction is a library call that reads its operand from memory, as a contraction does;
- it has no reduce_scatter: all_reduce, then a slice; and no pass that joins an all_reduce of an
  all_reduce;
- all_reduces over the same groups that do not need each other are combined, whatever their size.

The GPU and TPU compilers schedule for low memory, which the order of the program comes close to,
fuse elementwise producers into reductions, and have a reduce_scatter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from autoshard.evidence.collectives import Collective, CollectiveOp, ring_bytes

_C = TypeVar("_C", Collective, CollectiveOp)


@dataclass(frozen=True, slots=True)
class Backend:
    """How a backend lowers what the model counts.

    Attributes:
        name: `cpu` or `accelerator`.
        has_reduce_scatter: False where it becomes all_reduce and a slice.
        shares_host_memory: True where devices have no memory of their own.
        folds_all_reduces: True where sums over several mesh axes are one all_reduce; False: the
            partitioner adds the partial results of a contraction factor by factor, and nothing
            joins its all_reduces.
        breadth_first: True where equations run as soon as their operands are there; False: in
            program order.
        fuses_into_reductions: True where a reduction computes what it reads on the fly.
        copies_transposed: True where a contraction wants its operands with the contracted dimension
            in place (last on the left, first on the right), and gets a copy otherwise.
        instruction_fusion: True where XLA's InstructionFusion decides: nothing fuses that would
            have to be computed at many indices, and a cheap result in memory is computed again by
            its elementwise readers.
        combines_all_reduces: True where all_reduces that do not need each other are one operation
            (AllReduceCombiner), so that all they read and write is there at once.
        also_fuses: Primitives that fuse beyond `tracing.primitives.FUSED`.
    """

    name: str
    has_reduce_scatter: bool
    shares_host_memory: bool
    folds_all_reduces: bool
    breadth_first: bool
    fuses_into_reductions: bool
    copies_transposed: bool
    instruction_fusion: bool
    combines_all_reduces: bool
    also_fuses: frozenset[str]

    def as_sent(self, collectives: Iterable[_C]) -> list[_C]:
        """Collectives of a partitioned program as this backend sends them.

        Without a reduce_scatter it sends an all_reduce instead, twice the bytes, and slices it.

        >>> [op.kind for op in CPU.as_sent([Collective("reduce_scatter", ("x",), 1, 96)])]
        ['all_reduce']
        """
        if self.has_reduce_scatter:
            return list(collectives)
        return [_as_all_reduce(c) if c.kind == "reduce_scatter" else c for c in collectives]


CPU = Backend(
    "cpu",
    has_reduce_scatter=False,
    shares_host_memory=True,
    folds_all_reduces=False,
    breadth_first=True,
    fuses_into_reductions=False,
    copies_transposed=True,
    instruction_fusion=True,
    combines_all_reduces=True,
    also_fuses=frozenset({"concatenate", "dynamic_slice", "gather", "split"}),
)
ACCELERATOR = Backend(
    "accelerator",
    has_reduce_scatter=True,
    shares_host_memory=False,
    folds_all_reduces=True,
    breadth_first=False,
    fuses_into_reductions=True,
    copies_transposed=False,
    instruction_fusion=False,
    combines_all_reduces=False,
    also_fuses=frozenset({"split"}),
)


def backend_for(platform: str) -> Backend:
    """The backend of a platform as jax names it (`cpu`, `gpu`, `tpu`).

    >>> backend_for("cpu").has_reduce_scatter, backend_for("tpu").has_reduce_scatter
    (False, True)
    """
    return CPU if platform == "cpu" else ACCELERATOR


def _as_all_reduce(collective: _C) -> _C:
    """The all_reduce that stands in for a reduce_scatter of the same value."""
    if isinstance(collective, Collective):
        # a summary does not know its full bytes; a ring's all_reduce sends twice its reduce_scatter
        return replace(collective, kind="all_reduce", bytes=2 * collective.bytes)
    sent = ring_bytes("all_reduce", collective.full_bytes, collective.group_size)
    return replace(collective, kind="all_reduce", sent_bytes=sent)
