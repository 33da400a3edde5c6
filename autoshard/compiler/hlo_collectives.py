"""The collectives of a compiled program, read from its text: kind, mesh axes, bytes, executions,
source line.

What counts, and how often:

- the body of a loop counts as often as the loop runs (`known_trip_count` on CPU and GPU; on TPU
  start, step and bound of its counter; else once, and `trips_known` is False);
- of a conditional the branch that sends most bytes counts (the first one of equals);
- a start/done pair counts once, at the start. The TPU compiler repeats an asynchronous collective
  in every fusion that it runs beside: the one in the computation with `AsyncCollectiveStart`
  counts;
- an all-reduce of which a fusion keeps only this device's slice (how the TPU compiler writes it) is
  a reduce_scatter;
- a send counts as a collective_permute, its recv does not; a group of one device sends nothing and
  is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoshard.compiler.hlo_text import (
    Computation,
    HloProgram,
    Instruction,
    parse_program,
    shape_bytes,
    tuple_elements,
    without_layout,
)
from autoshard.compiler.hlo_trip_counts import trip_count
from autoshard.evidence.collectives import CollectiveOp, collective_bytes, ring_bytes
from autoshard.evidence.replica_groups import MeshCoordinates, parse_groups

_KINDS = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "collective_permute",
    "send": "collective_permute",
}
_OPCODES = re.compile(
    r" (?:(?:(?:ragged-)?all-(?:gather|reduce|to-all)|reduce-scatter|collective-(?:permute|broadcast))(?:-start)?"
    r"|send|while|call|fusion|conditional|custom-call|async-start)\("
)
_GROUPS = re.compile(r"\breplica_groups=")
_PAIRS = re.compile(r"source_target_pairs=\"?(\{\{.*?\}\})")
_REMAT = "Involuntary full rematerialization"


def read_collectives(
    text: str,
    mesh_axes: Mapping[str, int],
    device_ids: NDArray[np.int64] | None = None,
    *,
    by_operand: bool = False,
) -> tuple[CollectiveOp, ...]:
    """Reads the collectives of a compiled program.

    Args:
        text: `compiled.as_text()`.
        mesh_axes: Name and size of every mesh axis, in mesh order.
        device_ids: Partition ids laid out as the mesh; None is row-major, which is what `jit` uses
            for a mesh.
        by_operand: One entry per operand: the compiler combines collectives of many values into
            one, which carries the source line of one of them; here each has the line of the
            instruction that made it.

    Returns:
        One entry per collective instruction and call site, in program order.
    """
    program = parse_program(text)
    return _Reader(program, MeshCoordinates(mesh_axes, device_ids), by_operand).read(program.entry)


def read_full_remat_warnings(stderr_text: str) -> int:
    r"""Counts the distinct "Involuntary full rematerialization" messages that the partitioner
    printed.

    >>> line = "E0000 spmd.cc:1] [spmd] Involuntary full rematerialization. The compiler was not able to go from A to B"
    >>> read_full_remat_warnings(f"I0 {line}\nI1 {line}\nother")
    1
    """
    found = (
        line[line.index(_REMAT) :].strip() for line in stderr_text.splitlines() if _REMAT in line
    )
    return len(set(found))


class _Reader:
    def __init__(self, program: HloProgram, mesh: MeshCoordinates, by_operand: bool) -> None:
        self._program = program
        self._split_by_operand = by_operand
        self._mesh = mesh
        self._read: dict[str, tuple[CollectiveOp, ...]] = {}
        self._spans: dict[str, tuple[tuple[str, ...], int]] = {}

    def read(self, name: str) -> tuple[CollectiveOp, ...]:
        """Collectives of one execution of a computation, those of called computations included."""
        if name not in self._read:
            self._read[name] = ()  # a computation never calls itself
            computation = self._program.computations.get(name)
            if computation is not None:
                ops = (
                    op
                    for i in computation.matching(_OPCODES)
                    for op in self._instruction(computation, i)
                )
                self._read[name] = tuple(ops)
        return self._read[name]

    def _instruction(
        self, computation: Computation, instruction: Instruction
    ) -> tuple[CollectiveOp, ...]:
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in _KINDS:
            op = self._collective(computation, instruction, _KINDS[opcode])
            if op is None or not self._split_by_operand:
                return (op,) if op is not None else ()
            return self._by_operand(computation, instruction, op)
        called = instruction.called()
        if opcode == "while":
            trips, known = trip_count(self._program, computation, instruction)
            inner = self.read(called["body"][0]) + self.read(called["condition"][0])
            return tuple(
                replace(
                    op,
                    trip_count=op.trip_count * trips,
                    trip_count_known=op.trip_count_known and known,
                )
                for op in inner
            )
        if opcode == "conditional":
            branches = [self.read(name) for names in called.values() for name in names]
            return max(branches, key=collective_bytes, default=())
        inner = tuple(op for names in called.values() for name in names for op in self.read(name))
        source, op_name = self._program.source(instruction), instruction.metadata("op_name")
        return tuple(
            replace(op, source=op.source or source, op_name=op.op_name or op_name) for op in inner
        )

    def _collective(
        self, computation: Computation, instruction: Instruction, kind: str
    ) -> CollectiveOp | None:
        if "async_collective_fusion_config" in instruction.attributes and not _starts(computation):
            return None
        axes, size = self._span(instruction)
        if size <= 1:
            return None
        shape = _result_shape(instruction)
        local = shape_bytes(shape)
        if kind == "all_reduce" and _keeps_a_slice(computation, instruction, local, size):
            kind, full = "reduce_scatter", local
        elif kind in ("reduce_scatter", "all_to_all"):
            full = local * size
        else:
            full = local
        return CollectiveOp(
            kind=kind,
            axes=axes,
            group_size=size,
            trip_count=1,
            full_bytes=full,
            sent_bytes=ring_bytes(kind, full, size),
            shape=without_layout(shape),
            source=self._program.source(instruction),
            op_name=instruction.metadata("op_name"),
        )

    def _by_operand(
        self, computation: Computation, instruction: Instruction, op: CollectiveOp
    ) -> tuple[CollectiveOp, ...]:
        """The same collective as one of each operand, with the operand's bytes and source line."""
        shapes, operands = tuple_elements(_result_shape(instruction)), instruction.operands
        if len(shapes) != len(operands) or len(operands) < 2:
            made = () if op.source or not operands else self._maker(computation, operands[0])
            return (replace(op, source=made[0], op_name=made[1]) if made else op,)
        whole = sum(map(shape_bytes, shapes))
        parts = []
        for shape, operand in zip(shapes, operands, strict=True):
            full = op.full_bytes * shape_bytes(shape) // max(whole, 1)
            source, op_name = self._maker(computation, operand) or (op.source, op.op_name)
            sent = ring_bytes(op.kind, full, op.group_size)
            parts.append(
                replace(
                    op,
                    full_bytes=full,
                    sent_bytes=sent,
                    shape=without_layout(shape),
                    source=source,
                    op_name=op_name,
                )
            )
        return tuple(parts)

    def _maker(self, computation: Computation, name: str) -> tuple[str, str] | tuple[()]:
        """Source line and name stack of what made a value, through copies and fusions; () where
        nothing says it.
        """
        for _ in range(32):
            instruction = computation.instructions.get(name)
            if instruction is None:
                return ()
            if source := self._program.source(instruction):
                return source, instruction.metadata("op_name")
            called = [
                c
                for names in instruction.called().values()
                for c in names
                if c in self._program.computations
            ]
            root = self._program.computations[called[0]].root if called else None
            if root is not None:
                computation, name = self._program.computations[called[0]], root.name
            elif instruction.operands:
                name = instruction.operands[0]
            else:
                return ()
        return ()

    def _span(self, instruction: Instruction) -> tuple[tuple[str, ...], int]:
        """Mesh axes and group size."""
        if pairs := _PAIRS.search(instruction.attributes):
            text = pairs[1]
        elif groups := _GROUPS.search(instruction.plain):
            text = instruction.plain[groups.end() :]
        elif instruction.opcode == "send":
            return (), 2  # to another slice or host: no partition ids
        else:
            text = "{}"
        text = (
            text[: text.index("}}") + 2] if text.startswith("{{") else text.split("}", 1)[0] + "}"
        )
        key = f"{bool(pairs)}{text}"
        if key not in self._spans:
            self._spans[key] = self._pairs_span(text) if pairs else self._groups_span(text)
        return self._spans[key]

    def _pairs_span(self, text: str) -> tuple[tuple[str, ...], int]:
        numbers = [int(number) for number in re.findall(r"\d+", text)]
        pairs = [
            pair for pair in zip(numbers[::2], numbers[1::2], strict=True) if pair[0] != pair[1]
        ]
        if not pairs:
            return (), 1
        axes = self._mesh.moved_along(pairs)
        moving = len({device for pair in pairs for device in pair})
        return axes, math.prod(self._mesh.sizes[axis] for axis in axes) if axes else moving

    def _groups_span(self, text: str) -> tuple[tuple[str, ...], int]:
        groups = parse_groups(text)
        if groups is None:
            groups = self._mesh.all_devices
        return self._mesh.spanned(groups), groups.shape[1]


def _starts(computation: Computation) -> bool:
    return any("AsyncCollectiveStart" in line for line in computation.lines)


def _result_shape(instruction: Instruction) -> str:
    """The shape of the result: an asynchronous start also carries its operands and context."""
    elements = tuple_elements(instruction.shape)
    if instruction.opcode == "send":
        return elements[0] if elements else instruction.shape
    carries_operands = instruction.opcode != "all-reduce-start" or instruction.shape.startswith(
        "(("
    )
    if instruction.opcode.endswith("-start") and carries_operands and len(elements) >= 2:
        return elements[1]
    return instruction.shape


def _keeps_a_slice(
    computation: Computation, instruction: Instruction, local: int, size: int
) -> bool:
    """True in a fusion that ends with the slice of an all-reduce that belongs to this device."""
    root = computation.root
    return (
        root is not None
        and root.opcode == "dynamic-slice"
        and instruction.name in root.operands
        and shape_bytes(root.shape) * size == local
    )
