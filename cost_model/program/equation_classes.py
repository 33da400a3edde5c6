"""Classes: equations of the same primitive, shapes and logical axes, and values that are read in the same
ways, counted once.

An unrolled model of 32 layers has as many classes as one of 2: a class has a multiplicity, and its
cost depends only on how the rules split its few signatures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from autoshard.axes.sharding_rules import FactorKind
from autoshard.cost_model.program.applied_constraints import AppliedConstraints
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
        factors: The loop of each dimension.
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
    """A class of equations.

    Attributes:
        eqn: One of them.
        kinds: Kinds of its loops.
        operands: Operands with a shape.
        results: Results, scalars too.
        flops: Of one run, unsharded.
        stored_share: Share of the class whose results reach memory: those are operations of their own.
        runs_per_call: How often such an equation runs per call.
    """

    eqn: Eqn
    kinds: tuple[FactorKind, ...]
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    flops: float
    stored_share: float
    runs_per_call: float


@dataclass(frozen=True, eq=False, slots=True)
class ValueClass:
    """A class of values with everything in one body that reads them.

    Attributes:
        value: One of them.
        readers: (equation, loops of the operand), one per kind of reader.
        members: [values] their `Value.index`.
        spans: [kinds of reader, values, 2]: the first and the last equation (`Eqn.index`) of a kind
            that reads a value.
        moves_per_call: How often such a value is moved per call: as often as it is made, never where it
            depends on no argument, for it is then made as it is read (but takes memory).
    """

    value: Value
    readers: tuple[tuple[Eqn, tuple[int, ...]], ...]
    members: NDArray[np.int64]
    spans: NDArray[np.int64]
    moves_per_call: float


@dataclass(frozen=True, eq=False, slots=True)
class ProgramClasses:
    """The classes of a program.

    Attributes:
        equation_classes: Classes of equations.
        value_classes: Classes of values.
        of_eqn: By `Eqn.index`, the class; -1 for equations with bodies, which cost nothing
            themselves.
    """

    equation_classes: tuple[EquationClass, ...]
    value_classes: tuple[ValueClass, ...]
    of_eqn: NDArray[np.int64]


class _Builder:
    def __init__(
        self, problem: Problem, plans: Mapping[Body, Schedule], applied: AppliedConstraints
    ) -> None:
        self._problem = problem
        self._plans = plans
        self._axes = problem.logical_axes.classes
        self._applied = applied
        self._seen_of: dict[int, int] = {}
        self._seen_numbers: dict[object, int] = {}

    def build(self) -> ProgramClasses:
        works: dict[object, list[Eqn]] = {}
        work_times: dict[object, float] = defaultdict(float)
        transfers: dict[object, list[float]] = defaultdict(list)
        uses: dict[object, list[dict[object, list[tuple[Eqn, tuple[int, ...]]]]]] = defaultdict(
            list
        )
        values: dict[object, list[Value]] = defaultdict(list)
        use_times: dict[object, float] = defaultdict(float)
        numbers: dict[object, int] = {}
        of_eqn = np.full(len(self._problem.program.eqns), -1, dtype=np.int64)
        for body, times in bodies_of(self._problem.program.body, 1.0):
            readers: dict[Value, dict[object, list[tuple[Eqn, tuple[int, ...]]]]] = defaultdict(
                dict
            )
            for eqn in body.eqns:
                if eqn.bodies:
                    continue
                key = self._work_key(eqn)
                number = of_eqn[eqn.index] = numbers.setdefault(key, len(numbers))
                works.setdefault(key, []).append(eqn)
                work_times[key] += times
                often = _transfers(eqn, self._plans[body])
                transfers[key] = [
                    a + times * b for a, b in zip_longest(transfers[key], often, fillvalue=0.0)
                ]
                for operand in self._operands(eqn.inputs, self._axes.rules[eqn.index].operands):
                    if not operand.constant or eqn.primitive not in FUSED:
                        readers[operand.value].setdefault((number, operand.factors), []).append(
                            (eqn, operand.factors)
                        )
            for value, found in readers.items():
                constant = self._axes.constant[value.index]
                use_key = (self._seen(value), constant, frozenset(found))
                uses[use_key].append({kind: found[kind] for kind in sorted(found, key=repr)})
                values[use_key].append(value)
                use_times[use_key] += 0.0 if constant else times
        return ProgramClasses(
            tuple(
                self._work(eqns[0], work_times[key], transfers[key]) for key, eqns in works.items()
            ),
            tuple(
                self._uses(values[key], members, use_times[key]) for key, members in uses.items()
            ),
            of_eqn,
        )

    def _operands(
        self,
        values: Sequence[Value],
        maps: Sequence[tuple[int, ...]],
        transfers: Sequence[float] | None = None,
        *,
        scalars: bool = False,
    ) -> tuple[Operand, ...]:
        often = [0.0] * len(values) if transfers is None else transfers
        return tuple(
            Operand(v, factors, self._axes.constant[v.index], times)
            for v, factors, times in zip(values, maps, often, strict=True)
            if v.itemsize and (v.shape or scalars)
        )

    def _seen(self, value: Value) -> int:
        """A number for what the cost of moving a value depends on; a pinned value is a class of its
        own.
        """
        number = self._seen_of.get(value.index)
        if number is None:
            number = self._seen_numbers.setdefault(self._look_at(value), len(self._seen_numbers))
            self._seen_of[value.index] = number
        return number

    def _look_at(self, value: Value) -> object:
        pinned = value.index if value.index in self._problem.pins else -1
        made_for = tuple(
            (self._problem.factor_signature(e), factors)
            for e, factors in self._applied.get(value.index, ())
        )
        return self._problem.value_signature(value), value.itemsize, pinned, made_for

    def _work_key(self, eqn: Eqn) -> object:
        rule = self._axes.rules[eqn.index]
        family = "elementwise" if eqn.primitive in FUSED else eqn.primitive

        def side(values: Sequence[Value], maps: Sequence[tuple[int, ...]]) -> object:
            return tuple((self._seen(v), factors) for v, factors in zip(values, maps, strict=True))

        return (
            family, flops(eqn, rule), rule.kinds, self._problem.factor_signature(eqn), side(eqn.inputs, rule.operands),
            side(eqn.outputs, rule.results), exchanges(eqn, rule),
        )  # fmt: skip

    def _work(self, eqn: Eqn, times: float, transfers: Sequence[float]) -> EquationClass:
        rule = self._axes.rules[eqn.index]
        *often, stores = (moved / times if times else 0.0 for moved in transfers)
        count = len(eqn.inputs)
        operands = self._operands(eqn.inputs, rule.operands, often[:count])
        results = self._operands(  # a partial sum may well be a scalar
            eqn.outputs, rule.results, often[count:], scalars=True
        )
        return EquationClass(eqn, rule.kinds, operands, results, flops(eqn, rule), stores, times)

    def _uses(
        self,
        values: Sequence[Value],
        members: Sequence[dict[object, list[tuple[Eqn, tuple[int, ...]]]]],
        times: float,
    ) -> ValueClass:
        readers = tuple(found[0] for found in members[0].values())
        indices = np.array([v.index for v in values])
        spans = [
            [(found[0][0].index, found[-1][0].index) for found in member.values()]
            for member in members
        ]
        return ValueClass(values[0], readers, indices, np.array(spans).transpose(1, 0, 2), times)


def _transfers(eqn: Eqn, plan: Schedule) -> list[float]:
    """How often the bytes of each operand and result go to or from memory, then 1 if the equation
    stores anything.

    What looks up a part of its operand reads as much as it returns; an update in place reads and
    writes what it puts in (a scatter-add reads that place as well). A reshape moves nothing.
    """
    operands, results = len(eqn.inputs), len(eqn.outputs)
    loads = plan.loads.get(eqn.index, frozenset())
    fused = eqn.index in plan.fused
    if eqn.primitive in BITCASTS:
        return [0.0] * (operands + results + 1)
    reads = [1.0 if number in loads else 0.0 for number in range(operands)]
    writes = [1.0 if value in plan.stored else 0.0 for value in eqn.outputs]
    if eqn.primitive in LOOKUPS:
        writes = [often + reads[0] for often in writes] if not fused else [reads[0]]
        reads[0] = 0.0
    elif eqn.primitive in UPDATES:
        last = 1 if eqn.primitive == "dynamic_update_slice" else 2
        reads[0], writes = 0.0, [0.0]
        reads[last] = 2.0 if eqn.primitive in ("dynamic_update_slice", "scatter") else 3.0
    return [*reads, *writes, 0.0 if fused else 1.0]


def find_classes(
    problem: Problem, plans: Mapping[Body, Schedule], applied: AppliedConstraints
) -> ProgramClasses:
    """The classes of a problem's program.

    Args:
        problem: The problem.
        plans: What fuses in each body (`schedule.schedules`).
        applied: Its applied constraints.
    """
    return _Builder(problem, plans, applied).build()


def bodies_of(body: Body, times: float) -> Iterator[tuple[Body, float]]:
    """Every body with how often it runs; unknown trip counts count once, branches share one run."""
    yield body, times
    for eqn in body.eqns:
        share = 1.0 / len(eqn.bodies) if eqn.primitive == "cond" else 1.0
        for inner in eqn.bodies:
            yield from bodies_of(
                inner, times * share * (1 if inner.trip_count is None else inner.trip_count)
            )
