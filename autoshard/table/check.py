"""`check`: does a committed table still fit the code?

For CI of a training repo: no accelerator, no search. Each thing that may have changed is a finding
with a kind of its own. A finding that is fatal means that the table does not say what a trainer
would run; the others mean that its numbers are old while its specs still hold.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from autoshard.table.schema import Leaf
from autoshard.table.spec_entry import spec_from_entry, spec_text
from autoshard.table.spec_table import SpecTable
from autoshard.tracing.program import Value

Kind = Literal[
    "edited",
    "mesh",
    "axis types",
    "renamed",
    "optimizer",
    "added",
    "removed",
    "size",
    "dtype",
    "rules",
    "program",
    "jax",
]

WARNINGS = ("axis types", "program", "jax")
"""Kinds of findings under which the specs still hold."""

SHOWN = 3
"""Things of one kind that a finding lists, then it counts. Chosen by hand; the tests of messages
need the first two."""

_OTHER_LEAVES = ("renamed", "optimizer", "added", "removed")
_JIT_OPTIONS = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
_OPTIONS = ("example_kwargs", "carry", "pins", "user_constraints")
_REMEDY = (
    "Search again, or save what its rules give here: "
    "autoshard.apply(fn, args, mesh, table).table.save(path)."
)


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
    on = mesh_of(loaded) if mesh is None else mesh
    request, call = make_request(fn, example_args, on, jit=jit, **others)
    prepared = prepare(request, call)
    findings = [
        *_edited(loaded),
        *_mesh(loaded, request.mesh),
        *_leaves(loaded, prepared),
        *_program(loaded, prepared),
    ]
    # With other leaves the rules cannot hold either; one finding is enough.
    if not any(finding.kind in _OTHER_LEAVES for finding in findings):
        findings += _rules(loaded, prepared)
    return tuple(sorted(findings, key=lambda finding: not finding.fatal))


def mesh_of(table: SpecTable) -> Mesh:
    """The table's mesh over the devices of this process.

    Raises:
        MeshError: If they are too few.
    """
    needed, devices = math.prod(table.mesh.axes.values()), jax.devices()
    if len(devices) < needed:
        raise MeshError(
            f"the table is for mesh {table.mesh.axes}, {needed} devices, but this process has "
            f"{len(devices)}. On the command line pass --cpu-devices {needed}; in Python "
            f'jax.config.update("jax_num_cpu_devices", {needed}) first.'
        )
    types = [
        AxisType.Explicit if kind == "explicit" else AxisType.Auto for kind in table.mesh.types
    ]
    grid = np.array(devices[:needed]).reshape(tuple(table.mesh.axes.values()))
    return Mesh(grid, tuple(table.mesh.axes), axis_types=tuple(types))


def _edited(table: SpecTable) -> Iterator[Finding]:
    if table.edited:
        yield Finding(
            "edited",
            "specs, rules or mesh were edited after the search, so its numbers are of another "
            "plan. If the edit is meant, save the table anew: "
            "autoshard.apply(fn, args, mesh, table).table.save(path).",
        )


def _mesh(table: SpecTable, mesh: MeshInfo) -> Iterator[Finding]:
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


def _program(table: SpecTable, prepared: Prepared) -> Iterator[Finding]:
    written = table.versions.get("jax", "?")
    program = prepared.traced.program
    if written != jax.__version__:
        yield Finding(
            "jax",
            f"the table was written with jax {written}, this is {jax.__version__}: the same code "
            f"may trace to another program, so programs are not compared, and its numbers are of "
            f"that version.",
        )
    elif table.fingerprint != program.fingerprint:
        changes = _primitive_changes(table.evidence.primitives, primitives_of(program))
        yield Finding(
            "program",
            f"{program.name} computes something else than when the table was written ({changes}).",
        )


def _primitive_changes(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """`mul 3 -> 4, ...`: how often primitives occur."""
    changes = []
    for name in sorted({*before, *after}):
        old, new = before.get(name, 0), after.get(name, 0)
        if old != new:
            changes.append(f"{name} {old} -> {new}")
    if not changes or not before:
        return "the same operations, otherwise put together"
    return _some(changes, shown=6)


def _rules(table: SpecTable, prepared: Prepared) -> Iterator[Finding]:
    """What keeps the table from being applied, with the message that `apply` would give."""
    try:
        rebind_table(table, prepared)
    except (RuleError, SpecError, TableError) as error:
        # Axes that the mesh lacks are a finding of their own.
        if table.mesh.axes.keys() <= prepared.request.mesh.axes.keys():
            yield Finding("rules", " ".join(str(error).split()))


# Leaves -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Compared:
    """The argument leaves of a table beside those of a program.

    Attributes:
        table: Of the table, by path.
        values: Of the program, by path.
        groups: Their groups.
        gone: Paths that only the table has.
        new: Paths that only the program has.
    """

    table: Mapping[str, Leaf]
    values: Mapping[str, Value]
    groups: Mapping[str, str]
    gone: list[str]
    new: list[str]

    @property
    def only_optimizer(self) -> bool:
        """True if leaves came or went, but of the optimizer's state alone."""
        groups = {self.groups[path] for path in self.new}
        groups |= {self.table[path].group for path in self.gone}
        return groups == {"optimizer"}

    def in_both(self) -> Iterator[tuple[str, Leaf, Value]]:
        """(path, leaf of the table, value of the program)."""
        for path, value in self.values.items():
            if path in self.table:
                yield path, self.table[path], value


def _leaves(table: SpecTable, prepared: Prepared) -> Iterator[Finding]:
    program, groups = prepared.traced.program, prepared.problem.groups.of_input
    values = dict(zip(program.input_paths, program.body.inputs, strict=True))
    gone, new = leaf_changes(table, values)
    compared = _Compared(
        table=table.inputs,
        values=values,
        groups={path: group.value for path, group in zip(values, groups, strict=True)},
        gone=gone,
        new=new,
    )
    if compared.only_optimizer:
        changes = _listed(gone, new)
        yield Finding("optimizer", f"the optimizer's state changed: {changes}. {_REMEDY}")
    else:
        yield from _gone_and_new(compared)
    sizes = _without_state(compared, _size_changes(compared, prepared.request.mesh))
    if sizes:
        yield Finding("size", f"{_some(_folded_texts(sizes))}. {_REMEDY}")
    dtypes = _without_state(compared, _dtype_changes(compared))
    if dtypes:
        yield Finding("dtype", f"{_some(_folded_texts(dtypes))}. {_REMEDY}")


def _gone_and_new(compared: _Compared) -> Iterator[Finding]:
    renamed = _renamed(compared)
    if renamed:
        pairs = [f"{old} is gone, {now} has its shape" for old, now in renamed.items()]
        yield Finding("renamed", f"{_some(pairs)}. Use the old name, or search again.")
    new = [path for path in compared.new if path not in renamed.values()]
    if new:
        yield _added(new, compared)
    gone = [path for path in compared.gone if path not in renamed]
    if gone:
        yield _removed(gone, compared)


def _added(new: Sequence[str], compared: _Compared) -> Finding:
    layers = ""
    if not unlike(new, compared.table):
        layers = " (a layer more: they differ from known leaves in a number)"
    return Finding("added", f"{_some(_folded(new))} without a spec in the table{layers}. {_REMEDY}")


def _removed(gone: Sequence[str], compared: _Compared) -> Finding:
    layers = ""
    if not unlike(gone, compared.values):
        layers = " (a layer less: they differ from others in a number)"
    return Finding("removed", f"{_some(_folded(gone))} of the table are gone{layers}. {_REMEDY}")


def _renamed(compared: _Compared) -> dict[str, str]:
    """Leaves that are gone, each with the likest new one of equal shape and dtype.

    Leaves that differ from others in numbers alone are layers, not renamed.
    """
    values = compared.values
    new = unlike(compared.new, compared.table)
    renamed: dict[str, str] = {}
    for old in unlike(compared.gone, values):
        leaf = compared.table[old]
        free = [path for path in new if path not in renamed.values()]
        alike = [
            path
            for path in free
            if list(values[path].shape) == leaf.shape and values[path].dtype == leaf.dtype
        ]
        if alike:
            renamed[old] = _likest(alike, old)
    return renamed


def _likest(paths: Sequence[str], path: str) -> str:
    return max(paths, key=lambda other: difflib.SequenceMatcher(None, path, other).ratio())


def _size_changes(compared: _Compared, mesh: MeshInfo) -> dict[str, str]:
    changes = {}
    for path, leaf, value in compared.in_both():
        if tuple(leaf.shape) != value.shape:
            fits = _fits(path, leaf, value, mesh)
            changes[path] = f"{leaf.shape} in the table, {list(value.shape)} here; {fits}"
    return changes


def _fits(path: str, leaf: Leaf, value: Value, mesh: MeshInfo) -> str:
    """Whether the spec of a leaf divides a value of another shape, and where not."""
    try:
        canonical_spec(spec_from_entry(leaf.spec), value, mesh.axes, path)
    except SpecError as error:
        # Of the error only what does not divide: a finding has its own words for the rest.
        return " ".join(str(error).split()).partition(", but ")[2].partition(". ")[0]
    return f"{spec_text(leaf.spec)} still divides it"


def _dtype_changes(compared: _Compared) -> dict[str, str]:
    return {
        path: f"{leaf.dtype} in the table, {value.dtype} here"
        for path, leaf, value in compared.in_both()
        if leaf.dtype != value.dtype
    }


def _without_state(compared: _Compared, changes: dict[str, str]) -> dict[str, str]:
    """What changed, without the optimizer state that changed along with its parameters."""
    others = {path: text for path, text in changes.items() if compared.groups[path] != "optimizer"}
    return others or changes


# Texts --------------------------------------------------------------------------------------------


def _listed(gone: Sequence[str], new: Sequence[str]) -> str:
    parts = []
    if gone:
        parts.append(f"{_some(_folded(gone))} gone")
    if new:
        parts.append(f"{_some(_folded(new))} new")
    return ", ".join(parts)


def _folded(paths: Iterable[str]) -> list[str]:
    return list(fold(dict.fromkeys(paths, "")))


def _folded_texts(texts: Mapping[str, str]) -> list[str]:
    return [f"{path} is {text}" for path, (_, text) in fold(texts).items()]


def _some(texts: Sequence[str], shown: int = SHOWN) -> str:
    more = f" and {len(texts) - shown} more" if len(texts) > shown else ""
    return ", ".join(texts[:shown]) + more
