"""Stage 1: `fn` to a `Program`.

With `compat`, the only module that knows jaxprs. Tracing is abstract (no array is needed) and
happens once; every candidate is lowered from the same jaxpr, so values that change from trace to
trace (checkify codes) cannot look like wrong numbers. Before anything else the jaxpr is made
*distinct*: plain `jit` calls are inlined and every body gets variables of its own, because jax
hands the same Jaxpr object to two calls of one helper. `custom_jvp` and `custom_vjp` are never
inlined: the plan would silently lose its gradient rules.
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
        program: What the other stages see.
        original: The closed jaxpr as jax traced it, for verification: nothing of ours has touched
            it.
        out_tree: Structure of the outputs, array leaves only.
        static_outputs: Output leaves that are no arrays, by leaf number.
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
    """Traces `fn` for the shapes of `call`, under `mesh` (with Auto axes) so that bare
    PartitionSpecs in `fn` work.

    Raises:
        TraceError: If jax cannot trace it; the message is jax's own, which plain `jax.jit(fn)`
            gives as well.
    """
    static_outputs: list[tuple[int, Any]] = []
    out_trees: list[Any] = []
    out_paths: list[tuple[str, tuple[Any, ...]]] = []

    def flat_fn(*leaves: Any) -> list[Any]:
        args, kwargs = call.rebuild(leaves)
        with_paths, out_tree = jax.tree_util.tree_flatten_with_path(fn(*args, **kwargs))
        out_trees.append(out_tree)
        arrays = []
        for number, (path, leaf) in enumerate(with_paths):
            if is_static(leaf):
                static_outputs.append((number, leaf))
            else:
                arrays.append(leaf)
                out_paths.append(("out", tuple(path)))
        return arrays

    scope = (
        contextlib.nullcontext()
        if mesh is None
        else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    )
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        with scope:
            closed = jax.make_jaxpr(flat_fn)(*call.avals)
    except Exception as error:
        raise TraceError(
            f"{name} cannot be traced by jax with these arguments (autoshard changes nothing here: "
            f"jax.jit({name}) "
            f"fails as well): {type(error).__name__}: {str(error).strip()}"
        ) from error
    if any(jaxprs.is_ref(const) for const in jaxprs.consts_of(closed)):
        raise TraceError(
            f"{name} reads or writes a mutable array (jax.new_ref) that was made outside of it: "
            f"its state cannot be "
            "sharded. Pass its value as an argument, make the mutable array inside, and return the "
            "new value."
        )
    pure = jaxprs.plain(closed)
    jaxpr = jaxprs.close_jaxpr(_distinct(pure, keep_user_constraints), jaxprs.consts_of(pure))
    program = _Builder(name, call, leaf_paths(out_paths)).build(jaxpr)
    if mesh is not None and mesh.size > 1:
        _refuse_ordered_effects(program)
    return Traced(
        call, program, closed, out_trees[-1], tuple(static_outputs), out_trees[-1].num_leaves
    )


def effects_of(program: Program) -> tuple[Eqn, ...]:
    """The equations that do something on the host besides computing their results, those of bodies
    included.
    """
    return tuple(eqn for eqn in program.eqns if eqn.primitive in HOST_EFFECTS)


def _refuse_ordered_effects(program: Program) -> None:
    for eqn in program.eqns:
        if not eqn.bodies and jaxprs.one_device_only(eqn.origin):
            where = source_line(eqn)
            raise TraceError(
                f"{program.name} calls {eqn.primitive}{f' ({where})' if where else ''} with an "
                f"ordered effect, and jax "
                f"runs ordered effects on one device only. Use ordered=False there, or a mesh of "
                f"one device."
            )


def _plain_jit(eqn: Any) -> bool:
    """True for a call without shardings of the user's own: only then does inlining change
    nothing.
    """
    if eqn.primitive.name not in INLINED:
        return False
    jaxpr = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return not jaxprs.consts_of(jaxpr) and all(
        s is None or jaxprs.is_unspecified(s) for s in shardings
    )


def _distinct(closed: Any, keep_user_constraints: bool) -> Any:
    """The open jaxpr with plain jit calls inlined and every variable of every body its own."""

    def copy(jaxpr: Any) -> Any:
        jaxpr = jaxprs.open_jaxpr(jaxpr)
        env: dict[Any, Any] = {}

        def rename(var: Any) -> Any:
            env[var] = new = jaxprs.new_var(var.aval)
            return new

        invars = [rename(v) for v in jaxpr.invars]
        constvars = [rename(v) for v in jaxpr.constvars]
        eqns: list[Any] = []
        run(jaxpr, env, eqns, None)
        outvars = [v if jaxprs.is_literal(v) else env[v] for v in jaxpr.outvars]
        eqns = _live(eqns, outvars)
        return jaxpr.replace(invars=invars, constvars=constvars, eqns=eqns, outvars=outvars)

    def run(jaxpr: Any, env: dict[Any, Any], eqns: list[Any], call: Any) -> None:
        def read(atom: Any) -> Any:
            return atom if jaxprs.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            placed = eqn if call is None else jaxprs.nest_name_stack(eqn, call)
            if eqn.primitive.name == "sharding_constraint" and not keep_user_constraints:
                env[eqn.outvars[0]] = read(eqn.invars[0])
                continue
            if _plain_jit(eqn):
                inner = jaxprs.open_jaxpr(eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr"))
                inner_env = dict(zip(inner.invars, map(read, eqn.invars), strict=True))
                run(inner, inner_env, eqns, placed)
                for outer_var, inner_var in zip(eqn.outvars, inner.outvars, strict=True):
                    env[outer_var] = (
                        inner_var if jaxprs.is_literal(inner_var) else inner_env[inner_var]
                    )
                continue
            params = jaxprs.map_jaxprs(eqn.params, lambda _, j: jaxprs.replace_jaxpr(j, copy(j)))
            outvars = []
            for var in eqn.outvars:
                if jaxprs.is_drop(var):
                    outvars.append(var)
                else:
                    env[var] = jaxprs.new_var(var.aval)
                    outvars.append(env[var])
            eqns.append(
                placed.replace(invars=[read(a) for a in eqn.invars], outvars=outvars, params=params)
            )

    return copy(closed)


def _live(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """The equations that an output needs or that have an effect; XLA drops the others, so they must
    not count.
    """
    needed = {v for v in outvars if not jaxprs.is_literal(v)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if not jaxprs.is_literal(v))
    return kept[::-1]


class _Builder:
    """Builds a `Program` from a distinct jaxpr."""

    def __init__(self, name: str, call: Call, output_paths: tuple[str, ...]) -> None:
        self._name, self._call, self._output_paths = name, call, output_paths
        self._values: list[Value] = []
        self._eqns: list[Eqn] = []
        self._by_var: dict[Any, Value] = {}

    def build(self, closed: Any) -> Program:
        body = self._body("jaxpr", jaxprs.open_jaxpr(closed), 1)
        return Program(
            name=self._name,
            body=body,
            values=tuple(self._values),
            eqns=tuple(self._eqns),
            input_paths=self._call.paths,
            output_paths=self._output_paths,
            input_argnums=self._call.owners,
            fingerprint=fingerprint(jaxprs.open_jaxpr(closed)),
            origin=closed,
        )

    def _value(self, atom: Any, new: bool = False) -> Value:
        literal = jaxprs.is_literal(atom)
        if not (literal or new) and atom in self._by_var:
            return self._by_var[atom]
        aval = atom.aval
        value = Value(
            len(self._values),
            tuple(getattr(aval, "shape", ())),
            str(getattr(aval, "dtype", "token")),
            jaxprs.itemsize_of(aval),
            literal,
        )
        self._values.append(value)
        if not literal and not jaxprs.is_drop(atom):
            self._by_var[atom] = value
        return value

    def _body(self, name: str, jaxpr: Any, trip_count: int | None) -> Body:
        inputs = tuple(self._value(v) for v in jaxpr.invars)
        consts = tuple(self._value(v) for v in jaxpr.constvars)
        eqns = tuple(self._eqn(e) for e in jaxpr.eqns)
        return Body(
            name, inputs, consts, eqns, tuple(self._value(v) for v in jaxpr.outvars), trip_count
        )

    def _eqn(self, eqn: Any) -> Eqn:
        index = len(self._eqns)
        self._eqns.append(None)  # type: ignore[arg-type]  # outer equations come first in `Program.eqns`
        inputs = tuple(self._value(a) for a in eqn.invars)
        bodies = tuple(self._bodies(eqn))
        outputs = tuple(self._value(v, jaxprs.is_drop(v)) for v in eqn.outvars)
        mappings, scanned, carries = _mappings_of(eqn, inputs, outputs, bodies)
        built = Eqn(
            index,
            eqn.primitive.name,
            eqn.params,
            inputs,
            outputs,
            bodies,
            mappings,
            scanned,
            carries,
            eqn,
        )
        self._eqns[index] = built
        return built

    def _bodies(self, eqn: Any) -> Iterator[Body]:
        name, params = eqn.primitive.name, eqn.params
        if name in ONE_TO_ONE:
            key = next(k for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in params)
            yield self._body(key, jaxprs.open_jaxpr(params[key]), 1)
        elif name == "scan":
            yield self._body("jaxpr", jaxprs.open_jaxpr(params["jaxpr"]), int(params["length"]))
        elif name == "while":
            yield self._body("cond_jaxpr", jaxprs.open_jaxpr(params["cond_jaxpr"]), None)
            yield self._body("body_jaxpr", jaxprs.open_jaxpr(params["body_jaxpr"]), None)
        elif name == "cond":
            for i, branch in enumerate(params["branches"]):
                yield self._body(f"branches[{i}]", jaxprs.open_jaxpr(branch), 1)


_Mappings = tuple[tuple[BodyMapping, ...], tuple[Value, ...], tuple[tuple[Value, Value], ...]]


def _mappings_of(
    eqn: Any, inputs: tuple[Value, ...], outputs: tuple[Value, ...], bodies: tuple[Body, ...]
) -> _Mappings:
    """Ties, scanned operands and carries of an equation with bodies."""
    if not bodies:
        return (), (), ()
    name = eqn.primitive.name

    def pairs(
        flow: MappingKind, outer: Sequence[Value], inner: Sequence[Value], offset: int = 0
    ) -> list[BodyMapping]:
        return [BodyMapping(o, i, flow, offset) for o, i in zip(outer, inner, strict=True)]

    if name == "scan":
        consts, carry = jaxprs.scan_counts(eqn.params)
        (body,) = bodies
        start = consts + carry
        mappings = pairs(MappingKind.OPERAND_TO_INVAR, inputs[:start], body.inputs[:start])
        mappings += pairs(MappingKind.OPERAND_TO_INVAR, inputs[start:], body.inputs[start:], 1)
        mappings += pairs(MappingKind.OUTVAR_TO_RESULT, outputs[:carry], body.outputs[:carry])
        mappings += pairs(MappingKind.OUTVAR_TO_RESULT, outputs[carry:], body.outputs[carry:], 1)
        mappings += pairs(MappingKind.CARRY, outputs[:carry], body.inputs[consts:start])
        carries = tuple(zip(body.inputs[consts:start], body.outputs[:carry], strict=True))
        return tuple(mappings), (*inputs[start:], *outputs[carry:]), carries
    if name == "while":
        cond, body = bodies
        c, b = int(eqn.params["cond_nconsts"]), int(eqn.params["body_nconsts"])
        mappings = pairs(
            MappingKind.OPERAND_TO_INVAR, (*inputs[:c], *inputs[c + b :]), cond.inputs
        ) + pairs(MappingKind.OPERAND_TO_INVAR, inputs[c:], body.inputs)
        mappings += pairs(MappingKind.OUTVAR_TO_RESULT, outputs, body.outputs) + pairs(
            MappingKind.CARRY, outputs, body.inputs[b:]
        )
        mappings += pairs(MappingKind.CARRY, outputs, cond.inputs[c:])
        return tuple(mappings), (), tuple(zip(body.inputs[b:], body.outputs, strict=True))
    operands = inputs[1:] if name == "cond" else inputs
    mappings = []
    for body in bodies:
        mappings += pairs(MappingKind.OPERAND_TO_INVAR, operands, body.inputs) + pairs(
            MappingKind.OUTVAR_TO_RESULT, outputs, body.outputs
        )
    return tuple(mappings), (), ()
