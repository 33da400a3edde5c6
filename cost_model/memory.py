"""Peak memory by liveness, as a table: rows are program points, columns are signatures, entries are global bytes alive.

For a candidate the peak is the maximum over rows of (bytes alive / pieces each signature is cut into), plus what the
point itself gathers. The rules:

- a result that only fusing primitives read is never stored, and what it was computed from lives until its last reader
  (an expensive one, such as exp, with two readers is stored all the same);
- donated arguments die at their last use, others live to the end; outputs live from where they are made;
- the points of a loop body add to what is alive around the loop: stacked results from its start, one slice of each
  scanned operand, carries once (XLA updates them in place); bodies that are no loops share their operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_model.compute import EXPENSIVE, FUSED, REDUCTIONS
from autoshard.program import Body, Eqn, Program, Value

END = 1 << 60


@dataclass(frozen=True, eq=False)
class MemoryTable:
    """Bytes alive at each program point, points in program order (the points of a body lie together).

    Attributes:
        alive_bytes: [points, columns] global bytes alive.
        point_eqn: For each point the `Eqn.index` that runs there.
        point_of: By `Eqn.index`, its point; of an equation with bodies, the last of theirs.
    """

    alive_bytes: NDArray[np.float64]
    point_eqn: NDArray[np.int64]
    point_of: NDArray[np.int64]


def memory_table(
    program: Program, donated: Sequence[bool], columns: int, column_of: Callable[[Value], int]
) -> MemoryTable:
    """Builds the table.

    Args:
        program: The program.
        donated: For each argument leaf, whether its buffer may be reused.
        columns: Number of columns.
        column_of: Column of a value: values of one column are always cut into equally many pieces.
    """
    rows: list[NDArray[np.float64]] = []
    point_eqn: list[int] = []
    point_of = np.zeros(len(program.eqns), dtype=np.int64)

    def add(alive: Counter[Value], eqn: Eqn) -> None:
        row = np.zeros(columns)
        for value, copies in alive.items():
            row[column_of(value)] += copies * value.bytes
        rows.append(row)
        point_eqn.append(eqn.index)

    def visit(body: Body, around: Counter[Value], owned: Sequence[Value], keep: frozenset[Value]) -> None:
        """Points of a body. `owned` inputs count here, the others are counted by whoever calls; `keep` never dies."""
        last, stored = _last_uses(body)
        alive: Counter[Value] = Counter(owned)
        for value in keep:
            last[value] = END
        dying: dict[int, list[Value]] = {}
        for value, position in last.items():
            dying.setdefault(position, []).append(value)
        for position, eqn in enumerate(body.eqns):
            loop = eqn.primitive in ("scan", "while")
            made = Counter(v for v in eqn.outputs if v in stored)
            if eqn.bodies:
                outside = around + alive
                if loop:
                    carried = {t.outer for t in eqn.ties if t.flow.value == "back"}
                    starts = {t.outer for t in eqn.ties if t.flow.value == "in" and _carried_in(eqn, t.inner)}
                    outside += made + Counter(v for v in carried if v not in made)
                    outside -= Counter(v for v in starts if last.get(v) == position and v in alive)
                slices = {t.inner for t in eqn.ties if t.offset and t.flow.value == "in"}
                for inner in eqn.bodies:
                    visit(inner, outside, [v for v in inner.inputs if v in slices], frozenset())
                if not loop:
                    alive += made
                    add(around + alive, eqn)
                else:
                    alive += made
            else:
                alive += made
                add(around + alive, eqn)
            point_of[eqn.index] = len(rows) - 1
            for value in dying.get(position, ()):
                alive.pop(value, None)

    inputs = program.body.inputs
    keep = frozenset(v for v, gone in zip(inputs, donated, strict=True) if not gone)
    visit(program.body, Counter(), [*inputs, *program.body.consts], keep)
    table = np.array(rows).reshape(len(rows), columns)
    return MemoryTable(table, np.array(point_eqn, dtype=np.int64), np.maximum(point_of, 0))


def _carried_in(eqn: Eqn, inner: Value) -> bool:
    return any(start is inner for start, _ in eqn.carries)


def _last_uses(body: Body) -> tuple[dict[Value, int], set[Value]]:
    """Position of the last use of each value of a body, and the values that are stored at all."""
    outputs = set(body.outputs)
    readers: dict[Value, list[Eqn]] = {}
    for eqn in body.eqns:
        for value in eqn.inputs:
            readers.setdefault(value, []).append(eqn)
    stored: set[Value] = set()
    for eqn in body.eqns:
        for value in eqn.outputs:
            own = readers.get(value, ())
            fuses = eqn.primitive in FUSED and all(r.primitive in FUSED or r.primitive in REDUCTIONS for r in own)
            if eqn.primitive in EXPENSIVE and len(own) > 1:
                fuses = False
            if value in outputs or (not fuses and value in readers):
                stored.add(value)
    last: dict[Value, int] = dict.fromkeys(outputs, END)
    for position in range(len(body.eqns) - 1, -1, -1):
        eqn = body.eqns[position]
        virtual = [last.get(v, position) for v in eqn.outputs if v not in stored]
        until = max([position, *virtual])
        for value in eqn.inputs:
            last[value] = max(last.get(value, -1), until)
    return last, stored
