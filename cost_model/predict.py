"""Stage 5: predicts time, collectives and peak memory of a layout, without compiling anything.

Every equation's work is split as first-fit over its loops says; each operand is resharded from its own spec to what the
work needs, and a reduced loop that is split leaves a partial sum (DESIGN: all_reduce, or reduce_scatter where the
result's own spec takes the axis up). A value brought to a given spec is paid once per body. Several mesh axes in one
move are one collective.

A class's cost (see `classes`) depends only on how first-fit splits its few signatures: it is remembered under these, so
most of a new candidate is table look-ups.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_model.classes import Uses, Work, find_classes
from autoshard.cost_model.collectives import collective_s, joint, sent_bytes
from autoshard.cost_model.hardware import Hardware
from autoshard.cost_model.memory import MemoryTable, memory_table
from autoshard.dim_rules import LoopKind
from autoshard.evidence import Collective
from autoshard.groups import Group
from autoshard.layout import AxisRule, Fit, Layout, Problem, Signature, Spec, shard_count
from autoshard.program import Eqn, Value

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
        self._classes = find_classes(problem)
        self._memo: dict[tuple[int, ...], _Cost] = {}
        self._fits: dict[Fit, int] = {}
        self._columns: dict[tuple[Signature, int], int] = {}
        self._column_value: list[Value] = []
        columns = [self._column(v) for v in problem.program.values]
        self._arguments: Counter[tuple[int, Group]] = Counter()
        for value, group in zip(problem.program.body.inputs, problem.groups.of_input, strict=True):
            self._arguments[columns[value.index], group] += value.bytes
        self._memory: MemoryTable = memory_table(
            problem.program, donated, len(self._column_value), lambda v: columns[v.index]
        )
        self._class_of_point = self._classes.of_eqn[self._memory.point_eqn]

    # Classes -------------------------------------------------------------------------------------------------------

    def _column(self, value: Value) -> int:
        pinned = value.index if value.index in self.problem.pins else -1
        key = (self.problem.value_signature(value), pinned)
        if key not in self._columns:
            self._columns[key] = len(self._columns)
            self._column_value.append(value)
        return self._columns[key]

    # Costs ---------------------------------------------------------------------------------------------------------

    def predict(self, layout: Layout) -> Prediction:
        """The prediction of one layout (as if its constraints are stated inside; see `Layout.inside`)."""
        fits = [self._number(layout.fit_signature(signature)) for signature in self.problem.signatures]
        compute_s = 0.0
        moves: defaultdict[_Move, float] = defaultdict(float)
        extra = np.zeros(len(self._classes.works) + 1)
        copies: list[tuple[NDArray[np.int64], NDArray[np.int64], float]] = []
        for number, work in enumerate(self._classes.works):
            key = (number, *(fits[i] for i in work.signatures))
            cost = self._memo.get(key)
            if cost is None:
                cost = self._memo[key] = self._work_cost(layout, work)
            compute_s += work.times * cost.compute_s
            extra[number] = cost.extra_bytes
            for move in cost.moves:
                moves[move] += work.times
        for number, uses in enumerate(self._classes.uses, len(self._classes.works)):
            key = (number, *(fits[i] for i in uses.signatures))
            cost = self._memo.get(key)
            if cost is None:
                cost = self._memo[key] = self._use_cost(layout, uses)
            copies += cost.copies
            for move in cost.moves:
                moves[move] += uses.times
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

    def _number(self, fit: Fit) -> int:
        """A small number for an outcome of first-fit: costs are remembered under these."""
        return self._fits.setdefault(fit, len(self._fits))

    def _work_cost(self, layout: Layout, work: Work) -> _Cost:
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

    def _use_cost(self, layout: Layout, uses: Uses) -> _Cost:
        have = layout.fit(uses.value).spec
        wants: dict[Spec, list[int]] = defaultdict(list)
        for kind, (eqn, loops) in enumerate(uses.readers):
            wants[self._want(layout, eqn, loops, uses.value)].append(kind)
        cost = _Cost()
        for want in sorted(wants.keys() - {have}):
            cost.moves += self._reshard(uses.value, have, want)
            points = self._memory.point_of[uses.spans[wants[want]]]
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
        """Collectives that bring a value from one spec to another; slicing is free.

        Along a dimension the first mesh axis counts slowest. Where an axis stays but not first, or axes change
        places, every device holds another one's piece: a collective_permute of it.
        """
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
        shuffled = _shuffled(have, want)
        if shuffled:
            least = min(self._local_bytes(value, have), self._local_bytes(value, want))
            moves.append(_Move("collective_permute", self._order(tuple(shuffled)), least))
        return moves

    # Numbers -------------------------------------------------------------------------------------------------------

    def _order(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(a for a in self.problem.mesh_axes if a in axes)

    def _devices(self, axes: Sequence[str]) -> int:
        return math.prod(self.problem.mesh_axes[a] for a in axes)

    def _local_bytes(self, value: Value, spec: Spec) -> int:
        return value.bytes // shard_count(spec, self.problem.mesh_axes)

    def _move_s(self, move: _Move) -> float:
        return self.collective_s(move.kind, move.axes, move.full_bytes, self._devices(move.axes))

    def collective_s(self, kind: str, axes: Sequence[str], full_bytes: int, group_size: int) -> float:
        """Seconds of one collective over these mesh axes (all links where they are unknown)."""
        link, _ = joint(self.hardware, self.problem.mesh_axes, axes or tuple(self.problem.mesh_axes))
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
        at_points = at_points + extra[self._class_of_point]
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


def _shuffled(have: Spec, want: Spec) -> frozenset[str]:
    """Mesh axes of the dimensions along which the pieces of one spec lie on other devices than those of the other."""
    shuffled: frozenset[str] = frozenset()
    for i, old in enumerate(have):
        for j, new in enumerate(want):
            before, after = [a for a in old if a in new], [a for a in new if a in old]
            if before != after or (i == j and (before != list(old[: len(before)]) or after != list(new[: len(after)]))):
                shuffled |= {*old, *new}
    return shuffled
