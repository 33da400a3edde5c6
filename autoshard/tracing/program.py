"""The program as the rest of autoshard sees it: values, equations and bodies, free of jax types.

`trace` builds a `Program` from a jaxpr; `origin` leads back to it, and only `jax_internals` knows
what is in there. Invariants:

- every `Value` and every `Eqn` is unique: bodies are made distinct per call site, so identity means
  "this place";
- `Program.values[v.index] is v`, and `Program.eqns[e.index] is e` (equations of all bodies, outer
  ones first);
- how the values of a body relate to those of its equation is stated by `Eqn.mappings`, never
  guessed from primitive names.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """One array of the program.

    Attributes:
        index: Position in `Program.values`.
        shape: Global shape.
        dtype: Name of the dtype as jax prints it (`float32`, `bfloat16`, `key<fry>`).
        itemsize: Bytes of one element (a typed PRNG key counts its key data).
        literal: True for a scalar literal written into an equation.
        on_host: True if it is in the host's memory, by its type, and not in a device's.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    literal: bool = False
    on_host: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the whole (global) array."""
        total = self.itemsize
        for size in self.shape:
            total *= size
        return total


class MappingKind(enum.Enum):
    """Which way data goes along a body mapping.

    OPERAND_TO_INVAR: from an operand into a body. OUTVAR_TO_RESULT: out of a body to a result.
    CARRY: from a result back into the body, as the carry of the next trip.
    """

    OPERAND_TO_INVAR = "operand to invar"
    OUTVAR_TO_RESULT = "outvar to result"
    CARRY = "carry"


@dataclass(frozen=True, eq=False, slots=True)
class BodyMapping:
    """Dimension d + offset of `outer` is dimension d of `inner`.

    Attributes:
        outer: An operand or result of the equation.
        inner: An input or output of one of its bodies.
        kind: Which way data goes.
        offset: 1 where the leading dimension of `outer` is scanned, else 0.
    """

    outer: Value
    inner: Value
    kind: MappingKind
    offset: int = 0

    @property
    def source(self) -> Value:
        """The value that data comes from."""
        return self.inner if self.kind is MappingKind.OUTVAR_TO_RESULT else self.outer

    @property
    def target(self) -> Value:
        """The value that data goes to."""
        return self.outer if self.kind is MappingKind.OUTVAR_TO_RESULT else self.inner


@dataclass(frozen=True, eq=False, slots=True)
class Body:
    """A jaxpr: that of the whole program, or one among the parameters of an equation.

    Of a scan, while, cond, remat, custom_jvp, custom_vjp or jit.

    Attributes:
        name: Which parameter of the equation it came from (`jaxpr`, `body_jaxpr`, `branches[1]`).
        inputs: Invars.
        consts: Constvars.
        eqns: Equations in program order.
        outputs: Outvars.
        trip_count: How often it runs per run of its equation; None where that depends on data.
    """

    name: str
    inputs: tuple[Value, ...]
    consts: tuple[Value, ...]
    eqns: tuple[Eqn, ...]
    outputs: tuple[Value, ...]
    trip_count: int | None = 1


@dataclass(frozen=True, eq=False, slots=True)
class Eqn:
    """One application of a primitive.

    Attributes:
        index: Position in `Program.eqns`.
        primitive: Name of the primitive (`dot_general`, `scan`).
        params: The primitive's parameters as jax holds them (dimension numbers are duck-typed by
            the sharding rules).
        inputs: Operands, literals included.
        outputs: Results; a dropped result is a Value like any other.
        bodies: Sub-jaxprs, empty for ordinary primitives.
        mappings: How values of the bodies relate to `inputs` and `outputs` (and loop carries to
            themselves).
        scanned: Operands and results whose dimension 0 a scan consumes or stacks, one slice a trip.
        carries: For loops, body inputs and outputs that are carried: `(body input, body output)`.
        origin: The jax equation; only `jax_internals` knows what is in it.
        part: Which operand and result of `origin` it is about, of those that are unrelated
            (`primitives.OPERANDWISE`); they are equations of their own, in order.
    """

    index: int
    primitive: str
    params: Mapping[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    bodies: tuple[Body, ...] = ()
    mappings: tuple[BodyMapping, ...] = ()
    scanned: tuple[Value, ...] = ()
    carries: tuple[tuple[Value, Value], ...] = ()
    origin: Any = field(default=None, repr=False)
    part: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """A traced function.

    Attributes:
        name: Name of the traced function.
        body: The outermost body; `body.inputs` are the dynamic argument leaves in order.
        values: Every value, by index.
        eqns: Every equation of every body, by index.
        input_paths: Leaf path of each argument leaf (`params/layers/wq`), unique.
        output_paths: Leaf path of each output leaf, unique.
        input_argnums: Which argument each leaf belongs to: a position, or a keyword's name.
        fingerprint: Stable digest of the program (shapes, dtypes, primitives, structure; not
            variable names).
        origin: The closed jaxpr; only `jax_internals` knows what is in it.
    """

    name: str
    body: Body
    values: tuple[Value, ...]
    eqns: tuple[Eqn, ...]
    input_paths: tuple[str, ...]
    output_paths: tuple[str, ...]
    input_argnums: tuple[int | str, ...]
    fingerprint: str
    origin: Any = field(default=None, repr=False)

    def captured(self) -> tuple[Value, ...]:
        """Constants captured by closure, of all bodies."""
        bodies = [self.body, *(body for eqn in self.eqns for body in eqn.bodies)]
        return tuple(dict.fromkeys(value for body in bodies for value in body.consts))

    def walk(self, body: Body | None = None, trip_count: int = 1) -> Iterator[tuple[Eqn, int]]:
        """Yields every equation with how often it runs, in program order.

        Args:
            body: Where to start; the outermost body by default.
            trip_count: How often that runs. Loops of unknown trip count count once.
        """
        body = self.body if body is None else body
        for eqn in body.eqns:
            yield eqn, trip_count
            for inner in eqn.bodies:
                trips = 1 if inner.trip_count is None else inner.trip_count
                yield from self.walk(inner, trip_count * trips)
