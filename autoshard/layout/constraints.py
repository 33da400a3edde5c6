"""Which constraints a layout puts inside the function, as data.

At each anchor (contraction, convolution, gather, scatter) both operands and the raw result are
stated as the factors of the equation are sharded, then the result in its own spec where the two
differ; loop carries are stated in their own spec. One constraint on the result alone would leave
XLA to shard the computation otherwise. Where a rule's mesh axis does not divide, the dimension is
left UNCONSTRAINED, never pinned replicated. What the partitioner cannot split is put into a
`shard_map`, where the layout shards one of its factors: kernels, and anchors that run by pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.axes.kernels import params_of_shard
from autoshard.axes.logical_axes import LogicalAxes
from autoshard.axes.pieces import can_be_cut, params_of_piece, runs_by_pieces
from autoshard.axes.sharding_rules import FactorKind, ShardingRule, attention
from autoshard.layout.layout import Layout
from autoshard.layout.problem import Fit
from autoshard.layout.spec import Spec, to_partition_spec
from autoshard.tracing.primitives import ANCHORS, BY_PIECES, CUT_KERNELS, SHIFTS
from autoshard.tracing.program import Body, Eqn, Value
from autoshard.tracing.rewrite import Constraints, EqnConstraints, ShardMapCall
from autoshard.tracing.source_lines import source_line

Factors = tuple[int, ...]
"""The factor of each dimension of an operand or result."""

_LEAVE_REPLICATED_OPEN = ANCHORS - {
    *BY_PIECES,
    *attention.RULES,
    "conv_general_dilated",
    "ragged_dot_general",
    "scatter",
}
"""Anchors whose NEED_REPLICATION factors are left to the partitioner, which looks up rows of a
split table without gathering it.

A convolution states them: where the space of a kernel gradient stays split, XLA's partitioner adds
up all devices, copies included (jax 0.10.2 and 0.12.0.1, split over 4 of 4x2 devices: exactly twice
the gradient).
"""


def constraints_for(layout: Layout) -> Constraints:
    """The constraints of a layout; none at all where it is for arguments only."""
    if not layout.inside:
        return Constraints({})
    constrained: tuple[tuple[frozenset[str], _ConstrainEqn], ...] = (
        (ANCHORS, _anchor),
        (SHIFTS, _shift),
        (CUT_KERNELS, _kernel),
    )
    eqns: dict[int, EqnConstraints] = {}
    for primitives, constrain in constrained:
        for eqn in layout.problem.program.eqns:
            stated = constrain(layout, eqn) if eqn.primitive in primitives else None
            if stated is not None:
                eqns[eqn.index] = stated
    return Constraints(eqns, _carries(layout))


_ConstrainEqn = Callable[[Layout, Eqn], EqnConstraints | None]


def unstated_logical_axes(logical_axes: LogicalAxes) -> frozenset[int]:
    """Logical axes of which a rule says nothing to the compiler.

    No argument, output, anchor or loop carry has them.
    """
    program = logical_axes.classes.program
    values = [*program.body.inputs, *program.body.outputs]
    stated: set[int] = set()
    for eqn in program.eqns:
        values += [carried for _, carried in eqn.carries]
        if eqn.primitive in ANCHORS | CUT_KERNELS:
            values += eqn.outputs
            stated.update(logical_axis for logical_axis, _ in logical_axes.factors(eqn))
    for value in values:
        stated.update(logical_axes.of_value[value.index])
    return frozenset(logical_axis.index for logical_axis in logical_axes.axes) - stated


def leaves_open(primitive: str, rule: ShardingRule, factors: Sequence[int]) -> bool:
    """Whether an anchor leaves a dimension of an operand to the partitioner whatever the layout."""
    return primitive in _LEAVE_REPLICATED_OPEN and any(
        rule.kinds[factor] is FactorKind.NEED_REPLICATION for factor in factors
    )


def closed_dims(eqn: Eqn, rule: ShardingRule, factors: Sequence[int]) -> frozenset[int]:
    """Dimensions of an operand that an anchor shifts: they are never open.

    Nor is any dimension of what runs by pieces: in a `shard_map` nothing is left to the
    partitioner.

    Where the factor sharding splits one otherwise than the operand's own spec, the operand is
    stated in its own spec before the reshard. Else the equation that computes it would take the
    sharding of this one, and so on back to the last anchor.
    """
    if runs_by_pieces(eqn):
        return frozenset(range(len(factors)))
    if eqn.primitive not in SHIFTS and eqn.primitive != "conv_general_dilated":
        return frozenset()
    shifted = (FactorKind.PERMUTATION, FactorKind.NEED_REPLICATION)
    return frozenset(dim for dim, factor in enumerate(factors) if rule.kinds[factor] in shifted)


# Anchors ------------------------------------------------------------------------------------------


class _Sharded:
    """An equation as a layout shards its factors.

    Attributes:
        eqn: The equation.
        rule: Its sharding rule.
        sharding: The mesh axes of each factor, and the open ones.
    """

    def __init__(self, layout: Layout, eqn: Eqn) -> None:
        self.eqn = eqn
        self.rule = layout.problem.logical_axes.classes.rules[eqn.index]
        self.sharding = layout.factor_sharding(eqn)

    def spec(self, factors: Factors) -> PartitionSpec:
        """The spec of an operand or raw result, as the factors are split."""
        open_dims: set[int] = set()
        # Attention of cuDNN refuses operands that are split otherwise than its rule says.
        if self.eqn.primitive not in attention.RULES:
            open_dims = self._open_dims(factors)
        return to_partition_spec(self._axes_of_dims(factors), open_dims)

    def closed_specs(self, factors_of: Sequence[Factors]) -> tuple[PartitionSpec, ...]:
        """The specs of all operands or results, without open dimensions."""
        return tuple(to_partition_spec(self._axes_of_dims(factors)) for factors in factors_of)

    def reshards_closed(self, own: Fit, factors: Factors) -> bool:
        """Whether an operand is split otherwise in its own spec, in a dimension that is shifted."""
        closed = closed_dims(self.eqn, self.rule, factors)
        return any(own.spec[dim] != self.sharding.spec[factors[dim]] for dim in closed)

    def _axes_of_dims(self, factors: Factors) -> Spec:
        return tuple(self.sharding.spec[factor] for factor in factors)

    def _open_dims(self, factors: Factors) -> set[int]:
        rule = self.rule
        closed = closed_dims(self.eqn, rule, factors)
        open_dims = set()
        for dim, factor in enumerate(factors):
            is_misfit = factor in self.sharding.open_dims and dim not in closed
            if is_misfit or leaves_open(self.eqn.primitive, rule, (factor,)):
                open_dims.add(dim)
        return open_dims


def _anchor(layout: Layout, eqn: Eqn) -> EqnConstraints | None:
    sharded = _Sharded(layout, eqn)
    operands, before_reshard = _operands(layout, sharded)
    call = _by_pieces(layout, sharded) if runs_by_pieces(eqn) else None
    results = _results(layout, sharded) if call is None else _own_specs(layout, eqn, call)
    if not operands and not results and call is None:
        return None
    return EqnConstraints(operands, results, call, before_reshard)


def _operands(
    layout: Layout, sharded: _Sharded
) -> tuple[dict[int, PartitionSpec], dict[int, PartitionSpec]]:
    """The spec of each operand as the computation needs it; and what is stated before that."""
    operands: dict[int, PartitionSpec] = {}
    before_reshard: dict[int, PartitionSpec] = {}
    for i, value in enumerate(sharded.eqn.inputs):
        if not value.shape or value.literal or not value.bytes:
            continue
        factors = sharded.rule.operands[i]
        operands[i] = sharded.spec(factors)
        own = layout.fit(value)
        if sharded.reshards_closed(own, factors):
            before_reshard[i] = to_partition_spec(own.spec, own.open_dims)
    return operands, before_reshard


def _results(layout: Layout, sharded: _Sharded) -> dict[int, tuple[PartitionSpec, ...]]:
    """The specs of each result: as it is computed, then its own where that is another."""
    results: dict[int, tuple[PartitionSpec, ...]] = {}
    for i, value in enumerate(sharded.eqn.outputs):
        if not value.shape:
            continue
        raw = sharded.spec(sharded.rule.results[i])
        own_spec = _own_spec(layout, value)
        results[i] = (raw,) if raw == own_spec else (raw, own_spec)
    return results


def _shift(layout: Layout, eqn: Eqn) -> EqnConstraints | None:
    """A slice, pad, concatenation or window: an anchor where the layout splits what it shifts."""
    return _anchor(layout, eqn) if _splits_what_it_shifts(layout, eqn) else None


def _splits_what_it_shifts(layout: Layout, eqn: Eqn) -> bool:
    """Whether a PERMUTATION factor is split, or a dimension of an operand or result over it."""
    classes = layout.problem.logical_axes.classes
    rule = classes.rules[eqn.index]
    shifted = _factors_of(rule, FactorKind.PERMUTATION)
    if not shifted or classes.constant[eqn.outputs[0].index]:
        return False
    factor_spec = layout.factor_sharding(eqn).spec
    if any(factor_spec[factor] for factor in shifted):
        return True
    for value, factors in rule.places(eqn):
        own_spec = layout.fit(value).spec
        if any(own_spec[dim] for dim, factor in enumerate(factors) if factor in shifted):
            return True
    return False


def _factors_of(rule: ShardingRule, kind: FactorKind) -> set[int]:
    return {factor for factor, kind_of_it in enumerate(rule.kinds) if kind_of_it is kind}


def _own_spec(layout: Layout, value: Value) -> PartitionSpec:
    fit = layout.fit(value)
    return to_partition_spec(fit.spec, fit.open_dims)


# In a shard_map -----------------------------------------------------------------------------------


def _by_pieces(layout: Layout, sharded: _Sharded) -> ShardMapCall | None:
    """An anchor in a shard_map; None where no factor that can be cut is split."""
    eqn, rule = sharded.eqn, sharded.rule
    shards = _shards_of_factors(sharded.sharding.spec, layout.problem.mesh_axes)
    if not can_be_cut(eqn, rule, shards):
        return None
    return _shard_map_call(sharded, shards, params_of_piece(eqn, rule, shards))


def _kernel(layout: Layout, eqn: Eqn) -> EqnConstraints | None:
    """A kernel in a shard_map; None where every device runs all of it."""
    sharded = _Sharded(layout, eqn)
    rule = sharded.rule
    shards = _shards_of_factors(sharded.sharding.spec, layout.problem.mesh_axes)
    summed = _factors_of(rule, FactorKind.REDUCTION) & shards.keys()
    # The results of the devices are added up by a psum; other reductions are not written.
    if not shards or (summed and rule.combine != "add"):
        return None

    operand_shapes = _shard_shapes(eqn.inputs, rule.operands, shards)
    result_shapes = _shard_shapes(eqn.outputs, rule.results, shards)
    params = params_of_shard(eqn, shards, operand_shapes, result_shapes)
    call = _shard_map_call(sharded, shards, params)
    return EqnConstraints({}, _own_specs(layout, eqn, call), call)


def _shard_map_call(sharded: _Sharded, shards: Mapping[int, int], params: Any) -> ShardMapCall:
    """The equation in a shard_map, split as its factors are; sums are added up.

    Args:
        sharded: The equation.
        shards: By factor that is split, its shard count.
        params: Its parameters as one device runs it.
    """
    rule = sharded.rule
    summed = sorted(_factors_of(rule, FactorKind.REDUCTION) & shards.keys())
    return ShardMapCall(
        operands=sharded.closed_specs(rule.operands),
        results=sharded.closed_specs(rule.results),
        params=params,
        summed=tuple(axis for factor in summed for axis in sharded.sharding.spec[factor]),
    )


def _own_specs(
    layout: Layout, eqn: Eqn, call: ShardMapCall
) -> dict[int, tuple[PartitionSpec, ...]]:
    """The own specs of the results that a shard_map leaves in another one."""
    results: dict[int, tuple[PartitionSpec, ...]] = {}
    for i, value in enumerate(eqn.outputs):
        own_spec = _own_spec(layout, value)
        if value.shape and own_spec != call.results[i]:
            results[i] = (own_spec,)
    return results


def _shards_of_factors(factor_spec: Spec, mesh_axes: Mapping[str, int]) -> dict[int, int]:
    """By factor that is split, its shard count."""
    return {
        factor: math.prod(mesh_axes[axis] for axis in axes)
        for factor, axes in enumerate(factor_spec)
        if axes
    }


def _shard_shapes(
    values: Sequence[Value], factors_of: Sequence[Factors], shards: Mapping[int, int]
) -> list[tuple[int, ...]]:
    """The shape of the shard of each value."""
    shapes = []
    for value, factors in zip(values, factors_of, strict=True):
        sizes = zip(value.shape, factors, strict=True)
        shapes.append(tuple(size // shards.get(factor, 1) for size, factor in sizes))
    return shapes


# Loops --------------------------------------------------------------------------------------------


def _carries(layout: Layout) -> dict[tuple[int, int], dict[int, PartitionSpec]]:
    """By (`Eqn.index`, number of the body), the spec of each output that is carried."""
    outputs: dict[tuple[int, int], dict[int, PartitionSpec]] = {}
    for eqn in layout.problem.program.eqns:
        carried = {value.index for _, value in eqn.carries}
        for number, body in enumerate(eqn.bodies):
            stated = {
                position: _own_spec(layout, value)
                for position, value in enumerate(body.outputs)
                if value.index in carried and _has_elements(value)
            }
            if stated:
                outputs[eqn.index, number] = stated
    return outputs


def _has_elements(value: Value) -> bool:
    # Tokens and float0 have items of no bytes, and jax no constraint for them.
    return bool(value.shape) and not value.literal and value.itemsize > 0


# For users ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlacedConstraint:
    """One constraint, at its place in the program.

    Attributes:
        source: `file.py:line` of the model.
        primitive: The anchor.
        place: `operand 0 as stored` (in its own spec, before the reshard), `operand 0`,
            `result 0 as computed`, `result 0 as stored` (in its own spec), `carry 1`,
            `operand 0 of the shard_map`. Spec tables have these texts.
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
    return tuple(_placed_in(layout.problem.program.body, constraints))


def _placed_in(body: Body, constraints: Constraints) -> Iterator[PlacedConstraint]:
    for eqn in body.eqns:
        for number, inner in enumerate(eqn.bodies):
            yield from _placed_in(inner, constraints)
            for i, spec in constraints.outputs.get((eqn.index, number), {}).items():
                shape = inner.outputs[i].shape
                yield PlacedConstraint(source_line(eqn), eqn.primitive, f"carry {i}", shape, spec)
        stated = constraints.eqns.get(eqn.index)
        if stated is not None:
            line = source_line(eqn)
            for place, value, spec in _stated_places(eqn, stated):
                yield PlacedConstraint(line, eqn.primitive, place, value.shape, spec)


def _stated_places(eqn: Eqn, stated: EqnConstraints) -> Iterator[tuple[str, Value, PartitionSpec]]:
    """(place, value, spec) of each constraint around one equation, in the order they are put in."""
    if stated.shard_map is not None:
        for i, spec in enumerate(stated.shard_map.operands):
            yield f"operand {i} of the shard_map", eqn.inputs[i], spec
        for i, spec in enumerate(stated.shard_map.results):
            yield f"result {i} of the shard_map", eqn.outputs[i], spec
    for i, spec in stated.before_reshard.items():
        yield f"operand {i} as stored", eqn.inputs[i], spec
    for i, spec in stated.operands.items():
        yield f"operand {i}", eqn.inputs[i], spec
    for i, specs in stated.results.items():
        for how, spec in zip(("computed", "stored"), specs, strict=False):
            yield f"result {i} as {how}", eqn.outputs[i], spec
