"""Stage 8: which constraints a layout puts inside the function, as data: the work, then the store.

At each anchor (contraction, convolution, gather, scatter) both operands and the raw result are stated as the work is
split, then the result in its own spec where the two differ; loop carries are stated in their own spec. One constraint
on the result alone would leave XLA to choose other work. Where a rule's mesh axis does not divide, the dimension is
left UNCONSTRAINED, never pinned replicated.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import PartitionSpec

from autoshard.dim_rules import LoopKind
from autoshard.layout import Layout, to_partition_spec
from autoshard.program import Body, Eqn, Value
from autoshard.rewrite import Constraints, EqnConstraints
from autoshard.roles import Roles
from autoshard.trace import source_line

ANCHORS = frozenset(
    {
        "dot_general",
        "ragged_dot",
        "ragged_dot_general",
        "conv_general_dilated",
        "gather",
        "scatter",
        "scatter-add",
        "scatter-mul",
        "scatter-min",
        "scatter-max",
    }
)
_STATED = (LoopKind.PASS, LoopKind.REDUCED)


def constraints_for(layout: Layout) -> Constraints:
    """The constraints of a layout; none at all where it is for arguments only."""
    if not layout.inside:
        return Constraints({})
    program = layout.problem.program
    eqns = {e.index: _anchor(layout, e) for e in program.eqns if e.primitive in ANCHORS}
    outputs: dict[tuple[int, int], dict[int, PartitionSpec]] = {}
    for eqn in program.eqns:
        carried = {out.index for _, out in eqn.carries}
        for number, body in enumerate(eqn.bodies):
            stated = {i: _stored(layout, out) for i, out in enumerate(body.outputs) if _is_carry(layout, out, carried)}
            if stated and body.name != "cond_jaxpr":
                outputs[eqn.index, number] = stated
    return Constraints({i: c for i, c in eqns.items() if c is not None}, outputs)


def unstated_roles(roles: Roles) -> frozenset[int]:
    """Roles that no argument, output, anchor or loop carry has: a rule on one of them says nothing to the compiler."""
    program = roles.axes.program
    stated = {role for v in (*program.body.inputs, *program.body.outputs) for role in roles.of_value[v.index]}
    for eqn in program.eqns:
        if eqn.primitive in ANCHORS:
            stated |= {role for role, _ in roles.loops(eqn)}
            stated |= {role for v in eqn.outputs for role in roles.of_value[v.index]}
        stated |= {role for _, out in eqn.carries for role in roles.of_value[out.index]}
    return frozenset(role.index for role in roles.roles) - stated


def _is_carry(layout: Layout, value: Value, carried: set[int]) -> bool:
    return value.index in carried and bool(value.shape) and not value.literal and value.itemsize > 0


def _stored(layout: Layout, value: Value) -> PartitionSpec:
    fit = layout.fit(value)
    return to_partition_spec(fit.spec, fit.open_dims)


def _anchor(layout: Layout, eqn: Eqn) -> EqnConstraints | None:
    rule = layout.problem.roles.axes.rules[eqn.index]
    work = layout.work(eqn)

    def as_work(value: Value, loops: tuple[int, ...]) -> PartitionSpec:
        spec = tuple(work.spec[i] for i in loops)
        free = {d for d, i in enumerate(loops) if i in work.open_dims or rule.kinds[i] not in _STATED}
        return to_partition_spec(spec, free)

    operands = {
        i: as_work(value, loops)
        for i, (value, loops) in enumerate(zip(eqn.inputs, rule.operands, strict=True))
        if value.shape and not value.literal and value.itemsize > 0
    }
    results = {}
    for i, (value, loops) in enumerate(zip(eqn.outputs, rule.results, strict=True)):
        if value.shape:
            raw, stored = as_work(value, loops), _stored(layout, value)
            results[i] = (raw,) if raw == stored else (raw, stored)
    return EqnConstraints(operands, results) if operands or results else None


@dataclass(frozen=True, slots=True)
class PlacedConstraint:
    """One constraint as people read it.

    Attributes:
        source: `file.py:line` of the model.
        primitive: The anchor.
        place: `operand 0`, `result 0 as computed`, `result 0 as stored`, `carry 1`.
        shape: Shape of the value.
        spec: What is stated.
    """

    source: str
    primitive: str
    place: str
    shape: tuple[int, ...]
    spec: PartitionSpec


def placed(layout: Layout, constraints: Constraints) -> tuple[PlacedConstraint, ...]:
    """The constraints with source lines, in program order."""
    found: list[PlacedConstraint] = []

    def visit(body: Body) -> None:
        for eqn in body.eqns:
            for number, inner in enumerate(eqn.bodies):
                visit(inner)
                for i, spec in constraints.outputs.get((eqn.index, number), {}).items():
                    shape = inner.outputs[i].shape
                    found.append(PlacedConstraint(source_line(eqn), eqn.primitive, f"carry {i}", shape, spec))
            wanted = constraints.eqns.get(eqn.index)
            if wanted is not None:
                line = source_line(eqn)
                for i, spec in wanted.operands.items():
                    found.append(PlacedConstraint(line, eqn.primitive, f"operand {i}", eqn.inputs[i].shape, spec))
                for i, specs in wanted.results.items():
                    for how, spec in zip(("computed", "stored"), specs, strict=False):
                        place = f"result {i} as {how}"
                        found.append(PlacedConstraint(line, eqn.primitive, place, eqn.outputs[i].shape, spec))

    visit(layout.problem.program.body)
    return tuple(found)
