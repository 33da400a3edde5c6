"""From a function to a `Program`.

Tracing is abstract (no array is needed) and happens once; every candidate is lowered from the same
jaxpr, so values that change from trace to trace (checkify codes) cannot look like wrong numbers.
Before anything else the jaxpr is made *distinct*: plain `jit` calls are inlined and every body gets
variables of its own, because jax hands the same Jaxpr object to two calls of one helper.
`custom_jvp` and `custom_vjp` are never inlined: the plan would silently lose its gradient rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard.errors import TraceError
from autoshard.jax_internals import jaxprs
from autoshard.tracing.fingerprint import fingerprint
from autoshard.tracing.primitives import HOST_EFFECTS, INLINED, ONE_TO_ONE
from autoshard.tracing.program import Body, BodyMapping, Eqn, MappingKind, Program, Value
from autoshard.tracing.signature import Call, is_static, leaf_paths
from autoshard.tracing.source_lines import source_line


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced call.

    Attributes:
        call: The call it was traced for.
        program: What the other folders see.
        original: The closed jaxpr as jax traced it, for verification: nothing of ours has touched
            it.
        out_tree: Structure of the outputs.
        static_outputs: Output leaves that are no arrays, by leaf number.
        num_outputs: Number of output leaves, those included.
    """

    call: Call
    program: Program
    original: Any
    out_tree: Any
    static_outputs: tuple[tuple[int, Any], ...]
    num_outputs: int

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
    mesh: jax.sharding.Mesh | None = None,
    *,
    keep_user_constraints: bool = True,
) -> Traced:
    """Traces `fn` for the shapes of `call`.

    Args:
        fn: The function.
        call: What it is called with.
        mesh: With Auto axes; it is traced under it, so that bare PartitionSpecs in `fn` work.
        keep_user_constraints: False to leave out the sharding constraints in `fn`.

    Raises:
        TraceError: If jax cannot trace it; the message is jax's own, which plain `jax.jit(fn)`
            raises as well. Or if it does what cannot be sharded: it captures a mutable array, or
            has ordered effects.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    flat_fn = _FlatFunction(fn, call)
    closed = _as_jax_traces(flat_fn, name, call, mesh)
    if any(jaxprs.is_ref(const) for const in jaxprs.consts_of(closed)):
        raise TraceError(
            f"{name} reads or writes a mutable array (jax.new_ref) that was made outside of it: "
            f"its state cannot be sharded. Pass its value as an argument, make the mutable array "
            f"inside, and return the new value."
        )
    # References become values before variables are renamed: effects name variables.
    pure = jaxprs.plain(closed)
    distinct = _Distinct(keep_user_constraints).copy(pure)
    jaxpr = jaxprs.close_jaxpr(distinct, jaxprs.consts_of(pure))
    program = _Builder(name, call, leaf_paths(flat_fn.out_paths)).build(jaxpr)
    if mesh is not None and mesh.size > 1:
        _refuse_ordered_effects(program)
    return Traced(
        call=call,
        program=program,
        original=closed,
        out_tree=flat_fn.out_tree,
        static_outputs=tuple(flat_fn.static_outputs),
        num_outputs=flat_fn.out_tree.num_leaves,
    )


class _FlatFunction:
    """A function of the array leaves of a call, which returns the array leaves of its result.

    Attributes:
        out_tree: Structure of the result, once called.
        out_paths: Prefix and path of each array leaf of it.
        static_outputs: By number, its leaves that are no arrays.
    """

    def __init__(self, fn: Callable[..., Any], call: Call) -> None:
        self._fn, self._call = fn, call
        self.out_tree: Any = None
        self.out_paths: list[tuple[str, tuple[Any, ...]]] = []
        self.static_outputs: list[tuple[int, Any]] = []

    def flat(self, *leaves: Any) -> list[Any]:
        """The array leaves of the result of a call with these."""
        args, kwargs = self._call.rebuild(leaves)
        result = self._fn(*args, **kwargs)
        with_paths, self.out_tree = jax.tree_util.tree_flatten_with_path(result)
        arrays = []
        for number, (path, leaf) in enumerate(with_paths):
            if is_static(leaf):
                self.static_outputs.append((number, leaf))
            else:
                arrays.append(leaf)
                self.out_paths.append(("out", tuple(path)))
        return arrays


def _as_jax_traces(
    flat_fn: _FlatFunction, name: str, call: Call, mesh: jax.sharding.Mesh | None
) -> Any:
    """The closed jaxpr of a function, traced under a mesh."""
    scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if mesh is not None:
        scope = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    try:
        with scope:
            return jax.make_jaxpr(flat_fn.flat)(*call.avals)
    except Exception as error:
        raise TraceError(
            f"{name} cannot be traced by jax with these arguments (autoshard changes nothing here: "
            f"jax.jit({name}) fails as well): {type(error).__name__}: {str(error).strip()}"
        ) from error


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


class _Distinct:
    """Copies jaxprs so that plain jit calls are inlined and each variable is in one place only."""

    def __init__(self, keep_user_constraints: bool) -> None:
        self._keep_user_constraints = keep_user_constraints

    def copy(self, jaxpr: Any) -> Any:
        """An open jaxpr that computes the same, with variables of its own in all bodies."""
        jaxpr = jaxprs.open_jaxpr(jaxpr)
        scope = _Scope()
        invars = [scope.define(var) for var in jaxpr.invars]
        constvars = [scope.define(var) for var in jaxpr.constvars]
        eqns: list[Any] = []
        self._copy_eqns(jaxpr, scope, eqns, None)
        outvars = [scope.read(var) for var in jaxpr.outvars]
        eqns = _live(eqns, outvars)
        return jaxpr.replace(invars=invars, constvars=constvars, eqns=eqns, outvars=outvars)

    def _copy_eqns(self, jaxpr: Any, scope: _Scope, eqns: list[Any], call: Any) -> None:
        """Appends copies of the equations of a jaxpr.

        Args:
            jaxpr: The jaxpr.
            scope: What its variables are called in the copy.
            eqns: What to append to.
            call: The call that it is inlined from, None if it is not.
        """
        for eqn in jaxpr.eqns:
            named = eqn if call is None else jaxprs.nest_name_stack(eqn, call)
            # The user's constraint is left out by reading its operand in the place of its result.
            if eqn.primitive.name == "sharding_constraint" and not self._keep_user_constraints:
                scope.rename(eqn.outvars[0], scope.read(eqn.invars[0]))
            elif _is_plain_jit(eqn):
                self._inline(eqn, named, scope, eqns)
            else:
                eqns.append(self._copied(named, scope))

    def _inline(self, eqn: Any, call: Any, scope: _Scope, eqns: list[Any]) -> None:
        body = jaxprs.open_jaxpr(_called_jaxpr(eqn))
        body_scope = _Scope()
        for var, atom in zip(body.invars, eqn.invars, strict=True):
            body_scope.rename(var, scope.read(atom))
        self._copy_eqns(body, body_scope, eqns, call)
        for result, var in zip(eqn.outvars, body.outvars, strict=True):
            scope.rename(result, body_scope.read(var))

    def _copied(self, eqn: Any, scope: _Scope) -> Any:
        params = jaxprs.map_jaxprs(
            eqn.params, lambda _, jaxpr: jaxprs.replace_jaxpr(jaxpr, self.copy(jaxpr))
        )
        invars = [scope.read(atom) for atom in eqn.invars]
        outvars = [v if jaxprs.is_drop(v) else scope.define(v) for v in eqn.outvars]
        return eqn.replace(invars=invars, outvars=outvars, params=params)


class _Scope:
    """What the variables of a jaxpr are called in its copy."""

    def __init__(self) -> None:
        self._names: dict[Any, Any] = {}

    def define(self, var: Any) -> Any:
        """A new variable for this one."""
        self._names[var] = new = jaxprs.new_var(var.aval)
        return new

    def rename(self, var: Any, atom: Any) -> None:
        """Puts a variable or literal of the copy in the place of this one."""
        self._names[var] = atom

    def read(self, atom: Any) -> Any:
        """A literal itself; what a variable is called in the copy."""
        return atom if jaxprs.is_literal(atom) else self._names[atom]


def _is_plain_jit(eqn: Any) -> bool:
    """True for a call without shardings of its own: only then does inlining change nothing."""
    if eqn.primitive.name not in INLINED or jaxprs.consts_of(_called_jaxpr(eqn)):
        return False
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all(sharding is None or jaxprs.is_unspecified(sharding) for sharding in shardings)


def _called_jaxpr(eqn: Any) -> Any:
    return eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")


def _live(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """The equations that an output needs or that have an effect.

    XLA drops the others, so they must not count.
    """
    needed = {var for var in outvars if not jaxprs.is_literal(var)}
    live = []
    for eqn in reversed(eqns):
        # Effects count without readers: prints, callbacks, checks.
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            live.append(eqn)
            needed.update(atom for atom in eqn.invars if not jaxprs.is_literal(atom))
    return live[::-1]


class _Builder:
    """Builds a `Program` from a distinct jaxpr."""

    def __init__(self, name: str, call: Call, output_paths: tuple[str, ...]) -> None:
        self._name, self._call, self._output_paths = name, call, output_paths
        self._values: list[Value] = []
        self._eqns: list[Eqn] = []
        self._by_var: dict[Any, Value] = {}

    def build(self, closed: Any) -> Program:
        body = self._body("jaxpr", closed, 1)
        return Program(
            name=self._name,
            body=body,
            values=tuple(self._values),
            eqns=tuple(self._eqns),
            input_paths=self._call.paths,
            output_paths=self._output_paths,
            input_argnums=self._call.owners,
            fingerprint=fingerprint(closed),
            origin=closed,
        )

    def _value(self, atom: Any) -> Value:
        """The value of a variable, which is new where it occurs first; a literal is always new."""
        literal = jaxprs.is_literal(atom)
        if not literal and atom in self._by_var:  # not every literal can be hashed
            return self._by_var[atom]
        value = self._new_value(atom, literal)
        if not literal:
            self._by_var[atom] = value
        return value

    def _new_value(self, atom: Any, literal: bool = False) -> Value:
        aval = atom.aval
        value = Value(
            index=len(self._values),
            shape=tuple(getattr(aval, "shape", ())),
            dtype=str(getattr(aval, "dtype", "token")),
            itemsize=jaxprs.itemsize_of(aval),
            literal=literal,
        )
        self._values.append(value)
        return value

    def _result(self, var: Any) -> Value:
        """The value of a result; jax may use one object for all results that are dropped."""
        return self._new_value(var) if jaxprs.is_drop(var) else self._value(var)

    def _body(self, name: str, jaxpr: Any, trip_count: int | None) -> Body:
        jaxpr = jaxprs.open_jaxpr(jaxpr)
        return Body(
            name=name,
            inputs=tuple(map(self._value, jaxpr.invars)),
            consts=tuple(map(self._value, jaxpr.constvars)),
            eqns=tuple(map(self._eqn, jaxpr.eqns)),
            outputs=tuple(map(self._value, jaxpr.outvars)),
            trip_count=trip_count,
        )

    def _eqn(self, eqn: Any) -> Eqn:
        index = len(self._eqns)
        # A place for it before its bodies are built: outer equations come first in the program.
        self._eqns.append(None)  # type: ignore[arg-type]
        inputs = tuple(map(self._value, eqn.invars))
        bodies = tuple(self._bodies(eqn))
        outputs = tuple(map(self._result, eqn.outvars))
        flow = _data_flow(eqn, inputs, outputs, bodies)
        self._eqns[index] = built = Eqn(
            index=index,
            primitive=eqn.primitive.name,
            params=eqn.params,
            inputs=inputs,
            outputs=outputs,
            bodies=bodies,
            mappings=flow.mappings,
            scanned=flow.scanned,
            carries=flow.carries,
            origin=eqn,
        )
        return built

    def _bodies(self, eqn: Any) -> Iterator[Body]:
        name, params = eqn.primitive.name, eqn.params
        if name in ONE_TO_ONE:
            # By primitive and by release of jax.
            key = next(key for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params)
            yield self._body(key, params[key], 1)
        elif name == "scan":
            yield self._body("jaxpr", params["jaxpr"], int(params["length"]))
        elif name == "while":
            yield self._body("cond_jaxpr", params["cond_jaxpr"], None)
            yield self._body("body_jaxpr", params["body_jaxpr"], None)
        elif name == "cond":
            for i, branch in enumerate(params["branches"]):
                yield self._body(f"branches[{i}]", branch, 1)


@dataclass(frozen=True, slots=True)
class _DataFlow:
    """How data goes through an equation with bodies; the attributes are those of `Eqn`."""

    mappings: tuple[BodyMapping, ...] = ()
    scanned: tuple[Value, ...] = ()
    carries: tuple[tuple[Value, Value], ...] = ()


_Values = tuple[Value, ...]


def _data_flow(eqn: Any, inputs: _Values, outputs: _Values, bodies: tuple[Body, ...]) -> _DataFlow:
    if not bodies:
        return _DataFlow()
    name = eqn.primitive.name
    if name == "scan":
        return _scan_flow(eqn, inputs, outputs, bodies[0])
    if name == "while":
        return _while_flow(eqn, inputs, outputs, *bodies)
    operands = inputs[1:] if name == "cond" else inputs  # operand 0 chooses the branch
    mappings = []
    for body in bodies:
        mappings += _mappings(MappingKind.OPERAND_TO_INVAR, operands, body.inputs)
        mappings += _mappings(MappingKind.OUTVAR_TO_RESULT, outputs, body.outputs)
    return _DataFlow(tuple(mappings))


def _mappings(
    kind: MappingKind, outer: _Values, inner: _Values, offset: int = 0
) -> list[BodyMapping]:
    return [BodyMapping(o, i, kind, offset) for o, i in zip(outer, inner, strict=True)]


def _scan_flow(eqn: Any, inputs: _Values, outputs: _Values, body: Body) -> _DataFlow:
    """Operands: constants, carries, scanned arrays; results: carries, stacked arrays."""
    consts, carry = jaxprs.scan_counts(eqn.params)
    first_scanned = consts + carry
    whole_operands, scanned_operands = inputs[:first_scanned], inputs[first_scanned:]
    last_carries, stacked = outputs[:carry], outputs[carry:]
    carried_in = body.inputs[consts:first_scanned]

    into, out_of = MappingKind.OPERAND_TO_INVAR, MappingKind.OUTVAR_TO_RESULT
    mappings = _mappings(into, whole_operands, body.inputs[:first_scanned])
    mappings += _mappings(into, scanned_operands, body.inputs[first_scanned:], offset=1)
    mappings += _mappings(out_of, last_carries, body.outputs[:carry])
    mappings += _mappings(out_of, stacked, body.outputs[carry:], offset=1)
    mappings += _mappings(MappingKind.CARRY, last_carries, carried_in)
    carries = tuple(zip(carried_in, body.outputs[:carry], strict=True))
    return _DataFlow(tuple(mappings), (*scanned_operands, *stacked), carries)


def _while_flow(
    eqn: Any, inputs: _Values, outputs: _Values, condition: Body, body: Body
) -> _DataFlow:
    """Operands: constants of the condition, constants of the body, carries; results: carries."""
    condition_consts = int(eqn.params["cond_nconsts"])
    body_consts = int(eqn.params["body_nconsts"])
    carried = inputs[condition_consts + body_consts :]
    carried_in = body.inputs[body_consts:]

    into = MappingKind.OPERAND_TO_INVAR
    mappings = _mappings(into, (*inputs[:condition_consts], *carried), condition.inputs)
    mappings += _mappings(into, inputs[condition_consts:], body.inputs)
    mappings += _mappings(MappingKind.OUTVAR_TO_RESULT, outputs, body.outputs)
    mappings += _mappings(MappingKind.CARRY, outputs, carried_in)
    mappings += _mappings(MappingKind.CARRY, outputs, condition.inputs[condition_consts:])
    return _DataFlow(tuple(mappings), (), tuple(zip(carried_in, body.outputs, strict=True)))
