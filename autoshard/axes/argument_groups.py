"""What each argument leaf is for: parameters, optimizer state or data, read from the data flow,
never from names.

A leaf that comes back as an output one step later is state. State whose value reaches a
contraction, gather or convolution through anything but its own update is a parameter; state that
only feeds elementwise updates (momentum, variance, counts) is optimizer state, and so is what is
multiplied on the way to one update alone (Muon's momentum); state that has the batch axis
(observations of a loop, a cache) is data, in whichever argument. Where nothing comes back (a
forward pass, a gradient), or only what has the batch axis (the cache of a decode step), the leaves
without the batch axis are the parameters. What does not come back but is contracted as it was
passed, and has no batch axis, is a frozen parameter, and so are the leaves beside it in its
argument that have none either (biases, scales).
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.axes.argument_leaves import NO_LEAF, SEVERAL_LEAVES, ArgumentLeaves, weight_sides
from autoshard.axes.axis_classes import AxisClasses
from autoshard.axes.batch_class import batch_class
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
        optimizer_values: Values that hold optimizer state or are computed from it, alone or at its
            own shape, before it meets the parameters (`Value.index`); an axis rule that is scoped
            to the optimizer applies to these.
    """

    of_input: tuple[Group, ...]
    optimizer_values: frozenset[int]


def find_groups(classes: AxisClasses, state: Sequence[tuple[int, int]]) -> Groups:
    """Assigns each argument leaf its group.

    Args:
        classes: The axis classes.
        state: Pairs (input leaf, output leaf) that are the same array one step later.
    """
    leaves = ArgumentLeaves(classes, {leaf for leaf, _ in state})
    batch = batch_class(leaves)
    # A cache comes back as well, but with the batch: a decode step is no training step.
    if _has_state(leaves, batch):
        of_input = _groups_of_training(leaves, batch, dict(state))
    else:
        of_input = _groups_of_inference(leaves, batch)
    return Groups(of_input, _optimizer_values(classes, of_input, state))


def _has_state(leaves: ArgumentLeaves, batch: int | None) -> bool:
    """Whether something comes back that does not have the batch."""
    for leaf in leaves.carried:
        is_array = bool(leaves.inputs[leaf].shape)
        if is_array and (batch is None or batch not in leaves.dims[leaf]):
            return True
    return False


def _groups_of_training(
    leaves: ArgumentLeaves, batch: int | None, output_of: Mapping[int, int]
) -> tuple[Group, ...]:
    """Groups by what comes back, and by whether an anchor is reached from it."""
    anchored = _reaches_anchor(leaves.classes)
    anchored -= _orthogonalised(leaves, anchored, output_of)
    frozen = _frozen_parameters(leaves, batch)
    groups = []
    for leaf, value in enumerate(leaves.inputs):
        if leaf in leaves.carried and batch in leaves.dims[leaf]:
            group = Group.DATA
        elif leaf in leaves.carried:
            group = Group.PARAMETER if value.index in anchored else Group.OPTIMIZER
        elif leaf in frozen and leaves.without_batch(leaf, batch):
            group = Group.PARAMETER
        else:
            group = Group.DATA
        groups.append(group)
    return tuple(groups)


def _orthogonalised(
    leaves: ArgumentLeaves, anchored: set[int], output_of: Mapping[int, int]
) -> set[int]:
    """Numbers of state that is multiplied on its way to an update (Muon's momentum).

    It reaches nothing but the next state: its own, and that of the one parameter that it updates,
    which has its shape and reaches more (the gradients of all parameters depend on that).
    """
    body = leaves.classes.program.body
    bits = [0] * len(leaves.classes.of_value)
    for leaf in output_of:
        bits[leaves.inputs[leaf].index] = 1 << leaf
    bits = forward(leaves.classes.program, bits, operator.or_)
    reached = {
        leaf: frozenset(i for i, v in enumerate(body.outputs) if bits[v.index] >> leaf & 1)
        for leaf in output_of
        if leaves.inputs[leaf].index in anchored
    }
    orthogonalised = set()
    for leaf, outputs in reached.items():
        value = leaves.inputs[leaf]
        for other in reached:
            updates = outputs == {output_of[leaf], output_of[other]} and outputs < reached[other]
            if updates and leaves.inputs[other].shape == value.shape:
                orthogonalised.add(value.index)
    return orthogonalised


def _groups_of_inference(leaves: ArgumentLeaves, batch: int | None) -> tuple[Group, ...]:
    """Groups by who has the batch; without one, parameters are what is contracted as it came."""
    batch_decides = _data_has_batch(leaves, batch)
    frozen = _frozen_parameters(leaves, batch)
    groups = []
    for leaf in range(len(leaves.inputs)):
        candidate = batch_decides or leaf in frozen
        is_parameter = candidate and leaves.without_batch(leaf, batch)
        groups.append(Group.PARAMETER if is_parameter else Group.DATA)
    return tuple(groups)


def _data_has_batch(leaves: ArgumentLeaves, batch: int | None) -> bool:
    """Whether a leaf that does not come back has the batch."""
    if batch is None:
        return False
    return any(batch in dims for leaf, dims in enumerate(leaves.dims) if leaf not in leaves.carried)


def _frozen_parameters(leaves: ArgumentLeaves, batch: int | None) -> set[int]:
    """Leaves that are contracted as they were passed, and the others of their arguments."""
    contracted = _contracted(leaves, batch if _data_has_batch(leaves, batch) else None)
    return leaves.with_others_of_argument(contracted)


def _contracted(leaves: ArgumentLeaves, batch: int | None) -> set[int]:
    """Leaves that an anchor takes beside activations, themselves none.

    Of two leaves that meet before there are activations the larger one counts; but what meets a
    leaf that comes back is data. A table is looked up with what comes from elsewhere: indices of
    the same argument (the edges of a graph) make it data.

    Args:
        leaves: The argument leaves.
        batch: The axis class of the batch, if data brings it.
    """
    activations = _activations(leaves, batch)
    weights: set[int] = set()
    data: set[int] = set()
    for eqn in leaves.classes.program.eqns:
        for weight, other in weight_sides(eqn):
            value, other_value = eqn.inputs[weight].index, eqn.inputs[other].index
            leaf, other_leaf = leaves.sole_leaf[value], leaves.sole_leaf[other_value]
            if value in activations or leaf == NO_LEAF:
                continue
            if eqn.primitive == "gather":
                is_weight = not _same_argument(leaves, leaf, other_leaf)
            elif other_value in activations:
                is_weight = True
            else:
                is_weight = _is_larger(leaves, leaf, other_leaf)
                if other_leaf in leaves.carried:
                    data.add(leaf)
            if is_weight:
                weights.add(value)
    # Two leaves that both come back may still be weights (a product of two factors).
    return _leaves_behind(leaves, weights) - (data - leaves.carried)


def _activations(leaves: ArgumentLeaves, batch: int | None) -> set[int]:
    """Numbers of the values computed from what has the batch.

    Where there is no batch, activations are what is computed from several leaves.
    """
    if batch is None:
        sole = leaves.sole_leaf
        return {number for number, leaf in enumerate(sole) if leaf == SEVERAL_LEAVES}
    batched = [
        value for value, dims in zip(leaves.inputs, leaves.dims, strict=True) if batch in dims
    ]
    return computed_from(leaves.classes.program, batched)


def _same_argument(leaves: ArgumentLeaves, leaf: int, other: int) -> bool:
    owners = leaves.classes.program.input_argnums
    return leaf >= 0 and other >= 0 and owners[leaf] == owners[other]


def _is_larger(leaves: ArgumentLeaves, leaf: int, other: int) -> bool:
    if leaf < 0 or other < 0:
        return False
    return leaves.inputs[leaf].bytes > leaves.inputs[other].bytes


def _leaves_behind(leaves: ArgumentLeaves, values: set[int]) -> set[int]:
    """Leaves that these values are computed from, in one pass backwards.

    Unlike `needed_for`, that does not enter a loop whose result is one of them.
    """
    reached = set(values)
    for eqn in reversed(leaves.classes.program.eqns):
        reached |= {m.source.index for m in eqn.mappings if m.target.index in reached}
        if not eqn.bodies and any(v.index in reached for v in eqn.outputs):
            reached.update(v.index for v in eqn.inputs)
    return {leaf for leaf, value in enumerate(leaves.inputs) if value.index in reached}


def _reaches_anchor(classes: AxisClasses) -> set[int]:
    """Values from which an anchor is reached."""
    operands = [v for eqn in classes.program.eqns if eqn.primitive in WEIGHTED for v in eqn.inputs]
    return needed_for(classes.program, operands)


def _optimizer_values(
    classes: AxisClasses, of_input: Sequence[Group], state: Sequence[tuple[int, int]]
) -> frozenset[int]:
    """Optimizer state, its next value, and what is computed from it alone or at its own shape."""
    body = classes.program.body
    output_of = dict(state)

    def next_values(group: Group) -> set[int]:
        leaves = [leaf for leaf in output_of if of_input[leaf] is group]
        return {body.outputs[output_of[leaf]].index for leaf in leaves}

    leaves = zip(body.inputs, of_input, strict=True)
    optimizer_values = {value.index for value, group in leaves if group is Group.OPTIMIZER}
    next_parameters = next_values(Group.PARAMETER)
    # Updates are at the outermost level; what meets the parameters is theirs.
    for eqn in body.eqns:
        if _is_alone(classes, eqn, optimizer_values):
            optimizer_values |= _values_of(eqn) - next_parameters
        elif not eqn.bodies:
            shapes = _shapes_of(eqn.inputs, optimizer_values)
            grown = {output.index for output in eqn.outputs if output.shape in shapes}
            optimizer_values |= grown - next_parameters
    return frozenset(optimizer_values | next_values(Group.OPTIMIZER))


def _is_alone(classes: AxisClasses, eqn: Eqn, optimizer_values: set[int]) -> bool:
    """Whether the arrays that an equation reads are optimizer values, constants aside."""
    arrays = [v.index for v in eqn.inputs if v.shape and not classes.constant[v.index]]
    return bool(arrays) and optimizer_values.issuperset(arrays)


def _values_of(eqn: Eqn) -> set[int]:
    """Numbers of all that an equation computes, in its bodies too."""
    inside = {v.index for body in eqn.bodies for v in body.inputs}
    inside.update(*(_values_of(inner) for body in eqn.bodies for inner in body.eqns))
    return inside | {output.index for output in eqn.outputs}


def _shapes_of(values: Sequence[Value], chosen: set[int]) -> set[tuple[int, ...]]:
    """Shapes of those of the values that are among the chosen ones, scalars left out."""
    return {value.shape for value in values if value.index in chosen and value.shape}
