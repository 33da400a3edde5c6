"""Classes of equations with the same cost, and of values that are read in the same ways.

Equations of one class have the same primitive, shapes and logical axes. An unrolled model of 32
layers has as many classes as one of 2: a class is counted once, with a multiplicity, and its cost
depends only on how the rules split its few signatures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoshard.axes.sharding_rules import FactorKind
from autoshard.cost_model.program.applied_constraints import AppliedConstraints, Reader
from autoshard.cost_model.program.flops import flops
from autoshard.cost_model.program.fusion_schedule import Schedule
from autoshard.cost_model.program.halo import exchanges
from autoshard.layout.problem import Problem
from autoshard.tracing.primitives import BITCASTS, FUSED, LOOKUPS, UPDATES
from autoshard.tracing.program import Body, Eqn, Value


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand or result as its equation's cost sees it.

    Attributes:
        value: The value.
        factors: The factor of each dimension.
        constant: True if it depends on no argument.
        transfers: How often its bytes go to or from memory for one run (elementwise chains fuse),
            mean of the class.
    """

    value: Value
    factors: tuple[int, ...]
    constant: bool
    transfers: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class EquationClass:
    """Equations with the same cost.

    Attributes:
        eqn: One of them.
        kinds: Kinds of its factors.
        operands: Operands with a shape.
        results: Results, scalars too.
        flops: Of one run, unsharded.
        unfused_share: Share of the class that is not fused: those are operations of their own.
        runs_per_call: How often such an equation runs per call of the program.
    """

    eqn: Eqn
    kinds: tuple[FactorKind, ...]
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    flops: float
    unfused_share: float
    runs_per_call: float


@dataclass(frozen=True, eq=False, slots=True)
class ValueClass:
    """Values, and everything in one body that reads them.

    Attributes:
        value: One of them.
        readers: One reader per kind.
        members: [values] their `Value.index`.
        spans: [kinds of reader, values, 2]: the first and the last equation (`Eqn.index`) of a kind
            that reads a value.
        moves_per_call: How often such a value is resharded per call of the program: as often as it
            is computed; never where it depends on no argument, for it is then computed as it is
            read (but takes memory).
    """

    value: Value
    readers: tuple[Reader, ...]
    members: NDArray[np.int64]
    spans: NDArray[np.int64]
    moves_per_call: float


@dataclass(frozen=True, eq=False, slots=True)
class ProgramClasses:
    """The classes of a program.

    Attributes:
        equation_classes: Classes of equations.
        value_classes: Classes of values.
        of_eqn: By `Eqn.index`, the number of its class; -1 for equations with bodies, which cost
            nothing themselves.
    """

    equation_classes: tuple[EquationClass, ...]
    value_classes: tuple[ValueClass, ...]
    of_eqn: NDArray[np.int64]


ReaderKind = tuple[int, tuple[int, ...]]
"""The number of the reader's class, and the factors of what it reads."""
ReadersByKind = dict[ReaderKind, list[Reader]]


@dataclass(eq=False, slots=True)
class _EquationMembers:
    """The equations of a class, as they are found.

    Attributes:
        number: Number of the class.
        eqn: The first of them.
        runs_per_call: How often they run, together.
        transfers: For each operand and result how often it is transferred, together; then how often
            an equation is not fused.
    """

    number: int
    eqn: Eqn
    runs_per_call: float
    transfers: list[float]


@dataclass(eq=False, slots=True)
class _ValueMembers:
    """The values of a class, as they are found.

    Attributes:
        values: The values.
        readers: For each value its readers.
        moves_per_call: How often they are resharded, together.
    """

    values: list[Value] = field(default_factory=list)
    readers: list[ReadersByKind] = field(default_factory=list)
    moves_per_call: float = 0.0


class _Builder:
    def __init__(
        self, problem: Problem, schedules: Mapping[Body, Schedule], applied: AppliedConstraints
    ) -> None:
        self._problem = problem
        self._schedules = schedules
        self._classes = problem.logical_axes.classes
        self._applied = applied
        self._kind_of_value: dict[int, int] = {}
        self._value_kinds: dict[object, int] = {}
        self._equations: dict[object, _EquationMembers] = {}
        self._values: dict[object, _ValueMembers] = {}
        self._of_eqn = np.full(len(problem.program.eqns), -1, dtype=np.int64)

    def build(self) -> ProgramClasses:
        for body, runs in _bodies(self._problem.program.body, 1.0):
            readers: dict[Value, ReadersByKind] = {}
            for eqn in body.eqns:
                if not eqn.bodies:
                    number = self._add_equation(eqn, self._schedules[body], runs)
                    self._add_reads(readers, eqn, number)
            for value, by_kind in readers.items():
                self._add_value(value, by_kind, runs)
        return ProgramClasses(
            tuple(map(self._equation_class, self._equations.values())),
            tuple(map(self._value_class, self._values.values())),
            self._of_eqn,
        )

    def _add_equation(self, eqn: Eqn, schedule: Schedule, runs: float) -> int:
        """Adds an equation to its class, and returns the number of that."""
        transfers = [runs * times for times in _transfers(eqn, schedule)]
        key = self._equation_key(eqn)
        members = self._equations.get(key)
        if members is None:
            members = _EquationMembers(len(self._equations), eqn, runs, transfers)
            self._equations[key] = members
        else:
            members.runs_per_call += runs
            pairs = zip(members.transfers, transfers, strict=True)
            members.transfers = [before + more for before, more in pairs]
        self._of_eqn[eqn.index] = members.number
        return members.number

    def _add_reads(self, readers: dict[Value, ReadersByKind], eqn: Eqn, number: int) -> None:
        for operand in self._operands(eqn.inputs, self._classes.rules[eqn.index].operands):
            if operand.constant and eqn.primitive in FUSED:
                continue  # a fused reader computes a constant itself
            by_kind = readers.setdefault(operand.value, {})
            reader = Reader(eqn, operand.factors)
            by_kind.setdefault((number, operand.factors), []).append(reader)

    def _add_value(self, value: Value, by_kind: ReadersByKind, runs: float) -> None:
        constant = self._classes.constant[value.index]
        key = (self._value_kind(value), constant, frozenset(by_kind))
        members = self._values.setdefault(key, _ValueMembers())
        members.values.append(value)
        # In one order for all values, so that the spans of a kind of reader lie together.
        members.readers.append({kind: by_kind[kind] for kind in sorted(by_kind, key=repr)})
        members.moves_per_call += 0.0 if constant else runs

    def _equation_class(self, members: _EquationMembers) -> EquationClass:
        eqn, runs = members.eqn, members.runs_per_call
        rule = self._classes.rules[eqn.index]
        means = [transfers / runs if runs else 0.0 for transfers in members.transfers]
        *transfers, unfused_share = means
        count = len(eqn.inputs)
        return EquationClass(
            eqn,
            rule.kinds,
            self._operands(eqn.inputs, rule.operands, transfers[:count]),
            # scalars too: a partial sum may well be one
            self._operands(eqn.outputs, rule.results, transfers[count:], scalars=True),
            flops(eqn, rule),
            unfused_share,
            runs,
        )

    def _value_class(self, members: _ValueMembers) -> ValueClass:
        spans = []  # [values, kinds of reader, 2]
        for by_kind in members.readers:
            ends = [(of_kind[0].eqn.index, of_kind[-1].eqn.index) for of_kind in by_kind.values()]
            spans.append(ends)
        return ValueClass(
            members.values[0],
            tuple(of_kind[0] for of_kind in members.readers[0].values()),
            np.array([value.index for value in members.values]),
            np.array(spans).transpose(1, 0, 2),
            members.moves_per_call,
        )

    def _operands(
        self,
        values: Sequence[Value],
        factor_maps: Sequence[tuple[int, ...]],
        transfers: Sequence[float] | None = None,
        *,
        scalars: bool = False,
    ) -> tuple[Operand, ...]:
        if transfers is None:
            transfers = [0.0] * len(values)
        operands = []
        for value, factors, times in zip(values, factor_maps, transfers, strict=True):
            if value.itemsize and (value.shape or scalars):
                constant = self._classes.constant[value.index]
                operands.append(Operand(value, factors, constant, times))
        return tuple(operands)

    def _value_kind(self, value: Value) -> int:
        """A number for what the cost of resharding a value depends on."""
        number = self._kind_of_value.get(value.index)
        if number is None:
            number = self._value_kinds.setdefault(self._value_key(value), len(self._value_kinds))
            self._kind_of_value[value.index] = number
        return number

    def _value_key(self, value: Value) -> object:
        pinned = value.index if value.index in self._problem.pins else -1  # a class of its own
        applied = []
        for eqn, factors in self._applied.get(value.index, ()):
            applied.append((self._problem.factor_signature(eqn), factors))
        return self._problem.value_signature(value), value.itemsize, pinned, tuple(applied)

    def _equation_key(self, eqn: Eqn) -> object:
        """Equal for equations whose costs are, however the rules split them.

        All that fuses elementwise is one family: its flops and its traffic are the same.
        """
        rule = self._classes.rules[eqn.index]
        family = "elementwise" if eqn.primitive in FUSED else eqn.primitive
        places = [(self._value_kind(value), factors) for value, factors in rule.places(eqn)]
        return (
            family,
            flops(eqn, rule),
            rule.kinds,
            self._problem.factor_signature(eqn),
            len(eqn.inputs),  # where results begin among the places
            tuple(places),
            exchanges(eqn, rule),
            # an update at a position that the compiler knows costs otherwise
            tuple(v.literal for v in eqn.inputs) if eqn.primitive in UPDATES else (),
        )


def _transfers(eqn: Eqn, schedule: Schedule) -> list[float]:
    """How often the bytes of each operand and result go to or from memory; then 1 if not fused."""
    reads = [0.0] * len(eqn.inputs)
    writes = [0.0] * len(eqn.outputs)
    if eqn.primitive in BITCASTS:
        return [*reads, *writes, 0.0]
    for number in schedule.loads.get(eqn.index, ()):
        reads[number] = 1.0
    for number, value in enumerate(eqn.outputs):
        if value in schedule.in_memory:
            writes[number] = 1.0
    fused = eqn.index in schedule.fused
    if eqn.primitive in LOOKUPS:
        _look_up(reads, writes, fused)
    elif eqn.primitive in UPDATES:
        _update_in_place(eqn, reads, writes)
    return [*reads, *writes, 0.0 if fused else 1.0]


def _look_up(reads: list[float], writes: list[float], fused: bool) -> None:
    """What looks up a part of its first operand reads only as much as it returns."""
    for number, times in enumerate(writes):
        writes[number] = reads[0] if fused else times + reads[0]
    reads[0] = 0.0


def _update_in_place(eqn: Eqn, reads: list[float], writes: list[float]) -> None:
    """What updates in place reads the update and writes as much.

    A scatter that combines (adds, takes the larger) reads the old values there as well.
    """
    update = 1 if eqn.primitive == "dynamic_update_slice" else 2
    replaces = eqn.primitive in ("dynamic_update_slice", "scatter")
    reads[0], writes[0] = 0.0, 0.0
    reads[update] = 2.0 if replaces else 3.0


def find_classes(
    problem: Problem, schedules: Mapping[Body, Schedule], applied: AppliedConstraints
) -> ProgramClasses:
    """The classes of a problem's program.

    Args:
        problem: The problem.
        schedules: What fuses in each body (`fusion_schedule.schedules`).
        applied: Its applied constraints.
    """
    return _Builder(problem, schedules, applied).build()


def _bodies(body: Body, runs: float) -> Iterator[tuple[Body, float]]:
    """Every body with how often it runs; unknown trip counts count once, branches share one run."""
    yield body, runs
    for eqn in body.eqns:
        share = 1.0 / len(eqn.bodies) if eqn.primitive == "cond" else 1.0
        for inner in eqn.bodies:
            trip_count = 1 if inner.trip_count is None else inner.trip_count
            yield from _bodies(inner, runs * share * trip_count)
