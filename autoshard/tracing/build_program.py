"""From a distinct jaxpr to a `Program`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autoshard.jax_internals import jaxprs
from autoshard.tracing.fingerprint import fingerprint
from autoshard.tracing.primitives import ONE_TO_ONE, OPERANDWISE
from autoshard.tracing.program import Body, BodyMapping, Eqn, MappingKind, Program, Value
from autoshard.tracing.signature import Call


def build_program(closed: Any, name: str, call: Call, output_paths: tuple[str, ...]) -> Program:
    """The program of a closed jaxpr.

    Args:
        closed: Each of its variables is one place (`distinct`).
        name: Name of the traced function.
        call: What it was traced for.
        output_paths: Leaf path of each output.
    """
    return _Builder(name, call, output_paths).build(closed)


class _Builder:
    """Builds a `Program` from a distinct jaxpr."""

    def __init__(self, name: str, call: Call, output_paths: tuple[str, ...]) -> None:
        self._name, self._call, self._output_paths = name, call, output_paths
        self._values: list[Value] = []
        self._eqns: list[Eqn] = []
        self._by_var: dict[Any, Value] = {}

    def build(self, closed: Any) -> Program:
        """The program of a closed jaxpr."""
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
            on_host=jaxprs.is_on_host(aval),
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
            eqns=tuple(built for eqn in jaxpr.eqns for built in self._built(eqn)),
            outputs=tuple(map(self._value, jaxpr.outvars)),
            trip_count=trip_count,
        )

    def _built(self, eqn: Any) -> list[Eqn]:
        """What an equation computes: one thing, or one of each of its operands."""
        operandwise = eqn.primitive.name in OPERANDWISE and len(eqn.invars) == len(eqn.outvars)
        return self._parts(eqn) if operandwise else [self._eqn(eqn)]

    def _parts(self, eqn: Any) -> list[Eqn]:
        inputs = tuple(map(self._value, eqn.invars))
        parts = []
        for part, (operand, out) in enumerate(zip(inputs, eqn.outvars, strict=True)):
            parts.append(
                Eqn(
                    index=len(self._eqns),
                    primitive=eqn.primitive.name,
                    params=eqn.params,
                    inputs=(operand,),
                    outputs=(self._result(out),),
                    origin=eqn,
                    part=part,
                )
            )
            self._eqns.append(parts[-1])
        return parts

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
