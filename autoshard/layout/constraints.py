"""Stage 8: which constraints a layout puts inside the function, as data: the work, then the store.

At each anchor (contraction, convolution, gather, scatter) both operands and the raw result are
stated as the work is split, then the result in its own spec where the two differ; loop carries are
stated in their own spec. One constraint on the result alone would leave XLA to choose other work.
Where a rule's mesh axis does not divide, the dimension is left UNCONSTRAINED, never pinned
replicated. A kernel that the partitioner cannot split is put into a `shard_map` over its pieces,
where the layout splits its work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from autoshard.axes.kernels import params_of_shard
from autoshard.axes.logical_axes import LogicalAxes
from autoshard.axes.sharding_rules import FactorKind, ShardingRule, attention
from autoshard.layout.layout import Layout
from autoshard.layout.spec import to_partition_spec
from autoshard.tracing.primitives import ANCHORS, CUT_KERNELS, SHIFTS
from autoshard.tracing.program import Body, Eqn, Value
from autoshard.tracing.rewrite import Constraints, EqnConstraints, ShardMapCall
from autoshard.tracing.source_lines import source_line

_FREE_WHOLE = ANCHORS - {"conv_general_dilated"}
"""Anchors whose NEED_REPLICATION loops are left to the partitioner, which looks up rows of a split table
without gathering it.

A convolution states them: where the space of a kernel gradient stays split, XLA's partitioner adds
up all devices, copies included (jax 0.10.2 and 0.12.0.1, split over 4 of 4x2 devices: exactly twice
the gradient).
"""


def constraints_for(layout: Layout) -> Constraints:
    """The constraints of a layout; none at all where it is for arguments only."""
    if not layout.inside:
        return Constraints({})
    program = layout.problem.program
    eqns = {e.index: _anchor(layout, e) for e in program.eqns if e.primitive in ANCHORS}
    eqns |= {
        e.index: _anchor(layout, e)
        for e in program.eqns
        if e.primitive in SHIFTS and _shifts_split(layout, e)
    }
    eqns |= {e.index: _kernel(layout, e) for e in program.eqns if e.primitive in CUT_KERNELS}
    outputs: dict[tuple[int, int], dict[int, PartitionSpec]] = {}
    for eqn in program.eqns:
        carried = {out.index for _, out in eqn.carries}
        for number, body in enumerate(eqn.bodies):
            stated = {
                i: _stored(layout, out)
                for i, out in enumerate(body.outputs)
                if _is_carry(layout, out, carried)
            }
            if stated and body.name != "cond_jaxpr":
                outputs[eqn.index, number] = stated
    return Constraints({i: c for i, c in eqns.items() if c is not None}, outputs)


def unstated_logical_axes(logical_axes: LogicalAxes) -> frozenset[int]:
    """Logical axes that no argument, output, anchor or loop carry has: a rule on one of them says nothing
    to the compiler.
    """
    program = logical_axes.classes.program
    stated = {
        logical_axis
        for v in (*program.body.inputs, *program.body.outputs)
        for logical_axis in logical_axes.of_value[v.index]
    }
    for eqn in program.eqns:
        if eqn.primitive in ANCHORS | CUT_KERNELS:
            stated |= {logical_axis for logical_axis, _ in logical_axes.factors(eqn)}
            stated |= {
                logical_axis for v in eqn.outputs for logical_axis in logical_axes.of_value[v.index]
            }
        stated |= {
            logical_axis
            for _, out in eqn.carries
            for logical_axis in logical_axes.of_value[out.index]
        }
    return frozenset(logical_axis.index for logical_axis in logical_axes.axes) - stated


def _is_carry(layout: Layout, value: Value, carried: set[int]) -> bool:
    return value.index in carried and bool(value.shape) and not value.literal and value.itemsize > 0


def _stored(layout: Layout, value: Value) -> PartitionSpec:
    fit = layout.fit(value)
    return to_partition_spec(fit.spec, fit.open_dims)


def _unstated(primitive: str) -> tuple[FactorKind, ...]:
    return (
        (FactorKind.NEED_REPLICATION,)
        if primitive in _FREE_WHOLE and primitive not in attention.RULES
        else ()
    )


def leaves_open(primitive: str, rule: ShardingRule, factors: Sequence[int]) -> bool:
    """Whether an anchor leaves a dimension of an operand to the partitioner whatever the layout."""
    return any(rule.kinds[factor] in _unstated(primitive) for factor in factors)


def closed_dims(primitive: str, rule: ShardingRule, factors: Sequence[int]) -> frozenset[int]:
    """Dimensions of an operand that an anchor shifts: they are never open.

    Where the work splits one otherwise than the store, the operand is stated as stored first. Else
    what makes it would be split as the work is, back to the last anchor.
    """
    if primitive not in SHIFTS and primitive != "conv_general_dilated":
        return frozenset()
    return frozenset(
        d
        for d, factor in enumerate(factors)
        if rule.kinds[factor] in (FactorKind.PERMUTATION, FactorKind.NEED_REPLICATION)
    )


def _shifts_split(layout: Layout, eqn: Eqn) -> bool:
    """Whether the layout splits a PERMUTATION loop, or the dimension of an operand or result over
    which one runs.
    """
    axes = layout.problem.logical_axes.classes
    rule = axes.rules[eqn.index]
    if FactorKind.PERMUTATION not in rule.kinds or axes.constant[eqn.outputs[0].index]:
        return False
    shifted = {i for i, kind in enumerate(rule.kinds) if kind is FactorKind.PERMUTATION}
    if any(layout.factor_sharding(eqn).spec[i] for i in shifted):
        return True
    return any(
        layout.fit(value).spec[dim]
        for value, factors in rule.places(eqn)
        for dim, factor in enumerate(factors)
        if factor in shifted
    )


def _anchor(layout: Layout, eqn: Eqn) -> EqnConstraints | None:
    rule = layout.problem.logical_axes.classes.rules[eqn.index]
    work = layout.factor_sharding(eqn)
    exact = eqn.primitive in attention.RULES  # it refuses operands that are split otherwise
    unstated = _unstated(eqn.primitive)

    def as_work(value: Value, factors: tuple[int, ...]) -> PartitionSpec:
        spec = tuple(work.spec[i] for i in factors)
        free = {
            d
            for d, i in enumerate(factors)
            if rule.kinds[i] in unstated or (i in work.open_dims and d not in closed(factors))
        }
        return to_partition_spec(spec, () if exact else free)

    def closed(factors: tuple[int, ...]) -> frozenset[int]:
        return closed_dims(eqn.primitive, rule, factors)

    operands = {
        i: as_work(value, factors)
        for i, (value, factors) in enumerate(zip(eqn.inputs, rule.operands, strict=True))
        if value.shape and not value.literal and value.bytes
    }
    kept = {}
    for i in operands:
        fit, factors = layout.fit(eqn.inputs[i]), rule.operands[i]
        if any(fit.spec[d] != work.spec[factors[d]] for d in closed(factors)):
            kept[i] = to_partition_spec(fit.spec, fit.open_dims)
    results = {}
    for i, (value, factors) in enumerate(zip(eqn.outputs, rule.results, strict=True)):
        if value.shape:
            raw, stored = as_work(value, factors), _stored(layout, value)
            results[i] = (raw,) if raw == stored else (raw, stored)
    return EqnConstraints(operands, results, before_reshard=kept) if operands or results else None


def _kernel(layout: Layout, eqn: Eqn) -> EqnConstraints | None:
    """A kernel by pieces; None where its work is whole."""
    rule, work = layout.problem.logical_axes.classes.rules[eqn.index], layout.factor_sharding(eqn)
    mesh_axes = layout.problem.mesh_axes
    cut = {
        factor: math.prod(mesh_axes[axis] for axis in axes)
        for factor, axes in enumerate(work.spec)
        if axes
    }
    if not cut or (
        rule.combine != "add" and any(rule.kinds[factor] is FactorKind.REDUCTION for factor in cut)
    ):
        return None

    def specs(maps: Sequence[tuple[int, ...]]) -> tuple[PartitionSpec, ...]:
        return tuple(to_partition_spec(tuple(work.spec[i] for i in factors)) for factors in maps)

    def shapes(values: Sequence[Value], maps: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [
            tuple(size // cut.get(i, 1) for size, i in zip(v.shape, factors, strict=True))
            for v, factors in zip(values, maps, strict=True)
        ]

    operands, results = shapes(eqn.inputs, rule.operands), shapes(eqn.outputs, rule.results)
    pieces = ShardMapCall(
        specs(rule.operands),
        specs(rule.results),
        params_of_shard(eqn, cut, operands, results),
        tuple(
            axis
            for factor in cut
            if rule.kinds[factor] is FactorKind.REDUCTION
            for axis in work.spec[factor]
        ),
    )
    stored = {i: (_stored(layout, value),) for i, value in enumerate(eqn.outputs) if value.shape}
    return EqnConstraints(
        {}, {i: s for i, s in stored.items() if s[0] != pieces.results[i]}, pieces
    )


@dataclass(frozen=True, slots=True)
class PlacedConstraint:
    """One constraint as people read it.

    Attributes:
        source: `file.py:line` of the model.
        primitive: The anchor.
        place: `operand 0 as stored`, `operand 0`, `result 0 as computed`, `result 0 as stored`,
            `carry 1`, `operand 0 of the shard_map`.
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
                    found.append(
                        PlacedConstraint(source_line(eqn), eqn.primitive, f"carry {i}", shape, spec)
                    )
            wanted = constraints.eqns.get(eqn.index)
            if wanted is not None:
                line = source_line(eqn)
                if wanted.shard_map is not None:
                    for side, values, cut in (
                        ("operand", eqn.inputs, wanted.shard_map.operands),
                        ("result", eqn.outputs, wanted.shard_map.results),
                    ):
                        for i, (value, spec) in enumerate(zip(values, cut, strict=True)):
                            place = f"{side} {i} of the shard_map"
                            found.append(
                                PlacedConstraint(line, eqn.primitive, place, value.shape, spec)
                            )
                for i, spec in wanted.before_reshard.items():
                    found.append(
                        PlacedConstraint(
                            line, eqn.primitive, f"operand {i} as stored", eqn.inputs[i].shape, spec
                        )
                    )
                for i, spec in wanted.operands.items():
                    found.append(
                        PlacedConstraint(
                            line, eqn.primitive, f"operand {i}", eqn.inputs[i].shape, spec
                        )
                    )
                for i, specs in wanted.results.items():
                    for how, spec in zip(("computed", "stored"), specs, strict=False):
                        place = f"result {i} as {how}"
                        found.append(
                            PlacedConstraint(line, eqn.primitive, place, eqn.outputs[i].shape, spec)
                        )

    visit(layout.problem.program.body)
    return tuple(found)
