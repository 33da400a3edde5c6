"""What stays fixed while candidates vary, and first-fit over it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
    """Outcome of first-fit: the mesh axes of each dimension, and the dimensions left open."""

    spec: Spec
    open_dims: frozenset[int]


@dataclass(frozen=True, slots=True)
class BoundRule:
    """An axis rule bound to logical axis numbers and an axis size."""

    logical_axis: int
    mesh_axis: str
    size: int
    last: bool
    optimizer: bool
    needs: int | None
    forbids: int | None


def first_fit(
    logical_axes: Sequence[int],
    sizes: Sequence[int],
    rules: Iterable[BoundRule],
    optimizer: bool,
    shard_sizes: Sequence[int] | None = None,
    disallowed: Disallowed = (),
) -> Fit:
    """First-fit with divisibility over the dimensions of one value, or the loops of one equation.

    Args:
        logical_axes: Logical axis of each dimension.
        sizes: Size of each.
        rules: In order.
        optimizer: True for values of the optimizer state.
        shard_sizes: What is left of each size where other mesh axes already split it.
        disallowed: See `Disallowed`.
    """
    spec: list[tuple[str, ...]] = [()] * len(sizes)
    left = list(sizes if shard_sizes is None else shard_sizes)
    used: set[str] = set()
    misfits: dict[str, list[int]] = {}
    for rule in rules:
        if (
            rule.mesh_axis in used
            or rule.logical_axis not in logical_axes
            or (rule.optimizer and not optimizer)
        ):
            continue
        if (rule.needs is not None and rule.needs not in logical_axes) or (
            rule.forbids is not None and rule.forbids in logical_axes
        ):
            continue
        dims = [
            d
            for d, logical_axis in enumerate(logical_axes)
            if logical_axis == rule.logical_axis and sizes[d] > 1
        ]
        if disallowed:
            dims = [d for d in dims if rule.mesh_axis not in disallowed[d]]
        fitting = [d for d in dims if left[d] % rule.size == 0]
        if fitting:
            dim = fitting[-1] if rule.last else fitting[0]
            spec[dim] += (rule.mesh_axis,)
            left[dim] //= rule.size
            used.add(rule.mesh_axis)
        else:
            misfits.setdefault(rule.mesh_axis, []).extend(dims)
    unplaced = {dim for axis, dims in misfits.items() if axis not in used for dim in dims}
    if (
        unplaced
    ):  # the partitioner may give the mesh axis, or a factor of it, to any dimension without one
        unplaced = {dim for dim, axes in enumerate(spec) if not axes}
    return Fit(tuple(spec), frozenset(unplaced))


Signature = tuple[tuple[int, ...], tuple[int, ...], bool, Disallowed]
"""What first-fit looks at: logical axes and sizes of a value's dimensions (or an equation's loops),
whether it is optimizer state, and what is barred."""


@dataclass(frozen=True, eq=False)
class Problem:
    """What stays fixed while candidates vary.

    Attributes:
        logical_axes: The roles.
        groups: Groups of the arguments.
        mesh_axes: Size of each mesh axis, in mesh order.
        pins: Specs fixed by the user, by `Value.index`.
        disallowed: Mesh axes that the user keeps from dimensions, by `Value.index`.
        unstated: Logical axes without effect: no constraint and no argument has them
            (`constrain.unstated_roles`).
        signatures: Every distinct signature of the program's values and works, in a stable order.
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
        program, inside = self.logical_axes.classes.program, self.groups.optimizer_values
        of_value = tuple(
            (
                self._able(self.logical_axes.of_value[v.index]),
                v.shape,
                v.index in inside,
                self.disallowed.get(v.index, ()),
            )
            for v in program.values
        )
        of_work = tuple(map(self._signature_of_factors, program.eqns))
        edges = {of_value[v.index] for v in (*program.body.inputs, *program.body.outputs)}

        def split(found: Iterable[Signature]) -> tuple[Signature, ...]:
            return tuple(
                sorted(s for s in found if any(logical_axis != NO_AXIS for logical_axis in s[0]))
            )

        object.__setattr__(self, "_of_value", of_value)
        object.__setattr__(self, "_of_factors", of_work)
        object.__setattr__(self, "signatures", split({*of_value, *of_work}))
        object.__setattr__(self, "edge_signatures", split(edges))

    @property
    def program(self) -> Program:
        """The program."""
        return self.logical_axes.classes.program

    def value_signature(self, value: Value) -> Signature:
        """Signature of a value."""
        return self._of_value[value.index]

    def factor_signature(self, eqn: Eqn) -> Signature:
        """Signature of an equation's loops; NEED_REPLICATION loops have no logical axis, so they are never split."""
        return self._of_factors[eqn.index]

    def _signature_of_factors(self, eqn: Eqn) -> Signature:
        rule = self.logical_axes.classes.rules[eqn.index]
        factors = self.logical_axes.factors(eqn)
        able = (
            NO_AXIS if k is FactorKind.NEED_REPLICATION else logical_axis
            for k, (logical_axis, _) in zip(rule.kinds, factors, strict=True)
        )
        optimizer = any(v.index in self.groups.optimizer_values for v in eqn.outputs)
        return self._able(able), tuple(size for _, size in factors), optimizer, ()

    def _able(self, logical_axes: Iterable[int]) -> tuple[int, ...]:
        return tuple(
            NO_AXIS if logical_axis in self.unstated else logical_axis
            for logical_axis in logical_axes
        )


def bind(problem: Problem, rule: AxisRule) -> BoundRule:
    """An axis rule as numbers.

    Raises:
        RuleError: If it names a mesh axis, a logical axis that the problem does not have.
    """
    if rule.mesh_axis not in problem.mesh_axes:
        raise RuleError(
            f"rule '{rule}' names mesh axis {rule.mesh_axis!r}, but the mesh has "
            f"{dict(problem.mesh_axes)}. "
            f"Use one of {list(problem.mesh_axes)}."
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
        names = [r.name for r in problem.logical_axes.axes]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[:8]
        raise RuleError(
            f"rule '{rule}' names logical axis {name!r}, which this function does not have. Nearest: "
            f"{near}."
        )
    return logical_axis.index
