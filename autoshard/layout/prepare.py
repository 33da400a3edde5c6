"""From a function and example arguments to a `Problem`: trace, carry, axis classes, logical axes, groups
and pins.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from autoshard.layout.pins import HasSpecs, Only, PinMap, resolve_pins, user_constraints
from autoshard.layout.problem import Problem
from autoshard.tracing.carry import Carry, matching_state, resolve_carry
from autoshard.tracing.flax_metadata import logical_axis_names, specs_from_names
from autoshard.tracing.functionalize import FunctionalizedStep, functionalize
from autoshard.tracing.primitives import KERNELS
from autoshard.tracing.program import Program
from autoshard.tracing.signature import Call, CallOptions, flatten_call, options_for
from autoshard.tracing.source_lines import source_line
from autoshard.tracing.trace import Traced, effects_of, trace

Pins = PinMap | HasSpecs | Literal["metadata"] | None
UserConstraints = Literal["pin", "ignore"]

LARGE_CONSTANT_BYTES = 2**20
"""Captured constants from this size on are worth a word; smaller ones (masks, tables of positions)
are common."""


@dataclass(frozen=True, eq=False)
class Request:
    """What a person asked for, whatever the shapes: enough to trace again for another signature."""

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
        notes: What a person should know.
    """

    request: Request
    traced: Traced
    problem: Problem
    carry: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


def make_request(
    fn: Callable[..., Any],
    example_args: Sequence[Any] | Callable[[], Sequence[Any]],
    mesh: Mesh | str,
    *,
    example_kwargs: Mapping[str, Any] | None,
    static_argnums: Any,
    static_argnames: Any,
    donate_argnums: Any,
    donate_argnames: Any,
    carry: Carry,
    pins: Pins,
    user_constraints: str,
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
            f"arguments, "
            f"for one argument (x,)."
        )
    if user_constraints not in ("pin", "ignore"):
        raise ArgumentError(f"user_constraints={user_constraints!r}; use 'pin' or 'ignore'.")
    info = resolve_mesh(mesh)
    options = options_for(
        fn,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
    )
    fn = functionalize(fn, example_args, example_kwargs or {}, info.auto)
    call = flatten_call(fn, tuple(example_args), dict(example_kwargs or {}), options)
    kept: UserConstraints = "pin" if user_constraints == "pin" else "ignore"
    return Request(fn, options, info, carry, pins, kept), call


def prepare(request: Request, call: Call) -> Prepared:
    """Traces a request and finds its axis classes, logical axes, groups and pins."""
    mesh = request.mesh
    traced = trace(
        request.fn, call, mesh.auto, keep_user_constraints=request.user_constraints == "pin"
    )
    program = traced.program
    carry = resolve_carry(traced, request.carry)
    if isinstance(request.fn, FunctionalizedStep) and request.carry is None:
        carry += tuple(
            pair for pair in resolve_carry(traced, request.fn.carry) if pair not in carry
        )
    notes = []
    if request.carry is None and carry:
        owners = dict.fromkeys(program.input_paths[i].split("/")[0] for i, _ in carry)
        notes.append(
            f"carry: {', '.join(owners)} (donated, matched by outputs) keep their specs from step "
            f"to step"
        )
    if mesh.explicit_axes:
        notes.append(
            f"mesh axes {', '.join(mesh.explicit_axes)} are Explicit; the search worked on their "
            f"Auto version"
        )
    notes += _notes_on(program)
    state = tuple(carry) + tuple(
        pair
        for pair in matching_state(traced, donated_only=False)
        if pair[0] not in {i for i, _ in carry}
    )
    finder = RuleFinder()
    axes = axis_classes(program, carry, finder.rule_for)
    notes += [*finder.notes, *_notes_on_kernels(axes)]
    groups = find_groups(axes, state)
    pins = user_constraints(program, mesh.auto)
    asked: Pins = (
        specs_from_names(call, tuple(mesh.axes)) if request.pins == "metadata" else request.pins
    )
    pinned = resolve_pins(_pin_map(asked, program.input_paths), program, mesh.axes, carry)
    logical_axes = find_logical_axes(axes, logical_axis_names(call))
    problem = pinned.over(
        Problem(logical_axes, groups, mesh.axes, pins, unstated_logical_axes(logical_axes))
    )
    return Prepared(request, traced, problem, carry, tuple(notes))


def _notes_on(program: Program) -> list[str]:
    """What the program does or holds that its arguments do not show."""
    notes = []
    effects = Counter(eqn.primitive for eqn in effects_of(program))
    if effects:
        listed = ", ".join(f"{count} {name}" for name, count in effects.items())
        notes.append(
            f"side effects ({listed}): they happen whenever a candidate is verified or measured, "
            f"and when it runs"
        )
    large = [v for v in program.captured() if v.bytes >= LARGE_CONSTANT_BYTES]
    if large:
        listed = ", ".join(f"{v.dtype}{list(v.shape)}" for v in large[:3])
        notes.append(
            f"{sum(v.bytes for v in large)} bytes of captured constants ({listed}) are whole on "
            f"every device; "
            f"pass them as arguments and they can be sharded"
        )
    return notes


def _notes_on_kernels(classes: AxisClasses) -> list[str]:
    """For each kernel of the program whether it can be run by pieces."""
    notes = {}
    for eqn in classes.program.eqns:
        if eqn.primitive not in KERNELS:
            continue
        where = f"{eqn.primitive} ({source_line(eqn)})"
        if any(kind is not FactorKind.NEED_REPLICATION for kind in classes.rules[eqn.index].kinds):
            shown = (
                "its grid and index maps show"
                if eqn.primitive == "pallas_call"
                else "running it on small arrays shows"
            )
            notes[where] = (
                f"{where} is put into a shard_map where a layout splits its work: {shown} where it "
                f"can be cut"
            )
        elif not eqn.params.get("interpret"):
            notes[where] = (
                f"WARNING: {where} is opaque: its operands are gathered and every device runs all "
                f"of it. Wrap it in "
                f"jax.shard_map over its batch or heads dimensions"
            )
            if eqn.primitive == "pallas_call" and eqn.params["grid_mapping"].scratch_avals:
                notes[where] += (
                    ", or declare the axes of its grid that share no scratch memory 'parallel'"
                )
    return list(notes.values())


def _pin_map(pins: Pins, paths: Sequence[str]) -> PinMap:
    """Pins as a mapping; of another plan or table, the leaves that this function has too."""
    if pins is None:
        return {}
    if isinstance(pins, HasSpecs):
        specs = pins.specs
        shared: dict[str | re.Pattern[str], PartitionSpec | Only] = {
            path: spec for path, spec in specs.items() if path in set(paths)
        }
        if not shared:
            raise PathError(
                f"pins is a {type(pins).__name__} with leaves {', '.join(list(specs)[:3])}, ..., "
                f"none of which this "
                f"function has ({', '.join(list(paths)[:3])}, ...). Name the parameters alike, or "
                f"pass a mapping."
            )
        return shared
    if not isinstance(pins, Mapping):
        raise ArgumentError(
            f"pins is a {type(pins).__name__}; pass a mapping of leaf paths to PartitionSpecs."
        )
    given: Mapping[Any, Any] = pins
    for key, spec in given.items():
        if not isinstance(key, str | re.Pattern) or not isinstance(spec, PartitionSpec | Only):
            raise ArgumentError(
                f"pins[{key!r}] = {spec!r}; keys are leaf paths or re.compile(...), values "
                f"jax.sharding.PartitionSpec "
                f"or autoshard.Only."
            )
    return pins
