"""What the logical axes of a model are to those who shard it by hand, read from the data flow.

A *weight* is what an anchor takes beside activations, computed from parameters alone. It reads some
axes (which it contracts) and writes others. Of these axes

- a *residual* axis is that of a stream: results of weights that read it are added to it again;
- *heads* are batch dimensions of a product of two activations (attention), and what such a product
  contracts (the size of a head) is never split by hand;
- the *inner* axes are those that tensor parallelism splits: the heads, and then, weight by weight
  in the order of the program, an axis of each weight that has none yet, so that a weight that
  writes it (split by columns) goes before one that reads it (split by rows).

Nothing here looks at names, nor at how many layers there are: each kind of weight counts once, not
once a layer, so a model has the same inner axes at every depth, in a scan and written out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from autoshard.axes.argument_groups import Group
from autoshard.axes.argument_leaves import weight_sides
from autoshard.axes.axis_classes import NO_AXIS
from autoshard.axes.sharding_rules import FactorKind
from autoshard.axes.sharding_rules.reshaping import groups_of_equal_size
from autoshard.layout.problem import Problem
from autoshard.search.axis_sizes import dividing_mesh_axes
from autoshard.search.residual_streams import Streams
from autoshard.tracing.dataflow import forward
from autoshard.tracing.primitives import (
    ANCHORS,
    COPIES,
    CUT_KERNELS,
    WEIGHTED,
)
from autoshard.tracing.program import Eqn, Value

_Place = tuple[Value, Sequence[int]]
"""Some dimensions of a value."""

_DATA = 1
"""The bit of data in what a value is computed from; each parameter has one of its own."""


@dataclass(frozen=True, slots=True)
class WeightUse:
    """The logical axes of a weight, as an anchor of the forward pass takes it.

    Attributes:
        eqn: The anchor.
        weight: What it takes as a weight.
        activations: What it takes beside the weight.
        reads: Those that it contracts (of an embedding, the one that is looked up).
        writes: Those that its result has from it.
        groups: Those that it has in common with the activations and that stay (experts).
    """

    eqn: Eqn
    weight: Value
    activations: Value
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    groups: tuple[int, ...]

    @property
    def axes(self) -> tuple[int, ...]:
        """All of them."""
        return self.reads + self.writes + self.groups


class ModelAxes:
    """The logical axes of a model by what they are used for.

    Attributes:
        uses: Of each kind of weight the first use, in the order of the program.
        of_weights: Logical axes of weights.
        heads: Those that a product of two activations has as a batch dimension.
        contracted: Those that a product of two activations contracts.
        residual: Those of streams.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        program = problem.program
        self._computed_from = _computed_from(problem)
        every_use = list(self._every_use())
        self.uses = self._first_uses(every_use)
        self.of_weights = frozenset(axis for use in self.uses for axis in use.axes)
        self._beside_samples = {axis for use in self.uses for axis in self.of(use.weight)}
        self._has_samples = any(self._has_sample(use.activations) for use in self.uses)
        products = list(self._products_of_activations())
        self.heads, self.contracted = self._of_attention(products)
        sources = {use.eqn.index for use in every_use} | {eqn.index for eqn in products}
        self._streams = Streams(program, sources, self._is_activation)
        self.residual = self._residual(self._streams)

    def of(self, value: Value) -> tuple[int, ...]:
        """Logical axes of a value."""
        return self._problem.logical_axes.of_value[value.index]

    def is_usable(self, logical_axis: int, mesh_axis: str | None = None) -> bool:
        """True if the mesh axis (or any) divides the logical axis, and no scan takes it apart."""
        dividing = dividing_mesh_axes(self._problem, logical_axis)
        is_divided = bool(dividing) if mesh_axis is None else mesh_axis in dividing
        return is_divided and not self._problem.logical_axes.axes[logical_axis].scanned

    def inner(self, mesh_axis: str) -> tuple[int, ...]:
        """The inner axes that a mesh axis divides.

        Where every weight has residual axes and those of data only, these count as well.
        """
        never = {axis for axis in self.of_weights if not self.is_usable(axis, mesh_axis)}
        kept_whole = self.contracted | self._groups()
        for excluded in (self.residual | kept_whole, kept_whole, frozenset[int]()):
            inner = self._inner(never | (excluded - self.heads))
            if inner:
                return inner
        return ()

    def _inner(self, excluded: Collection[int]) -> tuple[int, ...]:
        """An axis of every weight, where it has one that is not excluded; see the module."""
        every = dict.fromkeys(axis for use in self.uses for axis in use.axes)
        inner = [axis for axis in every if axis in self.heads and axis not in excluded]
        for use in self.uses:
            left = [other for other in self.uses if _is_whole(other, inner)]
            if use in left:
                sides = [self._columns(use, left, inner), self._rows(use)]
                if use.eqn.primitive == "gather":  # the vocabulary, not the width
                    sides.reverse()
                candidates = (*sides[0], *sides[1], *use.groups)
                inner += [axis for axis in candidates if axis not in excluded][:1]
        return tuple(inner)

    def _columns(
        self, use: WeightUse, left: Sequence[WeightUse], inner: Collection[int]
    ) -> Iterator[int]:
        """What a weight writes and another one that has no axis yet reads; then final results.

        Of fused weights (queries, keys and values; gates) the parts are read, or are heads.

        What only weights read that are split already would have to be gathered for them (the latent
        of compressed keys and values, the rank of an adapter).
        """
        read = {axis for other in self.uses for axis in other.reads}
        read_by_left = {axis for other in left for axis in other.reads}
        for axis in use.writes:
            parts = self._parts[axis]
            if axis in read_by_left or not parts.isdisjoint(read_by_left.union(inner)):
                yield axis
        # What a router says goes on to other weights.
        if not any(self._streams.stems(other.activations, use.eqn) for other in self.uses):
            yield from (axis for axis in use.writes if axis not in read)

    def _rows(self, use: WeightUse) -> Iterator[int]:
        """What a weight reads that another one wrote, or that is looked up; data come whole."""
        written = {axis for other in self.uses for axis in other.writes}
        written.update(*(self._parts[axis] for axis in written))
        for axis in use.reads:
            if axis in written or axis in self._looked_up:
                yield axis

    @cached_property
    def _parts(self) -> Mapping[int, set[int]]:
        """By logical axis of a weight, those that slices, splits and reshapes make of it."""
        pieces: dict[int, set[int]] = defaultdict(set)
        for eqn in self._forward_eqns():
            for operand, result in _pieces(eqn):
                for source, target in product(*map(self._axes_at, (operand, result))):
                    pieces[source].add(target)
        parts = {}
        for axis in self.of_weights:
            parts[axis] = reached = {axis}
            new = [axis]
            while new:
                more = pieces[new.pop()] - reached
                reached |= more
                new += more
        return parts

    def _axes_at(self, place: _Place) -> list[int]:
        value, dims = place
        return [self.of(value)[dim] for dim in dims if self.of(value)[dim] != NO_AXIS]

    @cached_property
    def _looked_up(self) -> frozenset[int]:
        """Axes of embeddings: by a gather, or by comparing with an iota (one_hot)."""
        of_gathers = {axis for u in self.uses if u.eqn.primitive == "gather" for axis in u.reads}
        constant = self._problem.logical_axes.classes.constant
        values = self._problem.program.values
        return frozenset(of_gathers).union(*(self.of(v) for v in values if constant[v.index]))

    def fully_sharded(self, inner: Sequence[int] = ()) -> tuple[int, ...]:
        """Axes that together are in all weights: residual ones, then such as most weights have.

        Args:
            inner: What tensor parallelism splits; these come last.
        """
        weights = self._weight_leaves()
        of_leaves = {axis for axes in weights for axis in axes}
        # Not along the window of a convolution.
        usable = set(filter(self.is_usable, of_leaves & self.of_weights or of_leaves))
        cover: list[int] = []
        for stage in (usable & self.residual - set(inner), usable - set(inner), usable):
            cover += _cover(weights, stage, cover)
        return tuple(cover)

    # What is a weight -----------------------------------------------------------------------------

    def _leaves(self, group: Group) -> list[Value]:
        inputs = self._problem.program.body.inputs
        groups = self._problem.groups.of_input
        return [leaf for leaf, its_group in zip(inputs, groups, strict=True) if its_group is group]

    def _of_leaves(self, group: Group) -> set[int]:
        """Logical axes of the leaves of a group."""
        return {axis for leaf in self._leaves(group) for axis in self.of(leaf)} - {NO_AXIS}

    def _is_activation(self, value: Value) -> bool:
        """Whether it is computed from data and has samples or tokens, where the program has them.

        A gradient of a weight has none left.
        """
        of_data = bool(self._computed_from[value.index] & _DATA)
        return of_data and (self._has_sample(value) or not self._has_samples)

    def _has_sample(self, value: Value) -> bool:
        """Whether it has an axis that no weight has."""
        return any(axis not in self._beside_samples for axis in self.of(value) if axis != NO_AXIS)

    def _every_use(self) -> Iterator[WeightUse]:
        """Wherever an anchor takes a weight, in the order of the program.

        What has an axis that data alone bring is none, though no data may be in it: the gradient of
        a plain sum is made of ones and parameters.
        """
        of_data = self._of_leaves(Group.DATA)
        of_data_alone = (
            of_data - self._of_leaves(Group.PARAMETER) - self._of_leaves(Group.OPTIMIZER)
        )
        for eqn, _ in self._problem.program.walk():
            if eqn.primitive not in WEIGHTED:
                continue
            for weight, other in weight_sides(eqn):
                leaves = self._computed_from[eqn.inputs[weight].index]
                of_weight = self.of(eqn.inputs[weight])
                is_weight = leaves and not leaves & _DATA and of_data_alone.isdisjoint(of_weight)
                # A table of positions is looked up with constants: nobody calls it a vocabulary.
                if is_weight and self._computed_from[eqn.inputs[other].index] & _DATA:
                    yield self._use(eqn, weight, other)
                    break

    def _use(self, eqn: Eqn, weight: int, other: int) -> WeightUse:
        rule = self._problem.logical_axes.classes.rules[eqn.index]
        factors = self._problem.logical_axes.factors(eqn)
        of_activations = set(rule.operands[other])
        reads: list[int] = []
        writes: list[int] = []
        groups: list[int] = []
        for factor in rule.operands[weight]:
            axis, kind = factors[factor][0], rule.kinds[factor]
            if axis == NO_AXIS or kind not in (FactorKind.PASS_THROUGH, FactorKind.REDUCTION):
                continue
            if kind is FactorKind.REDUCTION:
                is_read = factor in of_activations or eqn.primitive == "gather"
                (reads if is_read else groups).append(axis)
            else:
                (groups if factor in of_activations else writes).append(axis)
        return WeightUse(
            eqn, eqn.inputs[weight], eqn.inputs[other], tuple(reads), tuple(writes), tuple(groups)
        )

    def _first_uses(self, uses: Iterable[WeightUse]) -> tuple[WeightUse, ...]:
        """Of each kind of weight the first use: the backward pass reads what that one writes."""
        of_leaves: set[tuple[int, frozenset[int]]] = set()
        first: dict[tuple[object, ...], WeightUse] = {}
        for use in uses:
            weight = (self._computed_from[use.weight.index], frozenset(use.axes))
            if weight not in of_leaves and (use.reads or use.writes):
                of_leaves.add(weight)
                first.setdefault((use.reads, use.writes, use.groups), use)
        return tuple(first.values())

    def _residual(self, streams: Streams) -> frozenset[int]:
        """Axes of streams, but for those within a block.

        That is what weights write that read another stream and what such as write that stream read,
        unless sum follows sum there as well.
        """
        sums = [*streams.sums, *streams.chained]
        of_streams = {axis for value in sums for axis in self.of(value)} - self.heads
        chained = {axis for value in streams.chained for axis in self.of(value)}
        turns = {(a, b) for use in self.uses for a in use.reads for b in use.writes}
        residual: list[int] = []
        for axis in dict.fromkeys(axis for use in self.uses for axis in use.axes):
            is_within = any((r, axis) in turns and (axis, r) in turns for r in residual)
            if axis in of_streams and (axis in chained or not is_within):
                residual.append(axis)
        return frozenset(residual)

    def _forward_eqns(self) -> Sequence[Eqn]:
        """The equations until the last kind of weight is taken for the first time."""
        last = max((use.eqn.index for use in self.uses), default=0)
        return self._problem.program.eqns[:last]

    def _products_of_activations(self) -> Iterator[Eqn]:
        """Products of two activations of the forward pass that make activations.

        In the backward pass elementwise operations become such products as well.
        """
        for eqn in self._forward_eqns():
            if eqn.primitive not in _PRODUCTS:
                continue
            operands = sum(map(self._is_activation, eqn.inputs))
            if operands > 1 and all(map(self._is_activation, eqn.outputs)):
                yield eqn

    def _of_attention(self, products: Iterable[Eqn]) -> tuple[frozenset[int], frozenset[int]]:
        """Axes of weights that such products have as batch dimensions, and that they contract."""
        heads: set[int] = set()
        contracted: set[int] = set()
        for eqn in products:
            rule = self._problem.logical_axes.classes.rules[eqn.index]
            in_operands: Counter[int] = Counter()
            for value, factors in zip(eqn.inputs, rule.operands, strict=True):
                in_operands.update(factors if self._is_activation(value) else ())
            for factor, (axis, _) in enumerate(self._problem.logical_axes.factors(eqn)):
                if axis in self.of_weights and in_operands[factor] > 1:
                    passes = rule.kinds[factor] is FactorKind.PASS_THROUGH
                    (heads if passes else contracted).add(axis)
        return frozenset(heads), frozenset(contracted)

    def _weight_leaves(self) -> dict[tuple[int, ...], int]:
        """Logical axes of each kind of parameter that is a weight, and elements of one of them.

        A weight has axes that some use reads and others that it writes; what is as large as the
        smallest such parameter is one as well. Scales and biases are left out: to gather them costs
        more than they take.
        """
        elements_of: dict[tuple[int, ...], int] = {}
        for leaf in self._leaves(Group.PARAMETER):
            axes, elements = [], 1
            for axis, size in zip(self.of(leaf), leaf.shape, strict=True):
                if axis == NO_AXIS or not self._problem.logical_axes.axes[axis].scanned:
                    axes.append(axis)
                    elements *= size
            kind = tuple(axis for axis in axes if axis != NO_AXIS)
            elements_of[kind] = max(elements, elements_of.get(kind, 0))
        used = [n for axes, n in elements_of.items() if self._reads_and_writes(axes)]
        least = min(used, default=0)
        return {axes: n for axes, n in elements_of.items() if n >= least}

    def _groups(self) -> set[int]:
        """Axes over which weights are stacked that are multiplied one by one or as a batch."""
        groups = {axis for use in self.uses for axis in use.groups}
        exact = {frozenset(use.axes) for use in self.uses}
        for leaf in self._leaves(Group.PARAMETER):
            axes = set(self.of(leaf)) - {NO_AXIS}
            for use in self.uses:
                if use.reads and use.writes and axes.issuperset(use.axes) and axes not in exact:
                    groups |= axes - set(use.axes)
        return groups

    def _reads_and_writes(self, axes: Sequence[int]) -> bool:
        present = set(axes)
        return any(
            not present.isdisjoint(use.reads) and not present.isdisjoint(use.writes)
            for use in self.uses
        )


_PRODUCTS = {name for name in ANCHORS | CUT_KERNELS if not name.startswith(("gather", "scatter"))}


def _computed_from(problem: Problem) -> list[int]:
    """By `Value.index`, the bits of the argument leaves that it is computed from."""
    facts = [0] * len(problem.program.values)
    leaves = zip(problem.program.body.inputs, problem.groups.of_input, strict=True)
    for leaf, (value, group) in enumerate(leaves, start=1):
        facts[value.index] = _DATA if group is Group.DATA else _DATA << leaf
    return forward(problem.program, facts, int.__or__)


def _pieces(eqn: Eqn) -> Iterator[tuple[_Place, _Place]]:
    """Dimensions of operands, and those of results that are pieces of them or that they are of."""
    if eqn.primitive == "reshape" and eqn.params.get("dimensions") is None:
        operand, result = eqn.inputs[0], eqn.outputs[0]
        for before, after in groups_of_equal_size(operand.shape, result.shape):
            yield (operand, before), (result, after)
    elif eqn.primitive in COPIES:
        for operand, result in product(eqn.inputs, eqn.outputs):
            for dim in range(min(len(operand.shape), len(result.shape))):
                yield (operand, (dim,)), (result, (dim,))


# Covers -------------------------------------------------------------------------------------------


def _is_whole(use: WeightUse, inner: Collection[int]) -> bool:
    return set(inner).isdisjoint(use.reads + use.writes)


def _cover(
    weights: Mapping[tuple[int, ...], int], allowed: Collection[int], cover: Sequence[int]
) -> list[int]:
    """More axes for a cover, until every weight that can has one.

    The one that most elements still need is next.
    """
    more: list[int] = []
    while True:
        needed: Counter[int] = Counter()
        for axes, elements in weights.items():
            if set(axes).isdisjoint([*cover, *more]):
                needed.update(dict.fromkeys(set(axes).intersection(allowed), elements))
        if not needed:
            return more
        more.append(max(needed, key=lambda axis: (needed[axis], -axis)))
