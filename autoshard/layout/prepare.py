"""From a function and example arguments to a `Problem`: the program, its logical axes, its pins.

`make_request` checks and normalises what the user passes; `prepare` traces it. The two are apart
because a plan called with other shapes prepares its request again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from jax.sharding import Mesh, PartitionSpec

from autoshard.axes.argument_groups import find_groups
from autoshard.axes.axis_classes import AxisClasses, axis_classes
from autoshard.axes.infer_rules import RuleFinder
from autoshard.axes.logical_axes import find_logical_axes
from autoshard.axes.sharding_rules import FactorKind
from autoshard.errors import ArgumentError, PathError
from autoshard.layout.constraints import unstated_logical_axes
from autoshard.layout.mesh import MeshInfo, resolve_mesh
from autoshard.layout.pins import (
    HasSpecs,
    Only,
    PinMap,
    Pinned,
    check_pin_map,
    resolve_pins,
    user_constraints,
)
from autoshard.layout.problem import Problem
from autoshard.tracing.carry import Carry, matching_state, resolve_carry
from autoshard.tracing.flax_metadata import logical_axis_names, specs_from_names
from autoshard.tracing.functionalize import FunctionalizedStep, functionalize
from autoshard.tracing.jit_options import CallOptions, options_for
from autoshard.tracing.primitives import KERNELS
from autoshard.tracing.program import Eqn, Program
from autoshard.tracing.signature import Call, flatten_call
from autoshard.tracing.source_lines import source_line
from autoshard.tracing.trace import Traced, effects_of, trace

Pins = PinMap | HasSpecs | Literal["metadata"] | None
UserConstraints = Literal["pin", "ignore"]
CarryPairs = tuple[tuple[int, int], ...]
"""Pairs (input leaf, output leaf) that are the same array one step later."""

Stages = Callable[[str], AbstractContextManager[None]]
"""Gives, by the name of a stage, what it is run within."""

LARGE_CONSTANT_BYTES = 2**20
"""Captured constants from this size on get a note; smaller ones, such as masks, are common.

Chosen by hand; `tests/cases/test_case_arguments.py` pins that 1 MiB is noted and 1 KiB is not."""


@dataclass(frozen=True, slots=True)
class JitOptions:
    """Static and donated arguments of a function, as `jax.jit` takes them."""

    static_argnums: Any = None
    static_argnames: Any = None
    donate_argnums: Any = None
    donate_argnames: Any = None

    def normalised(self, fn: Callable[..., Any]) -> CallOptions:
        """The same by position, where the signature of `fn` tells it."""
        return options_for(
            fn,
            static_argnums=self.static_argnums,
            static_argnames=self.static_argnames,
            donate_argnums=self.donate_argnums,
            donate_argnames=self.donate_argnames,
        )


NO_JIT_OPTIONS = JitOptions()


@dataclass(frozen=True, eq=False)
class Request:
    """What the user asked for, whatever the shapes: enough to trace again for another signature."""

    fn: Callable[..., Any]
    options: CallOptions
    mesh: MeshInfo
    carry: Carry
    pins: Pins
    user_constraints: UserConstraints


@dataclass(frozen=True, eq=False)
class Prepared:
    """A traced request.

    Attributes:
        request: What was asked for.
        traced: The traced call.
        problem: What stays fixed while candidates vary.
        carry: Pairs (input leaf, output leaf).
        notes: What the user should know.
    """

    request: Request
    traced: Traced
    problem: Problem
    carry: CarryPairs
    notes: tuple[str, ...]


def make_request(
    fn: Callable[..., Any],
    example_args: Sequence[Any] | Callable[[], Sequence[Any]],
    mesh: Mesh | str,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    jit: JitOptions = NO_JIT_OPTIONS,
    carry: Carry = None,
    pins: Pins = None,
    user_constraints: str = "pin",
) -> tuple[Request, Call]:
    """Checks and normalises the arguments of `optimize` and `apply`.

    Raises:
        ArgumentError: If one of them is not of the documented form.
    """
    if not callable(fn):
        raise ArgumentError(
            f"fn is a {type(fn).__name__}; pass the function you would give to jax.jit."
        )
    if callable(example_args):
        example_args = example_args()
    if not isinstance(example_args, tuple | list):
        raise ArgumentError(
            f"example_args is a {type(example_args).__name__}; pass a tuple of the positional "
            f"arguments, for one argument (x,)."
        )
    if user_constraints not in ("pin", "ignore"):
        raise ArgumentError(f"user_constraints={user_constraints!r}; use 'pin' or 'ignore'.")
    own_constraints: UserConstraints = "pin" if user_constraints == "pin" else "ignore"

    kwargs = dict(example_kwargs or {})
    info = resolve_mesh(mesh)
    options = jit.normalised(fn)
    fn = functionalize(fn, example_args, kwargs, info.for_tracing)
    call = flatten_call(fn, tuple(example_args), kwargs, options)
    return Request(fn, options, info, carry, pins, own_constraints), call


def _unwatched(name: str) -> AbstractContextManager[None]:
    return nullcontext()


def prepare(request: Request, call: Call, stage: Stages = _unwatched) -> Prepared:
    """Traces a request and finds its axis classes, logical axes, groups and pins.

    Args:
        request: The request.
        call: Its example arguments.
        stage: Within what it gives, by name, the stages are run: `trace` and `axes`.
    """
    with stage("trace"):
        traced = _traced(request, call)
    with stage("axes"):
        return _prepared(request, call, traced)


def _traced(request: Request, call: Call) -> Traced:
    mesh = request.mesh
    return trace(
        request.fn,
        call,
        mesh.auto,
        own_mesh=mesh.user if mesh.explicit_axes else None,
        keep_user_constraints=request.user_constraints == "pin",
    )


def _prepared(request: Request, call: Call, traced: Traced) -> Prepared:
    mesh, program = request.mesh, traced.program
    carry = _carry_of(request, traced)

    finder = RuleFinder()
    classes = axis_classes(program, carry, finder.rule_for)
    groups = find_groups(classes, _state_of(traced, carry))
    logical_axes = find_logical_axes(classes, logical_axis_names(call))
    constrained = user_constraints(program, mesh.auto)
    problem = Problem(
        logical_axes, groups, mesh.axes, constrained, unstated_logical_axes(logical_axes)
    )
    problem = _pinned(request, call, program, carry).over(problem)

    notes = (
        *_notes_on_request(request, traced, carry),
        *_notes_on_program(program),
        *finder.notes,
        *_notes_on_kernels(classes),
    )
    return Prepared(request, traced, problem, carry, notes)


def _carry_of(request: Request, traced: Traced) -> CarryPairs:
    """The leaves that are carried: those of the request, and modules that the step changes."""
    carry = resolve_carry(traced, request.carry)
    if not isinstance(request.fn, FunctionalizedStep) or request.carry is not None:
        return carry
    changed = resolve_carry(traced, request.fn.carry)
    return carry + tuple(pair for pair in changed if pair not in carry)


def _state_of(traced: Traced, carry: CarryPairs) -> CarryPairs:
    """What is carried, and what looks carried: whether a leaf is state does not hang on its being
    donated.
    """
    carried = {leaf for leaf, _ in carry}
    alike = matching_state(traced, donated_only=False)
    return carry + tuple(pair for pair in alike if pair[0] not in carried)


def _pinned(request: Request, call: Call, program: Program, carry: CarryPairs) -> Pinned:
    pins = request.pins
    mesh_axes = request.mesh.axes
    if pins == "metadata":
        pins = specs_from_names(call, tuple(mesh_axes))
    return resolve_pins(_pin_map(pins, program.input_paths), program, mesh_axes, carry)


def _notes_on_request(request: Request, traced: Traced, carry: CarryPairs) -> list[str]:
    """What was decided without being asked for."""
    notes = []
    program = traced.program
    if request.carry is None and carry:
        arguments = dict.fromkeys(program.input_paths[leaf].split("/")[0] for leaf, _ in carry)
        notes.append(
            f"carry: {', '.join(arguments)} (donated, matched by outputs) keep their specs from "
            f"step to step"
        )
    explicit_axes = request.mesh.explicit_axes
    if explicit_axes:
        notes.append(
            f"mesh axes {', '.join(explicit_axes)} are Explicit; the search worked on their Auto "
            f"version"
        )
    if traced.own_mesh is not None:
        kept = "kept" if request.user_constraints == "pin" else "left out"
        notes.append(
            f"{program.name} is written for Explicit axes: it was traced under them, and the "
            f"shardings that it states (out_sharding=, reshard) are {kept} as constraints"
        )
    if traced.reordered:
        notes.append(
            f"{program.name} names a mesh over these devices in another order, which jax refuses: "
            f"the order of the plan's mesh stands for it"
        )
    if traced.from_host:
        kinds = zip(traced.program.input_paths, traced.call.memory_kinds, strict=True)
        held = [path for path, kind in kinds if kind is not None]
        notes.append(
            f"{', '.join(held[:3])}{', ...' if len(held) > 3 else ''}: kept in the host's memory "
            f"and copied to the devices as the step begins, since jax computes with no arrays of "
            f"two memories; results come back on the devices. To send them back, return "
            f"jax.device_put(new, jax.memory.Space.Host)."
        )
    return notes


def _notes_on_program(program: Program) -> list[str]:
    """What the program does or holds that its arguments do not show."""
    notes = []
    effects = Counter(eqn.primitive for eqn in effects_of(program))
    if effects:
        listed = ", ".join(f"{count} {name}" for name, count in effects.items())
        notes.append(
            f"side effects ({listed}): they happen whenever a candidate is verified or measured, "
            f"and when it runs"
        )
    large = [value for value in program.captured() if value.bytes >= LARGE_CONSTANT_BYTES]
    if large:
        listed = ", ".join(f"{value.dtype}{list(value.shape)}" for value in large[:3])
        notes.append(
            f"{sum(value.bytes for value in large)} bytes of captured constants ({listed}) are "
            f"whole on every device; pass them as arguments and they can be sharded"
        )
    return notes


def _notes_on_kernels(classes: AxisClasses) -> list[str]:
    """Kernels that no layout can cut; of others the layout decides (`notes_on_kernels`)."""
    # By source line: a kernel that several equations call is noted once.
    notes: dict[str, str] = {}
    for eqn in classes.program.eqns:
        if eqn.primitive not in KERNELS:
            continue
        kernel = f"{eqn.primitive} ({source_line(eqn)})"
        kinds = classes.rules[eqn.index].kinds
        whole = all(kind is FactorKind.NEED_REPLICATION for kind in kinds)
        if whole and not eqn.params.get("interpret"):
            notes[kernel] = f"WARNING: {kernel} {_why_it_is_whole(eqn)}"
    return list(notes.values())


def _why_it_is_whole(kernel: Eqn) -> str:
    note = (
        "is opaque: its operands are gathered and every device runs all of it. Wrap it in "
        "jax.shard_map over its batch or heads dimensions"
    )
    if kernel.primitive == "pallas_call" and kernel.params["grid_mapping"].scratch_avals:
        note += ", or declare the axes of its grid that share no scratch memory 'parallel'"
    return note


def _pin_map(pins: Pins, paths: Sequence[str]) -> PinMap:
    """Pins as a mapping; of another plan or table, the leaves that this function has too."""
    if pins is None:
        return {}
    if isinstance(pins, HasSpecs):
        return _shared_specs(pins, paths)
    return check_pin_map(pins)


def _shared_specs(source: HasSpecs, paths: Sequence[str]) -> PinMap:
    specs = source.specs
    shared: dict[str | re.Pattern[str], PartitionSpec | Only] = {
        path: spec for path, spec in specs.items() if path in set(paths)
    }
    if not shared:
        raise PathError(
            f"pins is a {type(source).__name__} with leaves {', '.join(list(specs)[:3])}, ..., "
            f"none of which this function has ({', '.join(list(paths)[:3])}, ...). Name the "
            f"parameters alike, or pass a mapping."
        )
    return shared
