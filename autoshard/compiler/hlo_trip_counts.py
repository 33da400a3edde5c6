"""How often a while loop of a compiled program runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoshard.compiler.hlo_text import Computation, HloProgram, Instruction

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INTEGER = re.compile(r"-?\d+")
_FORWARDS = ("copy", "copy-start", "copy-done", "bitcast", "reshape", "convert")
"""Operations of a counter whose result is the number of their first operand."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A value: an instruction of a computation; inside a fusion, with the values that its
    parameters stand for.
    """

    program: HloProgram
    computation: Computation
    name: str
    arguments: Mapping[int, _Value] = field(default_factory=dict)

    def producer(self, opcode: str) -> _Producer | None:
        """The instruction that produces the value, behind copies and fusions, if it is of this
        opcode.
        """
        producer = self._producer()
        return producer if producer is not None and producer.instruction.opcode == opcode else None

    def _producer(self) -> _Producer | None:
        instruction = self.computation.instructions.get(self.name)
        if instruction is None:
            return None
        producer = _Producer(self, instruction)
        before: _Value | None
        if instruction.opcode == "parameter" and self.arguments:
            before = self.arguments.get(int(instruction.operand_text))
        elif instruction.opcode in _FORWARDS:
            before = producer.operand(0)
        elif instruction.opcode == "fusion" and not instruction.shape.startswith("("):
            before = producer.fused_root()
        else:
            return producer
        return None if before is None else before._producer()

    def integer(self) -> int | None:
        """Its value if it is an integer constant."""
        constant = self.producer("constant")
        if constant is None:
            return None
        match = _INTEGER.fullmatch(constant.instruction.operand_text.strip())
        return int(match[0]) if match else None

    def tuple_index(self) -> int | None:
        """Its position in the loop's state, None if it is no element of it."""
        element = self.producer("get-tuple-element")
        if element is None:
            return None
        match = re.search(r"\bindex=(\d+)", element.instruction.plain)
        return int(match[1]) if match else None

    def element(self, index: int) -> _Value | None:
        """An element of it, if it is a tuple."""
        elements = self.producer("tuple")
        if elements is None or index >= len(elements.instruction.operands):
            return None
        return elements.operand(index)


@dataclass(frozen=True, slots=True)
class _Producer:
    """The instruction that produces a value."""

    value: _Value
    instruction: Instruction

    def operand(self, index: int) -> _Value:
        """The value of one operand."""
        return replace(self.value, name=self.instruction.operands[index])

    def fused_root(self) -> _Value | None:
        """Of a fusion: the value that its computation returns, given the fusion's operands."""
        callees = self.instruction.called().get("calls", ("",))
        callee = self.value.program.computations.get(callees[0])
        if callee is None or callee.root is None:
            return None
        operands = range(len(self.instruction.operands))
        arguments = {number: self.operand(number) for number in operands}
        return _Value(self.value.program, callee, callee.root.name, arguments)


def trip_count(
    program: HloProgram, computation: Computation, loop: Instruction
) -> tuple[int, bool]:
    """Executions of a loop's body per execution of the loop.

    Args:
        program: The compiled program.
        computation: The computation that holds the loop.
        loop: A `while` instruction.

    Returns:
        The count and whether it is known; (1, False) if the loop's end depends on data.
    """
    known = _KNOWN.search(loop.attributes)
    count = int(known[1]) if known else _counted(program, computation, loop)
    return (1, False) if count is None else (count, True)


def _counted(program: HloProgram, computation: Computation, loop: Instruction) -> int | None:
    """The trip count by start, step and bound of a counter; None if one is not constant."""
    called = loop.called()
    condition = program.computations.get(called.get("condition", ("",))[0])
    body = program.computations.get(called.get("body", ("",))[0])
    if condition is None or body is None or condition.root is None:
        return None
    counter = _bound(_Value(program, condition, condition.root.name))
    if counter is None:
        return None
    index, bound = counter
    before = _Value(program, computation, loop.operands[0]).element(index)
    start = before.integer() if before is not None else None
    step = _step(program, body, index)
    if start is None or step is None:
        return None
    return max(0, -(-(bound - start) // step))


def _bound(root: _Value) -> tuple[int, int] | None:
    """The numbers (k, n) of a condition `state[k] < n`."""
    compare = root.producer("compare")
    if compare is None:
        return None
    match = re.search(r"\bdirection=(\w+)", compare.instruction.plain)
    direction = match[1] if match else ""
    left, right = compare.operand(0), compare.operand(1)
    if left.tuple_index() is None:  # written the other way round: n > state[k]
        left, right = right, left
        direction = {"GT": "LT", "GE": "LE"}.get(direction, "")
    index, bound = left.tuple_index(), right.integer()
    if index is None or bound is None:
        return None
    if direction == "LT":
        return index, bound
    return (index, bound + 1) if direction == "LE" else None


def _step(program: HloProgram, body: Computation, index: int) -> int | None:
    """By how much a body increases state[index], None if not by a positive constant."""
    if body.root is None:
        return None
    counter = _Value(program, body, body.root.name).element(index)
    add = counter.producer("add") if counter is not None else None
    if add is None:
        return None
    left, right = add.operand(0), add.operand(1)
    for value, step in ((left, right.integer()), (right, left.integer())):
        if value.tuple_index() == index and step is not None and step > 0:
            return step
    return None
