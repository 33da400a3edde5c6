"""Stage 5: predicts time, collectives and peak memory of a layout, without compiling anything.

Every equation's work is split as first-fit over its loops says; each operand is resharded from its own spec to what the
work needs, and a reduced loop that is split leaves a partial sum (DESIGN: all_reduce, or reduce_scatter where the
result's own spec takes the axis up). A value brought to a given spec is paid once per body. Several mesh axes in one
move are one collective.

Equations of the same primitive, shapes and roles are one class with a multiplicity, and a class's cost depends only on
the rules that name its roles: it is remembered under these, so most of a new candidate is table look-ups.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_model.collectives import collective_s, sent_bytes
from autoshard.cost_model.compute import FUSED, flops
from autoshard.cost_model.hardware import Hardware, Link
from autoshard.cost_model.memory import MemoryTable, memory_table
from autoshard.dim_rules import LoopKind
from autoshard.evidence import Collective
from autoshard.groups import Group
from autoshard.layout import AxisRule, Fit, Layout, Problem, Signature, Spec, shard_count
from autoshard.program import Body, Eqn, Value

CONTROL = frozenset({"scan", "while", "cond"})


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says of a layout, per device and per call.

    Attributes:
        time_s: Step time: compute + communication - overlap.
        compute_s: Roofline time of the work.
        comm_s: Alpha-beta time of the collectives.
        peak_bytes: Peak memory.
        argument_bytes: Bytes of the arguments, by what they are for.
        collectives: Collectives by kind and mesh axes.
        collective_bytes: Bytes one device sends.
    """

    time_s: float
    compute_s: float
    comm_s: float
    peak_bytes: int
    argument_bytes: Mapping[str, int]
    collectives: tuple[Collective, ...]
    collective_bytes: int


@dataclass(frozen=True, slots=True)
class _Move:
    """One collective of a class: kind, mesh axes, and the bytes of the full value."""

    kind: str
    axes: tuple[str, ...]
    full_bytes: int


@dataclass(slots=True)
class _Cost:
    """Cost of one run of a class.

    Attributes:
        compute_s: Seconds of compute.
        moves: Collectives.
        extra_bytes: Bytes that exist only while it runs.
        copies: Copies in another spec: for each member of the class the first and last point that reads it, and bytes.
    """

    compute_s: float = 0.0
    moves: list[_Move] = field(default_factory=list)
    extra_bytes: float = 0.0
    copies: list[tuple[NDArray[np.int64], NDArray[np.int64], float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Operand:
    """An operand or result as the cost of its equation sees it: signature, bytes, loop of each dimension."""

    value: Value
    loops: tuple[int, ...]
    constant: bool


@dataclass(frozen=True, eq=False, slots=True)
class _Work:
    """A class of equations."""

    eqn: Eqn
    kinds: tuple[LoopKind, ...]
    operands: tuple[_Operand, ...]
    results: tuple[_Operand, ...]
    flops: float
    traffic: tuple[_Operand, ...]
    roles: frozenset[int]


@dataclass(frozen=True, eq=False, slots=True)
class _Uses:
    """A class of values with everything in one body that reads them.

    Attributes:
        value: One of them.
        readers: (equation, loops of the operand), one per kind of reader.
        roles: Roles of the value and of its readers.
        spans: For each kind of reader and each value of the class, the first and the last equation that reads it.
    """

    value: Value
    readers: tuple[tuple[Eqn, tuple[int, ...]], ...]
    roles: frozenset[int]
    spans: tuple[list[tuple[int, int]], ...]


class Predictor:
    """Predicts layouts of one problem on one hardware."""

    def __init__(
        self, problem: Problem, hardware: Hardware, donated: Sequence[bool], *, has_reduce_scatter: bool = True
    ) -> None:
        """Builds the classes and the memory table.

        Args:
            problem: The problem.
            hardware: Rates and links.
            donated: For each argument leaf, whether it is donated.
            has_reduce_scatter: False for backends that lower it to all_reduce and a slice (CPU).
        """
        self.problem = problem
        self.hardware = hardware
        self._has_reduce_scatter = has_reduce_scatter
        self._axes = problem.roles.axes
        self._works: list[tuple[_Work, float]] = []
        self._uses: list[tuple[_Uses, float]] = []
        self._class_of_eqn = np.full(
            len(problem.program.eqns), -1, dtype=np.int64
        )  # -1: it has bodies, no cost of its own
        self._build_classes()
        self._memo: dict[tuple[int, tuple[AxisRule, ...]], _Cost] = {}
        self._columns: dict[tuple[Signature, int], int] = {}
        self._column_value: list[Value] = []
        columns = [self._column(v) for v in problem.program.values]
        self._arguments: Counter[tuple[int, Group]] = Counter()
        for value, group in zip(problem.program.body.inputs, problem.groups.of_input, strict=True):
            self._arguments[columns[value.index], group] += value.bytes
        self._memory: MemoryTable = memory_table(
            problem.program, donated, len(self._column_value), lambda v: columns[v.index]
        )

    # Classes -------------------------------------------------------------------------------------------------------

    def _column(self, value: Value) -> int:
        pinned = value.index if value.index in self.problem.pins else -1
        key = (self.problem.value_signature(value), pinned)
        if key not in self._columns:
            self._columns[key] = len(self._columns)
            self._column_value.append(value)
        return self._columns[key]

    def _build_classes(self) -> None:
        works: dict[object, int] = {}
        uses: dict[object, int] = {}
        multiplicity: list[list[float]] = [[], []]

        def count(key: object, table: dict[object, int], which: int, times: float) -> tuple[int, bool]:
            new = key not in table
            if new:
                table[key] = len(table)
                multiplicity[which].append(0.0)
            multiplicity[which][table[key]] += times
            return table[key], new

        work_classes: list[_Work] = []
        use_classes: list[_Uses] = []
        for body, times in _bodies(self.problem.program.body, 1.0):
            readers: dict[Value, dict[object, list[tuple[Eqn, tuple[int, ...]]]]] = defaultdict(dict)
            for eqn in body.eqns:
                if eqn.bodies:
                    continue
                work = self._work(eqn)
                key = self._work_key(work)
                number, new = count(key, works, 0, times)
                self._class_of_eqn[eqn.index] = number
                if new:
                    work_classes.append(work)
                for operand in work.operands:
                    if not operand.constant:
                        same = readers[operand.value].setdefault((number, operand.loops), [])
                        same.append((eqn, operand.loops))
            for value, found in readers.items():
                pinned = value.index if value.index in self.problem.pins else -1
                key = (self.problem.value_signature(value), value.itemsize, pinned, frozenset(found))
                number, new = count(key, uses, 1, times)
                kinds = sorted(found, key=repr)
                if new:
                    roles = set(self.problem.roles.of_value[value.index])
                    for same in found.values():
                        roles |= set(self.problem.work_signature(same[0][0])[0])
                    one_each = tuple(found[kind][0] for kind in kinds)
                    use_classes.append(_Uses(value, one_each, frozenset(roles), tuple([] for _ in kinds)))
                for spans, kind in zip(use_classes[number].spans, kinds, strict=True):
                    spans.append((found[kind][0][0].index, found[kind][-1][0].index))
        self._works = list(zip(work_classes, multiplicity[0], strict=True))
        self._uses = list(zip(use_classes, multiplicity[1], strict=True))

    def _work(self, eqn: Eqn) -> _Work:
        rule = self._axes.rules[eqn.index]

        def side(values: Sequence[Value], maps: Sequence[tuple[int, ...]]) -> tuple[_Operand, ...]:
            return tuple(
                _Operand(v, loops, self._axes.constant[v.index])
                for v, loops in zip(values, maps, strict=True)
                if v.shape and v.itemsize
            )

        operands, results = side(eqn.inputs, rule.operands), side(eqn.outputs, rule.results)
        traffic = () if eqn.primitive in FUSED else (*operands, *results)
        roles = frozenset(self.problem.work_signature(eqn)[0]).union(
            *(self.problem.roles.of_value[v.index] for v in (*eqn.inputs, *eqn.outputs))
        )
        return _Work(eqn, rule.kinds, operands, results, flops(eqn, rule), traffic, roles)

    def _work_key(self, work: _Work) -> object:
        def side(operands: tuple[_Operand, ...]) -> object:
            return tuple(
                (self.problem.value_signature(o.value), o.value.itemsize, o.loops, o.value.index in self.problem.pins)
                for o in operands
            )

        pinned = any(o.value.index in self.problem.pins for o in (*work.operands, *work.results))
        family = "elementwise" if work.eqn.primitive in FUSED else work.eqn.primitive
        return (
            family, work.flops, work.kinds, self.problem.work_signature(work.eqn), side(work.operands),
            side(work.results), work.eqn.index if pinned else -1,
        )  # fmt: skip

    # Costs ---------------------------------------------------------------------------------------------------------

    def predict(self, layout: Layout) -> Prediction:
        """The prediction of one layout (as if its constraints are stated inside; see `Layout.inside`)."""
        rules = layout.rules
        index = {r.name: r.index for r in self.problem.roles.roles}
        numbered = [(index[rule.role], rule) for rule in rules if self.problem.mesh_axes[rule.mesh_axis] > 1]
        compute_s = 0.0
        moves: Counter[_Move] = Counter()
        extra = np.zeros(len(self._works) + 1)
        copies: list[tuple[NDArray[np.int64], NDArray[np.int64], float]] = []
        for number, (work, times) in enumerate(self._works):
            restricted = tuple(rule for role, rule in numbered if role in work.roles)
            cost = self._memo.get((number, restricted))
            if cost is None:
                cost = self._memo[number, restricted] = self._work_cost(layout, work)
            compute_s += times * cost.compute_s
            extra[number] = cost.extra_bytes
            for move in cost.moves:
                moves[move] += times  # type: ignore[assignment]  # while bodies and branches count as fractions
        offset = len(self._works)
        for number, (uses, times) in enumerate(self._uses):
            restricted = tuple(rule for role, rule in numbered if role in uses.roles)
            cost = self._memo.get((offset + number, restricted))
            if cost is None:
                cost = self._memo[offset + number, restricted] = self._use_cost(layout, uses)
            copies += cost.copies
            for move in cost.moves:
                moves[move] += times  # type: ignore[assignment]
        comm_s = sum(times * self._move_s(move) for move, times in moves.items())
        overlapped = self.hardware.overlap * min(compute_s, comm_s)
        collectives = self._summarise(moves)
        return Prediction(
            time_s=compute_s + comm_s - overlapped,
            compute_s=compute_s,
            comm_s=comm_s,
            peak_bytes=self._peak(layout, extra, copies),
            argument_bytes=self._argument_bytes(layout),
            collectives=collectives,
            collective_bytes=sum(c.bytes for c in collectives),
        )

    def sent_bytes(self, rules: tuple[AxisRule, ...]) -> int:
        """Predicted collective bytes of a rule list."""
        return self.predict(Layout(self.problem, rules)).collective_bytes

    def _work_cost(self, layout: Layout, work: _Work) -> _Cost:
        fit = layout.work(work.eqn)
        cost = _Cost()
        pieces = shard_count(fit.spec, self.problem.mesh_axes)
        rate = self.hardware.flops_per_s(work.results[0].value.dtype if work.results else "float32")
        arithmetic_s = work.flops / pieces / rate
        traffic = 0.0
        for operand in work.operands:
            want = self._want(layout, work.eqn, operand.loops, operand.value)
            local = self._local_bytes(operand.value, want)
            traffic += local if operand in work.traffic else 0.0
        split = tuple(a for k, axes in zip(work.kinds, fit.spec, strict=True) if k is LoopKind.REDUCED for a in axes)
        for result in work.results:
            raw = tuple(fit.spec[i] for i in result.loops)
            local = self._local_bytes(result.value, raw)
            traffic += local if result in work.traffic else 0.0
            stored = layout.fit(result.value)
            target = tuple(raw[d] if d in stored.open_dims and not axes else axes for d, axes in enumerate(stored.spec))
            cost.moves += self._finish(result.value, raw, target, split)
            if split or raw != target:
                cost.extra_bytes += local
        cost.compute_s = max(arithmetic_s, traffic / self.hardware.memory_bytes_per_s)
        return cost

    def _use_cost(self, layout: Layout, uses: _Uses) -> _Cost:
        have = layout.fit(uses.value).spec
        wants: dict[Spec, list[int]] = defaultdict(list)
        for kind, (eqn, loops) in enumerate(uses.readers):
            wants[self._want(layout, eqn, loops, uses.value)].append(kind)
        cost = _Cost()
        for want in sorted(wants.keys() - {have}):
            cost.moves += self._reshard(uses.value, have, want)
            points = self._memory.point_of[np.array([uses.spans[kind] for kind in wants[want]])]
            first, last = points[:, :, 0].min(axis=0), points[:, :, 1].max(axis=0)
            cost.copies.append((first, last, self._local_bytes(uses.value, want)))
        for eqn, loops in uses.readers:
            cost.moves += self._halo(layout, eqn, loops, uses.value)
        return cost

    def _want(self, layout: Layout, eqn: Eqn, loops: tuple[int, ...], value: Value) -> Spec:
        """The spec in which the work reads an operand; open loops read it as it is."""
        fit: Fit = layout.work(eqn)
        have = layout.fit(value).spec
        used = {a for i in loops for a in fit.spec[i]}
        want = []
        for dim, loop in enumerate(loops):
            axes = fit.spec[loop]
            size = value.shape[dim]
            if loop in fit.open_dims and not axes:
                axes = tuple(a for a in have[dim] if a not in used)
            if size % math.prod(self.problem.mesh_axes[a] for a in axes):
                axes = ()
            want.append(axes)
        return tuple(want)

    def _halo(self, layout: Layout, eqn: Eqn, loops: tuple[int, ...], value: Value) -> list[_Move]:
        """The neighbour exchange of a split PERMUTED loop: at most the local shard moves."""
        fit = layout.work(eqn)
        kinds = self._axes.rules[eqn.index].kinds
        axes = tuple(a for i in loops if kinds[i] is LoopKind.PERMUTED for a in fit.spec[i])
        if not axes:
            return []
        return [_Move("collective_permute", self._order(axes), self._local_bytes(value, layout.fit(value).spec))]

    def _finish(self, value: Value, raw: Spec, target: Spec, split: tuple[str, ...]) -> list[_Move]:
        """From the raw (perhaps partial) result to its own spec."""
        if not split:
            return self._reshard(value, raw, target)
        local = self._local_bytes(value, raw)
        scattered = tuple(a for axes in target for a in axes if a in split) if self._has_reduce_scatter else ()
        summed = tuple(a for a in split if a not in scattered)
        moves = []
        if summed:
            moves.append(_Move("all_reduce", self._order(summed), local))
        if scattered:
            moves.append(_Move("reduce_scatter", self._order(scattered), local))
        sliced = tuple(tuple(a for a in axes if a not in split) for axes in target)
        return moves + self._reshard(value, raw, sliced)

    def _reshard(self, value: Value, have: Spec, want: Spec) -> list[_Move]:
        """Collectives that bring a value from one spec to another; slicing is free."""
        if have == want:
            return []
        at = {a: d for d, axes in enumerate(have) for a in axes}
        to = {a: d for d, axes in enumerate(want) for a in axes}
        moved = tuple(a for a in at if a in to and to[a] != at[a])
        gone = tuple(a for a in at if a not in to)
        moves = []
        if moved:
            held = self._local_bytes(value, have)
            moves.append(_Move("all_to_all", self._order(moved), held * self._devices(moved)))
        if gone:
            kept = tuple(tuple(a for a in axes if a in to) for axes in have)
            new = tuple(a for a in to if a not in at)
            gathered = self._local_bytes(value, kept)
            already = {d for d, axes in enumerate(have) if any(a in gone for a in axes)}
            early = [a for a in new if to[a] not in already]
            moves.append(_Move("all_gather", self._order(gone), gathered // self._devices(tuple(early))))
        return moves

    # Numbers -------------------------------------------------------------------------------------------------------

    def _order(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(a for a in self.problem.mesh_axes if a in axes)

    def _devices(self, axes: Sequence[str]) -> int:
        return math.prod(self.problem.mesh_axes[a] for a in axes)

    def _local_bytes(self, value: Value, spec: Spec) -> int:
        return value.bytes // shard_count(spec, self.problem.mesh_axes)

    def _link(self, axes: tuple[str, ...]) -> Link:
        return min((self.hardware.link_for(a) for a in axes), key=lambda link: link.bytes_per_s)

    def _move_s(self, move: _Move) -> float:
        return self.collective_s(move.kind, move.axes, move.full_bytes, self._devices(move.axes))

    def collective_s(self, kind: str, axes: Sequence[str], full_bytes: int, group_size: int) -> float:
        """Seconds of one collective over these mesh axes (all links where they are unknown)."""
        link = self._link(tuple(axes) or tuple(self.problem.mesh_axes))
        return collective_s(kind, full_bytes, link, group_size)

    def _summarise(self, moves: Mapping[_Move, float]) -> tuple[Collective, ...]:
        counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        sent: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        for move, times in moves.items():
            key = (move.kind, move.axes)
            counts[key] += times  # type: ignore[assignment]
            sent[key] += times * sent_bytes(move.kind, move.full_bytes, self._devices(move.axes))
        return tuple(Collective(*key, round(counts[key]), round(sent[key])) for key in sorted(counts))

    def _peak(
        self,
        layout: Layout,
        extra: NDArray[np.float64],
        copies: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], float]],
    ) -> int:
        pieces = np.array([shard_count(layout.fit(v).spec, self.problem.mesh_axes) for v in self._column_value])
        at_points = self._memory.alive_bytes @ (1.0 / pieces) if len(pieces) else np.zeros(1)
        if not len(at_points):
            return 0
        at_points = at_points + extra[self._class_of_eqn[self._memory.point_eqn]]
        if copies:
            first, last = (np.concatenate([copy[i] for copy in copies]) for i in (0, 1))
            held = np.concatenate([np.full(len(copy[0]), copy[2]) for copy in copies])
            change = np.bincount(first, held, len(at_points) + 1) - np.bincount(last + 1, held, len(at_points) + 1)
            at_points = at_points + np.cumsum(change)[:-1]
        return math.ceil(float(at_points.max(initial=0.0)))

    def _argument_bytes(self, layout: Layout) -> dict[str, int]:
        total = dict.fromkeys((g.value for g in Group), 0)
        for (column, group), whole in self._arguments.items():
            spec = layout.fit(self._column_value[column]).spec
            total[group.value] += whole // shard_count(spec, self.problem.mesh_axes)
        return total


def _bodies(body: Body, times: float) -> Iterator[tuple[Body, float]]:
    """Every body with how often it runs; unknown trip counts count once, branches share one run."""
    yield body, times
    for eqn in body.eqns:
        share = 1.0 / len(eqn.bodies) if eqn.primitive == "cond" else 1.0
        for inner in eqn.bodies:
            yield from _bodies(inner, times * share * (1 if inner.trips is None else inner.trips))
