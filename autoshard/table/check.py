"""`check`: does a committed table still fit the code? For CI of a training repo: no accelerator, no
search.

Each thing that may have changed is a finding with a kind of its own. A finding that is fatal means
that the table does not say what a trainer would run; the others mean that its numbers are old while
its specs still hold.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from autoshard.errors import MeshError, RuleError, SpecError, TableError
from autoshard.layout.mesh import MeshInfo
from autoshard.layout.pins import canonical_spec
from autoshard.layout.prepare import JitOptions, Prepared, make_request, prepare
from autoshard.table.from_plan import primitives_of
from autoshard.table.leaf_patterns import fold
from autoshard.table.rebind import leaf_changes, rebind_table, unlike
from autoshard.table.spec_table import Leaf, SpecTable, spec_from_entry, spec_text
from autoshard.tracing.program import Value

Kind = Literal[
    "edited", "mesh", "axis types", "renamed", "optimizer", "added", "removed", "size", "dtype", "rules", "program",
    "jax",
]  # fmt: skip
WARNINGS = ("axis types", "program", "jax")
"""Kinds of findings under which the specs still hold."""

_SHOWN = 3
_REMEDY = "Search again, or save what its rules give here: autoshard.apply(fn, args, mesh, table).table.save(path)."


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it was.

    Attributes:
        kind: What changed.
        text: What exactly, and what to do.
    """

    kind: Kind
    text: str

    @property
    def fatal(self) -> bool:
        """False for a warning."""
        return self.kind not in WARNINGS

    def __str__(self) -> str:
        return f"{'error' if self.fatal else 'warning'}: {self.kind}: {self.text}"


def check(
    table: SpecTable | str | Path,
    fn: Callable[..., Any],
    example_args: Sequence[Any] | Callable[[], Sequence[Any]],
    mesh: Mesh | str | None = None,
    **options: Any,
) -> tuple[Finding, ...]:
    """What a table says that the code does not, or not any more.

    Args:
        table: The table or its path.
        fn: As for `optimize`, and so are the arguments of the same names.
        example_args: Positional arguments.
        mesh: The mesh; by default the table's own, over as many devices as there are here.
        options: `example_kwargs`, `static_argnums`, `static_argnames`, `donate_argnums`,
            `donate_argnames`, `carry`, `pins`, `user_constraints`; arguments of `optimize` that say
            how to search are of no interest here.

    Returns:
        Findings, errors first; empty if all is as it was.

    Raises:
        TableError: If the table cannot be read.
        AutoshardError: For arguments that are not of the documented form.
    """
    loaded = table if isinstance(table, SpecTable) else SpecTable.load(table)
    jit = JitOptions(**{name: options[name] for name in _JIT_OPTIONS if name in options})
    others: dict[str, Any] = {name: options[name] for name in _OPTIONS if name in options}
    request, call = make_request(
        fn, example_args, mesh_of(loaded) if mesh is None else mesh, jit=jit, **others
    )
    prepared = prepare(request, call)
    found = [
        *_edited(loaded),
        *_mesh(loaded, request.mesh),
        *_leaves(loaded, prepared),
        *_program(loaded, prepared),
    ]
    if not any(f.kind in ("renamed", "optimizer", "added", "removed") for f in found):
        found += _rules(loaded, prepared)
    return tuple(sorted(found, key=lambda f: not f.fatal))


_JIT_OPTIONS = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
_OPTIONS = ("example_kwargs", "carry", "pins", "user_constraints")


def mesh_of(table: SpecTable) -> Mesh:
    """The table's mesh over the devices of this process.

    Raises:
        MeshError: If they are too few.
    """
    need, devices = math.prod(table.mesh.axes.values()), jax.devices()
    if len(devices) < need:
        raise MeshError(
            f"the table is for mesh {table.mesh.axes}, {need} devices, but this process has "
            f"{len(devices)}. On the "
            f"command line pass --cpu-devices {need}; in Python "
            f'jax.config.update("jax_num_cpu_devices", {need}) first.'
        )
    types = tuple(
        AxisType.Explicit if kind == "explicit" else AxisType.Auto for kind in table.mesh.types
    )
    grid = np.array(devices[:need]).reshape(tuple(table.mesh.axes.values()))
    return Mesh(grid, tuple(table.mesh.axes), axis_types=types)


def _edited(table: SpecTable) -> Iterable[Finding]:
    if table.edited:
        yield Finding(
            "edited",
            "specs, rules or mesh were edited after the search, so its numbers are of another "
            "plan. If the edit is "
            "meant, save the table anew: autoshard.apply(fn, args, mesh, table).table.save(path).",
        )


def _mesh(table: SpecTable, mesh: MeshInfo) -> Iterable[Finding]:
    if table.mesh.axes != dict(mesh.axes):
        yield Finding(
            "mesh",
            f"the table is for mesh {table.mesh.axes}, this mesh is {dict(mesh.axes)}. {_REMEDY}",
        )
    elif tuple(table.mesh.types) != mesh.axis_types:
        yield Finding(
            "axis types",
            f"the table's mesh axes are {table.mesh.types}, here {list(mesh.axis_types)}.",
        )


def _leaves(table: SpecTable, prepared: Prepared) -> Iterable[Finding]:
    program = prepared.traced.program
    values = dict(zip(program.input_paths, program.body.inputs, strict=True))
    groups = dict(
        zip(program.input_paths, (g.value for g in prepared.problem.groups.of_input), strict=True)
    )
    gone, new = leaf_changes(table, values)
    optimizer_only = [groups[p] for p in new] + [table.inputs[p].group for p in gone]
    if (gone or new) and set(optimizer_only) == {"optimizer"}:
        yield Finding(
            "optimizer", f"the optimizer's state changed: {_listed(gone, new)}. {_REMEDY}"
        )
    else:
        renamed = _renamed(unlike(gone, values), unlike(new, table.inputs), table.inputs, values)
        gone = [p for p in gone if p not in renamed]
        new = [p for p in new if p not in renamed.values()]
        if renamed:
            pairs = [f"{old} is gone, {now} has its shape" for old, now in renamed.items()]
            yield Finding("renamed", f"{_some(pairs)}. Use the old name, or search again.")
        if new:
            layers = (
                ""
                if unlike(new, table.inputs)
                else " (a layer more: they differ from known leaves in a number)"
            )
            yield Finding(
                "added", f"{_some(_folded(new))} without a spec in the table{layers}. {_REMEDY}"
            )
        if gone:
            layers = (
                ""
                if unlike(gone, values)
                else " (a layer less: they differ from others in a number)"
            )
            yield Finding(
                "removed", f"{_some(_folded(gone))} of the table are gone{layers}. {_REMEDY}"
            )
    both = {path: (table.inputs[path], values[path]) for path in values if path in table.inputs}
    state = {path for path, group in groups.items() if group == "optimizer"}
    sizes = _without(state, _sizes(both, prepared))
    if sizes:
        yield Finding("size", f"{_some(_said(sizes))}. {_REMEDY}")
    types = {
        p: f"{leaf.dtype} in the table, {v.dtype} here"
        for p, (leaf, v) in both.items()
        if leaf.dtype != v.dtype
    }
    types = _without(state, types)
    if types:
        yield Finding("dtype", f"{_some(_said(types))}. {_REMEDY}")


def _without(state: set[str], changed: dict[str, str]) -> dict[str, str]:
    """What changed, without the optimizer state that changed along with its parameters."""
    return {path: text for path, text in changed.items() if path not in state} or changed


def _sizes(both: Mapping[str, tuple[Leaf, Value]], prepared: Prepared) -> dict[str, str]:
    changed = {}
    for path, (leaf, value) in both.items():
        if tuple(leaf.shape) == value.shape:
            continue
        try:
            canonical_spec(spec_from_entry(leaf.spec), value, prepared.request.mesh.axes, path)
            fits = f"{spec_text(leaf.spec)} still divides it"
        except SpecError as error:
            fits = " ".join(str(error).split()).partition(", but ")[2].partition(". ")[0]
        changed[path] = f"{leaf.shape} in the table, {list(value.shape)} here; {fits}"
    return changed


def _program(table: SpecTable, prepared: Prepared) -> Iterable[Finding]:
    written = table.versions.get("jax", "?")
    program = prepared.traced.program
    if written != jax.__version__:
        yield Finding(
            "jax", f"the table was written with jax {written}, this is {jax.__version__}: the same code may trace to "
            f"another program, so programs are not compared, and its numbers are of that version."
        )  # fmt: skip
    elif table.fingerprint != program.fingerprint:
        before, after = table.evidence.primitives, primitives_of(program)
        counts = [
            f"{name} {before.get(name, 0)} -> {after.get(name, 0)}"
            for name in sorted({*before, *after})
            if before.get(name, 0) != after.get(name, 0)
        ]
        what = (
            _some(counts, 6) if counts and before else "the same operations, otherwise put together"
        )
        yield Finding(
            "program",
            f"{program.name} computes something else than when the table was written ({what}).",
        )


def _rules(table: SpecTable, prepared: Prepared) -> Iterable[Finding]:
    """What keeps the table from being applied, with the message that `apply` would give."""
    try:
        rebind_table(table, prepared)
    except (RuleError, SpecError, TableError) as error:
        if table.mesh.axes.keys() <= prepared.request.mesh.axes.keys():
            yield Finding("rules", " ".join(str(error).split()))


def _renamed(
    gone: Sequence[str], new: Sequence[str], table: Mapping[str, Leaf], values: Mapping[str, Value]
) -> dict[str, str]:
    """Leaves that are gone, each with the likest new one of equal shape and dtype."""
    pairs: dict[str, str] = {}
    for old in gone:
        leaf = table[old]
        alike = [
            p
            for p in new
            if p not in pairs.values()
            and (list(values[p].shape), values[p].dtype) == (leaf.shape, leaf.dtype)
        ]
        if alike:
            pairs[old] = max(alike, key=lambda p: difflib.SequenceMatcher(None, old, p).ratio())
    return pairs


def _listed(gone: Sequence[str], new: Sequence[str]) -> str:
    parts = [
        f"{_some(_folded(paths))} {what}" for paths, what in ((gone, "gone"), (new, "new")) if paths
    ]
    return ", ".join(parts)


def _folded(paths: Iterable[str]) -> list[str]:
    return list(fold(dict.fromkeys(paths, "")))


def _said(texts: Mapping[str, str]) -> list[str]:
    return [f"{path} is {text}" for path, (_, text) in fold(texts).items()]


def _some(texts: Sequence[str], shown: int = _SHOWN) -> str:
    more = f" and {len(texts) - shown} more" if len(texts) > shown else ""
    return ", ".join(texts[:shown]) + more
