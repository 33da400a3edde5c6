"""The collectives of a compiled program: kind, mesh axes, bytes, executions, source line.

What counts, and how often:

- the body of a loop counts as often as the loop runs (`known_trip_count` on CPU and GPU; on TPU
  start, step and bound of its counter; else once, and `trip_count_known` is False);
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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

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
    r" (?:(?:(?:ragged-)?all-(?:gather|reduce|to-all)|reduce-scatter"
    r"|collective-(?:permute|broadcast))(?:-start)?"
    r"|send|while|call|fusion|conditional|custom-call|async-start)\("
)
"""Collectives, and what may have some inside."""

_GROUPS = re.compile(r"\breplica_groups=")
_PAIRS = re.compile(r"source_target_pairs=\"?(\{\{.*?\}\})")
_REMAT = "Involuntary full rematerialization"

_MAX_STEPS_BACK = 32
"""How many copies and fusions are looked through for the source line of a value. Chosen by hand:
chains are a few instructions long, and a broken program must not hang. No test depends on it."""


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
    r"""Counts the distinct "Involuntary full rematerialization" messages of the partitioner.

    >>> warning = "spmd.cc:1] [spmd] Involuntary full rematerialization. It cannot go from A to B"
    >>> read_full_remat_warnings(f"E0 {warning}\nE1 {warning}\nother")
    1
    """
    messages = set()
    for line in stderr_text.splitlines():
        _, separator, message = line.partition(_REMAT)
        if separator:
            messages.add(message.strip())
    return len(messages)


class _Span(NamedTuple):
    """The mesh axes that a collective spans, and how many devices are in one of its groups."""

    axes: tuple[str, ...]
    group_size: int


class _Reader:
    def __init__(self, program: HloProgram, mesh: MeshCoordinates, by_operand: bool) -> None:
        self._program = program
        self._split_by_operand = by_operand
        self._mesh = mesh
        self._read: dict[str, tuple[CollectiveOp, ...]] = {}
        self._spans: dict[tuple[bool, str], _Span] = {}

    def read(self, name: str) -> tuple[CollectiveOp, ...]:
        """Collectives of one execution of a computation, those of called computations included."""
        if name not in self._read:
            self._read[name] = ()  # a computation never calls itself
            computation = self._program.computations.get(name)
            if computation is not None:
                ops: list[CollectiveOp] = []
                for instruction in computation.matching(_OPCODES):
                    ops += self._instruction(computation, instruction)
                self._read[name] = tuple(ops)
        return self._read[name]

    def _instruction(
        self, computation: Computation, instruction: Instruction
    ) -> Sequence[CollectiveOp]:
        """Collectives of one execution of an instruction."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in _KINDS:
            return self._collectives(computation, instruction, _KINDS[opcode])
        if opcode == "while":
            return self._loop(computation, instruction)
        if opcode == "conditional":
            branches = [self.read(name) for name in instruction.all_called()]
            return max(branches, key=collective_bytes, default=())
        return self._call(instruction)

    def _collectives(
        self, computation: Computation, instruction: Instruction, kind: str
    ) -> Sequence[CollectiveOp]:
        op = self._collective(computation, instruction, kind)
        if op is None:
            return ()
        return self._by_operand(computation, instruction, op) if self._split_by_operand else (op,)

    def _loop(self, computation: Computation, loop: Instruction) -> list[CollectiveOp]:
        count, known = trip_count(self._program, computation, loop)
        called = loop.called()
        ops = []
        for op in self.read(called["body"][0]) + self.read(called["condition"][0]):
            known_too = op.trip_count_known and known
            ops.append(replace(op, trip_count=op.trip_count * count, trip_count_known=known_too))
        return ops

    def _call(self, instruction: Instruction) -> list[CollectiveOp]:
        """Collectives inside a call or fusion; one without a source line has that of the call."""
        source, op_name = self._program.source(instruction), instruction.metadata("op_name")
        ops = []
        for name in instruction.all_called():
            for op in self.read(name):
                ops.append(replace(op, source=op.source or source, op_name=op.op_name or op_name))
        return ops

    def _collective(
        self, computation: Computation, instruction: Instruction, kind: str
    ) -> CollectiveOp | None:
        """A collective; None for one that sends nothing, or is counted elsewhere."""
        if "async_collective_fusion_config" in instruction.attributes and not _starts(computation):
            return None
        axes, size = self._span(instruction)
        if size <= 1:
            return None
        shape = _result_shape(instruction)
        full_bytes = shape_bytes(shape)
        if kind == "all_reduce" and _keeps_a_slice(computation, instruction, full_bytes, size):
            kind = "reduce_scatter"
        elif kind in ("reduce_scatter", "all_to_all"):
            full_bytes *= size  # the result is of one device
        return CollectiveOp(
            kind=kind,
            axes=axes,
            group_size=size,
            trip_count=1,
            full_bytes=full_bytes,
            sent_bytes=ring_bytes(kind, full_bytes, size),
            shape=without_layout(shape),
            source=self._program.source(instruction),
            op_name=instruction.metadata("op_name"),
        )

    def _by_operand(
        self, computation: Computation, instruction: Instruction, op: CollectiveOp
    ) -> Sequence[CollectiveOp]:
        """The same collective as one of each operand, with the operand's bytes and source line."""
        shapes, operands = tuple_elements(_result_shape(instruction)), instruction.operands
        if len(shapes) != len(operands) or len(operands) < 2:
            if not op.source and operands:
                op = self._with_source_of(op, computation, operands[0])
            return (op,)
        whole_bytes = max(sum(map(shape_bytes, shapes)), 1)
        ops = []
        for shape, operand in zip(shapes, operands, strict=True):
            full_bytes = op.full_bytes * shape_bytes(shape) // whole_bytes
            own = replace(
                op,
                full_bytes=full_bytes,
                sent_bytes=ring_bytes(op.kind, full_bytes, op.group_size),
                shape=without_layout(shape),
            )
            ops.append(self._with_source_of(own, computation, operand))
        return ops

    def _with_source_of(
        self, op: CollectiveOp, computation: Computation, name: str
    ) -> CollectiveOp:
        """The collective with source line and name stack of the producer of a value, through copies
        and fusions; as it is where nothing states them.
        """
        for _ in range(_MAX_STEPS_BACK):
            instruction = computation.instructions.get(name)
            if instruction is None:
                return op
            source = self._program.source(instruction)
            if source:
                return replace(op, source=source, op_name=instruction.metadata("op_name"))
            callee = self._first_callee(instruction)
            if callee is not None and callee.root is not None:
                computation, name = callee, callee.root.name
            elif instruction.operands:
                name = instruction.operands[0]
            else:
                return op
        return op

    def _first_callee(self, instruction: Instruction) -> Computation | None:
        for name in instruction.all_called():
            if name in self._program.computations:
                return self._program.computations[name]
        return None

    def _span(self, instruction: Instruction) -> _Span:
        """What a collective spans; read once for each way that it is written."""
        pairs = _PAIRS.search(instruction.attributes)
        groups = _GROUPS.search(instruction.plain)
        if pairs:
            text = pairs[1]
        elif groups:
            text = _first_list(instruction.plain[groups.end() :])
        elif instruction.opcode == "send":
            return _Span((), 2)  # to another slice or host: no partition ids
        else:
            text = "{}"
        key = bool(pairs), text
        if key not in self._spans:
            self._spans[key] = self._span_of_pairs(text) if pairs else self._span_of_groups(text)
        return self._spans[key]

    def _span_of_pairs(self, text: str) -> _Span:
        numbers = [int(number) for number in re.findall(r"\d+", text)]
        pairs = []
        for source, target in zip(numbers[::2], numbers[1::2], strict=True):
            if source != target:
                pairs.append((source, target))
        if not pairs:
            return _Span((), 1)
        axes = self._mesh.moved_along(pairs)
        if axes:
            return _Span(axes, math.prod(self._mesh.sizes[axis] for axis in axes))
        return _Span((), len({device for pair in pairs for device in pair}))

    def _span_of_groups(self, text: str) -> _Span:
        groups = parse_groups(text)
        if groups is None:
            groups = self._mesh.all_devices
        return _Span(self._mesh.spanned(groups), groups.shape[1])


def _first_list(text: str) -> str:
    """The list that attributes begin with: `{{0,1},{2,3}}`, or up to the first closing brace."""
    if text.startswith("{{"):
        return text[: text.index("}}") + 2]
    return text.split("}", 1)[0] + "}"


def _starts(computation: Computation) -> bool:
    """True in the fusion in which the TPU compiler starts an asynchronous collective."""
    return any("AsyncCollectiveStart" in line for line in computation.lines)


def _result_shape(instruction: Instruction) -> str:
    """The shape of the result: an asynchronous start also carries its operands and context."""
    elements = tuple_elements(instruction.shape)
    if instruction.opcode == "send":
        return elements[0] if elements else instruction.shape
    if not instruction.opcode.endswith("-start") or len(elements) < 2:
        return instruction.shape
    # An all-reduce-start has its results alone, unless it is written as ((operands), (results)).
    if instruction.opcode == "all-reduce-start" and not instruction.shape.startswith("(("):
        return instruction.shape
    return elements[1]


def _keeps_a_slice(
    computation: Computation, instruction: Instruction, local_bytes: int, size: int
) -> bool:
    """True in a fusion that ends with the slice of an all-reduce that belongs to this device."""
    root = computation.root
    return (
        root is not None
        and root.opcode == "dynamic-slice"
        and instruction.name in root.operands
        and shape_bytes(root.shape) * size == local_bytes
    )
