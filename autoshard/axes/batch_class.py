"""Which axis class is the batch.

It is the class of most bytes that comes first in every leaf that brings it. It is nothing that a
weight has: no class that an anchor takes over from a leaf as it was passed, beside what was
computed, nor one that it contracts of two such leaves; unless most anchors have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from autoshard.axes.argument_leaves import SEVERAL_LEAVES, ArgumentLeaves, weight_sides
from autoshard.axes.axis_classes import NO_AXIS, AxisClasses
from autoshard.axes.sharding_rules import FactorKind
from autoshard.tracing.primitives import WEIGHTED
from autoshard.tracing.program import Eqn


def batch_class(leaves: ArgumentLeaves) -> int | None:
    """The class that most bytes of intermediate values have, of those that can be the batch."""
    of_weights = _classes_of_weights(leaves) - _usual_classes(leaves.classes)
    bytes_of = _intermediate_bytes(leaves.classes)
    candidates = []
    for axis_class in sorted(_leading_classes(leaves) - of_weights):  # of equals the first
        if bytes_of.get(axis_class):
            candidates.append(axis_class)
    return max(candidates, key=lambda axis_class: bytes_of[axis_class], default=None)


def _leading_classes(leaves: ArgumentLeaves) -> set[int]:
    """Classes that come first in all leaves of data that have them, or else of state."""
    data = [leaf for leaf in range(len(leaves.inputs)) if leaf not in leaves.carried]
    first_in_data, later_in_data = _first_and_later(leaves, data)
    first_in_state, later_in_state = _first_and_later(leaves, leaves.carried)
    of_data = first_in_data - later_in_data
    return of_data | (first_in_state - later_in_state - first_in_data - later_in_data)


def _first_and_later(leaves: ArgumentLeaves, chosen: Collection[int]) -> tuple[set[int], set[int]]:
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


def _classes_of_weights(leaves: ArgumentLeaves) -> set[int]:
    """Classes that an anchor takes over from a leaf as it was passed, or contracts of two."""
    of_weights: set[int] = set()
    for eqn in leaves.classes.program.eqns:
        factors = leaves.classes.factors(eqn)
        for weight, other in weight_sides(eqn):
            for factor in _factors_of_weight(leaves, eqn, weight, other):
                of_weights.add(factors[factor][0])
    return of_weights


def _factors_of_weight(leaves: ArgumentLeaves, eqn: Eqn, weight: int, other: int) -> set[int]:
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
