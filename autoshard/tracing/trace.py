"""From a function to a `Program`.

Tracing is abstract (no array is needed) and happens once; every candidate is lowered from the same
jaxpr, so values that change from trace to trace (checkify codes) cannot look like wrong numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from autoshard.errors import TraceError
from autoshard.jax_internals import explicit_axes, jaxprs, other_meshes
from autoshard.jax_internals.jaxprs import source_of
from autoshard.tracing.build_program import build_program
from autoshard.tracing.distinct import distinct_copy
from autoshard.tracing.primitives import HOST_EFFECTS
from autoshard.tracing.program import Eqn, Program
from autoshard.tracing.signature import Call, leaf_paths
from autoshard.tracing.source_lines import source_line

SHOWN_DEVICES = 8
"""So many devices of a mesh are named in a message. Chosen by hand; no test depends on it."""


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced call.

    Attributes:
        call: The call it was traced for.
        program: What the other folders see.
        original: The closed jaxpr as jax traced it, for verification: of ours there is nothing in
            it but the order of the devices (see `reordered`).
        own_mesh: The mesh with Explicit axes under which it was traced, where it is written for
            them; None for a function that was traced for Auto axes.
        out_tree: Structure of the outputs.
        static_outputs: Output leaves that are no arrays, by leaf number.
        num_outputs: Number of output leaves, those included.
        from_host: True where arguments in the host's memory are copied to the devices first, since
            jax cannot trace the function for them where they are.
        reordered: True where the function names meshes over the same devices in another order, for
            which the order of the plan's mesh stands.
    """

    call: Call
    program: Program
    original: Any
    own_mesh: Mesh | None
    out_tree: Any
    static_outputs: tuple[tuple[int, Any], ...]
    num_outputs: int
    from_host: bool = False
    reordered: bool = False

    def output_memory_kinds(self) -> tuple[str | None, ...]:
        """The memory of each output leaf where that is not the device's own."""
        outputs = self.program.body.outputs
        return tuple(jaxprs.HOST_KIND if value.on_host else None for value in outputs)

    def unflatten_outputs(self, leaves: Sequence[Any]) -> Any:
        """The outputs as `fn` returns them."""
        flat: list[Any] = [None] * self.num_outputs
        static = dict(self.static_outputs)
        arrays = iter(leaves)
        for i in range(self.num_outputs):
            flat[i] = static[i] if i in static else next(arrays)
        return jax.tree.unflatten(self.out_tree, flat)


def trace(
    fn: Callable[..., Any],
    call: Call,
    mesh: Mesh | None = None,
    *,
    own_mesh: Mesh | None = None,
    keep_user_constraints: bool = True,
) -> Traced:
    """Traces `fn` for the shapes of `call`.

    A function that is written for Explicit axes is traced under them and rewritten for Auto axes:
    the shardings that it states become constraints.

    Args:
        fn: The function.
        call: What it is called with.
        mesh: With Auto axes; it is traced under it, so that bare PartitionSpecs in `fn` work.
        own_mesh: The same mesh with its Explicit axes, where it has some.
        keep_user_constraints: False to leave out the sharding constraints in `fn`.

    Raises:
        TraceError: If jax cannot trace it; the message has jax's own, and whether plain
            `jax.jit(fn)` fails as well. Or if it does what cannot be sharded: it captures a mutable
            array, has ordered effects, or states what only Explicit axes can mean.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    flat_fn = _FlatFunction(fn, call)
    ignored = frozenset() if keep_user_constraints else frozenset({"sharding_constraint"})
    original, named = _traced_for(flat_fn, name, call, mesh, own_mesh)
    closed = _on_devices_of(mesh, named, name, ignored)
    if original is named:
        original = closed
    if any(jaxprs.is_ref(const) for const in jaxprs.consts_of(closed)):
        raise TraceError(
            f"{name} reads or writes a mutable array (jax.new_ref) that was made outside of it: "
            f"its state cannot be sharded. Pass its value as an argument, make the mutable array "
            f"inside, and return the new value."
        )
    # References become values before variables are renamed: effects name variables.
    pure = jaxprs.plain(closed)
    distinct = distinct_copy(pure, keep_user_constraints)
    jaxpr = jaxprs.close_jaxpr(distinct, jaxprs.consts_of(pure))
    program = build_program(jaxpr, name, call, leaf_paths(flat_fn.out_paths))
    if mesh is not None and mesh.size > 1:
        _refuse_ordered_effects(program)
    return Traced(
        call=call,
        program=program,
        original=original,
        own_mesh=None if original is closed else own_mesh,
        reordered=closed is not named,
        out_tree=flat_fn.out_tree,
        static_outputs=tuple(flat_fn.static_outputs),
        num_outputs=flat_fn.out_tree.num_leaves,
        from_host=flat_fn.from_host,
    )


class _FlatFunction:
    """A function of the array leaves of a call, which returns the array leaves of its result.

    Attributes:
        out_tree: Structure of the result, once called.
        out_paths: Prefix and path of each array leaf of it.
        static_outputs: By number, its leaves that are no arrays.
        from_host: True to copy arguments in the host's memory to the devices first.
    """

    def __init__(self, fn: Callable[..., Any], call: Call) -> None:
        self._fn, self._call = fn, call
        self.from_host = False
        self.out_tree: Any = None
        self.out_paths: list[tuple[str, tuple[Any, ...]]] = []
        self.static_outputs: list[tuple[int, Any]] = []

    def flat(self, *leaves: Any) -> list[Any]:
        """The array leaves of the result of a call with these."""
        self.out_paths, self.static_outputs = [], []  # it may have been called before, and failed
        if self.from_host:
            leaves = tuple(map(_on_device, leaves, self._call.memory_kinds))
        args, kwargs = self._call.rebuild(leaves)
        result = self._fn(*args, **kwargs)
        with_paths, self.out_tree = jax.tree_util.tree_flatten_with_path(result)
        arrays = []
        for number, (path, leaf) in enumerate(with_paths):
            if self._call.is_static(leaf):
                self.static_outputs.append((number, leaf))
            else:
                arrays.append(leaf)
                self.out_paths.append(("out", tuple(path)))
        return arrays


def _on_device(leaf: Any, kind: str | None) -> Any:
    return jax.device_put(leaf, jax.memory.Space.Device) if kind == jaxprs.HOST_KIND else leaf


def _as_jax_traces(flat_fn: _FlatFunction, avals: Sequence[Any], mesh: Mesh | None) -> Any:
    """The closed jaxpr of a function, traced under a mesh.

    Raises:
        Exception: Whatever jax or the function raises.
    """
    scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if mesh is not None:
        scope = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    with scope:
        return jax.make_jaxpr(flat_fn.flat)(*avals)


def _traced_on_devices(flat_fn: _FlatFunction, call: Call, mesh: Mesh | None) -> Any:
    """The closed jaxpr where arguments in the host's memory are copied to the devices first, which
    jax does not do itself; None where there are none, or that is not what the function fails for.
    """
    if jaxprs.HOST_KIND not in call.memory_kinds:
        return None
    flat_fn.from_host = True
    try:
        return _as_jax_traces(flat_fn, call.typed_avals(), mesh)
    except Exception:  # the caller raises what jax says of the function as it is
        flat_fn.from_host = False
        return None


def _traced_alone(flat_fn: _FlatFunction, call: Call) -> Any:
    """The closed jaxpr where the function brings the mesh that it needs, with Auto axes: a
    `shard_map` over it is refused under any other. None where it needs the plan's.
    """
    try:
        closed = _as_jax_traces(flat_fn, call.typed_avals(), None)
    except Exception:  # the caller raises what jax says under the plan's mesh
        return None
    explicit = any(mesh.explicit_axes for mesh in other_meshes.meshes_named(closed))
    return None if explicit else closed


def _on_devices_of(mesh: Mesh | None, closed: Any, name: str, ignored: frozenset[str]) -> Any:
    """The closed jaxpr with meshes of the function's own over the devices of a mesh, in its order.

    Raises:
        TraceError: If the function names other devices.
    """
    if mesh is None:
        return closed
    try:
        return other_meshes.on_devices_of(closed, mesh, but=ignored)
    except other_meshes.OtherDevicesError as error:
        own, line = error.mesh, ":".join(map(str, source_of(error.eqn)))
        raise TraceError(
            f"{name}: {error.eqn.primitive.name} ({line}) names a mesh {dict(own.shape)} over "
            f"{_devices_text(own)}, but the plan's mesh {dict(mesh.shape)} is over "
            f"{_devices_text(mesh)}. A program runs on one set of devices: make the mesh there "
            f"from the devices of the mesh that is passed here (in any order)."
        ) from error


def _devices_text(mesh: Mesh) -> str:
    ids = [device.id for device in mesh.devices.flat]
    shown = ", ".join(map(str, ids[:SHOWN_DEVICES])) + (", ..." if len(ids) > SHOWN_DEVICES else "")
    return f"{len(ids)} {mesh.devices.flat[0].platform} devices ({shown})"


def _traced_for(
    flat_fn: _FlatFunction, name: str, call: Call, mesh: Mesh | None, own_mesh: Mesh | None
) -> tuple[Any, Any]:
    """The closed jaxpr as jax traces it, and for Auto axes: the same, unless the function is
    written for Explicit axes.

    A function that says nothing of shardings is often refused under Explicit axes (a gather, a
    reshape), so Auto axes come first.
    """
    try:
        closed = _as_jax_traces(flat_fn, call.typed_avals(), mesh)
    except Exception as error:
        failure = error
        closed = _traced_on_devices(flat_fn, call, mesh) or _traced_alone(flat_fn, call)
    if closed is not None:
        return closed, closed
    if own_mesh is None:
        raise TraceError(_why_not_traced(flat_fn, name, call, failure)) from failure

    assert mesh is not None
    avals = explicit_axes.avals_on(own_mesh, call.leaves, call.avals)
    try:
        closed = _as_jax_traces(flat_fn, avals, own_mesh)
        return closed, explicit_axes.for_auto_axes(closed, mesh)
    except explicit_axes.UnplannableEqnError as error:
        name_of_eqn, line = error.eqn.primitive.name, ":".join(map(str, source_of(error.eqn)))
        raise TraceError(
            f"{name} is written for Explicit axes, and {name_of_eqn} ({line}) states {error.why}, "
            f"which has no like for Auto axes, on which layouts are searched. Put what needs it "
            f"into a jax.shard_map, or leave the parameter out there."
        ) from error
    except Exception as error:
        raise TraceError(
            f"{name} cannot be traced by jax with these arguments, neither under the Explicit axes "
            f"of the mesh ({_one(error)}) nor under Auto axes ({_one(failure)})."
        ) from error


def _one(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}"


def _why_not_traced(flat_fn: _FlatFunction, name: str, call: Call, error: Exception) -> str:
    """What jax says, and whether it says so without autoshard as well, which is tried."""
    try:
        jax.jit(flat_fn.flat).trace(*call.typed_avals())
    except Exception:
        alone = f"jax.jit({name}) fails as well, which was tried"
    else:
        alone = (
            f"jax.jit({name}) traces it here, so that it is the mesh: pass the mesh that it is "
            f"written for, with its axis types"
        )
    return f"{name} cannot be traced by jax with these arguments ({alone}): {_one(error)}"


def effects_of(program: Program) -> tuple[Eqn, ...]:
    """The equations, of all bodies, that do something on the host besides computing results."""
    return tuple(eqn for eqn in program.eqns if eqn.primitive in HOST_EFFECTS)


def _refuse_ordered_effects(program: Program) -> None:
    for eqn in program.eqns:
        if not eqn.bodies and jaxprs.one_device_only(eqn.origin):
            line = source_line(eqn)
            where = f" ({line})" if line else ""
            raise TraceError(
                f"{program.name} calls {eqn.primitive}{where} with an ordered effect, and jax runs "
                f"ordered effects on one device only. Use ordered=False there, or a mesh of one "
                f"device."
            )
