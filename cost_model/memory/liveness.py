"""Peak memory by liveness, as a table of program points and columns of values.

Entries are global bytes alive. For a candidate the peak is the maximum over points of (bytes alive
/ shard count of each column), plus what the point itself gathers. The rules:

- a result that only fusing primitives read never reaches memory, and what it was computed from
  lives until its last reader (an expensive one, such as exp, with two readers reaches memory all
  the same); what fuses is the backend's;
- points follow the backend's schedule (`fusion_schedule`): XLA:CPU runs an equation as soon as its
  operands are there, for the sake of concurrency, and so holds more than one that follows the
  program;
- an update (scatter, dynamic_update_slice) is done in place where its operand dies there;
- donated arguments die at their last use, others live to the end; outputs live from where they are
  computed;
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
from autoshard.tracing.program import Body, BodyMapping, Eqn, MappingKind, Program, Value

END = 1 << 60
"""A point after every other: larger than any number of equations, and far from overflow."""

Bytes = NDArray[np.float64]
"""[columns] global bytes."""


@dataclass(frozen=True, eq=False)
class MemoryTable:
    """Bytes alive at each program point, in the order of the schedule.

    The points of a body lie together.

    Attributes:
        alive_bytes: [points, columns] global bytes alive.
        point_eqn: For each point the `Eqn.index` that runs there.
        point_of: By `Eqn.index`, its point (of a fused one, that of its last reader); with bodies,
            the last of theirs.
        copied_at: By `Value.index`, the point from which copies in other specs are alive at the
            latest: where the value is computed or its body begins, if what is ready runs; `END`
            where copies are made for their first reader.
    """

    alive_bytes: NDArray[np.float64]
    point_eqn: NDArray[np.int64]
    point_of: NDArray[np.int64]
    copied_at: NDArray[np.int64]


def memory_table(
    program: Program,
    donated: Sequence[bool],
    columns: int,
    column_of: Callable[[Value], int],
    backend: Backend = ACCELERATOR,
    by_body: Mapping[Body, Schedule] | None = None,
) -> MemoryTable:
    """Builds the table.

    Args:
        program: The program.
        donated: For each argument leaf, whether its buffer may be reused.
        columns: Number of columns.
        column_of: Column of a value: values of one column always have the same shard count.
        backend: What fuses, and in which order things run.
        by_body: What `schedules` says of the program, where the caller has it.
    """
    by_body = by_body or schedules(program.body, backend)
    return _Builder(program, columns, column_of, backend, by_body).build(donated)


class _Builder:
    def __init__(
        self,
        program: Program,
        columns: int,
        column_of: Callable[[Value], int],
        backend: Backend,
        by_body: Mapping[Body, Schedule],
    ) -> None:
        self._program = program
        self._columns = columns
        self._column_of = column_of
        self._backend = backend
        self._schedules = by_body
        self._rows: list[Bytes] = []
        self._point_eqn: list[int] = []
        self._point_of = np.zeros(len(program.eqns), dtype=np.int64)
        self._copied_at = np.full(len(program.values), END, dtype=np.int64)

    def build(self, donated: Sequence[bool]) -> MemoryTable:
        body = self._program.body
        undonated = [v for v, reused in zip(body.inputs, donated, strict=True) if not reused]
        around = np.zeros(self._columns)
        self._visit(body, around, owned=[*body.inputs, *body.consts], undying=undonated)
        if not self._rows and self._program.eqns:  # nothing is computed that anybody reads
            self._rows.append(self._bytes((v, ()) for v in body.inputs))
            self._point_eqn.append(0)
        table = np.array(self._rows).reshape(len(self._rows), self._columns)
        points = np.array(self._point_eqn, dtype=np.int64)
        last = max(len(points) - 1, 0)
        return MemoryTable(table, points, self._point_of.clip(0, last), self._copied_at)

    def _bytes(self, buffers: Iterable[Buffer]) -> Bytes:
        row = np.zeros(self._columns)
        for value, _ in buffers:
            if self._backend.shares_host_memory or not value.on_host:
                row[self._column_of(value)] += value.bytes
        return row

    def _visit(
        self, body: Body, around: Bytes, owned: Iterable[Value], undying: Sequence[Value] = ()
    ) -> None:
        """Adds the points of a body.

        Args:
            body: The body.
            around: What is alive around it.
            owned: Inputs that count here; the caller counts the others.
            undying: Inputs that live to the end.
        """
        schedule = self._schedules[body]
        dying = _last_uses(schedule, (*body.outputs, *undying))
        self._copies_from((*body.inputs, *body.consts), len(self._rows))
        alive: set[Buffer] = {(v, ()) for v in owned}
        row = around + self._bytes(alive)
        for position, node in enumerate(schedule.nodes):
            new = set(node.writes) - alive
            dead = (alive | new) & dying.get(position, set())
            if node.eqn is not None and node.eqn.bodies:
                self._enter(node.eqn, row, new, dead)
            alive |= new
            row = row + self._bytes(new)  # a new array: earlier ones are rows of the table
            if node.eqn is not None:
                # An update in place has no result of its own beside its operand.
                reused = {node.updated} & dead if node.updated in node.reads else set()
                self._point(node.eqn, row - self._bytes(reused))
            alive -= dead
            row = row - self._bytes(dead)
        for index, reader in schedule.fused.items():
            self._point_of[index] = self._point_of[reader]

    def _point(self, eqn: Eqn, row: Bytes) -> None:
        """Adds the point of an equation; a loop's are in its body."""
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

    def _enter(self, eqn: Eqn, row: Bytes, results: set[Buffer], dying: set[Buffer]) -> None:
        """Adds the points of the bodies of an equation (of branches, one of them runs).

        Args:
            eqn: The equation.
            row: What is alive before it.
            results: Buffers of its results.
            dying: Buffers that nobody reads after it.
        """
        if eqn.primitive in LOOPS:
            row = self._around_loop(eqn, row, results, dying)
        slices = {mapping.inner for mapping in _operand_mappings(eqn) if mapping.offset}
        for body in eqn.bodies:
            self._visit(body, row, owned=[v for v in body.inputs if v in slices])

    def _around_loop(self, eqn: Eqn, row: Bytes, results: set[Buffer], dying: set[Buffer]) -> Bytes:
        """What is alive around the body of a loop: its results from the start.

        A carry that dies with the loop is what becomes of its result, and counts once.
        """
        carried: set[Buffer] = set()
        for mapping in eqn.mappings:
            if mapping.kind is MappingKind.CARRY:
                carried.add((mapping.outer, ()))
        starts = {start for start, _ in eqn.carries}
        reused: set[Buffer] = set()
        for mapping in _operand_mappings(eqn):
            if mapping.inner in starts and (mapping.outer, ()) in dying:
                reused.add((mapping.outer, ()))
        return row + self._bytes(results | carried) - self._bytes(reused)


def _operand_mappings(eqn: Eqn) -> list[BodyMapping]:
    return [m for m in eqn.mappings if m.kind is MappingKind.OPERAND_TO_INVAR]


def _last_uses(schedule: Schedule, undying: Iterable[Value]) -> dict[int, set[Buffer]]:
    """By position of a node, the buffers that nobody needs after it; `END` for undying values."""
    last: dict[Buffer, int] = {}
    for position, node in enumerate(schedule.nodes):
        last |= dict.fromkeys((*node.reads, *node.writes), position)
    last |= dict.fromkeys(((v, ()) for v in undying), END)
    dying: dict[int, set[Buffer]] = {}
    for buffer, position in last.items():
        dying.setdefault(position, set()).add(buffer)
    return dying
