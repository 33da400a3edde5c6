"""Constraints of the traced program one by one, and collected by equation."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from autoshard.tracing.rewrite import Constraints, EqnConstraints


class Kind(enum.Enum):
    """Which value of an equation is stated."""

    OPERAND = "operand"
    OPERAND_BEFORE_RESHARD = "operand before the reshard"
    RESULT = "result"
    BODY_OUTPUT = "output of a body"


@dataclass(frozen=True, slots=True)
class TracedConstraint:
    """One constraint of the traced program.

    Attributes:
        eqn: `Eqn.index` of the anchor, or of the equation with the body.
        kind: Which of its values.
        position: Which operand, result or output.
        spec: What is stated.
        step: 0 for a result as the equation computes it, 1 for its own spec, to which it is
            resharded then; a cotangent has the step of its value.
        body: Number of the body, of an output.
    """

    eqn: int
    kind: Kind
    position: int
    spec: PartitionSpec
    step: int = 0
    body: int = 0


def collect(traced_constraints: Iterable[TracedConstraint]) -> Constraints:
    """The constraints by equation; of two for an operand that of the lower step holds."""
    collected = _Collected()
    for traced in traced_constraints:
        collected.add(traced)
    return collected.constraints()


_ByPosition = defaultdict[int, dict[int, PartitionSpec]]


@dataclass(eq=False)
class _Collected:
    """Specs by equation, then by position; those of results by step, those of outputs by body."""

    operands: _ByPosition = field(default_factory=lambda: defaultdict(dict))
    operand_steps: dict[tuple[int, int], int] = field(default_factory=dict)
    before_reshard: _ByPosition = field(default_factory=lambda: defaultdict(dict))
    results: defaultdict[int, _ByPosition] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    outputs: defaultdict[tuple[int, int], dict[int, PartitionSpec]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def add(self, traced: TracedConstraint) -> None:
        """Adds one."""
        if traced.kind is Kind.OPERAND:
            operand = traced.eqn, traced.position
            if traced.step <= self.operand_steps.get(operand, traced.step):
                self.operand_steps[operand] = traced.step
                self.operands[traced.eqn][traced.position] = traced.spec
        elif traced.kind is Kind.OPERAND_BEFORE_RESHARD:
            self.before_reshard[traced.eqn][traced.position] = traced.spec
        elif traced.kind is Kind.RESULT:
            self.results[traced.eqn][traced.position][traced.step] = traced.spec
        else:
            self.outputs[traced.eqn, traced.body][traced.position] = traced.spec

    def constraints(self) -> Constraints:
        """What was added."""
        eqns = {*self.operands, *self.before_reshard, *self.results}
        return Constraints({eqn: self._of_eqn(eqn) for eqn in eqns}, dict(self.outputs))

    def _of_eqn(self, eqn: int) -> EqnConstraints:
        results = {
            position: tuple(by_step[step] for step in sorted(by_step))
            for position, by_step in self.results.get(eqn, {}).items()
        }
        return EqnConstraints(
            self.operands.get(eqn, {}), results, before_reshard=self.before_reshard.get(eqn, {})
        )
