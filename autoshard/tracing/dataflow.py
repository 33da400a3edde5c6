"""Facts that flow through a program, forwards or backwards, to a fixed point.

Data goes from the operands of an equation to its results, through the mappings of its bodies into
them and out of them again, and along loop carries from one trip to the next. An equation with
bodies hands on nothing by itself: its bodies say what becomes of what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from autoshard.tracing.program import Body, Eqn, MappingKind, Program, Value

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
    flows = list(_flows(program.body))
    changed = True
    while changed:  # twice for most programs: once more than the deepest chain of loop carries
        changed = False
        for source, target in flows:
            joined = join(fact_of[target], fact_of[source])
            changed |= joined != fact_of[target]
            fact_of[target] = joined
    return fact_of


def computed_from(program: Program, values: Iterable[Value]) -> set[int]:
    """Numbers (`Value.index`) of these values and of all that are computed from any of them."""
    return _closure(values, list(_flows(program.body)))


def needed_for(program: Program, values: Iterable[Value]) -> set[int]:
    """Numbers (`Value.index`) of these values and of all that any of them is computed from."""
    flows = [(target, source) for source, target in _flows(program.body)]
    flows.reverse()
    return _closure(values, flows)


def _flows(body: Body) -> Iterator[tuple[int, int]]:
    """(source, target) of everything that is handed on, as `Value.index`, in order of execution."""
    for eqn in body.eqns:
        # What leaves the bodies is handed on after them: else each equation with bodies in a row
        # of them would take a pass of its own.
        yield from _mapped(eqn, MappingKind.OPERAND_TO_INVAR)
        for inner in eqn.bodies:
            yield from _flows(inner)
        yield from _mapped(eqn, MappingKind.OUTVAR_TO_RESULT)
        yield from _mapped(eqn, MappingKind.CARRY)
        if not eqn.bodies:
            for source in eqn.inputs:
                for target in eqn.outputs:
                    yield source.index, target.index


def _mapped(eqn: Eqn, kind: MappingKind) -> Iterator[tuple[int, int]]:
    for mapping in eqn.mappings:
        if mapping.kind is kind:
            yield mapping.source.index, mapping.target.index


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
