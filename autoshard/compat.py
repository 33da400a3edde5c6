"""The differences between jax 0.10 and 0.12 jaxprs, and the few jax internals autoshard needs,
behind one door.

jax 0.10 puts `ClosedJaxpr` into equation parameters and `num_consts`/`num_carry` into `scan`; 0.12
puts plain `Jaxpr` (which answers `.jaxpr` and `.consts` itself) and `ft_in`/`ft_out`. Only this
module and `trace` import `jax.extend`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

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


def open_jaxpr(jaxpr: Any) -> Any:
    """The plain jaxpr of a closed or plain one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """The constants bound to the constvars of a closed jaxpr (none for a plain one)."""
    return tuple(getattr(jaxpr, "consts", ()))


def is_jaxpr(value: object) -> bool:
    """True for a closed or a plain jaxpr."""
    return isinstance(value, core.ClosedJaxpr | core.Jaxpr)


def replace_jaxpr(old: Any, new_open: Any) -> Any:
    """A jaxpr of the kind of `old` (closed or plain) with the body `new_open` and the constants of
    `old`.
    """
    if isinstance(old, core.ClosedJaxpr) and open_jaxpr(old) is not old:
        return core.ClosedJaxpr(new_open, old.consts)
    lost = consts_of(old) and not consts_of(
        new_open
    )  # jax 0.12 makes plain inputs of constvars that are replaced
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
    """`eqn` with the name stack of the call `outer` it was inlined from put before its own, as in
    the call.

    Inside jax's own jitted functions (`take_along_axis`) no line is the user's: there the line of
    the call stands in.
    """
    info = eqn.source_info
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


def jit_options(fn: object) -> dict[str, Any]:
    """`static_argnums`, `static_argnames`, `donate_argnums`, `donate_argnames` of a jitted
    function; {} of others.
    """
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
    if not jax.numpy.issubdtype(dtype, jax.dtypes.extended) and dtype != jax.dtypes.float0:
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, weak_type=weak)


def is_ref(leaf: object) -> bool:
    """True for a mutable array (`jax.new_ref`)."""
    try:
        return type(jax.typeof(leaf)).__name__ == "AbstractRef"
    except TypeError:
        return False


def itemsize_of(aval: Any) -> int:
    """Bytes of one element of an abstract value on a device; 0 for tokens and float0."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or dtype == jax.dtypes.float0:
        return 0
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return int(dtype.itemsize)
    return int(np.dtype(dtype).itemsize)


def user_spec(eqn: JaxprEqn, mesh: jax.sharding.Mesh) -> PartitionSpec | None:
    """The PartitionSpec of a `sharding_constraint` equation; None where it is none, or on another
    mesh.
    """
    sharding = eqn.params.get("sharding")
    if not isinstance(sharding, NamedSharding):
        return None
    own = sharding.mesh
    same = own.axis_names == mesh.axis_names and own.axis_sizes == mesh.axis_sizes
    if isinstance(own, jax.sharding.Mesh):
        same = same and bool((own.devices == mesh.devices).all())
    return sharding.spec if same else None


class ConstraintMaker:
    """Makes `sharding_constraint` equations, with the primitive and parameters taken from a traced
    one.
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._mesh = mesh
        self._templates: dict[tuple[int, PartitionSpec], JaxprEqn] = {}

    def __call__(self, source: Var, result: Var, spec: PartitionSpec, anchor: JaxprEqn) -> JaxprEqn:
        """The equation `result = sharding_constraint(source)`, with the source line of `anchor`."""
        rank = len(source.aval.shape)
        key = (rank, spec)
        if key not in self._templates:
            sharding = NamedSharding(self._mesh, spec)
            aval = jax.ShapeDtypeStruct((self._mesh.size,) * rank, np.float32)
            with jax.sharding.use_abstract_mesh(
                self._mesh.abstract_mesh
            ):  # not the caller's, which may be Explicit
                traced = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(
                    aval
                )
            (self._templates[key],) = traced.jaxpr.eqns
        return self._templates[key].replace(
            invars=[source], outvars=[result], source_info=anchor.source_info, ctx=anchor.ctx
        )


def source_of(eqn: JaxprEqn) -> tuple[str, int]:
    """File and line of the user's code that an equation came from; ("", 0) where jax kept none."""
    from jax._src import source_info_util

    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return ("", 0) if frame is None else (frame.file_name, frame.start_line)


def has_effects(eqn: JaxprEqn) -> bool:
    """True if running the equation does more than compute its results."""
    return bool(eqn.effects)


def plain(closed: Any) -> Any:
    """The closed jaxpr as jax's own lowering first makes it: no high-level primitives, no mutable
    arrays.

    High-level primitives (`lax.custom_root` on jax 0.12) become what they stand for; reads and
    writes of mutable arrays that the program makes itself (`jax.new_ref`) become pure updates. The
    effects of the latter name variables, and would not survive a renaming. The references of
    kernels (pallas_call) stay: they belong to the kernel.
    """
    from jax._src.interpreters import partial_eval
    from jax._src.state.discharge import discharge_state

    def uses_refs(jaxpr: Any) -> bool:
        return any(
            eqn.primitive.ref_allocating
            or (eqn.primitive.name != "pallas_call" and any(map(uses_refs, jaxprs_in(eqn.params))))
            for eqn in jaxpr.eqns
        )

    if open_jaxpr(closed).is_high and not any(
        aval.is_high for aval in (*closed.in_avals, *closed.out_avals)
    ):
        closed = partial_eval.lower_jaxpr2(closed)
    return discharge_state(closed) if uses_refs(open_jaxpr(closed)) else closed


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
    values = [
        item
        for value in params.values()
        for item in (value if isinstance(value, tuple) else (value,))
    ]
    return tuple(open_jaxpr(value) for value in values if is_jaxpr(value))


def evaluate_result(jaxpr: Any, inputs: np.ndarray, result: int) -> np.ndarray:
    """One scalar result of a jaxpr of scalars, at many points.

    Args:
        jaxpr: Open or closed, without captured constants.
        inputs: [inputs, points]; inputs that the result does not depend on may be left out at the
            end.
        result: Position of the result.
    """
    jaxpr = open_jaxpr(jaxpr)
    target = jaxpr.outvars[result]
    needed, live = {target}, []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            live.append(eqn)
            needed.update(a for a in eqn.invars if not is_literal(a))

    def one(*point: Any) -> Any:
        env: dict[Any, Any] = dict(zip(jaxpr.invars, point, strict=False))

        def read(atom: Any) -> Any:
            return atom.val if is_literal(atom) else env[atom]

        for eqn in reversed(live):
            env.update(zip(eqn.outvars, as_call(eqn)(*map(read, eqn.invars)), strict=True))
        return read(target)

    with jax.ensure_compile_time_eval():
        return np.asarray(jax.vmap(one)(*inputs))


class ShardMapMaker:
    """Makes `shard_map` equations: a call on the pieces of its operands, manual over all mesh
    axes.
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._mesh = mesh
        self._context: Any = None

    def __call__(
        self,
        eqn: JaxprEqn,
        piece: JaxprEqn,
        operands: Sequence[PartitionSpec],
        results: Sequence[PartitionSpec],
        summed: Sequence[str] = (),
    ) -> JaxprEqn:
        """The equation that does what `eqn` does.

        Args:
            eqn: The equation it takes the place of.
            piece: The equation as one device runs it; only its parameters count.
            operands: Specs of the operands.
            results: Specs of the results.
            summed: Mesh axes over which the results of the pieces are added.
        """
        if self._context is None:
            probe = self._traced(
                jax.lax.neg,
                [jax.ShapeDtypeStruct((), np.float32)],
                (PartitionSpec(),),
                PartitionSpec(),
            )
            self._context = open_jaxpr(probe.params["jaxpr"]).eqns[0].ctx
        call = as_call(piece.replace(params=_in_context(piece.params, self._context)))

        def body(*operands: Any) -> tuple[Any, ...]:
            found = call(*operands)
            return tuple(jax.lax.psum(f, tuple(summed)) for f in found) if summed else found

        avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in eqn.invars]
        made = self._traced(body, avals, tuple(operands), tuple(results))
        return made.replace(
            invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info, ctx=eqn.ctx
        )

    def _traced(
        self, body: Callable[..., Any], avals: Sequence[Any], in_specs: Any, out_specs: Any
    ) -> JaxprEqn:
        with jax.sharding.use_abstract_mesh(
            self._mesh.abstract_mesh
        ):  # not the caller's, which may be Explicit
            mapped = jax.shard_map(
                body, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
            (made,) = jax.make_jaxpr(mapped)(*avals).jaxpr.eqns
        return made


def _in_context(params: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Parameters whose jaxprs (a kernel's and its index maps') were traced in another context: that
    of a `shard_map`.

    Without it jax finds that a kernel's equations are not manual over the mesh axes.
    """

    def moved(jaxpr: Any) -> Any:
        eqns = [
            eqn.replace(ctx=context, params=_in_context(eqn.params, context))
            for eqn in open_jaxpr(jaxpr).eqns
        ]
        return replace_jaxpr(jaxpr, open_jaxpr(jaxpr).replace(eqns=eqns))

    changed = map_jaxprs(params, lambda _, jaxpr: moved(jaxpr))
    if "grid_mapping" in changed:
        mapping = changed["grid_mapping"]
        blocks = (
            block.replace(index_map_jaxpr=moved(block.index_map_jaxpr))
            for block in mapping.block_mappings
        )
        changed["grid_mapping"] = mapping.replace(block_mappings=tuple(blocks))
    return changed


def calls_python(lowered: jax.stages.Lowered) -> bool:
    """True if the program calls back into this process."""
    args = lowered._lowering.compile_args
    return bool(args["host_callbacks"] or args["keepalive"])


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """A lowered program as another process can compile it, just as `lowered.compile()` would here.

    Attributes:
        module: StableHLO bytecode.
        options: Serialised XLA CompileOptions.
        device_ids: The devices of the program, in order.
    """

    module: bytes
    options: bytes
    device_ids: tuple[int, ...]


def compile_request(
    lowered: jax.stages.Lowered, compiler_options: Mapping[str, Any] | None
) -> CompileRequest | None:
    """What another process needs to compile a lowered program; None if it calls back into this
    one.
    """
    from jax._src.interpreters import pxla

    if calls_python(lowered):
        return None
    computation: Any = lowered._lowering
    args = computation.compile_args
    devices = list(computation._device_list)
    to_inputs, to_outputs = pxla.get_prop_to_input_output(
        args["in_shardings"], args["out_shardings"], len(args["ordered_effects"])
    )
    options: Any = pxla.create_compile_options(
        computation.stablehlo(),
        args["tuple_args"],
        to_inputs,
        to_outputs,
        args["backend"],
        np.array(devices, dtype=object),
        {**dict(computation._compiler_options_kvs), **(compiler_options or {})},
    )
    return CompileRequest(
        module_bytes(lowered), options.SerializeAsString(), tuple(device.id for device in devices)
    )


def module_bytes(lowered: jax.stages.Lowered) -> bytes:
    """A lowered program as MLIR bytecode, for another process with the same jax."""
    from jax._src.interpreters import mlir

    module: Any = lowered.compiler_ir("stablehlo")
    return mlir.module_to_bytecode(module)


@contextlib.contextmanager
def parsed_module(module: bytes) -> Iterator[Any]:
    """The MLIR module of `module_bytes`, with the dialects of jax known, while the context
    lasts.
    """
    from jax._src.interpreters import mlir
    from jax.extend.mlir import ir

    with mlir.make_ir_context():
        yield ir.Module.parse(module)


def compile_requested(request: CompileRequest, devices: Mapping[int, jax.Device]) -> Any:
    """Compiles a program that another process lowered, on these devices by id; it can be asked for
    text and memory.
    """
    from jax._src import stages
    from jaxlib import xla_client

    class Sent(stages.Executable):
        def xla_extension_executable(self) -> Any:
            return executable

    chosen = tuple(devices[number] for number in request.device_ids)
    client: Any = chosen[0].client
    options = xla_client.CompileOptions.ParseFromString(request.options)
    own = np.array([[device.id for device in chosen]])
    options.device_assignment = xla_client.DeviceAssignment.create(own)
    targets = xla_client.DeviceList(chosen)
    if is_compile_only(chosen[0]):
        with parsed_module(request.module) as module:
            executable = client.compile(module, executable_devices=targets, compile_options=options)
    else:
        executable = client.compile_and_load(
            request.module, executable_devices=targets, compile_options=options
        )
    return Sent()


def is_compile_only(device: Any) -> bool:
    """True for a device of a topology: programs can be compiled for it and not run."""
    from jaxlib import _jax

    return isinstance(device.client, _jax.CompileOnlyPyClient)


def gpu_target_config(devices: Sequence[jax.Device]) -> str | None:
    """What the GPU compiler knows of these GPUs, as text; None for devices that are no GPUs."""
    from jaxlib import _jax

    if devices[0].platform != "gpu":
        return None
    text: str = _jax.get_topology_for_devices(list(devices)).target_config
    return text


def quick_compile_options() -> dict[str, Any]:
    """What makes the TPU compiler skip its optimisations; jax 0.10 takes O0 as its number in XLA,
    0.12 by name.
    """
    major, minor = map(int, jax.__version__.split(".")[:2])
    return {"optimization_level": 9 if (major, minor) < (0, 11) else "O0"}


class Coordination:
    """The keys and values of jax's coordination service, which all processes of a program see."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, value: bytes) -> None:
        """Sets a key, once."""
        self._client.key_value_set_bytes(key, value)

    def get(self, key: str, limit_s: float) -> bytes | None:
        """The value of a key, waited for; None where it is not there after the limit."""
        try:
            found: bytes = self._client.blocking_key_value_get_bytes(key, int(1000 * limit_s))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        return found

    def below(self, prefix: str) -> dict[str, bytes]:
        """Values by key of all keys with a prefix."""
        return dict(self._client.key_value_dir_get_bytes(prefix))

    def count(self, key: str) -> int:
        """Adds one to a number, and says what it is now."""
        return int(self._client.key_value_increment(key, 1))

    def delete(self, prefix: str) -> None:
        """Forgets all keys with a prefix that ends in a slash."""
        self._client.key_value_delete(prefix)


def coordination() -> Coordination | None:
    """What `jax.distributed.initialize` connected this process to; None where it was not called."""
    from jax._src import distributed

    client = distributed.global_state.client
    return None if client is None else Coordination(client)
