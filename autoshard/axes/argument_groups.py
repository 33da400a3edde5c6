"""What each argument leaf is for: parameters, optimizer state or data, read from the data flow,
never from names.

A leaf that comes back as an output one step later is state. State whose value reaches a
contraction, gather or convolution through anything but its own update is a parameter; state that
only feeds elementwise updates (momentum, variance, counts) is optimizer state. Where nothing comes
back (a forward pass, a gradient), or only what has the batch axis (the cache of a decode step), the
leaves without the batch axis are the parameters. What does not come back but is contracted as it
was passed, and has no batch axis, is a frozen parameter, and so are the leaves beside it in its
argument that have none either (biases, scales).

The batch is the axis class of most bytes that comes first in every leaf that brings it. It is
nothing that a weight has: no class that an anchor takes over from a leaf as it was passed, beside
what was computed, nor one that it contracts of two such leaves; unless most anchors have it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
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
    leaves = _Leaves(classes, {leaf for leaf, _ in state})
    batch = _batch_class(leaves)
    # A cache comes back as well, but with the batch: a decode step is no training step.
    if _has_state(leaves, batch):
        of_input = _groups_of_training(leaves, batch)
    else:
        of_input = _groups_of_inference(leaves, batch)
    return Groups(of_input, _optimizer_values(classes, of_input, state))


SEVERAL_LEAVES, NO_LEAF = -1, -2
"""Stand for an argument leaf where a value is computed from several, or from constants only."""


class _Leaves:
    """The argument leaves of a program and what is computed from them.

    Attributes:
        classes: The axis classes of the program.
        carried: Leaves that come back one step later.
        inputs: The value of each leaf.
        dims: By leaf, the axis class of each dimension.
        sole_leaf: By `Value.index`, the leaf that alone it is computed from; `SEVERAL_LEAVES` or
            `NO_LEAF`.
    """

    def __init__(self, classes: AxisClasses, carried: set[int]) -> None:
        self.classes = classes
        self.carried = carried
        self.inputs = classes.program.body.inputs
        self.dims = [classes.of_value[value.index] for value in self.inputs]
        self.sole_leaf = _sole_leaves(classes)

    def without_batch(self, leaf: int, batch: int | None) -> bool:
        """Whether a leaf has axes, but not the batch among them: a parameter could."""
        dims = self.dims[leaf]
        return batch not in dims and any(axis != NO_AXIS for axis in dims)

    def with_others_of_argument(self, leaves: Iterable[int]) -> set[int]:
        """These leaves and all others of their arguments."""
        owners = self.classes.program.input_argnums
        arguments = {owners[leaf] for leaf in leaves}
        return {leaf for leaf, owner in enumerate(owners) if owner in arguments}


def _sole_leaves(classes: AxisClasses) -> list[int]:
    leaf_of = [NO_LEAF] * len(classes.program.values)
    for leaf, value in enumerate(classes.program.body.inputs):
        leaf_of[value.index] = leaf

    def join(a: int, b: int) -> int:
        if a == NO_LEAF:
            return b
        return a if b in (NO_LEAF, a) else SEVERAL_LEAVES

    return forward(classes.program, leaf_of, join)


def _has_state(leaves: _Leaves, batch: int | None) -> bool:
    """Whether something comes back that does not have the batch."""
    for leaf in leaves.carried:
        is_array = bool(leaves.inputs[leaf].shape)
        if is_array and (batch is None or batch not in leaves.dims[leaf]):
            return True
    return False


def _groups_of_training(leaves: _Leaves, batch: int | None) -> tuple[Group, ...]:
    """Groups by what comes back, and by whether an anchor is reached from it."""
    anchored = _reaches_anchor(leaves.classes)
    frozen = _frozen_parameters(leaves, batch)
    groups = []
    for leaf, value in enumerate(leaves.inputs):
        if leaf in leaves.carried:
            group = Group.PARAMETER if value.index in anchored else Group.OPTIMIZER
        elif leaf in frozen and leaves.without_batch(leaf, batch):
            group = Group.PARAMETER
        else:
            group = Group.DATA
        groups.append(group)
    return tuple(groups)


def _groups_of_inference(leaves: _Leaves, batch: int | None) -> tuple[Group, ...]:
    """Groups by who has the batch; without one, parameters are what is contracted as it came."""
    batch_decides = _data_has_batch(leaves, batch)
    frozen = _frozen_parameters(leaves, batch)
    groups = []
    for leaf in range(len(leaves.inputs)):
        candidate = batch_decides or leaf in frozen
        is_parameter = candidate and leaves.without_batch(leaf, batch)
        groups.append(Group.PARAMETER if is_parameter else Group.DATA)
    return tuple(groups)


def _data_has_batch(leaves: _Leaves, batch: int | None) -> bool:
    """Whether a leaf that does not come back has the batch."""
    if batch is None:
        return False
    return any(batch in dims for leaf, dims in enumerate(leaves.dims) if leaf not in leaves.carried)


def _frozen_parameters(leaves: _Leaves, batch: int | None) -> set[int]:
    """Leaves that are contracted as they were passed, and the others of their arguments."""
    contracted = _contracted(leaves, batch if _data_has_batch(leaves, batch) else None)
    return leaves.with_others_of_argument(contracted)


def _weight_sides(eqn: Eqn) -> Iterator[tuple[int, int]]:
    """(position of an operand that may be a weight, position of the other one) of an anchor."""
    if eqn.primitive == "gather":
        yield 0, 1
    elif eqn.primitive == "conv_general_dilated":
        yield 1, 0
    elif eqn.primitive in WEIGHTED:
        yield 0, 1
        yield 1, 0


def _contracted(leaves: _Leaves, batch: int | None) -> set[int]:
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
        for weight, other in _weight_sides(eqn):
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


def _activations(leaves: _Leaves, batch: int | None) -> set[int]:
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


def _same_argument(leaves: _Leaves, leaf: int, other: int) -> bool:
    owners = leaves.classes.program.input_argnums
    return leaf >= 0 and other >= 0 and owners[leaf] == owners[other]


def _is_larger(leaves: _Leaves, leaf: int, other: int) -> bool:
    if leaf < 0 or other < 0:
        return False
    return leaves.inputs[leaf].bytes > leaves.inputs[other].bytes


def _leaves_behind(leaves: _Leaves, values: set[int]) -> set[int]:
    """Leaves that these values are computed from, in one pass backwards.

    Unlike `needed_for`, that does not enter a loop whose result is one of them.
    """
    reached = set(values)
    for eqn in reversed(leaves.classes.program.eqns):
        reached |= {m.source.index for m in eqn.mappings if m.target.index in reached}
        if not eqn.bodies and any(v.index in reached for v in eqn.outputs):
            reached.update(v.index for v in eqn.inputs)
    return {leaf for leaf, value in enumerate(leaves.inputs) if value.index in reached}


def _batch_class(leaves: _Leaves) -> int | None:
    """The class that most bytes of intermediate values have, of those that can be the batch."""
    of_weights = _classes_of_weights(leaves) - _usual_classes(leaves.classes)
    bytes_of = _intermediate_bytes(leaves.classes)
    candidates = []
    for axis_class in sorted(_leading_classes(leaves) - of_weights):  # of equals the first
        if bytes_of.get(axis_class):
            candidates.append(axis_class)
    return max(candidates, key=lambda axis_class: bytes_of[axis_class], default=None)


def _leading_classes(leaves: _Leaves) -> set[int]:
    """Classes that come first in all leaves of data that have them, or else of state."""
    data = [leaf for leaf in range(len(leaves.inputs)) if leaf not in leaves.carried]
    first_in_data, later_in_data = _first_and_later(leaves, data)
    first_in_state, later_in_state = _first_and_later(leaves, leaves.carried)
    of_data = first_in_data - later_in_data
    return of_data | (first_in_state - later_in_state - first_in_data - later_in_data)


def _first_and_later(leaves: _Leaves, chosen: Collection[int]) -> tuple[set[int], set[int]]:
    """Classes of the first dimension of some of these leaves, and of their later dimensions.

    Dimensions that a scan takes apart do not count: (micro-batches, batch, ...).
    """
    scanned = leaves.classes.scanned
    first: set[int] = set()
    later: set[int] = set()
    for leaf in chosen:
        dims = [c for c in leaves.dims[leaf] if c != NO_AXIS and c not in scanned]
        first.update(dims[:1])
        later.update(dims[1:])
    return first, later


def _classes_of_weights(leaves: _Leaves) -> set[int]:
    """Classes that an anchor takes over from a leaf as it was passed, or contracts of two."""
    of_weights: set[int] = set()
    for eqn in leaves.classes.program.eqns:
        factors = leaves.classes.factors(eqn)
        for weight, other in _weight_sides(eqn):
            for factor in _factors_of_weight(leaves, eqn, weight, other):
                of_weights.add(factors[factor][0])
    return of_weights


def _factors_of_weight(leaves: _Leaves, eqn: Eqn, weight: int, other: int) -> set[int]:
    """Factors of an anchor that cannot be the batch, since an operand brings them as a weight."""
    leaf = leaves.sole_leaf[eqn.inputs[weight].index]
    other_leaf = leaves.sole_leaf[eqn.inputs[other].index]
    rule = leaves.classes.rules[eqn.index]
    own_factors = set(rule.operands[weight])
    if leaf < 0:
        return set()
    if other_leaf == SEVERAL_LEAVES and eqn.primitive != "gather":
        return own_factors - set(rule.operands[other])
    if other_leaf >= 0 and leaf != other_leaf:
        return {factor for factor in own_factors if rule.kinds[factor] is FactorKind.REDUCTION}
    return set()


def _usual_classes(classes: AxisClasses) -> set[int]:
    """Classes that more than half of all anchors run over."""
    anchors = [eqn for eqn in classes.program.eqns if eqn.primitive in WEIGHTED]
    counts: Counter[int] = Counter()
    for eqn in anchors:
        counts.update({axis_class for axis_class, _ in classes.factors(eqn)})
    # A majority, as the batch of a train step is in its forward and backward products.
    return {axis_class for axis_class, count in counts.items() if 2 * count > len(anchors)}


def _intermediate_bytes(classes: AxisClasses) -> dict[int, float]:
    """By class, the bytes of all results of equations that have it, loop trips included."""
    bytes_of: dict[int, float] = {}
    for eqn, trip_count in classes.program.walk():
        for value in eqn.outputs:
            for axis_class in classes.of_value[value.index]:
                so_far = bytes_of.get(axis_class, 0.0)
                bytes_of[axis_class] = so_far + trip_count * value.bytes
    return bytes_of


def _reaches_anchor(classes: AxisClasses) -> set[int]:
    """Values from which an anchor is reached."""
    operands = [v for eqn in classes.program.eqns if eqn.primitive in WEIGHTED for v in eqn.inputs]
    return needed_for(classes.program, operands)


def _optimizer_values(
    classes: AxisClasses, of_input: Sequence[Group], state: Sequence[tuple[int, int]]
) -> frozenset[int]:
    """Optimizer state, its next value, and what is computed from it at its own shape."""
    body = classes.program.body
    output_of = dict(state)

    def next_values(group: Group) -> set[int]:
        leaves = [leaf for leaf in output_of if of_input[leaf] is group]
        return {body.outputs[output_of[leaf]].index for leaf in leaves}

    leaves = zip(body.inputs, of_input, strict=True)
    optimizer_values = {value.index for value, group in leaves if group is Group.OPTIMIZER}
    next_parameters = next_values(Group.PARAMETER)
    # Updates are elementwise at the outermost level; what meets the parameters is theirs.
    for eqn in body.eqns:
        if not eqn.bodies:
            shapes = _shapes_of(eqn.inputs, optimizer_values)
            grown = {output.index for output in eqn.outputs if output.shape in shapes}
            optimizer_values |= grown - next_parameters
    return frozenset(optimizer_values | next_values(Group.OPTIMIZER))


def _shapes_of(values: Sequence[Value], chosen: set[int]) -> set[tuple[int, ...]]:
    """Shapes of those of the values that are among the chosen ones, scalars left out."""
    return {value.shape for value in values if value.index in chosen and value.shape}
