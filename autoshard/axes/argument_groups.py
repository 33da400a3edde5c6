"""What each argument leaf is for: parameters, optimizer state or data, read from the data flow,
never from names.

A leaf that comes back as an output one step later is state. State whose value reaches a
contraction, gather or convolution through anything but its own update is a parameter; state that
only feeds elementwise updates (momentum, variance, counts) is optimizer state. Where nothing comes
back (a forward pass, a gradient), or only what has the batch axis (the cache of a decode step), the
leaves without the batch axis are the parameters. What does not come back but is contracted as it
was given, and has no batch axis, is a frozen parameter, and so are the leaves beside it in its
argument that have none either (biases, scales).

The batch is the axis of most bytes that comes first in every leaf that brings it. It is nothing
that a weight has: no axis that an anchor takes over from a leaf as it was given, beside what was
computed, nor one that it contracts of two such leaves; unless most anchors have it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.axes.axis_classes import NO_AXIS, AxisClasses
from autoshard.axes.sharding_rules import FactorKind
from autoshard.tracing.dataflow import computed_from, forward, needed_for
from autoshard.tracing.primitives import WEIGHTED
from autoshard.tracing.program import Eqn, Value


class Group(enum.Enum):
    """What an argument leaf is for."""

    PARAMETER = "parameters"
    OPTIMIZER = "optimizer"
    DATA = "data"


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of the argument leaves.

    Attributes:
        of_input: By input leaf.
        optimizer_values: Values that hold optimizer state or are computed from it at its own shape,
            before it meets the parameters (`Value.index`); an axis rule that is scoped to the
            optimizer state applies to these.
    """

    of_input: tuple[Group, ...]
    optimizer_values: frozenset[int]


def find_groups(classes: AxisClasses, state: Sequence[tuple[int, int]]) -> Groups:
    """Assigns each argument leaf its group.

    Args:
        classes: The axis classes.
        state: Pairs (input leaf, output leaf) that are the same array one step later.
    """
    carried = {source for source, _ in state}
    program = classes.program
    inputs = program.body.inputs
    given = _given(classes)
    batch = _batch_axis(classes, carried, given)
    dims_of = [classes.of_value[v.index] for v in inputs]
    state_axes = [dims_of[leaf] for leaf in carried if inputs[leaf].shape]
    brought = any(
        batch in dims
        for leaf, dims in enumerate(dims_of)
        if leaf not in carried and batch is not None
    )
    frozen = _beside(
        program.input_argnums, _contracted(classes, given, batch if brought else None, carried)
    )

    def fixed(leaf: int) -> Group:
        able = any(axis != NO_AXIS for axis in dims_of[leaf]) and batch not in dims_of[leaf]
        return Group.PARAMETER if able and (leaf in frozen or told_by_batch) else Group.DATA

    told_by_batch = False
    if state_axes and not (batch is not None and all(batch in dims for dims in state_axes)):
        anchored = _reaches_anchor(classes)
        kept = {True: Group.PARAMETER, False: Group.OPTIMIZER}
        of_input = [
            kept[v.index in anchored] if leaf in carried else fixed(leaf)
            for leaf, v in enumerate(inputs)
        ]
    else:
        told_by_batch = brought
        of_input = [fixed(leaf) for leaf in range(len(inputs))]
    return Groups(tuple(of_input), _optimizer_values(classes, of_input, state))


MIXED, NOTHING = -1, -2


def _given(classes: AxisClasses) -> list[int]:
    """By value, the argument leaf that alone it is made from, `MIXED` for several, `NOTHING` for
    constants.
    """
    of = [NOTHING] * len(classes.program.values)
    for leaf, value in enumerate(classes.program.body.inputs):
        of[value.index] = leaf

    def join(a: int, b: int) -> int:
        return b if a == NOTHING else a if b in (NOTHING, a) else MIXED

    return forward(classes.program, of, join)


def _sides(eqn: Eqn) -> Iterator[tuple[int, int]]:
    """(position of an operand that may be a weight, position of the other one) of an anchor."""
    if eqn.primitive in ("gather", "conv_general_dilated"):
        yield (0, 1) if eqn.primitive == "gather" else (1, 0)
    elif eqn.primitive in WEIGHTED:
        yield from ((0, 1), (1, 0))


def _contracted(
    classes: AxisClasses, given: Sequence[int], batch: int | None, carried: set[int]
) -> set[int]:
    """Leaves that an anchor takes beside activations, themselves none: not computed from what has
    the batch.

    Where there is no batch, activations are what is made from several leaves. Of two leaves that
    meet before there are activations the larger one counts; but what meets a leaf that comes back
    is data. A table is looked up with what comes from elsewhere: indices of the same argument (the
    edges of a graph) make it data.
    """
    program = classes.program
    inputs, owners = program.body.inputs, program.input_argnums
    if batch is None:
        active = [leaf == MIXED for leaf in given]
    else:
        batched = computed_from(program, [v for v in inputs if batch in classes.of_value[v.index]])
        active = [value.index in batched for value in program.values]
    weights: set[int] = set()
    data: set[int] = set()
    for eqn in program.eqns:
        for weight, other in _sides(eqn):
            value, beside = eqn.inputs[weight].index, eqn.inputs[other].index
            leaf, leaf_beside = given[value], given[beside]
            if active[value] or leaf == NOTHING:
                continue
            if eqn.primitive == "gather":
                same = leaf_beside >= 0 and leaf >= 0 and owners[leaf_beside] == owners[leaf]
                weights |= set() if same else {value}
            elif active[beside]:
                weights.add(value)
            elif leaf >= 0 and leaf_beside in carried and leaf not in carried:
                data.add(leaf)
            elif leaf >= 0 and leaf_beside >= 0 and inputs[leaf].bytes > inputs[leaf_beside].bytes:
                weights.add(value)
    for eqn in reversed(program.eqns):
        weights |= {
            mapping.source.index for mapping in eqn.mappings if mapping.target.index in weights
        }
        if not eqn.bodies and any(v.index in weights for v in eqn.outputs):
            weights |= {v.index for v in eqn.inputs}
    return {leaf for leaf, value in enumerate(inputs) if value.index in weights} - data


def _beside(owners: Sequence[int | str], leaves: set[int]) -> set[int]:
    """These leaves and all others of their arguments."""
    owning = {owners[leaf] for leaf in leaves}
    return {leaf for leaf, owner in enumerate(owners) if owner in owning}


def _batch_axis(classes: AxisClasses, carried: set[int], given: Sequence[int]) -> int | None:
    """The axis that most bytes of intermediate values have, of those that come first in the leaves
    that bring them.
    """
    firsts: list[tuple[set[int], set[int]]] = []
    for group in (False, True):
        first, later = set(), set()
        for leaf, value in enumerate(classes.program.body.inputs):
            dims = [
                a
                for a in classes.of_value[value.index]
                if a != NO_AXIS and a not in classes.scanned
            ]
            if (leaf in carried) == group and dims:
                first.add(dims[0])
                later |= set(dims[1:])
        firsts.append((first, later))
    (data, not_data), (state, not_state) = firsts
    leading = (data - not_data) | (state - not_state - data - not_data)
    of_weights: set[int] = set()
    coverage: dict[int, float] = {}
    anchored: Counter[int] = Counter()
    anchors = 0
    for eqn, trip_count in classes.program.walk():
        rule, factors = classes.rules[eqn.index], classes.factors(eqn)
        if eqn.primitive in WEIGHTED:
            anchors += 1
            anchored.update({axis for axis, _ in factors})
        for weight, other in _sides(eqn):
            leaf, beside = (given[eqn.inputs[position].index] for position in (weight, other))
            own, others = rule.operands[weight], rule.operands[other]
            if leaf >= 0 and beside == MIXED and eqn.primitive != "gather":
                of_weights |= {factors[i][0] for i in own if i not in others}
            if leaf >= 0 and beside >= 0 and leaf != beside:
                of_weights |= {factors[i][0] for i in own if rule.kinds[i] is FactorKind.REDUCTION}
        for value in eqn.outputs:
            for axis in classes.of_value[value.index]:
                coverage[axis] = coverage.get(axis, 0.0) + trip_count * value.bytes
    usual = {axis for axis, count in anchored.items() if 2 * count > anchors}
    free = sorted(
        axis for axis in leading if coverage.get(axis) and (axis not in of_weights or axis in usual)
    )
    return max(free, key=lambda axis: coverage[axis], default=None)


def _reaches_anchor(classes: AxisClasses) -> set[int]:
    """Values from which an anchor is reached."""
    read = [v for eqn in classes.program.eqns if eqn.primitive in WEIGHTED for v in eqn.inputs]
    return needed_for(classes.program, read)


def _optimizer_values(
    classes: AxisClasses, of_input: Sequence[Group], state: Sequence[tuple[int, int]]
) -> frozenset[int]:
    program = classes.program
    own = [leaf for leaf, group in enumerate(of_input) if group is Group.OPTIMIZER]
    inside = {program.body.inputs[leaf].index for leaf in own}
    back = dict(state)
    parameters_out = {
        program.body.outputs[back[leaf]].index
        for leaf, group in enumerate(of_input)
        if group is Group.PARAMETER and leaf in back
    }

    def grows(value: Value, like: tuple[Value, ...]) -> bool:
        return value.index not in parameters_out and any(
            v.index in inside and v.shape == value.shape and v.shape for v in like
        )

    for eqn in program.body.eqns:
        if not eqn.bodies:
            inside |= {out.index for out in eqn.outputs if grows(out, eqn.inputs)}
    inside |= {program.body.outputs[back[leaf]].index for leaf in own if leaf in back}
    return frozenset(inside)
