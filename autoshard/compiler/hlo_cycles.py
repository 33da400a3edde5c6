"""The TPU compiler's own estimate of compute: `"estimated_cycles"` of a program's operations.

Each fusion, convolution, copy and custom call carries one, for one execution; collectives carry
none. Loop bodies count as often as the loop runs, and of a conditional the longest branch does, as
in `hlo_collectives`.

Only programs compiled at the full level carry estimates worth the name. An operation without one
(2^64 - 1 stands in there too) counts as nothing.
"""

from __future__ import annotations

import re

from autoshard.compiler.hlo_text import Computation, HloProgram, Instruction, parse_program
from autoshard.compiler.hlo_trip_counts import trip_count

_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')

_UNKNOWN = 2**62
"""From here on no estimate: the compiler writes 2^64 - 1 where it has none, and no step takes as
many cycles. `test_cycles_count_loops_and_the_longest_branch` has one."""

_CALLS = re.compile(r" (?:while|conditional|call|async-start)\(")


def read_cycles(text: str) -> int | None:
    """Estimated cycles of one call of a program, collectives left out; None where the compiler
    estimated nothing.
    """
    if not _CYCLES.search(text):
        return None
    program = parse_program(text)
    return _Reader(program).read(program.entry)


class _Reader:
    def __init__(self, program: HloProgram) -> None:
        self._program = program
        self._read: dict[str, int] = {}

    def read(self, name: str) -> int:
        """Cycles of one execution of a computation."""
        if name not in self._read:
            self._read[name] = 0  # a computation never calls itself
            computation = self._program.computations.get(name)
            if computation is not None:
                own = sum(_own(line) for line in computation.lines)
                called = sum(self._called(computation, i) for i in computation.matching(_CALLS))
                self._read[name] = own + called
        return self._read[name]

    def _called(self, computation: Computation, instruction: Instruction) -> int:
        if instruction.opcode == "while":
            called = instruction.called()
            count, _ = trip_count(self._program, computation, instruction)
            return count * (self.read(called["body"][0]) + self.read(called["condition"][0]))
        inner = [self.read(name) for name in instruction.all_called()]
        return max(inner, default=0) if instruction.opcode == "conditional" else sum(inner)


def _own(line: str) -> int:
    """The estimate that a line carries, 0 where it carries none."""
    estimate = _CYCLES.search(line)
    cycles = int(estimate[1]) if estimate else 0
    return cycles if cycles < _UNKNOWN else 0
