"""The text of a compiled program (`compiled.as_text()`) as computations and instructions.

Only what its readers need: instruction names, shapes, operands, called computations and attributes,
of CPU, TPU and GPU programs. jaxlib's own parser of this text aborts the process on some programs,
so it is never used.

Lines are split first and parsed on demand: most instructions are arithmetic, which nobody asks for.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) .*\{\s*$")
_NAME = re.compile(r"\s+(ROOT )?%?(\S+) = ")
_PARENTHESIS = re.compile(r'[()]|"(?:[^"\\]|\\.)*"')  # or a quoted string, which may hold some
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LISTS = re.compile(r"\b(branch_computations|called_computations|calls)=\{([^}]*)\}")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=? ]*)\]")
_LAYOUT = re.compile(r"\{[^{}]*\}")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_TABLE_ROW = re.compile(r"(\d+) (.*)")
_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
"""Bits of the types whose name does not end in them, or does not mean them (xla_data.proto)."""


def shape_bytes(text: str) -> int:
    """Bytes of a shape, all arrays of a tuple together.

    >>> shape_bytes("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}")
    2048
    >>> shape_bytes("(f32[4], s4[5], f8e4m3fn[2], token[])")
    21
    """
    return sum(_array_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(text))


def _array_bytes(dtype: str, dims: str) -> int:
    bits = _BITS.get(dtype)
    if bits is None:
        digits = re.match(r"[a-z]+(\d+)", dtype)
        bits = int(digits[1]) if digits else 0
    elements = math.prod(int(size) for size in re.findall(r"\d+", dims))
    return math.ceil(elements * bits / 8)  # types below a byte are packed


def without_layout(shape: str) -> str:
    """A shape without layouts and index comments (`(f32[4], f32[2,2])`)."""
    return re.sub(r"/\*.*?\*/", "", _LAYOUT.sub("", shape))


def tuple_elements(shape: str) -> tuple[str, ...]:
    """The elements of a tuple shape, () if it is an array.

    >>> tuple_elements("((f32[1]{0:T(8)}, f32[2]), f32[4,8])")
    ('(f32[1]{0:T(8)}, f32[2])', 'f32[4,8]')
    """
    if not shape.startswith("("):
        return ()
    parts: list[str] = []
    depth, start = 0, 1
    for match in re.finditer(r"[()\[\]{},]", shape):
        mark = match[0]  # layouts have commas in braces, and parentheses inside those
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
        if (mark == "," and depth == 1) or depth == 0:
            parts.append(re.sub(r"/\*.*?\*/", "", shape[start : match.start()]).strip())
            start = match.end()
    return tuple(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        name: Without the `%`.
        root: Whether its value is what the computation returns.
        shape: Of the result.
        opcode: What it does.
        operand_text: What stands between the parentheses.
        attributes: All text after them.
    """

    name: str
    root: bool
    shape: str
    opcode: str
    operand_text: str
    attributes: str

    @property
    def plain(self) -> str:
        """The attributes with quoted strings emptied: user text in them may look like one."""
        return _QUOTED.sub('""', self.attributes)

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        names = re.findall(r"%([\w.\-]+)", self.operand_text)
        if not names and self.opcode not in ("parameter", "constant"):
            # Some printers leave the % out: `add(f32[4] a, f32[4] b)`.
            names = [part.split()[-1] for part in self.operand_text.split(",") if part.strip()]
        return tuple(names)

    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the called computations by attribute (`body`, `condition`, `calls`,
        `branch_computations`, ...).
        """
        plain = self.plain
        called: dict[str, tuple[str, ...]] = {key: (name,) for key, name in _CALLED.findall(plain)}
        for key, names in _CALLED_LISTS.findall(plain):
            called[key] = tuple(name.strip().lstrip("%") for name in names.split(","))
        return called

    def all_called(self) -> list[str]:
        """Names of the called computations."""
        return [name for names in self.called().values() for name in names]

    def metadata(self, key: str) -> str:
        """A field of `metadata={...}`, "" if absent."""
        match = re.search(rf'\b{key}=(?:"((?:[^"\\]|\\.)*)"|(\d+))', self.attributes)
        return (match[1] or match[2] or "") if match else ""


def parse_instruction(line: str) -> Instruction | None:
    """One line of a computation; None for a comment, or the rest of a long constant."""
    head = _NAME.match(line)
    if head is None:
        return None
    start = head.end()
    end = _closing(line, start) + 1 if line.startswith("(", start) else line.find(" ", start)
    opening = line.find("(", end)
    if end <= 0 or opening < 0:
        return None
    closing = _closing(line, opening)
    opcode = line[end:opening].strip()
    return Instruction(
        head[2],
        head[1] is not None,
        line[start:end],
        opcode,
        line[opening + 1 : closing],
        line[closing + 1 :],
    )


def _closing(line: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`; the line's length if none does."""
    depth = 0
    for match in _PARENTHESIS.finditer(line, opening):
        if match[0] == "(":
            depth += 1
        elif match[0] == ")":
            depth -= 1
            if depth == 0:
                return match.start()
    return len(line)


class Computation:
    """The lines of one computation, parsed on demand."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[str] = []

    @functools.cached_property
    def instructions(self) -> Mapping[str, Instruction]:
        """All instructions by name."""
        parsed = (parse_instruction(line) for line in self.lines)
        return {instruction.name: instruction for instruction in parsed if instruction is not None}

    @property
    def root(self) -> Instruction | None:
        """The instruction whose value the computation returns."""
        roots = (line for line in reversed(self.lines) if line.lstrip().startswith("ROOT "))
        line = next(roots, None)
        return parse_instruction(line) if line is not None else None

    def matching(self, opcodes: re.Pattern[str]) -> Iterator[Instruction]:
        """Instructions whose opcode matches, in program order; other lines are not parsed."""
        for line in self.lines:
            if opcodes.search(line):
                instruction = parse_instruction(line)
                if instruction is not None and opcodes.fullmatch(f" {instruction.opcode}("):
                    yield instruction


@dataclass(frozen=True, slots=True)
class HloProgram:
    """A compiled program.

    Attributes:
        entry: Name of the computation that it begins with.
        computations: By name.
        frames: `file:line` by the number of a stack frame.
    """

    entry: str
    computations: Mapping[str, Computation]
    frames: Mapping[str, str]

    def source(self, instruction: Instruction) -> str:
        """`file.py:line` of an instruction, or "": from its stack frame or its own metadata."""
        if frame := instruction.metadata("stack_frame_id"):
            return self.frames.get(frame, "")
        file, line = instruction.metadata("source_file"), instruction.metadata("source_line")
        return f"{PurePath(file).name}:{line}" if file and line else ""


def parse_program(text: str) -> HloProgram:
    """Splits the text of a compiled program into computations; leaves out what is unknown to it."""
    splitter = _Splitter()
    for line in text.splitlines():
        if line.startswith(" "):  # most of them
            splitter.lines.append(line)
        else:
            splitter.take(line)
    return HloProgram(splitter.entry, splitter.computations, _frames(splitter.tables))


class _Splitter:
    """What was read of a program so far.

    Attributes:
        entry: Name of the computation that it begins with.
        computations: By name.
        tables: Rows by number, by the name of the table.
        lines: Where an indented line belongs; what is outside computations is dropped.
    """

    def __init__(self) -> None:
        self.entry = ""
        self.computations: dict[str, Computation] = {}
        self.tables: dict[str, dict[str, str]] = {}
        self.lines: list[str] = []
        self._table: dict[str, str] | None = None

    def take(self, line: str) -> None:
        """Takes the next line that is not indented."""
        if line in _TABLES:
            self._table = self.tables.setdefault(line, {})
        elif self._table is not None and (row := _TABLE_ROW.fullmatch(line)):
            self._table[row[1]] = row[2]
        elif line.startswith("}"):
            self.lines = []
        elif not line.startswith("HloModule") and (head := _HEADER.match(line)):
            self._begin(head[2], is_entry=head[1] is not None)

    def _begin(self, name: str, *, is_entry: bool) -> None:
        computation = Computation(name)
        self.computations[name] = computation
        self.lines = computation.lines
        self._table = None
        if is_entry:
            self.entry = name


def _frames(tables: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """`file:line` by the number of a stack frame: frames name locations, and these name files."""
    files = {
        number: PurePath(name.strip('"')).name
        for number, name in tables.get("FileNames", {}).items()
    }
    locations = {}
    for number, row in tables.get("FileLocations", {}).items():
        match = re.search(r"file_name_id=(\d+).*?\bline=(\d+)", row)
        if match:
            locations[number] = f"{files.get(match[1], '')}:{match[2]}"
    frames = {}
    for number, row in tables.get("StackFrames", {}).items():
        match = re.search(r"file_location_id=(\d+)", row)
        if match and match[1] in locations:
            frames[number] = locations[match[1]]
    return frames
