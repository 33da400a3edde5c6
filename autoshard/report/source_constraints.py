"""The constraints of a plan in the words of the source: one statement per expression and place.

A person who writes `with_sharding_constraint` around an expression states more than one place of
the traced program: the value itself, its recomputation under `jax.checkpoint`, and its cotangent in
the backward pass (the transpose of a constraint is the same constraint). A `Statement` holds these
places together, for the result of an expression or for one of its operands; unrolled layers share
their source lines, so the number of statements does not grow with depth. What cannot be said in the
source (a line that stands for different layouts, an operand that is no part of the expression)
becomes a statement without an expression.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec

from autoshard.axes.axis_classes import AxisClasses
from autoshard.report.source_expressions import (
    Expression,
    Site,
    expression_at,
    operand_expression,
    sites_of,
)
from autoshard.tracing.primitives import ANCHORS
from autoshard.tracing.program import Body, Eqn, Value
from autoshard.tracing.rewrite import Constraints, EqnConstraints
from autoshard.tracing.source_lines import name_stack_of, source_line

Entries = tuple[object, ...]
"""One entry per dimension, trailing Nones included."""


@dataclass(frozen=True, slots=True)
class Place:
    """One constraint of the traced program.

    Attributes:
        eqn: `Eqn.index` of the anchor, or of the equation with the body.
        kind: `operand`, `kept` (an operand as it is stored, before it is stated as the work reads
            it), `result` or `output` (of a body).
        position: Which operand, result or output.
        step: Of a result 0 as computed, 1 as stored (and so for the cotangent that such a result
            has, as an operand); of an output the number of the body.
        spec: What is stated.
    """

    eqn: int
    kind: str
    position: int
    step: int
    spec: PartitionSpec


@dataclass(frozen=True, slots=True)
class Statement:
    """One constraint as a person would write it.

    Attributes:
        source: `file.py:line`.
        what: `result`, `result as computed`, `operand 1`, `operand 1 as stored`, `carry 0`.
        primitive: The anchor.
        shape: Shape of the value there (inside a loop, of one trip).
        spec: Spec of the expression's value.
        expression: What to write it around; None where it cannot be written in the source.
        places: What it states in the traced program.
        in_loop: True inside a scan or while body.
    """

    source: str
    what: str
    primitive: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    expression: Expression | None
    places: tuple[Place, ...]
    in_loop: bool


def as_constraints(statements: Iterable[Statement]) -> Constraints:
    """The statements as constraints of the traced program; of two for one operand that of the lower
    step holds.
    """
    operands: dict[int, dict[int, tuple[int, PartitionSpec]]] = defaultdict(dict)
    kept: dict[int, dict[int, PartitionSpec]] = defaultdict(dict)
    results: dict[int, dict[int, dict[int, PartitionSpec]]] = defaultdict(lambda: defaultdict(dict))
    outputs: dict[tuple[int, int], dict[int, PartitionSpec]] = defaultdict(dict)
    for place in (place for statement in statements for place in statement.places):
        if place.kind == "operand":
            known = operands[place.eqn].get(place.position)
            if known is None or place.step <= known[0]:
                operands[place.eqn][place.position] = place.step, place.spec
        elif place.kind == "kept":
            kept[place.eqn][place.position] = place.spec
        elif place.kind == "result":
            results[place.eqn][place.position][place.step] = place.spec
        else:
            outputs[place.eqn, place.step][place.position] = place.spec
    eqns = {
        index: EqnConstraints(
            {k: spec for k, (_, spec) in operands.get(index, {}).items()},
            {
                k: tuple(spec for _, spec in sorted(steps.items()))
                for k, steps in results.get(index, {}).items()
            },
            before_reshard=kept.get(index, {}),
        )
        for index in {*operands, *kept, *results}
    }
    return Constraints(eqns, dict(outputs))


def statements_for(classes: AxisClasses, constraints: Constraints) -> tuple[Statement, ...]:
    """The statements that together say what the constraints say, those that can be written in the
    source first.
    """
    finder = _Finder(classes, constraints)
    made = [*finder.at_anchors(), *finder.at_carries()]
    made += finder.unsaid(made)
    order = {"result": 0, "carry": 1, "operand": 2}
    return tuple(
        sorted(
            made, key=lambda s: (s.expression is None, order[s.what.split()[0]], s.places[0].eqn)
        )
    )


class _Finder:
    def __init__(self, classes: AxisClasses, constraints: Constraints) -> None:
        self._axes = classes
        self._constraints = constraints
        self._backward: set[int] = set()
        self._looped: set[int] = set()
        self._body_of: dict[int, Body] = {}
        self._sites: dict[int, tuple[Site, ...]] = {}
        self._visit(classes.program.body, transposed=False, looped=False)

    def _visit(self, body: Body, transposed: bool, looped: bool) -> None:
        for eqn in body.eqns:
            self._body_of[eqn.index] = body
            stack = name_stack_of(eqn)
            own = (transposed or "transpose(" in stack) and "rematted_computation" not in stack
            if own:
                self._backward.add(eqn.index)
            if looped:
                self._looped.add(eqn.index)
            for inner in eqn.bodies:
                self._visit(inner, own, looped or eqn.primitive in ("scan", "while"))

    def _sites_of(self, eqn: Eqn) -> tuple[Site, ...]:
        if eqn.index not in self._sites:
            self._sites[eqn.index] = sites_of(eqn)
        return self._sites[eqn.index]

    # Anchors --------------------------------------------------------------------------------------

    def at_anchors(self) -> Iterator[Statement]:
        """Statements around the expressions of contractions, gathers and the like."""
        program = self._axes.program
        anchors = [program.eqns[index] for index in sorted(self._constraints.eqns)]
        for site, forward, backward in self._by_site(
            [e for e in anchors if e.primitive in ANCHORS]
        ):
            yield from self._of_site(site, forward, backward)

    def _by_site(self, anchors: Sequence[Eqn]) -> Iterator[tuple[Site, list[Eqn], list[Eqn]]]:
        """Anchors by the innermost expression that means one and the same thing whenever it
        runs.
        """
        level = dict.fromkeys((e.index for e in anchors), 0)
        left = list(anchors)
        while left:
            groups: dict[Site, list[Eqn]] = defaultdict(list)
            for eqn in left:
                sites = self._sites_of(eqn)
                if level[eqn.index] < len(sites):
                    groups[sites[level[eqn.index]]].append(eqn)
            left = []
            for site, group in groups.items():
                forward = [e for e in group if e.index not in self._backward]
                if len({self._meaning(e) for e in forward}) == 1:
                    yield site, forward, [e for e in group if e.index in self._backward]
                else:
                    left += group
                    for eqn in group:
                        level[eqn.index] += 1

    def _meaning(self, eqn: Eqn) -> tuple[object, ...]:
        wanted = self._constraints.eqns[eqn.index]
        stated = (tuple(sorted(wanted.operands.items())), tuple(sorted(wanted.results.items())))
        shapes = tuple(v.shape for v in eqn.inputs)
        return eqn.primitive, shapes, str(eqn.params.get("dimension_numbers")), repr(stated)

    def _of_site(self, site: Site, forward: list[Eqn], backward: list[Eqn]) -> Iterator[Statement]:
        first = forward[0]
        whole = expression_at(site)
        stated = self._constraints.eqns[first.index]
        cotangents = [(e, k) for e in backward for k in self._cotangent(e, first)]
        looped = first.index in self._looped

        def made(what: str, shape: tuple[int, ...], spec: PartitionSpec, at: Expression | None, places: list[Place],
                 ) -> Statement:  # fmt: skip
            return Statement(
                str(site), what, first.primitive, shape, spec, at, tuple(places), looped
            )

        for position, specs in stated.results.items():
            value = first.outputs[position]
            outside = self._escaped(value, site) if position == 0 else None
            for step, spec in enumerate(specs, 2 - len(specs)):
                places = [Place(e.index, "result", position, step, spec) for e in forward]
                if position == 0:
                    places += [Place(e.index, "operand", k, step, spec) for e, k in cotangents]
                said = None if outside is None else self._carried_over(spec, value, outside)
                what = "result" if step else "result as computed"
                yield made(
                    what, value.shape, said or spec, whole if said is not None else None, places
                )
        for position, spec in stated.operands.items():
            value = first.inputs[position]
            part = None if whole is None else operand_expression(whole, first, position)
            places = [Place(e.index, "operand", position, 0, spec) for e in forward]
            for eqn in backward:
                if self._differentiated(eqn, first) == position:
                    own = self._carried_over(spec, value, eqn.outputs[0])
                    places += [] if own is None else [Place(eqn.index, "result", 0, 0, own)]
            yield made(f"operand {position}", value.shape, spec, part, places)

    def _kind(self, value: Value) -> tuple[object, ...]:
        return tuple(sorted(zip(self._axes.of_value[value.index], value.shape, strict=True)))

    def _cotangent(self, eqn: Eqn, first: Eqn) -> tuple[int, ...]:
        """Which operand of a transposed anchor is the cotangent of the forward one's result."""
        result = self._kind(first.outputs[0])
        order = (
            reversed(range(len(eqn.inputs)))
            if eqn.primitive.startswith("scatter")
            else range(len(eqn.inputs))
        )
        return tuple(k for k in order if self._kind(eqn.inputs[k]) == result)[:1]

    def _differentiated(self, eqn: Eqn, first: Eqn) -> int | None:
        """Which operand of the forward anchor a transposed one makes the cotangent of."""
        made = self._kind(eqn.outputs[0])
        able = [k for k, v in enumerate(first.inputs) if self._kind(v) == made]
        cotangent = self._cotangent(eqn, first)
        read = [self._kind(v) for k, v in enumerate(eqn.inputs) if k not in cotangent]
        others = [
            k
            for k in able
            if any(self._kind(v) in read for j, v in enumerate(first.inputs) if j != k)
        ]
        return next(iter(others or able), None)

    def _escaped(self, value: Value, site: Site) -> Value | None:
        """What an expression with this anchor is worth: follows the value while only the expression
        itself reads it.
        """
        body = next(b for b in self._bodies() if any(value in e.outputs for e in b.eqns))
        while True:
            readers = [e for e in body.eqns if value in e.inputs]
            inside = [
                e for e in readers if site in self._sites_of(e) and e.index not in self._backward
            ]
            if value in body.outputs or len(inside) < len(readers) or not readers:
                return value
            if len(readers) > 1 or readers[0].bodies or len(readers[0].outputs) != 1:
                return None
            value = readers[0].outputs[0]

    def _bodies(self) -> Iterator[Body]:
        yield self._axes.program.body
        for eqn in self._axes.program.eqns:
            yield from eqn.bodies

    def _carried_over(
        self, spec: PartitionSpec, source: Value, target: Value
    ) -> PartitionSpec | None:
        """The spec of a value said of another one with the same dimensions in another order; None
        if it has others.
        """
        entries = [*spec, *[None] * (len(source.shape) - len(spec))]
        mine, theirs = self._axes.of_value[source.index], self._axes.of_value[target.index]
        if (mine, source.shape) == (theirs, target.shape):
            return spec
        left = list(zip(mine, source.shape, entries, strict=True))
        found = []
        for axis, size in zip(theirs, target.shape, strict=True):
            match = next((item for item in left if item[:2] == (axis, size)), None)
            if match is not None:
                left.remove(match)
            elif size != 1:
                return None
            found.append(None if match is None else match[2])
        while found and found[-1] is None:
            found.pop()
        return None if any(entry is not None for _, _, entry in left) else PartitionSpec(*found)

    # Carries --------------------------------------------------------------------------------------

    def at_carries(self) -> Iterator[Statement]:
        """Statements around the expressions that loop bodies return as carries."""
        program = self._axes.program
        forward: dict[tuple[object, ...], Statement] = {}
        for (index, number), specs in sorted(self._constraints.outputs.items()):
            eqn = program.eqns[index]
            body = eqn.bodies[number]
            for position, spec in specs.items():
                value = body.outputs[position]
                place = Place(index, "output", position, number, spec)
                key = (self._sites_of(eqn)[:1], self._kind(value), spec)
                if key in forward:
                    known = forward[key]
                    forward[key] = replace(known, places=(*known.places, place))
                    continue
                maker = next((e for e in body.eqns if value in e.outputs), None)
                site = (
                    next(iter(self._sites_of(maker)), None)
                    if maker is not None and not maker.bodies
                    else None
                )
                said = None if site is None or index in self._backward else expression_at(site)
                source = source_line(eqn) if site is None else str(site)
                what = f"carry {position}"
                forward[key] = Statement(
                    source, what, eqn.primitive, value.shape, spec, said, (place,), True
                )
        yield from forward.values()

    # The rest -------------------------------------------------------------------------------------

    def unsaid(self, made: Sequence[Statement]) -> Iterator[Statement]:
        """Statements without an expression, for the constraints that no other statement says."""
        said = as_constraints(made)
        for index, wanted in self._constraints.eqns.items():
            eqn, known = self._axes.program.eqns[index], said.eqns.get(index, EqnConstraints())
            for k, spec in wanted.before_reshard.items():
                yield self._unsaid(eqn, eqn.inputs[k], Place(index, "kept", k, 0, spec))
            for k, spec in wanted.operands.items():
                if known.operands.get(k) != spec:
                    yield self._unsaid(eqn, eqn.inputs[k], Place(index, "operand", k, 0, spec))
            for k, specs in wanted.results.items():
                if known.results.get(k) != specs:
                    for step, spec in enumerate(specs, 2 - len(specs)):
                        yield self._unsaid(
                            eqn, eqn.outputs[k], Place(index, "result", k, step, spec)
                        )

    def _unsaid(self, eqn: Eqn, value: Value, place: Place) -> Statement:
        what = f"{place.kind} {place.position}"
        if (place.kind, place.step) == ("result", 0):
            what = "result as computed"
        elif place.kind == "kept":
            what = f"operand {place.position} as stored"
        looped = eqn.index in self._looped
        return Statement(
            source_line(eqn), what, eqn.primitive, value.shape, place.spec, None, (place,), looped
        )
