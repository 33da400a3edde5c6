"""Runs Shardy's own partitioner on a lowered program, without compiling, and reads what it decided.

The passes propagate the shardings of arguments and constraints through the StableHLO and insert
explicit collectives with mesh axes by name. That takes milliseconds where a compile takes seconds,
for any mesh size and on any backend. It is not an exact count of the compiled program's bytes
(**partitioned**, not **compiled**): XLA fuses, merges and moves collectives afterwards, and its CPU
compiler writes a reduce_scatter as an all_reduce of twice the bytes. So that equal reshards are not
counted twice, one of the same value to the same sharding counts once per loop body.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from autoshard.evidence.collectives import (
    Collective,
    CollectiveOp,
    collective_bytes,
    ring_bytes,
    summarise,
)
from autoshard.evidence.replica_groups import MeshCoordinates
from autoshard.jax_internals.mlir import (
    DimSharding,
    PassError,
    axis_names,
    callee,
    dense_integers,
    dim_shardings,
    functions,
    local_bytes,
    location,
    rank,
    run_passes,
    signature,
    stated_sharding,
    trip_count,
)

_PIPELINE = (
    "builtin.module(sdy-import-pipeline,sdy-import-func-calls,sdy-user-priority-propagate,"
    "sdy-export-pipeline{enable-insert-explicit-collectives=true})"
)

_STABLEHLO_AXIS = re.compile(r'axis_ref<\s*name = "([^"]+)"([^>]*)')

_RESHARD_AXES = {
    "sdy.all_gather": "gathering_axes",
    "sdy.reduce_scatter": "reduce_scatter_axes",
    "sdy.all_reduce": "reduction_axes",
    "sdy.all_to_all": "params",
    "sdy.collective_permute": "",
}
"""Collectives that Shardy inserts, with the attribute that names their mesh axes."""

_MANUAL = (
    "stablehlo.all_gather",
    "stablehlo.reduce_scatter",
    "stablehlo.all_reduce",
    "stablehlo.all_to_all",
    "stablehlo.collective_permute",
)
"""Collectives that the user wrote in a shard_map."""


@dataclass(frozen=True, slots=True)
class Partitioned:
    """What Shardy decided.

    Attributes:
        ops: One entry per collective and call site, in program order.
        collectives: The same, per kind and mesh axes.
        collective_bytes: Bytes one device sends per call, loop trip counts included.
        arg_shardings: Per argument of the lowered program (`jit` drops unused ones), the mesh axes
            of each dimension.
        result_shardings: The same per result.
    """

    ops: tuple[CollectiveOp, ...]
    collectives: tuple[Collective, ...]
    collective_bytes: int
    arg_shardings: tuple[tuple[DimSharding, ...], ...]
    result_shardings: tuple[tuple[DimSharding, ...], ...]


@dataclass(frozen=True, slots=True)
class PartitionFailure:
    """The partitioner's passes failed, for this reason; the compiler may still take the program.

    Attributes:
        reason: In one line.
        expired: They took too long and were ended.
    """

    reason: str
    expired: bool = False


def partition(
    lowered: jax.stages.Lowered, mesh_axes: Mapping[str, int]
) -> Partitioned | PartitionFailure:
    """Partitions a lowered program with Shardy's passes; the program itself is left as it is.

    Args:
        lowered: `jax.jit(fn, ...).lower(...)`, with shardings of one mesh.
        mesh_axes: Name and size of every mesh axis, in mesh order.

    Returns:
        What Shardy decided, or why it could not.
    """
    return partition_module(lowered.compiler_ir("stablehlo"), mesh_axes)


def partition_module(module: Any, mesh_axes: Mapping[str, int]) -> Partitioned | PartitionFailure:
    """`partition` of the module of a lowered program."""
    try:
        operation = run_passes(module, _PIPELINE)
        by_name = functions(operation)
        main = by_name["main"]
        reader = _Reader(mesh_axes, by_name)
        ops = tuple(reader.body(main.regions[0].blocks[0], {}))
        return Partitioned(
            ops=ops,
            collectives=summarise(ops),
            collective_bytes=collective_bytes(ops),
            arg_shardings=signature(main, "arg_attrs", "inputs"),
            result_shardings=signature(main, "res_attrs", "results"),
        )
    except (PassError, ValueError, KeyError, RuntimeError) as error:
        diagnostics = getattr(error, "error_diagnostics", ())
        text = "; ".join(diagnostic.message for diagnostic in diagnostics) or str(error)
        return PartitionFailure(f"Shardy's passes: {type(error).__name__}: {text}")


_Reshards = dict[tuple[Any, str], Any]
"""By (value, operation and new sharding), the result: the reshards of a loop body so far."""


class _Reader:
    """Walks the partitioned functions; `alias` maps a value to the value it is equal to."""

    def __init__(self, mesh_axes: Mapping[str, int], functions: Mapping[str, Any]) -> None:
        self._mesh = MeshCoordinates(mesh_axes)
        self._functions = functions
        self._alias: dict[Any, Any] = {}

    def body(self, block: Any, reshards: _Reshards) -> Iterator[CollectiveOp]:
        """Collectives of one execution of a block."""
        for view in block:
            yield from self._collectives(view.operation, reshards)

    def _collectives(self, op: Any, reshards: _Reshards) -> Iterator[CollectiveOp]:
        """Collectives of one execution of an operation."""
        name = op.name
        if name in _RESHARD_AXES:
            yield from self._reshard(op, reshards)
        elif name in _MANUAL:
            yield from self._manual(op)
        elif name == "sdy.named_computation":
            yield from self._inlined(op, op.regions[0].blocks[0], reshards)
        elif name == "func.call":
            called = self._functions[callee(op)]
            yield from self._inlined(op, called.regions[0].blocks[0], {})
        elif name == "sdy.manual_computation":
            yield from self.body(op.regions[0].blocks[0], {})
        elif name == "stablehlo.while":
            yield from self._loop(op)
        elif name in ("stablehlo.case", "stablehlo.if"):
            branches = [tuple(self.body(region.blocks[0], {})) for region in op.regions]
            yield from max(branches, key=collective_bytes, default=())

    def _loop(self, op: Any) -> Iterator[CollectiveOp]:
        """Collectives of all trips; an unknown trip count counts as one."""
        trips = trip_count(op)
        for region in op.regions:  # condition and body
            for collective in self.body(region.blocks[0], {}):
                yield replace(
                    collective,
                    trip_count=collective.trip_count * (1 if trips is None else trips),
                    trip_count_known=collective.trip_count_known and trips is not None,
                )

    def _resolve(self, value: Any) -> Any:
        while value in self._alias:
            value = self._alias[value]
        return value

    def _inlined(self, op: Any, block: Any, reshards: _Reshards) -> Iterator[CollectiveOp]:
        for argument, operand in zip(block.arguments, op.operands, strict=True):
            self._alias[argument] = self._resolve(operand)
        yield from self.body(block, reshards)
        returned = list(block)[-1].operation.operands
        for result, value in zip(op.results, returned, strict=True):
            self._alias[result] = self._resolve(value)

    def _reshard(self, op: Any, reshards: _Reshards) -> Iterator[CollectiveOp]:
        """A collective that Shardy inserted: its type is global, its sharding cuts that."""
        sharding = str(op.attributes["out_sharding"])
        result = op.results[0]
        key = (self._resolve(op.operands[0]), f"{op.name} {sharding}")
        if key in reshards:
            self._alias[result] = reshards[key]
            return
        reshards[key] = result

        dims = dim_shardings(sharding, rank(result.type))
        names = self._reshard_axes(op, dims)
        sizes = {name: self._size(name) for name in names}
        axes = self._mesh.ordered([name.split(":")[0] for name in names])
        local = local_bytes(result.type, self._shard_counts(dims))
        yield self._collective(op, axes, math.prod(sizes.values()), local)

    def _reshard_axes(self, op: Any, dims: tuple[DimSharding, ...]) -> list[str]:
        """Mesh axes, sub-axes among them, that a reshard to this sharding spans."""
        if op.name != "sdy.collective_permute":
            return axis_names(str(op.attributes[_RESHARD_AXES[op.name]]))
        # It names none: they are those of the dimensions whose sharding changes.
        before = stated_sharding(self._resolve(op.operands[0]))
        if before is None:
            return [name for axes in dims for name in axes]
        names: list[str] = []
        for new, old in zip(dims, before, strict=True):
            if new != old:
                names += (*new, *old)
        return names

    def _manual(self, op: Any) -> Iterator[CollectiveOp]:
        """A collective of the user's shard_map: its type is one device's (of the manual axes)."""
        local = 0
        for result in op.results:
            dims = stated_sharding(result) or ()
            local += local_bytes(result.type, self._shard_counts(dims))
        axes, group_size = self._span(op)
        if group_size > 1:
            yield self._collective(op, axes, group_size, local)

    def _span(self, op: Any) -> tuple[tuple[str, ...], int]:
        """Mesh axes that a manual collective spans, and the devices in one group."""
        if op.name == "stablehlo.collective_permute":
            pairs = dense_integers(op.attributes["source_target_pairs"])
            assert pairs is not None
            moved = self._mesh.moved_along([(a, b) for a, b in pairs.tolist()])
            return moved, math.prod(self._mesh.sizes[axis] for axis in moved)
        groups = op.attributes["replica_groups"]
        numbers = dense_integers(groups)
        if numbers is not None:
            return self._mesh.spanned(numbers.astype(np.int64)), numbers.shape[1]
        # Groups by mesh axes, some of them in part.
        names, size = [], 1
        for name, rest in _STABLEHLO_AXIS.findall(str(groups)):
            part = re.search(r"\bsize = (\d+)", rest)
            names.append(name)
            size *= int(part[1]) if part else self._mesh.sizes[name]
        return self._mesh.ordered(names), size

    def _collective(
        self, op: Any, axes: tuple[str, ...], group_size: int, local: int
    ) -> CollectiveOp:
        """The record of a collective.

        Args:
            op: The operation.
            axes: Mesh axes that it spans.
            group_size: Devices in one group.
            local: Bytes of its result on one device.
        """
        kind = op.name.partition(".")[2]
        full = local * group_size if kind in ("reduce_scatter", "all_to_all") else local
        source, op_name = location(op)
        return CollectiveOp(
            kind=kind,
            axes=axes,
            group_size=group_size,
            trip_count=1,
            full_bytes=full,
            sent_bytes=ring_bytes(kind, full, group_size),
            shape=", ".join(str(result.type) for result in op.results),
            source=source,
            op_name=op_name,
        )

    def _shard_counts(self, dims: Sequence[DimSharding]) -> list[int]:
        """By dimension, into how many shards it is cut."""
        return [math.prod(self._size(name) for name in axes) for axes in dims]

    def _size(self, axis: str) -> int:
        """Devices along a mesh axis, or along a part of it (`model:(1)2`)."""
        name, _, part = axis.partition(":")
        return int(part.rpartition(")")[2]) if part else self._mesh.sizes[name]
