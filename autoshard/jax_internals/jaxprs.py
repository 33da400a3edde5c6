"""Jaxprs: the differences between those of jax 0.10 and 0.12, and the few internals that autoshard
needs of them.

jax 0.10 puts `ClosedJaxpr` into equation parameters and `num_consts`/`num_carry` into `scan`; 0.12
puts plain `Jaxpr` (which answers `.jaxpr` and `.consts` itself) and `ft_in`/`ft_out`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.extend import core

JaxprEqn = Any
Var = Any


def is_literal(atom: object) -> bool:
    """True for a literal operand."""
    return isinstance(atom, core.Literal)


def is_drop(var: object) -> bool:
    """True for a result that nobody reads."""
    return isinstance(var, core.DropVar)


def new_var(aval: Any) -> Var:
    """A fresh variable of the same abstract value."""
    return core.Var(aval)


def new_literal(value: Any, aval: Any) -> Any:
    """A literal operand of an abstract value."""
    return core.Literal(value, aval)


def open_jaxpr(jaxpr: Any) -> Any:
    """The plain jaxpr of a closed or plain one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """The constants bound to the constvars of a closed jaxpr (none for a plain one)."""
    return tuple(getattr(jaxpr, "consts", ()))


def all_inputs(jaxpr: Any) -> list[Var]:
    """The variables of a plain jaxpr that its constants and its operands are bound to, in order."""
    return [*jaxpr.constvars, *jaxpr.invars]


def context_of(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """What was configured where an equation was traced (how random bits are made, what it runs
    on).
    """
    manager: AbstractContextManager[Any] = eqn.ctx.manager
    return manager


def is_jaxpr(value: object) -> bool:
    """True for a closed or a plain jaxpr."""
    return isinstance(value, core.ClosedJaxpr | core.Jaxpr)


def close_jaxpr(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """The closed jaxpr of a plain one and its constants."""
    return core.ClosedJaxpr(jaxpr, consts)


def check(closed: Any) -> None:
    """Type-checks a jaxpr with jax's own checker."""
    core.check_jaxpr(open_jaxpr(closed))


def as_flat_function(closed: Any) -> Callable[..., list[Any]]:
    """A function of flat leaves that evaluates a closed jaxpr."""
    flat: Callable[..., list[Any]] = core.jaxpr_as_fun(closed)
    return flat


def replace_jaxpr(old: Any, new_open: Any) -> Any:
    """`new_open` as a jaxpr of the kind of `old` (closed or plain), with the constants of `old`."""
    if isinstance(old, core.ClosedJaxpr) and open_jaxpr(old) is not old:
        return core.ClosedJaxpr(new_open, old.consts)
    # jax 0.12 makes plain inputs of constvars that are replaced
    lost = consts_of(old) and not consts_of(new_open)
    return new_open.with_consts(consts_of(old)) if lost else new_open


def map_jaxprs(params: Mapping[str, Any], transform: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Parameters with every jaxpr replaced by `transform(name, jaxpr)`.

    Only jaxprs and *exact* tuples of jaxprs are touched; named tuples of jaxprs
    (`custom_linear_solve`) stay as they are.
    """
    changed = dict(params)
    for key, value in params.items():
        if is_jaxpr(value):
            changed[key] = transform(key, value)
        elif type(value) is tuple and value and all(is_jaxpr(item) for item in value):
            changed[key] = tuple(transform(f"{key}[{i}]", item) for i, item in enumerate(value))
    return changed


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of constants and of carries of a scan equation."""
    if "num_consts" in params:
        return int(params["num_consts"]), int(params["num_carry"])
    consts, carry, _ = (len(part) for part in params["ft_in"].unpack())
    return consts, carry


def nest_name_stack(eqn: JaxprEqn, outer: JaxprEqn) -> JaxprEqn:
    """`eqn` with the name stack of the call `outer` that it was inlined from before its own.

    Inside jax's own jitted functions (`take_along_axis`) no line is the user's: there the line of
    the call stands in.
    """
    info = eqn.source_info
    # As the call would have nested them, so that profiles look as they did.
    stack = outer.source_info.name_stack + info.name_stack
    traceback = info.traceback if source_of(eqn)[0] else outer.source_info.traceback
    return eqn.replace(source_info=info.replace(name_stack=stack, traceback=traceback))


def one_device_only(eqn: JaxprEqn) -> bool:
    """True for an equation with an ordered effect that jax refuses on more than one device."""
    from jax._src.effects import ordered_effects, shardable_ordered_effects

    return any(
        ordered_effects.contains(e) and not shardable_ordered_effects.contains(e)
        for e in eqn.effects
    )


def is_jitted(fn: object) -> bool:
    """True for what `jax.jit` returns."""
    return hasattr(fn, "_jit_info")


def jit_options(fn: object) -> dict[str, Any]:
    """Static and donated arguments of a jitted function, by parameter of `jit`; {} of others."""
    names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    info = getattr(fn, "_jit_info", None)
    return {name: getattr(info, name) for name in names if getattr(info, name, None)}


def is_unspecified(sharding: object) -> bool:
    """True for the marker that a nested jit uses where the user gave no sharding."""
    return type(sharding).__name__ == "UnspecifiedValue"


def abstractify(leaf: object) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an argument leaf.

    Raises:
        TypeError: If jax does not take such a value as an array.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        shape, dtype, weak = leaf.shape, leaf.dtype, bool(getattr(leaf, "weak_type", False))
    else:
        aval = jax.typeof(leaf)
        shape, dtype, weak = aval.shape, aval.dtype, bool(getattr(aval, "weak_type", False))
    # Keys and float0 have no canonical dtype; float64 becomes float32 unless x64 is enabled.
    if not jax.numpy.issubdtype(dtype, jax.dtypes.extended) and dtype != jax.dtypes.float0:
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, weak_type=weak)


def is_ref(leaf: object) -> bool:
    """True for a mutable array (`jax.new_ref`)."""
    try:
        return type(jax.typeof(leaf)).__name__ == "AbstractRef"
    except TypeError:
        return False


HOST_KIND = "pinned_host"
"""The memory kind that jax tracks in types; arrays in any other are those of the device to it."""


def memory_kind_of(leaf: object) -> str | None:
    """The memory kind of an argument leaf where it is not the device's own; else None."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return None if kind in (None, "device") else str(kind)


def in_memory(aval: jax.ShapeDtypeStruct, kind: str | None) -> Any:
    """An abstract argument as jax types it in a memory."""
    if kind != HOST_KIND:
        return aval
    return jax.core.ShapedArray(
        aval.shape, aval.dtype, bool(aval.weak_type), memory_space=jax.memory.Space.Host
    )


def is_on_host(aval: Any) -> bool:
    """True for a value that jax keeps in the host's memory, by its type."""
    space = getattr(aval, "memory_space", None)
    return bool(space == jax.memory.Space.Host)


def itemsize_of(aval: Any) -> int:
    """Bytes of one element of an abstract value on a device; 0 for tokens and float0."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or dtype == jax.dtypes.float0:
        return 0
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return int(dtype.itemsize)
    return int(np.dtype(dtype).itemsize)


def source_of(eqn: JaxprEqn) -> tuple[str, int]:
    """File and line of the user's code that an equation came from; ("", 0) where jax kept none."""
    from jax._src import source_info_util

    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return ("", 0) if frame is None else (frame.file_name, frame.start_line)


def frames_of(eqn: JaxprEqn) -> tuple[tuple[str, int, int, int, int], ...]:
    """Extent of each call of the user's code that an equation was traced in, innermost first.

    File, first line, first column, last line, last column.
    """
    from jax._src import source_info_util

    frames = source_info_util.user_frames(eqn.source_info.traceback)
    return tuple(
        (f.file_name, f.start_line, f.start_column, f.end_line, f.end_column) for f in frames
    )


def name_stack_of(eqn: JaxprEqn) -> str:
    """Name scopes and transformations that an equation was traced under."""
    return str(eqn.source_info.name_stack)


def has_effects(eqn: JaxprEqn) -> bool:
    """True if running the equation does more than compute its results."""
    return bool(eqn.effects)


def plain(closed: Any) -> Any:
    """The closed jaxpr as jax's own lowering begins: no high-level primitives, no mutable arrays.

    High-level primitives (`lax.custom_root` on jax 0.12) become what they stand for; reads and
    writes of mutable arrays that the program creates (`jax.new_ref`) become pure updates. The
    effects of the latter name variables, and would not survive a renaming. The references of
    kernels (pallas_call) stay: they belong to the kernel.
    """
    from jax._src.interpreters import partial_eval
    from jax._src.state.discharge import discharge_state

    avals = (*closed.in_avals, *closed.out_avals)
    if open_jaxpr(closed).is_high and not any(aval.is_high for aval in avals):
        closed = partial_eval.lower_jaxpr2(closed)
    return discharge_state(closed) if _uses_refs(open_jaxpr(closed)) else closed


def _uses_refs(jaxpr: Any) -> bool:
    """Whether a jaxpr creates mutable arrays, kernels aside."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.ref_allocating:
            return True
        if eqn.primitive.name != "pallas_call" and any(map(_uses_refs, jaxprs_in(eqn.params))):
            return True
    return False


def operand_values(eqn: JaxprEqn) -> tuple[Any, ...]:
    """By operand, the value of a literal, else shape and dtype."""
    return tuple(
        atom.val if is_literal(atom) else jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
        for atom in eqn.invars
    )


def as_call(
    eqn: JaxprEqn, result_shapes: Sequence[tuple[int, ...]] | None = None
) -> Callable[..., tuple[Any, ...]]:
    """The equation as a function of its operands.

    Args:
        eqn: Any equation.
        result_shapes: What the results are to be, for primitives whose parameters state that
            (`ffi_call`).
    """
    params = dict(eqn.params)
    if result_shapes is not None and "result_avals" in params:
        avals = zip(params["result_avals"], result_shapes, strict=True)
        params["result_avals"] = tuple(aval.update(shape=tuple(shape)) for aval, shape in avals)

    def call(*operands: Any) -> tuple[Any, ...]:
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
        return tuple(results) if eqn.primitive.multiple_results else (results,)

    return call


def jaxprs_in(params: Mapping[str, Any]) -> tuple[Any, ...]:
    """Every jaxpr among the parameters of an equation, opened; those in tuples too."""
    jaxprs = []
    for value in params.values():
        items = value if isinstance(value, tuple) else (value,)
        jaxprs += [open_jaxpr(item) for item in items if is_jaxpr(item)]
    return tuple(jaxprs)


def evaluate_result(jaxpr: Any, inputs: np.ndarray, result: int) -> np.ndarray:
    """One scalar result of a jaxpr of scalars, at many points.

    Args:
        jaxpr: Open or closed, without captured constants.
        inputs: [inputs, points]; inputs that the result does not depend on may be left out at the
            end.
        result: Position of the result.

    Returns:
        [points]: the result.
    """
    jaxpr = open_jaxpr(jaxpr)
    target = jaxpr.outvars[result]
    live = _eqns_behind(jaxpr, target)

    def at_point(*inputs: Any) -> Any:
        env: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=False))

        def read(atom: Any) -> Any:
            return atom.val if is_literal(atom) else env[atom]

        for eqn in live:
            env.update(zip(eqn.outvars, as_call(eqn)(*map(read, eqn.invars)), strict=True))
        return read(target)

    # Also while something else is being traced.
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.vmap(at_point)(*inputs))


def _eqns_behind(jaxpr: Any, target: Any) -> list[Any]:
    """The equations that a variable is computed by, in program order."""
    # The others may need inputs that are left out.
    needed, live = {target}, []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            live.append(eqn)
            needed.update(atom for atom in eqn.invars if not is_literal(atom))
    return live[::-1]
