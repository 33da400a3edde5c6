"""Pins: what the user fixes, for argument leaves by path or pattern, and for values constrained in
the code.

A `PartitionSpec` fixes a leaf's spec (`P()`: never shard it); an `Only` says over which mesh axes
its dimensions may be split, and leaves the rest to the search.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import PartitionSpec

from autoshard.errors import PathError, SpecError
from autoshard.jax_internals.constraint_eqns import user_spec
from autoshard.layout.problem import Problem
from autoshard.layout.spec import Disallowed, Spec
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

    def disallowed(self, value: Value, mesh_axes: Mapping[str, int], path: str) -> Disallowed:
        """By dimension of a value, the mesh axes that may not split it.

        Raises:
            SpecError: If it names an unknown mesh axis, or has too many entries.
        """
        what = f"{path} is {value.dtype}{list(value.shape)}"
        if len(self.entries) > len(value.shape):
            raise SpecError(
                f"{what}, but {self} has {len(self.entries)} entries for {len(value.shape)} "
                f"dimensions. "
                f"Use at most {len(value.shape)} entries."
            )
        result: list[tuple[str, ...]] = [()] * len(value.shape)
        for dim, entry in enumerate(self.entries):
            if entry is PartitionSpec.UNCONSTRAINED:
                continue
            allowed = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            for axis in allowed:
                _check_axis(axis, mesh_axes, f"{what}, but {self}")
            result[dim] = tuple(sorted(set(mesh_axes) - set(allowed)))
        return tuple(result)


PinMap = Mapping[str | re.Pattern[str], PartitionSpec | Only]


@runtime_checkable
class HasSpecs(Protocol):
    """A plan or a spec table, whose specs are pins for a function with leaves of the same paths."""

    @property
    def specs(self) -> Mapping[str, PartitionSpec]:
        """PartitionSpec of each argument leaf, by leaf path."""


def canonical_spec(
    spec: PartitionSpec, value: Value, mesh_axes: Mapping[str, int], path: str
) -> Spec:
    """The canonical spec of a value: full rank, mesh axes with one device dropped, UNCONSTRAINED as
    not split.

    Raises:
        SpecError: If it names an unknown mesh axis, one twice, too many dimensions, or does not
            divide a dimension.
    """
    what = f"{path} is {value.dtype}{list(value.shape)}"
    if len(spec) > len(value.shape):
        raise SpecError(
            f"{what}, but {spec} has {len(spec)} entries for {len(value.shape)} dimensions. "
            f"Use at most {len(value.shape)} entries."
        )
    result: list[tuple[str, ...]] = []
    used: set[str] = set()
    for dim, entry in enumerate(spec):
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            result.append(())
            continue
        axes = (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in axes:
            _check_axis(axis, mesh_axes, f"{what}, but {spec}")
            if axis in used:
                raise SpecError(
                    f"{what}, but {spec} uses mesh axis {axis!r} twice. Use each mesh axis once."
                )
            used.add(axis)
        pieces = math.prod(mesh_axes[a] for a in axes)
        size = value.shape[dim]
        if size % pieces:
            over = (
                f"mesh axis {axes[0]!r} (size {pieces})"
                if len(axes) == 1
                else f"mesh axes {axes} (size {pieces})"
            )
            padded = -(-size // pieces) * pieces
            entries = list(spec)
            entries[dim] = None
            raise SpecError(
                f"{what}, but {spec} splits dimension {dim} (size {size}) over {over}, which does "
                f"not divide it.\n"
                f"Pad dimension {dim} to {padded}, or use {_trim(entries)}."
            )
        result.append(tuple(a for a in axes if mesh_axes[a] > 1))
    return tuple(result + [()] * (len(value.shape) - len(result)))


def _check_axis(axis: object, mesh_axes: Mapping[str, int], said: str) -> None:
    if axis not in mesh_axes:
        near = difflib.get_close_matches(str(axis), list(mesh_axes), n=1)
        raise SpecError(
            f"{said} names mesh axis {axis!r}; the mesh has {dict(mesh_axes)}. "
            f"Use {near[0] if near else ' or '.join(map(repr, mesh_axes))}."
        )


def _trim(entries: list[object]) -> PartitionSpec:
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


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
        kept = {i: spec for i, spec in problem.pins.items() if i not in self.disallowed}
        free = {
            i: disallowed for i, disallowed in problem.disallowed.items() if i not in self.specs
        }
        return replace(problem, pins={**kept, **self.specs}, disallowed={**free, **self.disallowed})


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
    found = Pinned({}, {})
    leaves = dict(zip(program.input_paths, program.body.inputs, strict=True))
    ordered = sorted(pins.items(), key=lambda item: isinstance(item[0], str))
    for where, pin in ordered:
        if isinstance(where, str):
            if where not in leaves:
                near = difflib.get_close_matches(where, leaves, n=3, cutoff=0.4) or list(leaves)[:5]
                raise PathError(
                    f"pins names {where!r}, which is no argument leaf. Nearest: {', '.join(near)}."
                )
            matched = [where]
        else:
            matched = [path for path in leaves if where.search(path)]
            if not matched:
                raise PathError(
                    f"pins has the pattern {where.pattern!r}, which matches none of the "
                    f"{len(leaves)} argument leaves "
                    f"(the first are {', '.join(list(leaves)[:5])})."
                )
        for path in matched:
            index = leaves[path].index
            if isinstance(pin, Only):
                found.disallowed[index] = pin.disallowed(leaves[path], mesh_axes, path)
                found.specs.pop(index, None)
            else:
                found.specs[index] = canonical_spec(pin, leaves[path], mesh_axes, path)
                found.disallowed.pop(index, None)
    for source, target in carry:
        leaf, output = program.body.inputs[source].index, program.body.outputs[target].index
        if leaf in found.specs:
            found.specs[output] = found.specs[leaf]
        if leaf in found.disallowed:
            found.disallowed[output] = found.disallowed[leaf]
    return found


def user_constraints(program: Program, mesh: jax.sharding.Mesh) -> dict[int, Spec]:
    """Pins of the values that the function itself constrains with `with_sharding_constraint` on
    this very mesh.

    Constraints on another mesh over the same devices stay in the program, but say nothing in the
    words of this one.
    """
    mesh_axes = {str(name): int(size) for name, size in mesh.shape.items()}
    found: dict[int, Spec] = {}
    for eqn in program.eqns:
        if eqn.primitive == "sharding_constraint":
            spec = user_spec(eqn.origin, mesh)
            (value,) = eqn.outputs
            if spec is not None and PartitionSpec.UNCONSTRAINED not in tuple(spec):
                try:
                    found[value.index] = canonical_spec(
                        spec, value, mesh_axes, "a constraint in the function"
                    )
                except (
                    SpecError
                ):  # an uneven constraint is the partitioner's to judge, as without autoshard
                    continue
    return found
