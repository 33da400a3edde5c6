"""Pins: specs that the user fixes, for argument leaves by path or pattern, and for values constrained in the code."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import PartitionSpec

from autoshard.compat import user_spec
from autoshard.errors import PathError, SpecError
from autoshard.layout import Spec
from autoshard.program import Program, Value

PinMap = Mapping[str | re.Pattern[str], PartitionSpec]


def canonical_spec(spec: PartitionSpec, value: Value, mesh_axes: Mapping[str, int], path: str) -> Spec:
    """The canonical spec of a value: full rank, mesh axes with one device dropped, UNCONSTRAINED as not split.

    Raises:
        SpecError: If it names an unknown mesh axis, one twice, too many dimensions, or does not divide a dimension.
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
            if axis not in mesh_axes:
                near = difflib.get_close_matches(str(axis), list(mesh_axes), n=1)
                raise SpecError(
                    f"{what}, but {spec} names mesh axis {axis!r}; the mesh has {dict(mesh_axes)}. "
                    f"Use {near[0] if near else ' or '.join(map(repr, mesh_axes))}."
                )
            if axis in used:
                raise SpecError(f"{what}, but {spec} uses mesh axis {axis!r} twice. Use each mesh axis once.")
            used.add(axis)
        pieces = math.prod(mesh_axes[a] for a in axes)
        size = value.shape[dim]
        if size % pieces:
            over = f"mesh axis {axes[0]!r} (size {pieces})" if len(axes) == 1 else f"mesh axes {axes} (size {pieces})"
            padded = -(-size // pieces) * pieces
            entries = list(spec)
            entries[dim] = None
            raise SpecError(
                f"{what}, but {spec} splits dimension {dim} (size {size}) over {over}, which does not divide it.\n"
                f"Pad dimension {dim} to {padded}, or use {_trim(entries)}."
            )
        result.append(tuple(a for a in axes if mesh_axes[a] > 1))
    return tuple(result + [()] * (len(value.shape) - len(result)))


def _trim(entries: list[object]) -> PartitionSpec:
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def resolve_pins(
    pins: PinMap, program: Program, mesh_axes: Mapping[str, int], carry: Sequence[tuple[int, int]]
) -> dict[int, Spec]:
    """Pins by `Value.index`; the output that a pinned argument is carried in gets the same spec.

    Args:
        pins: Leaf path, or compiled pattern (searched in the path), to spec. Exact paths win over patterns.
        program: The program.
        mesh_axes: The mesh.
        carry: Pairs (input leaf, output leaf).

    Raises:
        PathError: If a path or pattern matches no leaf.
        SpecError: If a spec does not fit a leaf.
    """
    found: dict[int, Spec] = {}
    leaves = dict(zip(program.input_paths, program.body.inputs, strict=True))
    ordered = sorted(pins.items(), key=lambda item: isinstance(item[0], str))
    for where, spec in ordered:
        if isinstance(where, str):
            if where not in leaves:
                near = difflib.get_close_matches(where, leaves, n=3, cutoff=0.4) or list(leaves)[:5]
                raise PathError(f"pins names {where!r}, which is no argument leaf. Nearest: {', '.join(near)}.")
            matched = [where]
        else:
            matched = [path for path in leaves if where.search(path)]
            if not matched:
                raise PathError(
                    f"pins has the pattern {where.pattern!r}, which matches none of the {len(leaves)} argument leaves "
                    f"(the first are {', '.join(list(leaves)[:5])})."
                )
        for path in matched:
            found[leaves[path].index] = canonical_spec(spec, leaves[path], mesh_axes, path)
    for source, target in carry:
        pinned = found.get(program.body.inputs[source].index)
        if pinned is not None:
            found[program.body.outputs[target].index] = pinned
    return found


def user_constraints(program: Program, mesh: jax.sharding.Mesh) -> dict[int, Spec]:
    """Pins of the values that the function itself constrains with `with_sharding_constraint` on this very mesh.

    Constraints on another mesh over the same devices stay in the program, but say nothing in the words of this one.
    """
    mesh_axes = {str(name): int(size) for name, size in mesh.shape.items()}
    found: dict[int, Spec] = {}
    for eqn in program.eqns:
        if eqn.primitive == "sharding_constraint":
            spec = user_spec(eqn.origin, mesh)
            (value,) = eqn.outputs
            if spec is not None and PartitionSpec.UNCONSTRAINED not in tuple(spec):
                try:
                    found[value.index] = canonical_spec(spec, value, mesh_axes, "a constraint in the function")
                except SpecError:  # an uneven constraint is the partitioner's to judge, as without autoshard
                    continue
    return found
