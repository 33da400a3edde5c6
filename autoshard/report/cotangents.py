"""What a constraint of the forward pass states in the backward pass.

The transpose of `with_sharding_constraint` is the same constraint on the cotangent. So stating a
value's spec in the source states its cotangent's too, which some equation of the backward pass
reads or computes; this module finds which. Values correspond if they have the same dimensions (axis
class and size), in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from autoshard.axes.axis_classes import AxisClasses
from autoshard.tracing.program import Eqn, Value

Dimension = tuple[int, int]
"""Axis class and size."""


@dataclass(frozen=True, eq=False)
class Cotangents:
    """Finds cotangents by the dimensions that values have."""

    classes: AxisClasses

    def dimensions(self, value: Value) -> tuple[Dimension, ...]:
        """The dimensions of a value, in order."""
        return tuple(zip(self.classes.of_value[value.index], value.shape, strict=True))

    def signature(self, value: Value) -> tuple[Dimension, ...]:
        """The dimensions of a value, the same for values that have them in another order."""
        return tuple(sorted(self.dimensions(value)))

    def operands_with(self, backward: Eqn, forward: Eqn) -> tuple[int, ...]:
        """The operand of a transposed anchor that is the cotangent of the forward one's result.

        At most one. A transposed gather is a scatter, whose updates come last.
        """
        result = self.signature(forward.outputs[0])
        positions: Sequence[int] = range(len(backward.inputs))
        if backward.primitive.startswith("scatter"):
            positions = positions[::-1]
        for position in positions:
            if self.signature(backward.inputs[position]) == result:
                return (position,)
        return ()

    def differentiated(self, backward: Eqn, forward: Eqn) -> int | None:
        """Which operand of the forward anchor a transposed one computes the cotangent of.

        Of several that could be, one beside which the forward anchor reads what the transposed one
        reads beside the cotangent of the result.
        """
        computed = self.signature(backward.outputs[0])
        operands = [self.signature(value) for value in forward.inputs]
        possible = [position for position, own in enumerate(operands) if own == computed]
        cotangent = self.operands_with(backward, forward)
        # A product has two transposes: both read the cotangent of the result, and one factor each.
        read = [
            self.signature(value)
            for position, value in enumerate(backward.inputs)
            if position not in cotangent
        ]
        for position in possible:
            beside = operands[:position] + operands[position + 1 :]
            if any(own in read for own in beside):
                return position
        return possible[0] if possible else None

    def carried_over(
        self, spec: PartitionSpec, source: Value, target: Value
    ) -> PartitionSpec | None:
        """The spec of a value for another one with the same dimensions in another order.

        None if it has others. Dimensions of size 1 may come and go.
        """
        if self.dimensions(source) == self.dimensions(target):
            return spec
        entries = [*spec, *[None] * (len(source.shape) - len(spec))]
        left = list(zip(self.dimensions(source), entries, strict=True))
        carried: list[object] = []
        for dimension in self.dimensions(target):
            own = [entry for entry in left if entry[0] == dimension]
            if own:
                left.remove(own[0])
                carried.append(own[0][1])
            elif dimension[1] == 1:  # nothing to split
                carried.append(None)
            else:
                return None
        lost = any(entry is not None for _, entry in left)
        return None if lost else _without_trailing_nones(carried)


def _without_trailing_nones(entries: list[object]) -> PartitionSpec:
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
