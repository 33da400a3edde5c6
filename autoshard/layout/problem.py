"""What stays fixed while candidates vary, and first-fit over it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autoshard.axes.argument_groups import Groups
from autoshard.axes.axis_classes import NO_AXIS
from autoshard.axes.logical_axes import LogicalAxes
from autoshard.axes.sharding_rules import FactorKind
from autoshard.errors import RuleError
from autoshard.layout.axis_rule import OPTIMIZER, AxisRule, ScopeKind
from autoshard.layout.spec import Disallowed, Spec
from autoshard.tracing.program import Eqn, Program, Value


@dataclass(frozen=True, slots=True)
class Fit:
    """Outcome of first-fit.

    Attributes:
        spec: The mesh axes of each dimension, or factor.
        open_dims: Those left to the partitioner, see `layout`.
    """

    spec: Spec
    open_dims: frozenset[int]


@dataclass(frozen=True, slots=True)
class BoundRule:
    """An axis rule as numbers.

    Attributes:
        logical_axis: Index of its logical axis.
        mesh_axis: Name of its mesh axis.
        size: Devices along the mesh axis.
        last: True where it takes the last dimension that fits, not the first.
        optimizer: True where it holds in the optimizer state alone.
        needs: Logical axis that a value must have for the rule to hold.
        forbids: Logical axis that a value must not have.
    """

    logical_axis: int
    mesh_axis: str
    size: int
    last: bool
    optimizer: bool
    needs: int | None
    forbids: int | None


class Signature(NamedTuple):
    """What first-fit looks at: values and equations with the same signature are split alike.

    Attributes:
        logical_axes: Logical axis of each dimension of a value, or factor of an equation.
        sizes: Size of each.
        optimizer: True for the optimizer state, and for equations that write it.
        disallowed: Mesh axes kept from dimensions by the user; () for equations.
    """

    logical_axes: tuple[int, ...]
    sizes: tuple[int, ...]
    optimizer: bool
    disallowed: Disallowed


def first_fit(
    signature: Signature, rules: Iterable[BoundRule], shard_sizes: Sequence[int] | None = None
) -> Fit:
    """First-fit with divisibility over the dimensions of a value, or the factors of an equation.

    Args:
        signature: Of the value or equation.
        rules: In order.
        shard_sizes: What is left of each size where other mesh axes already split it.
    """
    spec: list[tuple[str, ...]] = [()] * len(signature.sizes)
    left = list(signature.sizes if shard_sizes is None else shard_sizes)
    used: set[str] = set()
    misfits: set[str] = set()
    for rule in rules:
        if rule.mesh_axis in used or not _applies(rule, signature):
            continue
        dims = _dims_of(rule, signature)
        fitting = [dim for dim in dims if left[dim] % rule.size == 0]
        if fitting:
            dim = fitting[-1] if rule.last else fitting[0]
            spec[dim] += (rule.mesh_axis,)
            left[dim] //= rule.size
            used.add(rule.mesh_axis)
        elif dims:
            misfits.add(rule.mesh_axis)

    return Fit(tuple(spec), _open_dims(spec, misfits - used))


def _open_dims(spec: Sequence[tuple[str, ...]], misfits: set[str]) -> frozenset[int]:
    """Dimensions left to the partitioner, where these mesh axes divide none of their dimensions."""
    if not misfits:
        return frozenset()
    # It may give the mesh axis, or a divisor of it, to any dimension that no rule split.
    return frozenset(dim for dim, axes in enumerate(spec) if not axes)


def _applies(rule: BoundRule, signature: Signature) -> bool:
    """Whether the scope of a rule takes a signature in."""
    present = signature.logical_axes
    if rule.logical_axis not in present:
        return False
    if rule.optimizer and not signature.optimizer:
        return False
    if rule.needs is not None and rule.needs not in present:
        return False
    return rule.forbids is None or rule.forbids not in present


def _dims_of(rule: BoundRule, signature: Signature) -> list[int]:
    """The dimensions that a rule may split, whether or not its mesh axis divides them."""
    dims = []
    for dim, logical_axis in enumerate(signature.logical_axes):
        if logical_axis != rule.logical_axis or signature.sizes[dim] <= 1:
            continue
        if not signature.disallowed or rule.mesh_axis not in signature.disallowed[dim]:
            dims.append(dim)
    return dims


@dataclass(frozen=True, eq=False)
class Problem:
    """What stays fixed while candidates vary.

    Attributes:
        logical_axes: The logical axes of the program.
        groups: Groups of the arguments.
        mesh_axes: Size of each mesh axis, in mesh order.
        pins: Specs fixed by the user, by `Value.index`.
        unstated: Logical axes without effect: no constraint and no argument has them
            (`constraints.unstated_logical_axes`).
        disallowed: Mesh axes that the user keeps from dimensions, by `Value.index`.
        signatures: Every distinct signature with a logical axis, in a stable order.
        edge_signatures: Those of the argument and output leaves.
    """

    logical_axes: LogicalAxes
    groups: Groups
    mesh_axes: Mapping[str, int]
    pins: Mapping[int, Spec] = field(default_factory=dict)
    unstated: frozenset[int] = frozenset()
    disallowed: Mapping[int, Disallowed] = field(default_factory=dict)
    signatures: tuple[Signature, ...] = field(init=False, repr=False)
    edge_signatures: tuple[Signature, ...] = field(init=False, repr=False)
    _of_value: tuple[Signature, ...] = field(init=False, repr=False)
    _of_factors: tuple[Signature, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        body = self.program.body
        of_value = tuple(map(self._signature_of_value, self.program.values))
        of_factors = tuple(map(self._signature_of_factors, self.program.eqns))
        at_edge = {of_value[value.index] for value in (*body.inputs, *body.outputs)}

        object.__setattr__(self, "_of_value", of_value)
        object.__setattr__(self, "_of_factors", of_factors)
        object.__setattr__(self, "signatures", _with_logical_axes({*of_value, *of_factors}))
        object.__setattr__(self, "edge_signatures", _with_logical_axes(at_edge))

    @property
    def program(self) -> Program:
        """The program."""
        return self.logical_axes.classes.program

    def value_signature(self, value: Value) -> Signature:
        """Signature of a value."""
        return self._of_value[value.index]

    def factor_signature(self, eqn: Eqn) -> Signature:
        """Signature of an equation's factors."""
        return self._of_factors[eqn.index]

    def _signature_of_value(self, value: Value) -> Signature:
        return Signature(
            self._without_unstated(self.logical_axes.of_value[value.index]),
            value.shape,
            value.index in self.groups.optimizer_values,
            self.disallowed.get(value.index, ()),
        )

    def _signature_of_factors(self, eqn: Eqn) -> Signature:
        kinds = self.logical_axes.classes.rules[eqn.index].kinds
        splittable: list[int] = []
        sizes: list[int] = []
        for kind, (logical_axis, size) in zip(kinds, self.logical_axes.factors(eqn), strict=True):
            # Without a logical axis no rule takes the factor, so it is never split.
            replicated = kind is FactorKind.NEED_REPLICATION
            splittable.append(NO_AXIS if replicated else logical_axis)
            sizes.append(size)
        optimizer = any(out.index in self.groups.optimizer_values for out in eqn.outputs)
        return Signature(self._without_unstated(splittable), tuple(sizes), optimizer, ())

    def _without_unstated(self, logical_axes: Iterable[int]) -> tuple[int, ...]:
        return tuple(NO_AXIS if axis in self.unstated else axis for axis in logical_axes)


def _with_logical_axes(signatures: Iterable[Signature]) -> tuple[Signature, ...]:
    """Those that a rule may split, in a stable order."""
    return tuple(
        sorted(
            signature
            for signature in signatures
            if any(axis != NO_AXIS for axis in signature.logical_axes)
        )
    )


def bind(problem: Problem, rule: AxisRule) -> BoundRule:
    """An axis rule as numbers.

    Raises:
        RuleError: If it names a mesh axis, a logical axis that the problem does not have.
    """
    if rule.mesh_axis not in problem.mesh_axes:
        raise RuleError(
            f"rule '{rule}' names mesh axis {rule.mesh_axis!r}, but the mesh has "
            f"{dict(problem.mesh_axes)}. Use one of {list(problem.mesh_axes)}."
        )
    scope = rule.where
    other = None
    if scope.is_condition:
        other = _logical_axis_number(problem, scope.logical_axis, rule)
    return BoundRule(
        logical_axis=_logical_axis_number(problem, rule.logical_axis, rule),
        mesh_axis=rule.mesh_axis,
        size=problem.mesh_axes[rule.mesh_axis],
        last=rule.occurrence == "last",
        optimizer=scope == OPTIMIZER,
        needs=other if scope.kind is ScopeKind.WITH else None,
        forbids=other if scope.kind is ScopeKind.WITHOUT else None,
    )


def _logical_axis_number(problem: Problem, name: str, rule: AxisRule) -> int:
    logical_axis = problem.logical_axes.by_name(name)
    if logical_axis is None:
        names = [axis.name for axis in problem.logical_axes.axes]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[:8]
        raise RuleError(
            f"rule '{rule}' names logical axis {name!r}, which this function does not have. "
            f"Nearest: {near}."
        )
    return logical_axis.index
