"""Peak memory by liveness, as a table: rows are program points, columns are signatures, entries are
global bytes alive.

For a candidate the peak is the maximum over rows of (bytes alive / pieces each signature is cut
into), plus what the point itself gathers. The rules:

- a result that only fusing primitives read is never stored, and what it was computed from lives
  until its last reader (an expensive one, such as exp, with two readers is stored all the same);
  what fuses is the backend's;
- points follow the backend's schedule (`schedule`): XLA:CPU runs an equation as soon as its
  operands are there, for the sake of concurrency, and so holds more than one that follows the
  program;
- an update (scatter, dynamic_update_slice) is done in place where its operand dies there;
- donated arguments die at their last use, others live to the end; outputs live from where they are
  made;
- the points of a loop body add to what is alive around the loop: stacked results from its start,
  one slice of each scanned operand, carries once (XLA updates them in place); bodies that are no
  loops share their operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_model.hardware.backend import ACCELERATOR, Backend
from autoshard.cost_model.program.fusion_schedule import Buffer, Schedule, schedules
from autoshard.tracing.primitives import LOOPS
from autoshard.tracing.program import Body, Eqn, MappingKind, Program, Value

END = 1 << 60


@dataclass(frozen=True, eq=False)
class MemoryTable:
    """Bytes alive at each program point, points in the order of the schedule (the points of a body
    lie together).

    Attributes:
        alive_bytes: [points, columns] global bytes alive.
        point_eqn: For each point the `Eqn.index` that runs there.
        point_of: By `Eqn.index`, its point (of a fused one, that of its last reader); with bodies,
            the last of theirs.
        copied_at: By `Value.index`, the point from which copies in other specs are alive at the
            latest: where the value is made or its body begins, if what is ready runs; `END` where
            copies are made for their first reader.
    """

    alive_bytes: NDArray[np.float64]
    point_eqn: NDArray[np.int64]
    point_of: NDArray[np.int64]
    copied_at: NDArray[np.int64]


class _Builder:
    def __init__(
        self,
        program: Program,
        donated: Sequence[bool],
        columns: int,
        column_of: Callable[[Value], int],
        backend: Backend,
        plans: Mapping[Body, Schedule],
    ) -> None:
        self._program = program
        self._donated = donated
        self._columns = columns
        self._column_of = column_of
        self._backend = backend
        self._plans = plans
        self._rows: list[NDArray[np.float64]] = []
        self._point_eqn: list[int] = []
        self._point_of = np.zeros(len(program.eqns), dtype=np.int64)
        self._copied_at = np.full(len(program.values), END, dtype=np.int64)

    def build(self) -> MemoryTable:
        body = self._program.body
        keep = frozenset(v for v, gone in zip(body.inputs, self._donated, strict=True) if not gone)
        self._visit(body, np.zeros(self._columns), [*body.inputs, *body.consts], keep)
        if not self._rows and self._program.eqns:  # nothing is computed that anybody reads
            self._rows.append(self._bytes((v, ()) for v in body.inputs))
            self._point_eqn.append(0)
        table = np.array(self._rows).reshape(len(self._rows), self._columns)
        points = np.array(self._point_eqn, dtype=np.int64)
        last = max(len(points) - 1, 0)
        return MemoryTable(table, points, self._point_of.clip(0, last), self._copied_at)

    def _bytes(self, buffers: Iterable[Buffer]) -> NDArray[np.float64]:
        row = np.zeros(self._columns)
        for value, _ in buffers:
            row[self._column_of(value)] += value.bytes
        return row

    def _visit(
        self,
        body: Body,
        around: NDArray[np.float64],
        owned: Iterable[Value],
        keep: frozenset[Value],
    ) -> None:
        """Points of a body. `owned` inputs count here, the others are counted by whoever calls;
        `keep` never dies.
        """
        plan = self._plans[body]
        last: dict[Buffer, int] = {}
        for position, node in enumerate(plan.nodes):
            last |= dict.fromkeys((*node.reads, *node.writes), position)
        last |= dict.fromkeys(((v, ()) for v in (*body.outputs, *keep)), END)
        dying: dict[int, set[Buffer]] = {}
        for buffer, position in last.items():
            dying.setdefault(position, set()).add(buffer)
        self._copies_from((*body.inputs, *body.consts), len(self._rows))
        alive: set[Buffer] = {(v, ()) for v in owned}
        row = around + self._bytes(alive)
        for position, node in enumerate(plan.nodes):
            made = set(node.writes) - alive
            dead = (alive | made) & dying.get(position, set())
            if node.eqn is not None and node.eqn.bodies:
                self._enter(node.eqn, row, made, dead)
            alive |= made
            row = row + self._bytes(made)
            if node.eqn is not None:
                self._point(
                    node.eqn,
                    row - self._bytes({node.updated} & dead if node.updated in node.reads else ()),
                )
            alive -= dead
            row = row - self._bytes(dead)
        for index, reader in plan.fused.items():
            self._point_of[index] = self._point_of[reader]

    def _point(self, eqn: Eqn, row: NDArray[np.float64]) -> None:
        """The point of an equation; a loop's are in its body."""
        if eqn.primitive not in LOOPS:
            self._rows.append(row)
            self._point_eqn.append(eqn.index)
        point = self._point_of[eqn.index] = max(len(self._rows) - 1, 0)
        self._copies_from(eqn.outputs, point)

    def _copies_from(self, values: Iterable[Value], point: int) -> None:
        """What is ready is gathered at once by a backend that runs whatever is ready."""
        if self._backend.breadth_first:
            for value in values:
                self._copied_at[value.index] = point

    def _enter(
        self, eqn: Eqn, row: NDArray[np.float64], made: set[Buffer], dying: set[Buffer]
    ) -> None:
        """The bodies of an equation, one after the other (branches: one of them runs)."""
        outside = row
        if (
            eqn.primitive in LOOPS
        ):  # results exist from the start; a carry that ends here becomes its result
            carried = {(t.outer, ()) for t in eqn.mappings if t.kind is MappingKind.CARRY}
            begins = {start for start, _ in eqn.carries}
            starts = {
                (t.outer, ())
                for t in eqn.mappings
                if t.kind is MappingKind.OPERAND_TO_INVAR and t.inner in begins
            }
            outside = row + self._bytes(made | carried) - self._bytes(starts & dying)
        slices = {
            t.inner for t in eqn.mappings if t.offset and t.kind is MappingKind.OPERAND_TO_INVAR
        }
        for inner in eqn.bodies:
            self._visit(inner, outside, [v for v in inner.inputs if v in slices], frozenset())


def memory_table(
    program: Program,
    donated: Sequence[bool],
    columns: int,
    column_of: Callable[[Value], int],
    backend: Backend = ACCELERATOR,
    plans: Mapping[Body, Schedule] | None = None,
) -> MemoryTable:
    """Builds the table.

    Args:
        program: The program.
        donated: For each argument leaf, whether its buffer may be reused.
        columns: Number of columns.
        column_of: Column of a value: values of one column are always cut into equally many pieces.
        backend: What fuses, and in which order things run.
        plans: What `schedules` says, if it is known.
    """
    return _Builder(
        program, donated, columns, column_of, backend, plans or schedules(program.body, backend)
    ).build()
