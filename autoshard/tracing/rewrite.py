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
from autoshard.tracing.program import Body, Program


@dataclass(frozen=True, slots=True)
class ShardMapCall:
    """A kernel that every device runs on its own pieces, in a `shard_map`.

    Attributes:
        operands: The spec of each operand.
        results: The spec of each result.
        params: The parameters of the equation as one device runs it.
        summed: Mesh axes over which the results of the pieces are added.
    """

    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]
    params: Mapping[str, Any]
    summed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EqnConstraints:
    """What to state around one equation, by position of the operand or result.

    Attributes:
        operands: The spec an operand is brought to before the work.
        kept: The spec an operand is stated in first, where what makes it must not be split as the
            work is.
        results: The spec of the raw result (the work), then that of the stored result where the two
            differ.
        pieces: How a kernel is run by pieces; None for what the partitioner splits itself.
    """

    operands: Mapping[int, PartitionSpec] = field(default_factory=dict)
    results: Mapping[int, tuple[PartitionSpec, ...]] = field(default_factory=dict)
    shard_map: ShardMapCall | None = None
    before_reshard: Mapping[int, PartitionSpec] = field(default_factory=dict)


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
        inner = sum(
            len(c.operands)
            + len(c.before_reshard)
            + sum(map(len, c.results.values()))
            + (c.shard_map is not None)
            for c in self.eqns.values()
        )
        return inner + sum(map(len, self.outputs.values()))


def insert_constraints(program: Program, constraints: Constraints, mesh: jax.sharding.Mesh) -> Any:
    """The program's closed jaxpr with the constraints written into it, its types checked.

    The constrained value keeps the old variable and the raw result gets a fresh one, so nothing
    downstream changes.

    Args:
        program: From `trace`.
        constraints: What to state where.
        mesh: The mesh (Auto axes) that the specs name.

    Returns:
        A closed jaxpr; `as_function` makes a callable of it.
    """
    make, in_pieces = constraint_eqns.ConstraintMaker(mesh), constraint_eqns.ShardMapMaker(mesh)

    def rewrite(jaxpr: Any, body: Body, owner: tuple[int, int] | None) -> Any:
        eqns: list[Any] = []
        kept: dict[tuple[Any, PartitionSpec], Any] = {}
        last = None
        for built in body.eqns:
            eqn = last = built.origin
            bodies = {b.name: (b, (built.index, i)) for i, b in enumerate(built.bodies)}

            def inner(name: str, old: Any, bodies: dict[str, Any] = bodies) -> Any:
                if name not in bodies:
                    return old
                return jaxprs.replace_jaxpr(old, rewrite(jaxprs.open_jaxpr(old), *bodies[name]))

            params = jaxprs.map_jaxprs(eqn.params, inner) if bodies else eqn.params
            wanted = constraints.eqns.get(built.index)
            if wanted is None:
                eqns.append(eqn.replace(params=params) if bodies else eqn)
                continue
            invars, outvars, after = list(eqn.invars), list(eqn.outvars), []
            for position, spec in sorted(wanted.operands.items()):
                source = invars[position]
                if (first := wanted.before_reshard.get(position)) is not None:
                    if (
                        source,
                        first,
                    ) not in kept:  # once for all that read it, so that they share what moves
                        kept[source, first] = jaxprs.new_var(source.aval)
                        eqns.append(make(source, kept[source, first], first, eqn))
                    source = kept[source, first]
                invars[position] = jaxprs.new_var(source.aval)
                eqns.append(make(source, invars[position], spec, eqn))
            for position, specs in sorted(wanted.results.items()):
                stored = outvars[position]
                outvars[position] = raw = jaxprs.new_var(stored.aval)
                for step, spec in enumerate(specs):
                    target = stored if step == len(specs) - 1 else jaxprs.new_var(stored.aval)
                    after.append(make(raw, target, spec, eqn))
                    raw = target
            made = eqn.replace(params=params, invars=invars, outvars=outvars)
            if wanted.shard_map is not None:
                cut = wanted.shard_map
                made = in_pieces(
                    made, made.replace(params=cut.params), cut.operands, cut.results, cut.summed
                )
            eqns += [made, *after]
        outvars = list(jaxpr.outvars)
        if owner is not None and last is not None:
            for position, spec in sorted(constraints.outputs.get(owner, {}).items()):
                source = outvars[position]
                outvars[position] = jaxprs.new_var(source.aval)
                eqns.append(make(source, outvars[position], spec, last))
        return jaxpr.replace(eqns=eqns, outvars=outvars)

    closed = program.origin
    return jaxprs.close_jaxpr(rewrite(jaxprs.open_jaxpr(closed), program.body, None), closed.consts)


def as_reference(closed: Any) -> Any:
    """The closed jaxpr without what does not change its outputs: constraints, prints, callbacks
    that return nothing.
    """

    def strip(jaxpr: Any) -> Any:
        same: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            return atom if jaxprs.is_literal(atom) else same.get(atom, atom)

        kept = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in HOST_EFFECTS and all(map(jaxprs.is_drop, eqn.outvars)):
                continue
            if eqn.primitive.name == "sharding_constraint":
                same[eqn.outvars[0]] = read(eqn.invars[0])
                continue
            params = jaxprs.map_jaxprs(
                eqn.params, lambda _, j: jaxprs.replace_jaxpr(j, strip(jaxprs.open_jaxpr(j)))
            )
            kept.append(eqn.replace(invars=[read(atom) for atom in eqn.invars], params=params))
        return jaxpr.replace(eqns=kept, outvars=[read(atom) for atom in jaxpr.outvars])

    return jaxprs.close_jaxpr(strip(jaxprs.open_jaxpr(closed)), jaxprs.consts_of(closed))


def as_function(closed: Any, name: str) -> Callable[..., list[Any]]:
    """A function of flat leaves that evaluates the jaxpr; it carries `name` so that profiles show
    it.
    """
    flat = jaxprs.as_flat_function(closed)

    def call(*leaves: Any) -> list[Any]:
        return list(flat(*leaves))

    call.__name__ = call.__qualname__ = name
    return call
