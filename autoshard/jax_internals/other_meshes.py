"""Meshes that a function makes itself, in another order of the devices than the plan's.

jax compiles a program for its devices in one order, and refuses a function that names them in
another. What a sharding means for values does not depend on which device is the first, so a mesh
over the same devices is written again over them in the order of the plan's mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autoshard.jax_internals.jaxprs import (
    JaxprEqn,
    close_jaxpr,
    consts_of,
    is_jaxpr,
    open_jaxpr,
    replace_jaxpr,
)


class OtherDevicesError(ValueError):
    """An equation names a mesh over other devices than the plan's.

    Attributes:
        eqn: The equation.
        mesh: Its mesh.
    """

    def __init__(self, eqn: JaxprEqn, mesh: Mesh) -> None:
        super().__init__(f"{eqn.primitive.name} names {mesh}")
        self.eqn, self.mesh = eqn, mesh


def meshes_named(closed: Any) -> list[Mesh]:
    """The distinct meshes (of devices, not abstract) that the equations of a jaxpr name."""
    return list(dict.fromkeys(mesh for _, mesh in _named(closed)))


def on_devices_of(closed: Any, mesh: Mesh, *, but: frozenset[str] = frozenset()) -> Any:
    """The closed jaxpr with every mesh over the devices of another, in its order.

    Args:
        closed: The jaxpr; it is returned itself where no mesh is in another order.
        mesh: The mesh of the plan.
        but: Primitives of which it does not matter what they name.

    Raises:
        OtherDevicesError: If an equation names other devices.
    """
    devices = list(mesh.devices.flat)
    in_order = True
    for eqn, own in _named(closed):
        if eqn.primitive.name not in but:
            if set(own.devices.flat) != set(devices):
                raise OtherDevicesError(eqn, own)
            in_order = in_order and list(own.devices.flat) == devices

    def ordered(own: Mesh) -> Mesh:
        if set(own.devices.flat) != set(devices):
            return own
        grid = mesh.devices.reshape(-1).reshape(own.devices.shape)
        return Mesh(grid, own.axis_names, axis_types=own.axis_types)

    consts = [_const_on(const, ordered) for const in consts_of(closed)]
    in_order = in_order and all(a is b for a, b in zip(consts, consts_of(closed), strict=True))
    return closed if in_order else close_jaxpr(_written(open_jaxpr(closed), ordered), consts)


def _named(jaxpr: Any) -> Iterator[tuple[JaxprEqn, Mesh]]:
    """The meshes that equations name, of all bodies."""
    for eqn in open_jaxpr(jaxpr).eqns:
        for value in eqn.params.values():
            for item in value if type(value) is tuple else (value,):
                if is_jaxpr(item):
                    yield from _named(item)
                mesh = item.mesh if isinstance(item, NamedSharding) else item
                if isinstance(mesh, Mesh) and not mesh.empty:
                    yield eqn, mesh


def _written(jaxpr: Any, ordered: Callable[[Mesh], Mesh]) -> Any:
    """An open jaxpr with other meshes; its variables stay."""

    def changed(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(changed, value))
        if is_jaxpr(value):
            return replace_jaxpr(value, _written(open_jaxpr(value), ordered))
        if isinstance(value, NamedSharding) and isinstance(value.mesh, Mesh):
            return _sharding_on(value, ordered)
        return ordered(value) if isinstance(value, Mesh) and not value.empty else value

    eqns = []
    for eqn in jaxpr.eqns:
        params = {name: changed(value) for name, value in eqn.params.items()}
        eqns.append(eqn.replace(params=params))
    return jaxpr.replace(eqns=eqns)


def _sharding_on(sharding: NamedSharding, ordered: Callable[[Mesh], Mesh]) -> NamedSharding:
    mesh: Any = sharding.mesh
    return NamedSharding(ordered(mesh), sharding.spec, memory_kind=sharding.memory_kind)


def _const_on(const: Any, ordered: Callable[[Mesh], Mesh]) -> Any:
    """A captured array, moved where its mesh is in another order."""
    sharding = getattr(const, "sharding", None)
    if not isinstance(const, jax.Array) or not isinstance(sharding, NamedSharding):
        return const
    moved = _sharding_on(sharding, ordered)
    same = list(moved.mesh.devices.flat) == list(sharding.mesh.devices.flat)
    return const if same else jax.device_put(const, moved)
