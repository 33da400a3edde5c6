"""A table on a program that may have changed: its specs where they still hold, else its rules'.

The same mesh and shapes give exactly the table's specs. Under other axis sizes, for a model of
another width or with more layers of the same kind, specs come from the rules, and what the user had
pinned stays pinned where it divides; the table's numbers are then stale. A logical axis is found by
the leaves that have it, so it may have another name here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from autoshard.axes.axis_classes import NO_AXIS
from autoshard.errors import SpecError, TableError
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.pins import canonical_spec
from autoshard.layout.prepare import Prepared
from autoshard.layout.problem import Problem
from autoshard.layout.spec import Spec
from autoshard.table.schema import Leaf
from autoshard.table.spec_entry import spec_from_entry
from autoshard.table.spec_table import SpecTable
from autoshard.tracing.program import Value

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, eq=False)
class BoundTable:
    """A table bound to a program.

    Attributes:
        layout: Rules and pins.
        stale: Why the table's numbers are not of this program on this mesh; empty if they are.
        notes: What a user should know.
    """

    layout: Layout
    stale: tuple[str, ...]
    notes: tuple[str, ...]


def rebind_table(table: SpecTable, prepared: Prepared) -> BoundTable:
    """Binds a table.

    Raises:
        TableError: If the mesh lacks an axis of the table, or the arguments are those of another
            function.
        RuleError: If a rule's logical axis does not exist here.
        SpecError: If a spec that the table pins against its rules does not fit any more.
    """
    gone, new = leaf_changes(table, prepared.traced.program.input_paths)
    _check_mesh(table, prepared)
    _check_arguments(table, prepared, gone, new)
    names = logical_axis_names(table, prepared)
    rules = tuple(_renamed(AxisRule.parse(text), names) for text in table.rules)
    stale = tuple(_stale(table, prepared, gone, new))
    pins, dropped = _pins(table, prepared, rules)
    # Pins of this call come before those of the table.
    problem = replace(prepared.problem, pins=pins | dict(prepared.problem.pins))
    layout = Layout(problem, rules, table.constraints == "anchors")
    return BoundTable(layout, stale, (*_notes(table, names, stale), *dropped))


def _check_mesh(table: SpecTable, prepared: Prepared) -> None:
    mesh = prepared.request.mesh
    lacking = [axis for axis in table.mesh.axes if axis not in mesh.axes]
    if lacking:
        raise TableError(
            f"the table is for mesh {table.mesh.axes}, this mesh is {dict(mesh.axes)}, without "
            f"{lacking[0]!r}. Name the axes alike, or search again."
        )


def _check_arguments(table: SpecTable, prepared: Prepared, gone: list[str], new: list[str]) -> None:
    program = prepared.traced.program
    strange_gone, strange_new = unlike(gone, program.input_paths), unlike(new, table.inputs)
    if strange_gone or strange_new or not set(table.inputs) & set(program.input_paths):
        raise TableError(
            f"the table is for {table.function!r} with other arguments than {program.name!r}: "
            f"{len(gone)} leaves are gone ({', '.join((strange_gone or gone)[:3])}), {len(new)} "
            f"are new ({', '.join((strange_new or new)[:3])}). Search again, or apply its rules "
            f"alone: apply(..., layout=[*table.rules])."
        )


def leaf_changes(table: SpecTable, paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """(argument leaves of the table that are gone, leaves that it does not have)."""
    here = dict.fromkeys(paths)
    gone = [path for path in table.inputs if path not in here]
    return gone, [path for path in here if path not in table.inputs]


def unlike(paths: Iterable[str], others: Iterable[str]) -> list[str]:
    """Those of `paths` that differ from every other path in more than numbers.

    Layers differ in numbers.
    """
    patterns = {_NUMBER.sub("*", other) for other in others}
    return [path for path in paths if _NUMBER.sub("*", path) not in patterns]


def logical_axis_names(table: SpecTable, prepared: Prepared) -> dict[str, str]:
    """What the logical axes of the table are called here, by vote of the leaves that have them."""
    logical_axes, program = prepared.problem.logical_axes, prepared.traced.program
    votes: dict[str, Counter[str]] = {}
    for path, value in zip(program.input_paths, program.body.inputs, strict=True):
        leaf = table.inputs.get(path)
        # The leaf may have another rank here, and a table of schema 1 knows no logical axes.
        if leaf is None or len(leaf.logical_axes) != len(value.shape):
            continue
        here = logical_axes.of_value[value.index]
        for name, logical_axis in zip(leaf.logical_axes, here, strict=True):
            if name is not None and logical_axis != NO_AXIS:
                votes.setdefault(name, Counter())[logical_axes.axes[logical_axis].name] += 1
    return {name: counts.most_common(1)[0][0] for name, counts in votes.items()}


def _renamed(rule: AxisRule, names: Mapping[str, str]) -> AxisRule:
    scope = rule.where
    if scope.is_condition:
        scope = replace(scope, logical_axis=names.get(scope.logical_axis, scope.logical_axis))
    return replace(rule, logical_axis=names.get(rule.logical_axis, rule.logical_axis), where=scope)


# What is stale ------------------------------------------------------------------------------------


def _stale(
    table: SpecTable, prepared: Prepared, gone: Sequence[str], new: Sequence[str]
) -> Iterator[str]:
    """Why the table's numbers are not of this program on this mesh."""
    program, mesh = prepared.traced.program, prepared.request.mesh
    if table.edited:
        yield "specs or rules were edited after the search"
    if table.mesh.axes != dict(mesh.axes):
        yield (
            f"they are of mesh {table.mesh.axes}, this mesh is {dict(mesh.axes)}; specs come from "
            f"the rules"
        )
    if gone or new:
        yield f"{len(gone)} leaves are gone and {len(new)} are new; specs come from the rules"
    elif table.fingerprint != program.fingerprint and _same_jax(table):
        yield "the program changed since the table was written"


def _same_jax(table: SpecTable) -> bool:
    """True if fingerprints can be compared: another jax may trace the same code differently."""
    return table.versions.get("jax") == jax.__version__


def _notes(table: SpecTable, names: Mapping[str, str], stale: Iterable[str]) -> Iterator[str]:
    for reason in stale:
        yield f"the table's numbers are stale: {reason}"
    for old, now in names.items():
        if old != now:
            yield f"logical axis {old} of the table is called {now} here"
    if not _same_jax(table):
        written = table.versions.get("jax")
        yield f"the table was written with jax {written}, this is {jax.__version__}"


# Pins ---------------------------------------------------------------------------------------------


def _pins(
    table: SpecTable, prepared: Prepared, rules: tuple[AxisRule, ...]
) -> tuple[dict[int, Spec], list[str]]:
    """The specs that the table's rules alone do not give on its own mesh, by `Value.index`.

    And, as notes, what of it had to be dropped.
    """
    here, there = dict(prepared.request.mesh.axes), table.mesh.axes
    problem: Problem = replace(prepared.problem, mesh_axes=dict(there), pins={})
    by_rules = Layout(problem, tuple(rule for rule in rules if rule.mesh_axis in there))
    pins: dict[int, Spec] = {}
    dropped = []
    for path, value, leaf in _leaves_in_both(table, prepared):
        spec = spec_from_entry(leaf.spec)
        if canonical_spec(spec, value, there, path) == by_rules.fit(value).spec:
            continue
        try:
            pins[value.index] = canonical_spec(spec, value, here, path)
        except SpecError:
            if there == here:
                raise
            dropped.append(f"{path} was fixed as {spec}, which does not divide here: dropped")
    return pins, dropped


def _leaves_in_both(table: SpecTable, prepared: Prepared) -> Iterator[tuple[str, Value, Leaf]]:
    """(path, value, leaf) of each argument and output leaf of equal shape in table and program."""
    program = prepared.traced.program
    for paths, values, leaves in (
        (program.input_paths, program.body.inputs, table.inputs),
        (program.output_paths, program.body.outputs, table.outputs),
    ):
        for path, value in zip(paths, values, strict=True):
            leaf = leaves.get(path)
            if leaf is not None and tuple(leaf.shape) == value.shape:
                yield path, value, leaf
