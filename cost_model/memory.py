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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_model.compute import EXPENSIVE, FUSED, REDUCTIONS
from autoshard.program import Body, Eqn, Flow, Program, Value

END = 1 << 60
LOOPS = frozenset({"scan", "while"})


@dataclass(frozen=True, eq=False)
class MemoryTable:
    """Bytes alive at each program point, points in program order (the points of a body lie together).

    Attributes:
        alive_bytes: [points, columns] global bytes alive.
        point_eqn: For each point the `Eqn.index` that runs there.
        point_of: By `Eqn.index`, its point (the one before where it has none); with bodies, the last of theirs.
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

    def bytes_of(values: Iterable[Value]) -> NDArray[np.float64]:
        row = np.zeros(columns)
        for value in values:
            row[column_of(value)] += value.bytes
        return row

    def visit(body: Body, around: NDArray[np.float64], owned: Iterable[Value], keep: frozenset[Value]) -> None:
        """Points of a body. `owned` inputs count here, the others are counted by whoever calls; `keep` never dies."""
        last, stored = _last_uses(body)
        last |= dict.fromkeys(keep, END)
        dying: dict[int, list[Value]] = {}
        for value, position in last.items():
            dying.setdefault(position, []).append(value)
        alive = set(owned)
        row = around + bytes_of(alive)
        for position, eqn in enumerate(body.eqns):
            made = {v for v in eqn.outputs if v in stored} - alive
            if eqn.bodies:
                outside = row
                if eqn.primitive in LOOPS:  # results exist from the start; a carry that ends here becomes its result
                    carried = {t.outer for t in eqn.ties if t.flow is Flow.BACK}
                    begins = {start for start, _ in eqn.carries}
                    starts = {t.outer for t in eqn.ties if t.flow is Flow.IN and t.inner in begins}
                    ending = {v for v in starts if last.get(v) == position and v in alive}
                    outside = row + bytes_of(made | carried) - bytes_of(ending)
                slices = {t.inner for t in eqn.ties if t.offset and t.flow is Flow.IN}
                for inner in eqn.bodies:
                    visit(inner, outside, [v for v in inner.inputs if v in slices], frozenset())
            alive |= made
            row = row + bytes_of(made)
            # A point that stores nothing new and only fuses holds no more than the one before.
            if eqn.primitive not in LOOPS and (made or eqn.primitive not in FUSED or not rows):
                rows.append(row)
                point_eqn.append(eqn.index)
            point_of[eqn.index] = len(rows) - 1
            dead = alive.intersection(dying.get(position, ()))
            if dead:
                alive -= dead
                row = row - bytes_of(dead)

    inputs = program.body.inputs
    keep = frozenset(v for v, gone in zip(inputs, donated, strict=True) if not gone)
    visit(program.body, np.zeros(columns), [*inputs, *program.body.consts], keep)
    table = np.array(rows).reshape(len(rows), columns)
    return MemoryTable(table, np.array(point_eqn, dtype=np.int64), np.maximum(point_of, 0))


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
