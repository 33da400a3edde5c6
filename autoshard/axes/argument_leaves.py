"""The argument leaves of a program, and where they enter anchors as they were passed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autoshard.axes.axis_classes import NO_AXIS, AxisClasses
from autoshard.tracing.dataflow import forward
from autoshard.tracing.primitives import WEIGHTED
from autoshard.tracing.program import Eqn

SEVERAL_LEAVES, NO_LEAF = -1, -2
"""Stand for an argument leaf where a value is computed from several, or from constants only."""


class ArgumentLeaves:
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


def weight_sides(eqn: Eqn) -> Iterator[tuple[int, int]]:
    """(position of an operand that may be a weight, position of the other one) of an anchor."""
    if eqn.primitive == "gather":
        yield 0, 1
    elif eqn.primitive == "conv_general_dilated":
        yield 1, 0
    elif eqn.primitive in WEIGHTED:
        yield 0, 1
        yield 1, 0
