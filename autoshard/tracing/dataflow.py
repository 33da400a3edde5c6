"""Facts that flow through a program, forwards or backwards, to a fixed point.

Data goes from the operands of an equation to its results, through the mappings of its bodies into
them and out of them again, and along loop carries from one trip to the next. An equation with
bodies hands on nothing by itself: its bodies say what becomes of what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from autoshard.tracing.program import Program, Value

Fact = TypeVar("Fact")


def forward(
    program: Program, facts: Sequence[Fact], join: Callable[[Fact, Fact], Fact]
) -> list[Fact]:
    """Facts about values, each joined with those of all values that it is computed from.

    Args:
        program: The program.
        facts: By `Value.index`, what holds to begin with.
        join: Of two facts the one that holds of what is computed from both; commutative,
            associative and idempotent, so that there is a fixed point.

    Returns:
        By `Value.index`, the joined facts.
    """
    fact_of = list(facts)
    changed = True
    while changed:  # twice for most programs: once more than the deepest chain of loop carries
        changed = False
        for eqn in program.eqns:
            flows = [(mapping.source, mapping.target) for mapping in eqn.mappings]
            if not eqn.bodies:
                flows += [(source, target) for source in eqn.inputs for target in eqn.outputs]
            for source, target in flows:
                joined = join(fact_of[target.index], fact_of[source.index])
                changed |= joined != fact_of[target.index]
                fact_of[target.index] = joined
    return fact_of


def computed_from(program: Program, values: Iterable[Value]) -> set[int]:
    """Numbers (`Value.index`) of these values and of all that are computed from any of them."""
    reached = {value.index for value in values}
    size = -1
    while size != len(reached):
        size = len(reached)
        for eqn in program.eqns:
            for mapping in eqn.mappings:
                if mapping.source.index in reached:
                    reached.add(mapping.target.index)
            if not eqn.bodies and any(v.index in reached for v in eqn.inputs):
                reached.update(v.index for v in eqn.outputs)
    return reached


def needed_for(program: Program, values: Iterable[Value]) -> set[int]:
    """Numbers (`Value.index`) of these values and of all that any of them is computed from."""
    reached = {value.index for value in values}
    size = -1
    while size != len(reached):
        size = len(reached)
        for eqn in reversed(program.eqns):
            for mapping in eqn.mappings:
                if mapping.target.index in reached:
                    reached.add(mapping.source.index)
            if not eqn.bodies and any(v.index in reached for v in eqn.outputs):
                reached.update(v.index for v in eqn.inputs)
    return reached
