"""A table on a program that may have changed: the specs it states where they still hold, else those
its rules give.

The same mesh and shapes give exactly the table's specs. Under other axis sizes, for a model of
another width or with more layers of the same kind, specs come from the rules, and what the person
had fixed stays fixed where it divides; the table's numbers are then stale. A logical axis is found by the
leaves that have it, so a logical axis may be called otherwise here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
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
from autoshard.table.spec_table import Leaf, SpecTable, spec_from_entry
from autoshard.tracing.program import Value

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, eq=False)
class Derived:
    """A table bound to a program.

    Attributes:
        layout: Rules and pins.
        stale: Why the table's numbers are not of this program on this mesh; empty if they are.
        notes: What a person should know.
    """

    layout: Layout
    stale: tuple[str, ...]
    notes: tuple[str, ...]


def rebind_table(table: SpecTable, prepared: Prepared) -> Derived:
    """Binds a table.

    Raises:
        TableError: If the mesh lacks an axis of the table, or the arguments are those of another
            function.
        RuleError: If a rule's logical axis is not found here.
        SpecError: If a spec that the table fixed against its rules fits no more.
    """
    problem, program, mesh = prepared.problem, prepared.traced.program, prepared.request.mesh
    lacking = [axis for axis in table.mesh.axes if axis not in mesh.axes]
    if lacking:
        raise TableError(
            f"the table is for mesh {table.mesh.axes}, this mesh is {dict(mesh.axes)}, without "
            f"{lacking[0]!r}. "
            f"Name the axes alike, or search again."
        )
    gone, new = leaf_changes(table, program.input_paths)
    strange_gone, strange_new = unlike(gone, program.input_paths), unlike(new, table.inputs)
    if strange_gone or strange_new or not set(table.inputs) & set(program.input_paths):
        raise TableError(
            f"the table is for {table.function!r} with other arguments than {program.name!r}: "
            f"{len(gone)} leaves are "
            f"gone ({', '.join((strange_gone or gone)[:3])}), {len(new)} are new "
            f"({', '.join((strange_new or new)[:3])}). "
            f"Search again, or apply its rules alone: apply(..., layout=[*table.rules])."
        )
    names = logical_axis_names(table, prepared)
    rules = tuple(_renamed(AxisRule.parse(text), names) for text in table.rules)
    inside = table.constraints == "anchors"
    stale = _stale(table, prepared, gone, new)
    pinned, dropped = _pins(table, prepared, rules)
    layout = Layout(replace(problem, pins=pinned | dict(problem.pins)), rules, inside)
    notes = [f"the table's numbers are stale: {reason}" for reason in stale]
    notes += [
        f"logical axis {old} of the table is called {now} here"
        for old, now in names.items()
        if old != now
    ]
    if table.versions.get("jax") != jax.__version__:
        notes.append(
            f"the table was written with jax {table.versions.get('jax')}, this is {jax.__version__}"
        )
    return Derived(layout, tuple(stale), (*notes, *dropped))


def leaf_changes(table: SpecTable, paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """(argument leaves of the table that are gone, leaves that it does not have)."""
    here = dict.fromkeys(paths)
    return [p for p in table.inputs if p not in here], [p for p in here if p not in table.inputs]


def unlike(paths: Iterable[str], others: Iterable[str]) -> list[str]:
    """Those of `paths` that differ from every other path in more than numbers (a layer more differs
    in numbers).
    """
    known = {_NUMBER.sub("*", other) for other in others}
    return [path for path in paths if _NUMBER.sub("*", path) not in known]


def logical_axis_names(table: SpecTable, prepared: Prepared) -> dict[str, str]:
    """What the logical axes of the table's rules are called here, by vote of the argument leaves that have
    them.
    """
    logical_axes, program = prepared.problem.logical_axes, prepared.traced.program
    votes: dict[str, Counter[str]] = {}
    for path, value in zip(program.input_paths, program.body.inputs, strict=True):
        leaf = table.inputs.get(path)
        if leaf is None or len(leaf.logical_axes) != len(value.shape):
            continue
        for name, logical_axis in zip(
            leaf.logical_axes, logical_axes.of_value[value.index], strict=True
        ):
            if name is not None and logical_axis != NO_AXIS:
                votes.setdefault(name, Counter())[logical_axes.axes[logical_axis].name] += 1
    return {name: count.most_common(1)[0][0] for name, count in votes.items()}


def _renamed(rule: AxisRule, names: Mapping[str, str]) -> AxisRule:
    scope = rule.where
    if scope.is_condition:
        scope = replace(scope, logical_axis=names.get(scope.logical_axis, scope.logical_axis))
    return replace(rule, logical_axis=names.get(rule.logical_axis, rule.logical_axis), where=scope)


def _stale(table: SpecTable, prepared: Prepared, gone: list[str], new: list[str]) -> list[str]:
    program, mesh = prepared.traced.program, prepared.request.mesh
    found = []
    if table.edited:
        found.append("specs or rules were edited after the search")
    if table.mesh.axes != dict(mesh.axes):
        found.append(
            f"they are of mesh {table.mesh.axes}, this mesh is {dict(mesh.axes)}; specs come from "
            f"the rules"
        )
    if gone or new:
        found.append(
            f"{len(gone)} leaves are gone and {len(new)} are new; specs come from the rules"
        )
    elif table.fingerprint != program.fingerprint and table.versions.get("jax") == jax.__version__:
        found.append("the program changed since the table was written")
    return found


def sides(table: SpecTable, prepared: Prepared) -> list[tuple[str, Value, Leaf]]:
    """(path, value, leaf) of every argument and output leaf that the table and the program have
    with equal shape.
    """
    program = prepared.traced.program
    pairs = [
        *(
            (p, v, table.inputs.get(p))
            for p, v in zip(program.input_paths, program.body.inputs, strict=True)
        ),
        *(
            (p, v, table.outputs.get(p))
            for p, v in zip(program.output_paths, program.body.outputs, strict=True)
        ),
    ]
    return [
        (p, v, leaf) for p, v, leaf in pairs if leaf is not None and tuple(leaf.shape) == v.shape
    ]


def _pins(
    table: SpecTable, prepared: Prepared, rules: tuple[AxisRule, ...]
) -> tuple[dict[int, Spec], list[str]]:
    """Every spec of the table that its rules alone do not give on its own mesh, and what of it had
    to be dropped.
    """
    here = prepared.request.mesh.axes
    there: Problem = replace(prepared.problem, mesh_axes=dict(table.mesh.axes), pins={})
    derived = Layout(there, tuple(rule for rule in rules if rule.mesh_axis in table.mesh.axes))
    pins: dict[int, Spec] = {}
    dropped = []
    for path, value, leaf in sides(table, prepared):
        spec = canonical_spec(spec_from_entry(leaf.spec), value, table.mesh.axes, path)
        if spec == derived.fit(value).spec:
            continue
        try:
            pins[value.index] = canonical_spec(spec_from_entry(leaf.spec), value, here, path)
        except SpecError:
            if table.mesh.axes == dict(here):
                raise
            dropped.append(
                f"{path} was fixed as {spec_from_entry(leaf.spec)}, which does not divide here: "
                f"dropped"
            )
    return pins, dropped
