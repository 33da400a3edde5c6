"""Programs written for Explicit mesh axes, as programs for Auto axes.

With Explicit axes jax tracks shardings in types, and a program says in which sharding a result is
to be (`out_sharding=`, `jax.sharding.reshard`). For Auto axes the same is said by sharding
constraints: values stay what they are, types and contexts lose their shardings. Axes that a
`shard_map` has made Manual stay so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.jax_internals.constraint_eqns import ConstraintMaker
from autoshard.jax_internals.jaxprs import (
    JaxprEqn,
    Var,
    close_jaxpr,
    consts_of,
    is_drop,
    is_jaxpr,
    is_literal,
    new_literal,
    new_var,
    open_jaxpr,
    replace_jaxpr,
)

_STATED = ("out_sharding", "sharding")
"""Parameters by which an equation states the sharding of its one result."""

_RESHARDS = ("reshard", "mesh_cast")


class UnplannableEqnError(Exception):
    """An equation means something with Explicit axes that it cannot mean with Auto axes.

    Attributes:
        eqn: The equation.
        why: What it means.
    """

    def __init__(self, eqn: JaxprEqn, why: str) -> None:
        super().__init__(why)
        self.eqn, self.why = eqn, why


def avals_on(mesh: Mesh, leaves: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Abstract arguments with the shardings that arrays of this mesh have in their types.

    Args:
        mesh: With Explicit axes.
        leaves: The arguments: arrays, or what stands for them.
        avals: Their shapes and dtypes.
    """
    typed = []
    for leaf, aval in zip(leaves, avals, strict=True):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.shape_tuple == mesh.shape_tuple:
            explicit = set(mesh.explicit_axes)
            spec = PartitionSpec(*(_only(axes, explicit) for axes in sharding.spec.partitions))
            aval = jax.ShapeDtypeStruct(
                aval.shape,
                aval.dtype,
                sharding=NamedSharding(mesh, spec),
                weak_type=aval.weak_type,
            )
        typed.append(aval)
    return typed


def _only(axes: Any, wanted: set[Any]) -> Any:
    """The part of one entry of a spec that names wanted mesh axes."""
    if axes is None or axes is PartitionSpec.UNCONSTRAINED:
        return None
    kept = tuple(a for a in (axes if isinstance(axes, tuple) else (axes,)) if a in wanted)
    return kept or None


def for_auto_axes(closed: Any, mesh: Mesh) -> Any:
    """The closed jaxpr that computes the same on a mesh with Auto axes.

    Args:
        closed: Traced under a mesh with Explicit axes.
        mesh: The same mesh with Auto axes.

    Raises:
        UnplannableEqnError: If an equation has no like for Auto axes.
    """
    jaxpr = _AutoWriter(mesh).written(open_jaxpr(closed))
    consts = [_on_auto_axes(const, mesh) for const in consts_of(closed)]
    return close_jaxpr(jaxpr, consts)


def _on_auto_axes(const: Any, mesh: Mesh) -> Any:
    sharding = getattr(const, "sharding", None)
    if not isinstance(const, jax.Array) or not isinstance(sharding, NamedSharding):
        return const
    if not sharding.mesh.explicit_axes:
        return const
    return jax.device_put(const, NamedSharding(mesh, sharding.spec))


class _AutoWriter:
    """Writes jaxprs for Auto axes."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._constraint = ConstraintMaker(mesh)
        self._contexts: dict[int, tuple[Any, Any]] = {}

    def written(self, jaxpr: Any) -> Any:
        """An open jaxpr that computes the same, with variables of its own."""
        names: dict[Var, Any] = {}

        def define(var: Var) -> Var:
            new = new_var(_auto_aval(var.aval))
            names[var] = new
            return new

        def read(atom: Any) -> Any:
            return new_literal(atom.val, _auto_aval(atom.aval)) if is_literal(atom) else names[atom]

        invars, constvars = list(map(define, jaxpr.invars)), list(map(define, jaxpr.constvars))
        eqns: list[JaxprEqn] = []
        for eqn in jaxpr.eqns:
            operands = list(map(read, eqn.invars))
            if eqn.primitive.name in _RESHARDS:
                names[eqn.outvars[0]] = self._resharded(eqn, operands[0], eqns)
                continue
            results = [var if is_drop(var) else define(var) for var in eqn.outvars]
            self._append(eqn, operands, results, eqns)
        outvars = list(map(read, jaxpr.outvars))
        return jaxpr.replace(invars=invars, constvars=constvars, eqns=eqns, outvars=outvars)

    def _resharded(self, eqn: JaxprEqn, source: Any, eqns: list[JaxprEqn]) -> Any:
        """The operand of a reshard, constrained to what it says of Explicit axes."""
        spec = _stated_spec(eqn.params["dst_sharding"])
        if spec is None:  # into a region of Auto axes (jax.sharding.auto_axes): it says nothing
            return source
        target = new_var(_auto_aval(eqn.outvars[0].aval))
        eqns.append(self._constraint(source, target, spec, self._moved(eqn)))
        return target

    def _append(
        self, eqn: JaxprEqn, operands: list[Any], results: list[Any], eqns: list[JaxprEqn]
    ) -> None:
        """Appends an equation and the constraint that it states."""
        stated = [_stated_spec(eqn.params.get(name)) for name in _STATED]
        spec = next((spec for spec in stated if spec is not None), None)
        params = {name: self._param(eqn, name, value) for name, value in eqn.params.items()}
        moved = self._moved(eqn).replace(invars=operands, outvars=results, params=params)
        if spec is None or eqn.primitive.name == "sharding_constraint" or is_drop(results[0]):
            eqns.append(moved)
            return
        raw = new_var(results[0].aval)
        eqns.append(moved.replace(outvars=[raw]))
        eqns.append(self._constraint(raw, results[0], spec, moved))

    def _moved(self, eqn: JaxprEqn) -> JaxprEqn:
        """The equation in the context of Auto axes, all else of its context kept."""
        return eqn.replace(ctx=self._context(eqn.ctx))

    def _context(self, context: Any) -> Any:
        from jax._src.core import current_jaxpr_eqn_context

        if id(context) not in self._contexts:
            mesh = context.cur_abstract_mesh
            if not mesh.explicit_axes:
                auto = context
            else:
                with context.manager, jax.sharding.use_abstract_mesh(_auto_mesh(mesh)):
                    auto = current_jaxpr_eqn_context()
            self._contexts[id(context)] = context, auto  # the first keeps the id taken
        return self._contexts[id(context)][1]

    def _param(self, eqn: JaxprEqn, name: str, value: Any) -> Any:
        """A parameter of an equation, for Auto axes."""
        if is_jaxpr(value):
            return replace_jaxpr(value, self.written(open_jaxpr(value)))
        if type(value) is tuple:
            return tuple(self._param(eqn, name, item) for item in value)
        if isinstance(value, NamedSharding):
            return self._sharding(eqn, name, value)
        if isinstance(value, Mesh | AbstractMesh):
            return _auto_mesh(value)
        if isinstance(value, jax.core.ShapedArray):
            return _auto_aval(value)
        if isinstance(value, PartitionSpec) and (value.unreduced or value.reduced):
            raise UnplannableEqnError(eqn, f"{name}={value}: sums that are left undone")
        return value

    def _sharding(self, eqn: JaxprEqn, name: str, sharding: NamedSharding) -> Any:
        if not sharding.mesh.explicit_axes:
            return sharding
        if eqn.primitive.name == "sharding_constraint" or name in ("in_shardings", "out_shardings"):
            return NamedSharding(_auto_mesh(sharding.mesh), sharding.spec)
        if name in _STATED:
            return None  # said by a constraint
        raise UnplannableEqnError(eqn, f"{name}={sharding.spec} on Explicit axes")


def _stated_spec(sharding: Any) -> PartitionSpec | None:
    """What a sharding says of Explicit axes; None where it says nothing.

    Sums left undone (`unreduced`) are done for Auto axes: the value is their sum in both.
    """
    if not isinstance(sharding, NamedSharding) or not sharding.mesh.explicit_axes:
        return None
    if sharding.mesh.manual_axes:  # inside a shard_map, which keeps what it is
        return None
    return PartitionSpec(
        *(_only(axes, set(sharding.mesh.axis_names)) for axes in sharding.spec.partitions)
    )


def _auto_mesh(mesh: Any) -> Any:
    """The mesh with Auto axes in the place of Explicit ones."""
    types = tuple(AxisType.Auto if t == AxisType.Explicit else t for t in mesh.axis_types)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return mesh.update_axis_types(dict(zip(mesh.axis_names, types, strict=True)))


def _auto_aval(aval: Any) -> Any:
    """An abstract value as it is on the same mesh with Auto axes: its type says no sharding."""
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not sharding.mesh.explicit_axes:
        return aval
    whole = PartitionSpec(*(None,) * len(aval.shape))
    return aval.update(sharding=NamedSharding(_auto_mesh(sharding.mesh), whole))
