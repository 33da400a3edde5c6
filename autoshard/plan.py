"""The plan: what `optimize` returns; it runs as the function and says what it does and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

from autoshard.compiler.bound_plan import BoundPlan
from autoshard.cost_model.hardware.hardware import Hardware
from autoshard.errors import ArgumentError
from autoshard.layout.pins import PinMap
from autoshard.report.explain import Explanation, explain
from autoshard.report.html import fragment_html
from autoshard.report.minimise import MinimalConstraints, minimise
from autoshard.report.plan_text import plan_text
from autoshard.report.what_if import LeafExplanation, WhatIf, explain_leaf, what_if
from autoshard.table.from_plan import table_of
from autoshard.table.spec_table import SpecTable


@dataclass(frozen=True, eq=False, repr=False)
class Plan(BoundPlan):
    """A bound plan that answers for itself: its table, its explanation, what else it would cost."""

    @property
    def table(self) -> SpecTable:
        """The plan as a file; `plan.table.save(path)`."""
        return table_of(self)

    def __copy__(self) -> Plan:
        return self  # it is frozen

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def __reduce__(self) -> str:
        """Refuses pickling: a plan holds a function, devices and a compiled program.

        Raises:
            ArgumentError: It says what to do instead.
        """
        raise ArgumentError(
            "a plan cannot be pickled: it holds devices and a compiled program. Save its table, "
            "plan.table.save(path), and apply it there: autoshard.apply(fn, args, mesh, path)."
        )

    def __str__(self) -> str:
        return plan_text(self, self.table)

    def records(self) -> list[dict[str, Any]]:
        """The candidates as plain dicts, for a data frame or JSON: prediction, evidence, reason."""
        return [candidate.to_dict() for candidate in self.candidates]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return fragment_html(self.table, self.timings)

    def __repr__(self) -> str:
        rules = ", ".join(map(str, self.rules)) or "replicated"
        name, axes = self.traced.program.name, dict(self.mesh.axes)
        return f"<Plan of {name} on {axes}: {rules}; verified: {self.verified}>"

    def minimise(self) -> MinimalConstraints:
        """The fewest constraints inside the function that give the same collectives, in the words
        of the source.

        Takes some dozens of runs of Shardy's passes and a few compilations; none for a plan of
        another machine.
        """
        compiled = None if self.mesh.target is not None else self.compile
        return minimise(self.traced, self.layout, self.mesh, compiled, self.compiler_options)

    @overload
    def explain(
        self, leaf: None = None, *, hardware: Hardware | str | None = None
    ) -> Explanation: ...

    @overload
    def explain(self, leaf: str, *, hardware: Hardware | str | None = None) -> LeafExplanation: ...

    def explain(
        self, leaf: str | None = None, *, hardware: Hardware | str | None = None
    ) -> Explanation | LeafExplanation:
        """What the plan moves, from which source line and rule, what each device stores, and why no
        preset is better.

        Args:
            leaf: A leaf path: explains its spec instead, and what each other one would cost.
            hardware: What seconds are predicted for, a preset or file; by default the mesh's
                devices.

        Raises:
            PathError: If there is no such leaf.
        """
        return explain(self, hardware) if leaf is None else explain_leaf(self, leaf, hardware)

    def what_if(self, pins: PinMap, *, hardware: Hardware | str | None = None) -> WhatIf:
        """Predicts the plan with other pins; `.compile()` of the answer asks the compiler.

        The first question builds the predictor's tables, later ones take milliseconds.

        Raises:
            PathError: If a pin names no leaf.
            SpecError: If a spec does not fit its leaf.
        """
        return what_if(self, pins, hardware)
