"""Residual streams: where a program adds to a value what weights made of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from autoshard.tracing.primitives import BITCASTS, COPIES, MOVING
from autoshard.tracing.program import Body, Eqn, MappingKind, Program, Value

_BILINEAR = frozenset({"mul", "div"})
_LINEAR = (BITCASTS | COPIES | MOVING) | {
    "add",
    "add_any",
    "convert_element_type",
    "neg",
    "reduce_sum",
    "sub",
}


@dataclass(slots=True)
class _Origin:
    """Where a value comes from; sources are bits.

    Attributes:
        direct: Sources that it stems from through operations without weights.
        through: Those that it stems from through weights.
        layers: How many weights there are on the way at most, with something between each two that
            is not linear: the two factors of an adapter count once.
        is_linear: False if something that is not linear came after the last weight.
        is_summed: True if it stems directly from a sum that continues a stream.
    """

    direct: int = 0
    through: int = 0
    layers: int = 0
    is_linear: bool = True
    is_summed: bool = False

    def add(self, other: _Origin) -> None:
        """Stems from the other one as well."""
        self.direct |= other.direct
        self.through |= other.through
        if other.layers == self.layers:
            self.is_linear &= other.is_linear
        elif other.layers > self.layers:
            self.layers, self.is_linear = other.layers, other.is_linear
        self.is_summed |= other.is_summed


class Streams:
    """The sums of a program that continue a stream.

    Each result of a product is a source, and so is each activation that is passed. A sum of two
    activations continues a stream if one stems directly from what the other one stems from through
    weights, or if both come from one source through unlike numbers of layers (a shortcut with a
    weight of its own).

    Attributes:
        sums: Results of these sums.
        chained: Those of them that continue a stream of several sums.
    """

    def __init__(
        self, program: Program, products: Collection[int], is_activation: Callable[[Value], bool]
    ) -> None:
        """Finds them.

        Args:
            program: The program.
            products: Numbers (`Eqn.index`) of the anchors that take a weight, and of products of
                activations.
            is_activation: What may be in a stream.
        """
        self.sums: list[Value] = []
        self.chained: list[Value] = []
        self._is_activation = is_activation
        self._origins = [_Origin() for _ in program.values]
        # By number of the product, its bit.
        self._source_of = {index: 1 << bit for bit, index in enumerate(sorted(products))}
        passed = filter(is_activation, program.body.inputs)
        for bit, leaf in enumerate(passed, start=len(self._source_of)):
            self._origins[leaf.index].direct = 1 << bit
        self._visit(program.body)

    def stems(self, value: Value, product: Eqn) -> bool:
        """Whether a value stems from a product, in the same trip of loops around both."""
        origin = self._origins[value.index]
        return bool((origin.direct | origin.through) & self._source_of[product.index])

    def _visit(self, body: Body) -> None:
        for eqn in body.eqns:
            self._hand_on(eqn, MappingKind.OPERAND_TO_INVAR)
            for inner in eqn.bodies:
                self._visit(inner)
            self._hand_on(eqn, MappingKind.OUTVAR_TO_RESULT)
            if not eqn.bodies:
                self._compute(eqn)

    def _hand_on(self, eqn: Eqn, kind: MappingKind) -> None:
        for mapping in eqn.mappings:
            if mapping.kind is kind:
                self._origins[mapping.target.index].add(self._origins[mapping.source.index])

    def _compute(self, eqn: Eqn) -> None:
        origin = _Origin()
        for value in eqn.inputs:
            origin.add(self._origins[value.index])
        if eqn.index in self._source_of:
            layers = origin.layers + (not origin.is_linear or not origin.layers)
            origin = _Origin(self._source_of[eqn.index], origin.direct | origin.through, layers)
        elif eqn.primitive == "add" and self._continues(*eqn.inputs):
            (self.chained if origin.is_summed else self.sums).append(eqn.outputs[0])
            origin.is_summed = True
        elif not self._is_linear(eqn):
            origin.is_linear = False
        for value in eqn.outputs:
            self._origins[value.index] = origin

    def _is_linear(self, eqn: Eqn) -> bool:
        if eqn.primitive in _LINEAR:
            return True
        return eqn.primitive in _BILINEAR and sum(map(self._is_activation, eqn.inputs)) < 2

    def _continues(self, left: Value, right: Value) -> bool:
        if not (self._is_activation(left) and self._is_activation(right)):
            return False
        a, b = self._origins[left.index], self._origins[right.index]
        # What both stem from directly says nothing: gates, the terms of a recurrence.
        both = a.direct & b.direct
        if (a.direct & b.through | b.direct & a.through) & ~both:
            return True
        return not both and bool(a.through & b.through) and a.layers != b.layers
