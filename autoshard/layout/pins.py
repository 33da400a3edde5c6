"""Pins: what the user fixes of argument leaves, by path or pattern, and constrains in the code.

A `PartitionSpec` fixes a leaf's spec (`P()`: never shard it); an `Only` says over which mesh axes
its dimensions may be split, and leaves the rest to the search.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import PartitionSpec

from autoshard.arguments import check_kind
from autoshard.errors import ArgumentError, PathError, SpecError
from autoshard.jax_internals.constraint_eqns import user_spec
from autoshard.layout.problem import Problem
from autoshard.layout.spec import Disallowed, Spec, trimmed
from autoshard.tracing.program import Program, Value


class Only:
    """A pin that says over which mesh axes each dimension may be split; what is split is searched.

    An entry is a mesh axis, several, `None` for a dimension that is never split, or
    `PartitionSpec.UNCONSTRAINED` for one that may be split over any; dimensions after the last
    entry may be split over any, too.

    >>> Only(None, "data")
    Only(None, 'data')
    """

    def __init__(self, *entries: str | tuple[str, ...] | Any | None) -> None:
        """What may split each dimension."""
        self.entries = entries

    def __repr__(self) -> str:
        return f"Only({', '.join(map(repr, self.entries))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Only) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash(self.entries)


PinMap = Mapping[str | re.Pattern[str], PartitionSpec | Only]


def check_pin_map(pins: Any) -> PinMap:
    """The pins, refused where they are no mapping of leaf paths or patterns to specs of mesh axes.

    Raises:
        ArgumentError: Naming the pin.
    """
    check_kind("pins", pins, Mapping, "a mapping of leaf paths to PartitionSpecs")
    for key, pin in pins.items():
        if not isinstance(key, str | re.Pattern) or not isinstance(pin, PartitionSpec | Only):
            raise ArgumentError(
                f"pins[{key!r}] = {pin!r}; keys are leaf paths or re.compile(...), values "
                f"jax.sharding.PartitionSpec or autoshard.Only."
            )
        for entry in pin.entries if isinstance(pin, Only) else pin:
            several = entry if isinstance(entry, tuple) else (entry,)
            free = entry is None or entry is PartitionSpec.UNCONSTRAINED
            if not free and not all(isinstance(axis, str) for axis in several):
                raise SpecError(
                    f"pins[{key!r}] = {pin!r}: {entry!r} is no mesh axis; each entry is a name, "
                    f"several of them, None or UNCONSTRAINED."
                )
    checked: PinMap = pins
    return checked


def disallowed_axes(pin: Only, value: Value, mesh_axes: Mapping[str, int], path: str) -> Disallowed:
    """By dimension of a value, the mesh axes that may not split it.

    Raises:
        SpecError: If it names an unknown mesh axis, or has too many entries.
    """
    subject = _subject(pin, value, path)
    _check_rank(len(pin.entries), value, subject)
    disallowed: list[tuple[str, ...]] = [()] * len(value.shape)
    for dim, entry in enumerate(pin.entries):
        if entry is PartitionSpec.UNCONSTRAINED:
            continue
        allowed = _axes_of(entry)
        for axis in allowed:
            _check_axis(axis, mesh_axes, subject)
        disallowed[dim] = tuple(sorted(set(mesh_axes) - set(allowed)))
    return tuple(disallowed)


@runtime_checkable
class HasSpecs(Protocol):
    """A plan or a spec table, whose specs are pins for a function with leaves of the same paths."""

    @property
    def specs(self) -> Mapping[str, PartitionSpec]:
        """PartitionSpec of each argument leaf, by leaf path."""


def canonical_spec(
    spec: PartitionSpec, value: Value, mesh_axes: Mapping[str, int], path: str
) -> Spec:
    """The canonical spec of a value.

    It has full rank; mesh axes with one device are dropped, UNCONSTRAINED is not split.

    Raises:
        SpecError: If it names an unknown mesh axis, one twice, too many dimensions, or does not
            divide a dimension.
    """
    subject = _subject(spec, value, path)
    _check_rank(len(spec), value, subject)
    canonical: list[tuple[str, ...]] = [()] * len(value.shape)
    used: set[str] = set()
    for dim, entry in enumerate(spec):
        axes = () if entry is PartitionSpec.UNCONSTRAINED else _axes_of(entry)
        for axis in axes:
            _check_axis(axis, mesh_axes, subject)
            if axis in used:
                raise SpecError(
                    f"{subject} uses mesh axis {axis!r} twice. Use each mesh axis once."
                )
            used.add(axis)
        shards = math.prod(mesh_axes[axis] for axis in axes)
        if value.shape[dim] % shards:
            raise SpecError(f"{subject} {_uneven(spec, dim, value.shape[dim], axes, shards)}")
        canonical[dim] = tuple(axis for axis in axes if mesh_axes[axis] > 1)
    return tuple(canonical)


def _axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _subject(pin: object, value: Value, path: str) -> str:
    """How a message about a pin begins."""
    return f"{path} is {value.dtype}{list(value.shape)}, but {pin}"


def _check_rank(entries: int, value: Value, subject: str) -> None:
    rank = len(value.shape)
    if entries > rank:
        raise SpecError(
            f"{subject} has {entries} entries for {rank} dimensions. Use at most {rank} entries."
        )


def _check_axis(axis: object, mesh_axes: Mapping[str, int], subject: str) -> None:
    if axis not in mesh_axes:
        near = difflib.get_close_matches(str(axis), list(mesh_axes), n=1)
        raise SpecError(
            f"{subject} names mesh axis {axis!r}; the mesh has {dict(mesh_axes)}. "
            f"Use {near[0] if near else ' or '.join(map(repr, mesh_axes))}."
        )


def _uneven(spec: PartitionSpec, dim: int, size: int, axes: tuple[str, ...], shards: int) -> str:
    """What is wrong where mesh axes do not divide a dimension, and two ways to mend it."""
    over = f"mesh axis {axes[0]!r}" if len(axes) == 1 else f"mesh axes {axes}"
    padded = -(-size // shards) * shards
    without = [None if d == dim else entry for d, entry in enumerate(spec)]
    return (
        f"splits dimension {dim} (size {size}) over {over} (size {shards}), which does not divide "
        f"it.\nPad dimension {dim} to {padded}, or use {trimmed(without)}."
    )


@dataclass(frozen=True, slots=True)
class Pinned:
    """Pins by `Value.index`.

    Attributes:
        specs: Of leaves whose spec is fixed.
        disallowed: Of leaves whose dimensions are kept from mesh axes.
    """

    specs: dict[int, Spec]
    disallowed: dict[int, Disallowed]

    def over(self, problem: Problem) -> Problem:
        """A problem with these pins, which come before those that it has."""
        pins = {i: spec for i, spec in problem.pins.items() if i not in self.disallowed}
        disallowed = {i: axes for i, axes in problem.disallowed.items() if i not in self.specs}
        return replace(
            problem, pins={**pins, **self.specs}, disallowed={**disallowed, **self.disallowed}
        )


def resolve_pins(
    pins: PinMap, program: Program, mesh_axes: Mapping[str, int], carry: Sequence[tuple[int, int]]
) -> Pinned:
    """Pins by `Value.index`; the output that a pinned argument is carried in gets the same one.

    Args:
        pins: Leaf path, or compiled pattern (searched in the path), to spec or `Only`. Exact paths
            win over patterns.
        program: The program.
        mesh_axes: The mesh.
        carry: Pairs (input leaf, output leaf).

    Raises:
        PathError: If a path or pattern matches no leaf.
        SpecError: If a spec does not fit a leaf.
    """
    leaves = dict(zip(program.input_paths, program.body.inputs, strict=True))
    specs: dict[int, Spec] = {}
    disallowed: dict[int, Disallowed] = {}
    # Patterns first: an exact path that comes later replaces what a pattern said of its leaf.
    for where, pin in sorted(pins.items(), key=lambda item: isinstance(item[0], str)):
        for path in _matching(where, program.input_paths):
            leaf = leaves[path]
            if isinstance(pin, Only):
                disallowed[leaf.index] = disallowed_axes(pin, leaf, mesh_axes, path)
                specs.pop(leaf.index, None)
            else:
                specs[leaf.index] = canonical_spec(pin, leaf, mesh_axes, path)
                disallowed.pop(leaf.index, None)

    for source, target in carry:
        leaf, output = program.body.inputs[source], program.body.outputs[target]
        if leaf.index in specs:
            specs[output.index] = specs[leaf.index]
        if leaf.index in disallowed:
            disallowed[output.index] = disallowed[leaf.index]
    return Pinned(specs, disallowed)


def _matching(where: str | re.Pattern[str], paths: Sequence[str]) -> Sequence[str]:
    """The leaf paths that a key of `pins` names, at least one."""
    if isinstance(where, str):
        if where in paths:
            return [where]
        near = difflib.get_close_matches(where, paths, n=3, cutoff=0.4) or paths[:5]
        raise PathError(
            f"pins names {where!r}, which is no argument leaf. Nearest: {', '.join(near)}."
        )
    matching = [path for path in paths if where.search(path)]
    if not matching:
        raise PathError(
            f"pins has the pattern {where.pattern!r}, which matches none of the {len(paths)} "
            f"argument leaves (the first are {', '.join(paths[:5])})."
        )
    return matching


def user_constraints(program: Program, mesh: jax.sharding.Mesh) -> dict[int, Spec]:
    """Pins of the values that the function itself constrains on this very mesh.

    Constraints on another mesh over the same devices stay in the program, but say nothing about
    the axes of this one.
    """
    mesh_axes = {str(name): int(size) for name, size in mesh.shape.items()}
    specs: dict[int, Spec] = {}
    for eqn in program.eqns:
        if eqn.primitive != "sharding_constraint":
            continue
        spec = user_spec(eqn.origin, mesh)
        if spec is None or PartitionSpec.UNCONSTRAINED in tuple(spec):
            continue
        (value,) = eqn.outputs
        # An uneven constraint is the partitioner's to judge, as without autoshard.
        with suppress(SpecError):
            specs[value.index] = canonical_spec(
                spec, value, mesh_axes, "a constraint in the function"
            )
    return specs
