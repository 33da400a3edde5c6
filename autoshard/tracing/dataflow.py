"""Facts that flow through a program, forwards or backwards, to a fixed point.

Data goes from the operands of an equation to its results, through the mappings of its bodies into
them and out of them again, and along loop carries from one trip to the next. An equation with
bodies hands on nothing by itself: its bodies say what becomes of what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from autoshard.tracing.program import Eqn, Program, Value

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
            for source, target in _flows(eqn):
                joined = join(fact_of[target.index], fact_of[source.index])
                changed |= joined != fact_of[target.index]
                fact_of[target.index] = joined
    return fact_of


def computed_from(program: Program, values: Iterable[Value]) -> set[int]:
    """Numbers (`Value.index`) of these values and of all that are computed from any of them."""
    flows = []
    for eqn in program.eqns:
        flows += [(source.index, target.index) for source, target in _flows(eqn)]
    return _closure(values, flows)


def needed_for(program: Program, values: Iterable[Value]) -> set[int]:
    """Numbers (`Value.index`) of these values and of all that any of them is computed from."""
    flows = []
    for eqn in reversed(program.eqns):
        flows += [(target.index, source.index) for source, target in _flows(eqn)]
    return _closure(values, flows)


def _flows(eqn: Eqn) -> Iterator[tuple[Value, Value]]:
    """(source, target) of everything that an equation hands on."""
    for mapping in eqn.mappings:
        yield mapping.source, mapping.target
    if not eqn.bodies:
        for source in eqn.inputs:
            for target in eqn.outputs:
                yield source, target


def _closure(values: Iterable[Value], flows: Sequence[tuple[int, int]]) -> set[int]:
    """Numbers of the values that are reached along flows (source, target), in a few passes."""
    reached = {value.index for value in values}
    size = -1
    while size != len(reached):
        size = len(reached)
        for source, target in flows:
            if source in reached:
                reached.add(target)
    return reached
