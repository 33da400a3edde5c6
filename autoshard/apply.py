"""`apply`: a layout that is known already (a table, a preset, rules, another plan), bound to a function; no search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from autoshard.carry import Carry
from autoshard.compile import CompilerOptions
from autoshard.cost_model.hardware import hardware_for
from autoshard.cost_model.predict import Predictor
from autoshard.errors import (
    ArgumentError,
    PathError,
    RuleError,
    SignatureError,
    TableError,
)
from autoshard.layout import AxisRule, Layout, Problem
from autoshard.pins import canonical_spec
from autoshard.plan import Plan, Verification
from autoshard.prepare import Pins, Prepared, Request, make_request, prepare
from autoshard.search.presets import presets
from autoshard.signature import Call
from autoshard.table import SpecTable, spec_from_entry


def apply(
    fn: Callable[..., Any],
    example_args: Sequence[Any] | Callable[[], Sequence[Any]],
    mesh: Mesh | str,
    layout: Plan | SpecTable | str | Path | Sequence[AxisRule | str | tuple[str, str]],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    carry: Carry = None,
    pins: Pins = None,
    user_constraints: str = "pin",
    compiler_options: CompilerOptions | None = None,
    constraints: str = "anchors",
) -> Plan:
    """Applies a known layout; searches nothing, compiles at the first call.

    Args:
        fn: As for `optimize`, and so are the other arguments of the same names.
        example_args: Positional arguments.
        mesh: The mesh.
        layout: A SpecTable or its path, a preset's name (`"fsdp"`), a list of rules (`"wq.1->model"`, pairs or
            `AxisRule`s), or a Plan.
        example_kwargs: Keyword arguments.
        static_argnums: As for `jax.jit`.
        static_argnames: As for `jax.jit`.
        donate_argnums: As for `jax.jit`.
        donate_argnames: As for `jax.jit`.
        carry: As for `optimize`.
        pins: As for `optimize`.
        user_constraints: As for `optimize`.
        compiler_options: As for `optimize`.
        constraints: `"anchors"` states the layout inside the function too, `"arguments"` on arguments and outputs only.
            A table or plan decides for itself.

    Returns:
        The plan. It is not verified: nothing is run here.

    Raises:
        TableError: If the table is for another mesh or another function, or cannot be read.
        RuleError: If the preset or a role does not exist here; the existing ones are named.
    """
    request, call = make_request(
        fn, example_args, mesh, example_kwargs=example_kwargs, static_argnums=static_argnums,
        static_argnames=static_argnames, donate_argnums=donate_argnums, donate_argnames=donate_argnames, carry=carry,
        pins=pins, user_constraints=user_constraints,
    )  # fmt: skip
    if constraints not in ("anchors", "arguments"):
        raise ArgumentError(f"constraints={constraints!r}; use 'anchors' or 'arguments'.")
    prepared = prepare(request, call)
    if isinstance(layout, Path) or (isinstance(layout, str) and (layout.endswith(".json") or Path(layout).is_file())):
        layout = SpecTable.load(layout)
    notes = list(prepared.notes)
    inside = constraints == "anchors"
    reason = "apply searches and runs nothing"
    problem = prepared.problem
    if isinstance(layout, Plan):
        rules, inside = layout.rules, layout.layout.inside
    elif isinstance(layout, SpecTable):
        rules = tuple(AxisRule.parse(text) for text in layout.rules)
        inside = layout.constraints == "anchors"
        notes += _check_table(layout, prepared)
        problem = _pin_table(layout, prepared, Layout(problem, rules, inside))
        reason = f"apply runs nothing; the table says {layout.verified}"
    elif isinstance(layout, str):
        rules = _preset_rules(layout, prepared)
    else:
        rules = tuple(map(_as_rule, layout))
    return Plan(
        user_fn=fn,
        options=request.options,
        traced=prepared.traced,
        layout=Layout(problem, rules, inside),
        mesh=request.mesh,
        carry=prepared.carry,
        verified=Verification(False, reason),
        notes=tuple(notes),
        compiler_options=compiler_options,
        rebind=rebinder(request),
    )


def _as_rule(rule: AxisRule | str | tuple[str, str]) -> AxisRule:
    if isinstance(rule, AxisRule):
        return rule
    if isinstance(rule, str):
        return AxisRule.parse(rule)
    pair: Any = rule
    if isinstance(pair, tuple) and len(pair) == 2:
        return AxisRule(str(pair[0]), str(pair[1]))
    raise RuleError(f"{rule!r} is no axis rule. Use 'role->mesh axis', a pair (role, mesh axis) or an AxisRule.")


def _preset_rules(name: str, prepared: Prepared) -> tuple[AxisRule, ...]:
    anything = hardware_for("cpu")  # only bytes are asked for, and they are the same on any hardware
    predictor = Predictor(prepared.problem, anything, prepared.traced.call.donated)
    made, skipped = presets(prepared.problem, predictor.sent_bytes)
    for preset in made:
        if preset.name == name:
            return preset.rules
    for left_out in skipped:
        if left_out.name == name:
            raise RuleError(
                f"preset {name!r} makes no sense here: {left_out.reason}. Use one of {[p.name for p in made]}."
            )
    raise RuleError(
        f"{name!r} is no preset, and no file of that name exists. The presets are {[p.name for p in made]}."
    )


def _check_table(table: SpecTable, prepared: Prepared) -> list[str]:
    """Refuses a table of another mesh or function; says what else changed."""
    mesh, program = prepared.request.mesh, prepared.traced.program
    if dict(table.mesh.axes) != dict(mesh.axes):
        raise TableError(
            f"the table is for mesh {dict(table.mesh.axes)}, this mesh is {dict(mesh.axes)}. "
            f"Search again for this mesh, or apply its rules alone: apply(..., layout=table.rules)."
        )
    here, there = set(program.input_paths), set(table.inputs)
    if here != there:
        stale, new = sorted(there - here), sorted(here - there)
        raise TableError(
            f"the table is for {table.function!r} with other arguments than {program.name!r}: "
            f"{len(stale)} leaves are gone ({', '.join(stale[:3])}), {len(new)} are new ({', '.join(new[:3])}). "
            f"Search again, or apply its rules alone: apply(..., layout=table.rules)."
        )
    notes = []
    if table.fingerprint != program.fingerprint:
        if table.versions.get("jax") != jax.__version__:
            notes.append(f"the table was written with jax {table.versions.get('jax')}, this is {jax.__version__}")
        else:
            notes.append("the program changed since the table was written; its numbers are not of this program")
    return notes


def _pin_table(table: SpecTable, prepared: Prepared, derived: Layout) -> Problem:
    """The problem with every spec of the table pinned that the rules alone would not give here."""
    program, pins = prepared.traced.program, dict(prepared.problem.pins)
    sides = (
        (table.inputs, program.input_paths, program.body.inputs),
        (table.outputs, program.output_paths, program.body.outputs),
    )
    for entries, paths, values in sides:
        for path, value in zip(paths, values, strict=True):
            entry = entries.get(path)
            if entry is None or tuple(entry.shape) != value.shape:
                continue  # the rules derive the spec of another shape
            spec = canonical_spec(spec_from_entry(entry.spec), value, prepared.request.mesh.axes, path)
            if spec != derived.fit(value).spec:
                pins[value.index] = spec
    return replace(prepared.problem, pins=pins)


def rebinder(request: Request) -> Callable[[Plan, Call], Plan]:
    """What a plan does for another signature: trace anew, apply the same rules, search nothing."""

    def rebind(plan: Plan, call: Call) -> Plan:
        try:
            prepared = prepare(request, call)
            known = {role.name for role in prepared.problem.roles.roles}
            rules = tuple(rule for rule in plan.rules if rule.role in known)
            layout = Layout(prepared.problem, rules, plan.layout.inside)
        except (PathError, RuleError, ValueError) as error:
            raise SignatureError(f"the plan's rules do not fit the new shapes: {error}") from error
        return Plan(
            user_fn=plan.user_fn,
            options=plan.options,
            traced=prepared.traced,
            layout=layout,
            mesh=plan.mesh,
            carry=prepared.carry,
            verified=Verification(False, "the rules of a plan for other shapes, applied without a search"),
            compiler_options=plan.compiler_options,
            rebind=plan.rebind,
        )

    return rebind
