"""The constraints of a plan in the source: one for each expression and what of it is stated.

A user who writes `with_sharding_constraint` around an expression states more than one value of the
traced program: the value itself, its recomputation under `jax.checkpoint`, and its cotangent in the
backward pass (the transpose of a constraint is the same constraint). A `SourceConstraint` holds
these together, for the result of an expression or for one of its operands; unrolled layers share
their source lines, so the number of source constraints does not grow with depth. What cannot be
expressed in the source (a line that stands for different layouts, an operand that is no part of the
expression) becomes a source constraint without an expression.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from jax.sharding import PartitionSpec

from autoshard.axes.axis_classes import AxisClasses
from autoshard.report.cotangents import Cotangents
from autoshard.report.source_expressions import (
    Expression,
    SourceSpan,
    expression_at,
    operand_expression,
    spans_of,
)
from autoshard.report.traced_constraints import Kind, TracedConstraint, collect
from autoshard.tracing.primitives import ANCHORS
from autoshard.tracing.program import Body, Eqn, Value
from autoshard.tracing.rewrite import Constraints, EqnConstraints
from autoshard.tracing.source_lines import name_stack_of, source_line


@dataclass(frozen=True, slots=True)
class SourceConstraint:
    """One constraint as a user would write it.

    Attributes:
        source: `file.py:line`.
        what: `result`, `result as computed`, `operand 1`, `operand 1 as stored`, `carry 0`.
        primitive: The anchor.
        shape: Shape of the value there (inside a loop, of one trip).
        spec: Spec of the expression's value.
        expression: What to write it around; None where it cannot be expressed in the source.
        traced: What it states in the traced program.
        in_loop: True inside a scan or while body.
    """

    source: str
    what: str
    primitive: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    expression: Expression | None
    traced: tuple[TracedConstraint, ...]
    in_loop: bool


def as_constraints(source_constraints: Iterable[SourceConstraint]) -> Constraints:
    """The source constraints as constraints of the traced program."""
    return collect(traced for constraint in source_constraints for traced in constraint.traced)


def source_constraints_for(
    classes: AxisClasses, constraints: Constraints
) -> tuple[SourceConstraint, ...]:
    """The source constraints that together state the constraints, expressible ones first."""
    anchors = _AnchorConstraints(_Equations(classes), constraints)
    expressed = [*anchors.source_constraints(), *_at_carries(anchors.equations, constraints)]
    rest = _rest(anchors.equations, constraints, as_constraints(expressed))
    return tuple(sorted([*expressed, *rest], key=_expressible_first))


_ORDER = {"result": 0, "carry": 1, "operand": 2}
"""Results first: theirs are the lines that people write."""


def _expressible_first(constraint: SourceConstraint) -> tuple[bool, int, int]:
    what, *_ = constraint.what.split()
    return constraint.expression is None, _ORDER[what], constraint.traced[0].eqn


class _Equations:
    """What is known of each equation: its expressions, its body, whether it runs backward."""

    def __init__(self, classes: AxisClasses) -> None:
        self.program = classes.program
        self.cotangents = Cotangents(classes)
        self.backward: set[int] = set()
        self.looped: set[int] = set()
        self.body_of: dict[int, Body] = {}
        self._spans: dict[int, tuple[SourceSpan, ...]] = {}
        self._visit(self.program.body, transposed=False, looped=False)

    def _visit(self, body: Body, transposed: bool, looped: bool) -> None:
        for eqn in body.eqns:
            self.body_of[eqn.index] = body
            stack = name_stack_of(eqn)
            # What `jax.checkpoint` computes anew lies in the backward pass but runs forward.
            backward = transposed or "transpose(" in stack
            backward = backward and "rematted_computation" not in stack
            if backward:
                self.backward.add(eqn.index)
            if looped:
                self.looped.add(eqn.index)
            loop = eqn.primitive in ("scan", "while")
            for inner in eqn.bodies:
                self._visit(inner, backward, looped or loop)

    def spans_of(self, eqn: Eqn) -> tuple[SourceSpan, ...]:
        """The expressions that an equation was traced in, innermost first."""
        if eqn.index not in self._spans:
            self._spans[eqn.index] = spans_of(eqn)
        return self._spans[eqn.index]


# Anchors ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Group:
    """Anchors that one expression is traced to, which means the same whenever it runs.

    Attributes:
        span: The expression.
        forward: The anchor, once for each call and each recomputation.
        backward: Its transposes.
    """

    span: SourceSpan
    forward: list[Eqn]
    backward: list[Eqn]

    @property
    def first(self) -> Eqn:
        """One of the anchors, which are all alike."""
        return self.forward[0]


@dataclass(frozen=True, eq=False)
class _AnchorConstraints:
    """Source constraints around the expressions of contractions, gathers and the like."""

    equations: _Equations
    constraints: Constraints

    def source_constraints(self) -> Iterator[SourceConstraint]:
        """Those of results and operands, expression by expression."""
        eqns = [self.equations.program.eqns[index] for index in sorted(self.constraints.eqns)]
        for group in self._groups([eqn for eqn in eqns if eqn.primitive in ANCHORS]):
            yield from self._of_results(group)
            yield from self._of_operands(group)

    def _groups(self, anchors: Sequence[Eqn]) -> Iterator[_Group]:
        """Anchors by the innermost expression that means the same whenever it runs.

        An expression in a helper that is called for different layers does not; then the calls of
        the helper may. Anchors that run out of expressions are left out.
        """
        undecided, level = list(anchors), 0
        while undecided:
            by_span = self._by_span(undecided, level)
            undecided, level = [], level + 1
            for span, eqns in by_span.items():
                forward = [eqn for eqn in eqns if eqn.index not in self.equations.backward]
                backward = [eqn for eqn in eqns if eqn.index in self.equations.backward]
                if len({self._meaning(eqn) for eqn in forward}) == 1:
                    yield _Group(span, forward, backward)
                else:
                    undecided += eqns

    def _by_span(self, eqns: Sequence[Eqn], level: int) -> dict[SourceSpan, list[Eqn]]:
        """Equations by the expression that lies so many levels around the innermost one."""
        by_span: dict[SourceSpan, list[Eqn]] = defaultdict(list)
        for eqn in eqns:
            spans = self.equations.spans_of(eqn)
            if level < len(spans):
                by_span[spans[level]].append(eqn)
        return by_span

    def _meaning(self, eqn: Eqn) -> tuple[object, ...]:
        """What the anchor computes and what is stated of it."""
        stated = self.constraints.eqns[eqn.index]
        specs = (tuple(sorted(stated.operands.items())), tuple(sorted(stated.results.items())))
        shapes = tuple(value.shape for value in eqn.inputs)
        return eqn.primitive, shapes, str(eqn.params.get("dimension_numbers")), repr(specs)

    def _of_results(self, group: _Group) -> Iterator[SourceConstraint]:
        expression = expression_at(group.span)
        for position, specs in self.constraints.eqns[group.first.index].results.items():
            value = group.first.outputs[position]
            whole = self._value_of_expression(group) if position == 0 else None
            # One spec alone is the result's own: it is computed in it.
            for step, spec in enumerate(specs, 2 - len(specs)):
                own_spec = None
                if whole is not None:
                    own_spec = self.equations.cotangents.carried_over(spec, value, whole)
                yield SourceConstraint(
                    source=str(group.span),
                    what="result" if step else "result as computed",
                    primitive=group.first.primitive,
                    shape=value.shape,
                    spec=own_spec or spec,  # an empty one states no more
                    expression=None if own_spec is None else expression,
                    traced=tuple(self._traced_results(group, position, step, spec)),
                    in_loop=group.first.index in self.equations.looped,
                )

    def _traced_results(
        self, group: _Group, position: int, step: int, spec: PartitionSpec
    ) -> Iterator[TracedConstraint]:
        """The result of each anchor; of the first result the cotangents too."""
        for eqn in group.forward:
            yield TracedConstraint(eqn.index, Kind.RESULT, position, spec, step)
        for eqn in group.backward if position == 0 else ():
            for operand in self.equations.cotangents.operands_with(eqn, group.first):
                yield TracedConstraint(eqn.index, Kind.OPERAND, operand, spec, step)

    def _of_operands(self, group: _Group) -> Iterator[SourceConstraint]:
        whole = expression_at(group.span)
        for position, spec in self.constraints.eqns[group.first.index].operands.items():
            part = None if whole is None else operand_expression(whole, group.first, position)
            yield SourceConstraint(
                source=str(group.span),
                what=f"operand {position}",
                primitive=group.first.primitive,
                shape=group.first.inputs[position].shape,
                spec=spec,
                expression=part,
                traced=tuple(self._traced_operands(group, position, spec)),
                in_loop=group.first.index in self.equations.looped,
            )

    def _traced_operands(
        self, group: _Group, position: int, spec: PartitionSpec
    ) -> Iterator[TracedConstraint]:
        """The operand of each anchor, and its cotangents."""
        cotangents = self.equations.cotangents
        for eqn in group.forward:
            yield TracedConstraint(eqn.index, Kind.OPERAND, position, spec)
        for eqn in group.backward:
            if cotangents.differentiated(eqn, group.first) == position:
                value = group.first.inputs[position]
                own_spec = cotangents.carried_over(spec, value, eqn.outputs[0])
                if own_spec is not None:
                    yield TracedConstraint(eqn.index, Kind.RESULT, 0, own_spec)

    def _value_of_expression(self, group: _Group) -> Value | None:
        """The value of an expression with this anchor; None if it is not certain.

        Follows the anchor's result through equations (a transposition, say) as long as only the
        expression itself reads it.
        """
        body = self.equations.body_of[group.first.index]
        value: Value | None = group.first.outputs[0]
        while value is not None and not self._leaves(value, body, group.span):
            value = _only_result(_readers(value, body))
        return value

    def _leaves(self, value: Value, body: Body, span: SourceSpan) -> bool:
        """True for a value that is read outside of an expression, or not at all."""
        readers = _readers(value, body)
        inside = [
            eqn
            for eqn in readers
            if eqn.index not in self.equations.backward and span in self.equations.spans_of(eqn)
        ]
        return value in body.outputs or not readers or len(inside) < len(readers)


def _readers(value: Value, body: Body) -> list[Eqn]:
    return [eqn for eqn in body.eqns if value in eqn.inputs]


def _only_result(eqns: list[Eqn]) -> Value | None:
    """The result of the only equation; None if there are several equations, results or bodies."""
    first, *others = eqns
    if others or first.bodies or len(first.outputs) != 1:
        return None
    return first.outputs[0]


# Carries ------------------------------------------------------------------------------------------


def _at_carries(equations: _Equations, constraints: Constraints) -> Iterator[SourceConstraint]:
    """Source constraints around the expressions that loop bodies return as carries."""
    by_meaning: dict[tuple[object, ...], SourceConstraint] = {}
    for (index, number), specs in sorted(constraints.outputs.items()):
        eqn = equations.program.eqns[index]
        body = eqn.bodies[number]
        for position, spec in specs.items():
            value = body.outputs[position]
            traced = TracedConstraint(index, Kind.BODY_OUTPUT, position, spec, body=number)
            # A loop in a helper that is called for each layer is one expression.
            meaning = (equations.spans_of(eqn)[:1], equations.cotangents.signature(value), spec)
            if meaning in by_meaning:
                same = by_meaning[meaning]
                by_meaning[meaning] = replace(same, traced=(*same.traced, traced))
                continue
            span = _span_of_output(equations, body, value)
            forward = index not in equations.backward
            by_meaning[meaning] = SourceConstraint(
                source=source_line(eqn) if span is None else str(span),
                what=f"carry {position}",
                primitive=eqn.primitive,
                shape=value.shape,
                spec=spec,
                expression=expression_at(span) if span is not None and forward else None,
                traced=(traced,),
                in_loop=True,
            )
    yield from by_meaning.values()


def _span_of_output(equations: _Equations, body: Body, value: Value) -> SourceSpan | None:
    """The innermost expression that computes an output of a body; None if no expression does."""
    for eqn in body.eqns:
        if value in eqn.outputs:
            spans = () if eqn.bodies else equations.spans_of(eqn)
            return spans[0] if spans else None
    return None


# The rest -----------------------------------------------------------------------------------------


def _rest(
    equations: _Equations, constraints: Constraints, expressed: Constraints
) -> Iterator[SourceConstraint]:
    """Source constraints without an expression, for what no expressed one states."""
    for index, stated in constraints.eqns.items():
        eqn = equations.program.eqns[index]
        already = expressed.eqns.get(index, EqnConstraints())
        for position, spec in stated.before_reshard.items():
            traced = TracedConstraint(index, Kind.OPERAND_BEFORE_RESHARD, position, spec)
            yield _inexpressible(equations, eqn, traced, f"operand {position} as stored")
        for position, spec in _changed(stated.operands, already.operands):
            traced = TracedConstraint(index, Kind.OPERAND, position, spec)
            yield _inexpressible(equations, eqn, traced, f"operand {position}")
        for position, specs in _changed(stated.results, already.results):
            for step, spec in enumerate(specs, 2 - len(specs)):
                traced = TracedConstraint(index, Kind.RESULT, position, spec, step)
                what = f"result {position}" if step else "result as computed"
                yield _inexpressible(equations, eqn, traced, what)


_Specs = TypeVar("_Specs", PartitionSpec, tuple[PartitionSpec, ...])


def _changed(
    stated: Mapping[int, _Specs], expressed: Mapping[int, _Specs]
) -> Iterator[tuple[int, _Specs]]:
    """What is stated by position and not expressed just so."""
    for position, specs in stated.items():
        if expressed.get(position) != specs:
            yield position, specs


def _inexpressible(
    equations: _Equations, eqn: Eqn, traced: TracedConstraint, what: str
) -> SourceConstraint:
    values = eqn.outputs if traced.kind is Kind.RESULT else eqn.inputs
    return SourceConstraint(
        source=source_line(eqn),
        what=what,
        primitive=eqn.primitive,
        shape=values[traced.position].shape,
        spec=traced.spec,
        expression=None,
        traced=(traced,),
        in_loop=eqn.index in equations.looped,
    )
