"""Lowers and compiles a layout with real `jit` shardings, and reads the evidence from the program.

One builder serves the search and the plan, so what the search compiled is what the plan runs. On a
mesh with Explicit axes the function is wrapped in `jax.sharding.auto_axes`: it takes and returns
Explicit arrays.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from autoshard.compiler.captured_stderr import captured_stderr
from autoshard.compiler.hlo_collectives import read_collectives, read_full_remat_warnings
from autoshard.compiler.hlo_cycles import read_cycles
from autoshard.devices.platforms import facts_of
from autoshard.evidence.candidate import CompiledEvidence
from autoshard.evidence.collectives import CollectiveOp, collective_bytes, summarise
from autoshard.layout.constraints import constraints_for
from autoshard.layout.layout import Layout
from autoshard.layout.mesh import MeshInfo
from autoshard.tracing.rewrite import Constraints, as_function, insert_constraints
from autoshard.tracing.trace import Traced

CompilerOptions = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Built:
    """A layout as a jitted function of flat leaves.

    Attributes:
        jitted: Takes and returns flat leaves.
        function: The same, not jitted: constraints inside, no shardings on arguments and outputs.
        in_shardings: Of the argument leaves.
        out_shardings: Of the output leaves.
        avals: Shapes and dtypes of the argument leaves.
        jit: Makes `jitted`; takes further options of `jax.jit`.
    """

    jitted: Any
    function: Callable[..., list[Any]]
    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    jit: Callable[..., Any]

    def in_same_memory(self, carry: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Of pairs (input leaf, output leaf) those whose output can be passed on as it is."""
        ins, outs = self.in_shardings, self.out_shardings
        return [(i, o) for i, o in carry if ins[i].memory_kind == outs[o].memory_kind]

    def lower(self) -> jax.stages.Lowered:
        """Lowers for the shapes it was traced for."""
        lowered: jax.stages.Lowered = self.jitted.lower(*self.avals)
        return lowered


@dataclass(frozen=True, slots=True)
class Figures:
    """What a compiled program says of itself in numbers, here or in another process.

    Attributes:
        argument_bytes: Per device, as the others.
        output_bytes: Outputs.
        alias_bytes: Outputs that live in donated arguments.
        temp_bytes: Temporaries.
        peak_bytes: The compiler's own peak, 0 where it gives none.
        flops: The compiler's count for one device, 0 where it gives none.
        compile_s: Seconds it took to compile.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int
    flops: float
    compile_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """What a compiled program says, whoever compiled it and whatever its collectives cost.

    Attributes:
        figures: Its numbers.
        ops: Its collectives.
        cycles: The compiler's estimate of all that is no collective, trip counts included; None
            where it makes none.
        full_remat_warnings: "Involuntary full rematerialization" warnings of the partitioner.
    """

    figures: Figures
    ops: tuple[CollectiveOp, ...]
    cycles: int | None
    full_remat_warnings: int


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled layout with what its program says.

    Attributes:
        built: The layout.
        executable: The program.
        evidence: What the program says.
        options: What was passed to XLA.
    """

    built: Built
    executable: Any
    evidence: CompiledEvidence
    options: CompilerOptions | None = None

    @functools.cached_property
    def run(self) -> Callable[..., list[Any]]:
        """Runs it on flat leaves that are laid out as `built.in_shardings` say.

        What has elements of less than a byte is dispatched by `jax.jit`, with the same shardings:
        jax 0.10 compiles a program for packed int4 and then refuses every int4 array as not packed.
        """
        if all(bits_of(aval.dtype) >= 8 for aval in self.built.avals):
            run: Callable[..., list[Any]] = self.executable
        elif self.options:
            run = self.built.jit(compiler_options=dict(self.options))
        else:
            run = self.built.jitted
        return run


def bits_of(dtype: Any) -> int:
    """Bits of one element; at least 8 where it is no number (a key, a bool)."""
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).bits)  # type: ignore[no-untyped-call]
    if jnp.issubdtype(dtype, jnp.floating):
        return int(jnp.finfo(dtype).bits)  # type: ignore[no-untyped-call]
    return 8


def build(
    traced: Traced, layout: Layout, mesh: MeshInfo, constraints: Constraints | None = None
) -> Built:
    """The layout as a jitted function; compiles nothing yet.

    Args:
        traced: The function.
        layout: Of its values.
        mesh: The mesh.
        constraints: Stated inside instead of the layout's own.
    """
    if constraints is None:
        constraints = constraints_for(layout)
    jaxpr = insert_constraints(traced.program, constraints, mesh.auto)
    function = as_function(jaxpr, traced.program.name)
    kinds = traced.call.memory_kinds
    in_shardings = tuple(map(mesh.sharding, layout.input_specs(), kinds))
    out_shardings = tuple(map(mesh.sharding, layout.output_specs(), traced.output_memory_kinds()))
    jit = functools.partial(
        jax.jit,
        _with_explicit_axes(function, layout, mesh, traced.program.name),
        in_shardings=in_shardings,
        out_shardings=list(out_shardings),
        donate_argnums=tuple(i for i, donated in enumerate(traced.call.donated) if donated),
    )
    avals = tuple(map(_in_memory, traced.call.avals, in_shardings, kinds))
    return Built(jit(), function, in_shardings, out_shardings, avals, jit)


def _in_memory(
    aval: jax.ShapeDtypeStruct, sharding: NamedSharding, kind: str | None
) -> jax.ShapeDtypeStruct:
    """An abstract argument; only a sharding says that it is not in the devices' own memory."""
    if kind is None:
        return aval
    weak = bool(aval.weak_type)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def _with_explicit_axes(
    function: Callable[..., Any], layout: Layout, mesh: MeshInfo, name: str
) -> Callable[..., Any]:
    """The function as it is jitted: on a mesh with Explicit axes it takes and returns Explicit
    arrays, and knows nothing of them inside.
    """
    if not mesh.explicit_axes:
        return function
    out = [mesh.explicit_part(spec) for spec in layout.output_specs()]
    wrapped: Callable[..., Any] = jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=out
    )
    wrapped.__name__ = wrapped.__qualname__ = name
    return wrapped


def compile_built(
    built: Built,
    mesh: MeshInfo,
    *,
    compiler_options: CompilerOptions | None = None,
    time_of: Callable[[Sequence[Any]], float] | None = None,
) -> Compiled:
    """Compiles and reads the evidence.

    Args:
        built: From `build`.
        mesh: The mesh.
        compiler_options: Passed to XLA as they are.
        time_of: Seconds of a step given the program's collectives.

    Returns:
        The executable with its evidence. Whatever XLA raises comes through: the driver makes a
        rejection of it.
    """
    options = dict(compiler_options) if compiler_options else None
    with captured_stderr() as written:
        lowered = built.lower()
        start_s = time.perf_counter()
        executable = lowered.compile(compiler_options=options)
        compile_s = time.perf_counter() - start_s
    figures = figures_of(executable, compile_s)
    reading = read_program(executable.as_text() or "", figures, written(), mesh)
    return Compiled(built, executable, evidence_of(reading, mesh, time_of), options)


def figures_of(executable: Any, compile_s: float) -> Figures:
    """What an executable says of itself in numbers; it took `compile_s` seconds to compile."""
    memory: Any = executable.memory_analysis()
    try:
        cost = executable.cost_analysis() or {}
    except NotImplementedError:  # the GPU compiler counts for devices that are here only
        cost = {}
    return Figures(
        argument_bytes=int(memory.argument_size_in_bytes),
        output_bytes=int(memory.output_size_in_bytes),
        alias_bytes=int(memory.alias_size_in_bytes),
        temp_bytes=int(memory.temp_size_in_bytes),
        peak_bytes=int(getattr(memory, "peak_memory_in_bytes", 0)),
        flops=float(cost.get("flops", 0.0)),
        compile_s=compile_s,
    )


def read_program(text: str, figures: Figures, stderr: str, mesh: MeshInfo) -> Reading:
    """Reads a program's text, and what the compiler wrote to standard error."""
    return Reading(
        figures,
        read_collectives(text, mesh.axes),
        read_cycles(text),
        read_full_remat_warnings(stderr),
    )


def evidence_of(
    reading: Reading, mesh: MeshInfo, time_of: Callable[[Sequence[Any]], float] | None
) -> CompiledEvidence:
    """The evidence in what a program says.

    Args:
        reading: What it says.
        mesh: That it is for.
        time_of: Seconds of a step given the program's collectives.
    """
    figures = reading.figures
    peak = figures.argument_bytes + figures.output_bytes - figures.alias_bytes + figures.temp_bytes
    if facts_of(mesh.platform).peak_has_temporaries:
        peak = figures.peak_bytes or peak
    return CompiledEvidence(
        collectives=summarise(reading.ops),
        collective_bytes=collective_bytes(reading.ops),
        argument_bytes=figures.argument_bytes,
        output_bytes=figures.output_bytes,
        alias_bytes=figures.alias_bytes,
        temp_bytes=figures.temp_bytes,
        peak_bytes=peak,
        full_remat_warnings=reading.full_remat_warnings,
        flops=figures.flops,
        time_s=0.0 if time_of is None else time_of(reading.ops),
        compile_s=figures.compile_s,
    )
