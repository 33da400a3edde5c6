"""How often a while loop of a compiled program runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.compiler.hlo_text import Computation, HloProgram, Instruction

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INTEGER = re.compile(r"-?\d+")
_SAME = ("copy", "bitcast", "reshape", "copy-done", "convert")


@dataclass(frozen=True, slots=True)
class _Place:
    """A value: an instruction of a computation; inside a fusion, with the values its parameters
    stand for.
    """

    program: HloProgram
    computation: Computation
    name: str
    arguments: Mapping[int, _Place] = field(default_factory=dict)

    def resolve(self) -> tuple[_Place, Instruction] | None:
        """The instruction that makes the value, behind copies and fusions."""
        instruction = self.computation.instructions.get(self.name)
        if instruction is None:
            return None
        if instruction.opcode == "parameter" and self.arguments:
            argument = self.arguments.get(int(instruction.operand_text))
            return argument.resolve() if argument is not None else None
        if instruction.opcode in _SAME:
            return self.operand(instruction, 0).resolve()
        if instruction.opcode == "copy-start":
            return self.operand(instruction, 0).resolve()
        if instruction.opcode == "fusion" and not instruction.shape.startswith("("):
            callee = self.program.computations.get(instruction.called().get("calls", ("",))[0])
            if callee is None or callee.root is None:
                return None
            arguments = {k: self.operand(instruction, k) for k in range(len(instruction.operands))}
            return _Place(self.program, callee, callee.root.name, arguments).resolve()
        return self, instruction

    def operand(self, instruction: Instruction, index: int) -> _Place:
        """The value of one operand of an instruction of this place's computation."""
        return _Place(self.program, self.computation, instruction.operands[index], self.arguments)

    def integer(self) -> int | None:
        """Its value if it is an integer constant."""
        found = self.resolve()
        if found is None or found[1].opcode != "constant":
            return None
        match = _INTEGER.fullmatch(found[1].operand_text.strip())
        return int(match[0]) if match else None

    def tuple_index(self) -> int | None:
        """Its place in the loop's state, None if it is no element of it."""
        found = self.resolve()
        if found is None or found[1].opcode != "get-tuple-element":
            return None
        match = re.search(r"\bindex=(\d+)", found[1].plain)
        return int(match[1]) if match else None


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
    if known := _KNOWN.search(loop.attributes):
        return int(known[1]), True
    called = loop.called()
    condition = program.computations.get(called.get("condition", ("",))[0])
    body = program.computations.get(called.get("body", ("",))[0])
    if condition is None or body is None or condition.root is None:
        return 1, False
    bounded = _bound(_Place(program, condition, condition.root.name))
    if bounded is None:
        return 1, False
    index, bound = bounded
    start = _element(_Place(program, computation, loop.operands[0]), index)
    first = start.integer() if start is not None else None
    step = _step(program, body, index)
    if first is None or step is None:
        return 1, False
    return max(0, -(-(bound - first) // step)), True


def _bound(root: _Place) -> tuple[int, int] | None:
    """The numbers (k, n) of a condition `state[k] < n`."""
    found = root.resolve()
    if found is None or found[1].opcode != "compare":
        return None
    place, compare = found
    direction = re.search(r"\bdirection=(\w+)", compare.plain)
    left, right = place.operand(compare, 0), place.operand(compare, 1)
    word = direction[1] if direction else ""
    if left.tuple_index() is None:
        left, right = right, left
        word = {"GT": "LT", "GE": "LE"}.get(word, "")
    index, bound = left.tuple_index(), right.integer()
    if index is None or bound is None or word not in ("LT", "LE"):
        return None
    return index, bound + (word == "LE")


def _element(state: _Place, index: int) -> _Place | None:
    found = state.resolve()
    if found is None or found[1].opcode != "tuple" or index >= len(found[1].operands):
        return None
    return found[0].operand(found[1], index)


def _step(program: HloProgram, body: Computation, index: int) -> int | None:
    """By how much a body increases state[index], None if not by a positive constant."""
    if body.root is None:
        return None
    counter = _element(_Place(program, body, body.root.name), index)
    found = counter.resolve() if counter is not None else None
    if found is None or found[1].opcode != "add":
        return None
    place, add = found
    left, right = place.operand(add, 0), place.operand(add, 1)
    for value, step in ((left, right.integer()), (right, left.integer())):
        if value.tuple_index() == index and step is not None and step > 0:
            return step
    return None
