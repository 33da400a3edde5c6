"""A `Program` back to a jaxpr: constraints written into it as data, effects taken out, a function
made of it.

The jaxpr is rewritten, never traced again: that keeps names and source lines, and is ten times
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard.jax_internals import constraint_eqns, jaxprs
from autoshard.tracing.primitives import HOST_EFFECTS
from autoshard.tracing.program import Body, Eqn, Program


@dataclass(frozen=True, slots=True)
class ShardMapCall:
    """A kernel that every device runs on its own shards, in a `shard_map`.

    Attributes:
        operands: The spec of each operand.
        results: The spec of each result.
        params: The parameters of the equation as one device runs it.
        summed: Mesh axes over which the results of the shards are added.
    """

    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]
    params: Mapping[str, Any]
    summed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EqnConstraints:
    """What to state around one equation, by position of the operand or result.

    Attributes:
        operands: The sharding that the computation needs an operand in.
        results: The sharding in which the computation leaves a result, then the result sharding of
            the layout where the two differ.
        shard_map: How a kernel is run in shards; None for what the partitioner splits itself.
        before_reshard: The sharding an operand is stated in first, where its producer must not be
            split as this computation is.
    """

    operands: Mapping[int, PartitionSpec] = field(default_factory=dict)
    results: Mapping[int, tuple[PartitionSpec, ...]] = field(default_factory=dict)
    shard_map: ShardMapCall | None = None
    before_reshard: Mapping[int, PartitionSpec] = field(default_factory=dict)

    def count(self) -> int:
        """How many specs are stated; a shard_map counts as one."""
        of_results = sum(map(len, self.results.values()))
        of_operands = len(self.operands) + len(self.before_reshard)
        return of_operands + of_results + (self.shard_map is not None)


@dataclass(frozen=True, slots=True)
class Constraints:
    """All constraints of a layout, as data.

    Attributes:
        eqns: By `Eqn.index`.
        outputs: Outputs of bodies: (`Eqn.index` of the equation, body number) to spec by output
            position.
    """

    eqns: Mapping[int, EqnConstraints]
    outputs: Mapping[tuple[int, int], Mapping[int, PartitionSpec]] = field(default_factory=dict)

    def __len__(self) -> int:
        of_eqns = sum(stated.count() for stated in self.eqns.values())
        return of_eqns + sum(map(len, self.outputs.values()))


def insert_constraints(program: Program, constraints: Constraints, mesh: jax.sharding.Mesh) -> Any:
    """The program's closed jaxpr with the constraints written into it.

    The constrained value has the old variable and the raw result gets a fresh one, so nothing
    downstream changes.

    Args:
        program: From `trace`.
        constraints: What to state where.
        mesh: The mesh (Auto axes) that the specs name.

    Returns:
        A closed jaxpr; `as_function` makes a callable of it.
    """
    closed = program.origin
    writer = _ConstraintWriter(constraints, mesh)
    jaxpr = writer.rewritten(jaxprs.open_jaxpr(closed), program.body, {})
    return jaxprs.close_jaxpr(jaxpr, closed.consts)


class _ConstraintWriter:
    """Writes constraints into the jaxprs of a program and its bodies."""

    def __init__(self, constraints: Constraints, mesh: jax.sharding.Mesh) -> None:
        self._constraints = constraints
        self._constraint_eqn = constraint_eqns.ConstraintMaker(mesh)
        self._shard_map_eqn = constraint_eqns.ShardMapMaker(mesh)

    def rewritten(self, jaxpr: Any, body: Body, outputs: Mapping[int, PartitionSpec]) -> Any:
        """A jaxpr with its constraints.

        Args:
            jaxpr: The jaxpr of the body.
            body: The body.
            outputs: Specs of its outputs, by position.
        """
        eqns: list[Any] = []
        stated = _StatedOperands(self._constraint_eqn, eqns)
        for eqn in body.eqns:
            if eqn.part:
                continue  # its first part stands for the whole; none is constrained
            jax_eqn = self._with_rewritten_bodies(eqn)
            # Most equations are no anchors and stay as they are.
            wanted = self._constraints.eqns.get(eqn.index)
            if wanted is None:
                eqns.append(jax_eqn)
            else:
                invars = stated.invars(jax_eqn, wanted)
                eqns += self._with_stated_results(jax_eqn.replace(invars=invars), wanted)

        outvars = list(jaxpr.outvars)
        if body.eqns:
            anchor = body.eqns[-1].origin  # a body's outputs have no source line of their own
            for position, spec in sorted(outputs.items()):
                source = outvars[position]
                outvars[position] = jaxprs.new_var(source.aval)
                eqns.append(self._constraint_eqn(source, outvars[position], spec, anchor))
        return jaxpr.replace(eqns=eqns, outvars=outvars)

    def _with_rewritten_bodies(self, eqn: Eqn) -> Any:
        """The jax equation, with constraints in the jaxprs among its parameters."""
        if not eqn.bodies:
            return eqn.origin
        number_of = {body.name: number for number, body in enumerate(eqn.bodies)}

        def rewritten(name: str, old: Any) -> Any:
            if name not in number_of:  # a jaxpr that is no body: of a custom rule, of a reduction
                return old
            number = number_of[name]
            outputs = self._constraints.outputs.get((eqn.index, number), {})
            new = self.rewritten(jaxprs.open_jaxpr(old), eqn.bodies[number], outputs)
            return jaxprs.replace_jaxpr(old, new)

        return eqn.origin.replace(params=jaxprs.map_jaxprs(eqn.origin.params, rewritten))

    def _with_stated_results(self, eqn: Any, wanted: EqnConstraints) -> list[Any]:
        """The equation, followed by the constraints on its results."""
        outvars, constraints = list(eqn.outvars), []
        for position, specs in sorted(wanted.results.items()):
            result = outvars[position]
            outvars[position] = source = jaxprs.new_var(result.aval)
            for step, spec in enumerate(specs, 1):
                target = result if step == len(specs) else jaxprs.new_var(result.aval)
                constraints.append(self._constraint_eqn(source, target, spec, eqn))
                source = target
        eqn = eqn.replace(outvars=outvars)
        if wanted.shard_map is not None:
            call = wanted.shard_map
            shard = eqn.replace(params=call.params)
            eqn = self._shard_map_eqn(eqn, shard, call.operands, call.results, call.summed)
        return [eqn, *constraints]


class _StatedOperands:
    """Constraints on the operands of the equations of one jaxpr, appended to its equations.

    What is stated before a reshard is stated once for all equations that read it, so that they
    share what moves.
    """

    def __init__(self, constraint_eqn: constraint_eqns.ConstraintMaker, eqns: list[Any]) -> None:
        self._constraint_eqn, self._eqns = constraint_eqn, eqns
        self._before_reshard: dict[tuple[Any, PartitionSpec], Any] = {}

    def invars(self, eqn: Any, wanted: EqnConstraints) -> list[Any]:
        """The operands that the equation reads instead of its own."""
        invars = list(eqn.invars)
        for position, spec in sorted(wanted.operands.items()):
            source = invars[position]
            first = wanted.before_reshard.get(position)
            if first is not None:
                source = self._stated_once(source, first, eqn)
            invars[position] = self._stated(source, spec, eqn)
        return invars

    def _stated_once(self, source: Any, spec: PartitionSpec, anchor: Any) -> Any:
        key = source, spec
        if key not in self._before_reshard:
            self._before_reshard[key] = self._stated(source, spec, anchor)
        return self._before_reshard[key]

    def _stated(self, source: Any, spec: PartitionSpec, anchor: Any) -> Any:
        target = jaxprs.new_var(source.aval)
        self._eqns.append(self._constraint_eqn(source, target, spec, anchor))
        return target


def as_reference(closed: Any) -> Any:
    """The closed jaxpr without what does not change its outputs.

    That is: constraints, prints, callbacks that return nothing.
    """
    jaxpr = _without_side_effects(jaxprs.open_jaxpr(closed))
    return jaxprs.close_jaxpr(jaxpr, jaxprs.consts_of(closed))


def _without_side_effects(jaxpr: Any) -> Any:
    unconstrained: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom if jaxprs.is_literal(atom) else unconstrained.get(atom, atom)

    def of_body(_: str, old: Any) -> Any:
        return jaxprs.replace_jaxpr(old, _without_side_effects(jaxprs.open_jaxpr(old)))

    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in HOST_EFFECTS and all(map(jaxprs.is_drop, eqn.outvars)):
            continue
        if eqn.primitive.name == "sharding_constraint":
            # Its result is its operand, for everything that reads it.
            unconstrained[eqn.outvars[0]] = read(eqn.invars[0])
            continue
        params = jaxprs.map_jaxprs(eqn.params, of_body)
        eqns.append(eqn.replace(invars=list(map(read, eqn.invars)), params=params))
    return jaxpr.replace(eqns=eqns, outvars=list(map(read, jaxpr.outvars)))


def as_function(closed: Any, name: str) -> Callable[..., list[Any]]:
    """A function of flat leaves that evaluates the jaxpr; profiles show it under `name`."""
    flat = jaxprs.as_flat_function(closed)

    def call(*leaves: Any) -> list[Any]:
        return list(flat(*leaves))

    call.__name__ = call.__qualname__ = name
    return call
