"""`apply`: a layout that is known already (a table, a preset, rules, another plan), bound to a
function; no search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from autoshard.compiler.bound_plan import Verification
from autoshard.compiler.compile import CompilerOptions
from autoshard.cost_model.hardware.hardware import hardware_for
from autoshard.cost_model.predict import Predictor
from autoshard.devices.target import mesh_on
from autoshard.errors import (
    ArgumentError,
    PathError,
    RuleError,
    SignatureError,
)
from autoshard.evidence.throughput import checked_samples
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import JitOptions, Pins, Prepared, Request, make_request, prepare
from autoshard.plan import Plan
from autoshard.search.presets import presets
from autoshard.table.rebind import rebind_table
from autoshard.table.spec_table import SpecTable
from autoshard.tracing.carry import Carry
from autoshard.tracing.signature import Call


def apply(
    fn: Callable[..., Any],
    example_args: Sequence[Any] | Callable[[], Sequence[Any]],
    mesh: Mesh | str,
    layout: Plan | SpecTable | str | Path | Sequence[AxisRule | str | tuple[str, str]],
    *,
    target: str | None = None,
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
    samples_per_step: float | None = None,
) -> Plan:
    """Applies a known layout; searches nothing, compiles at the first call.

    Args:
        fn: As for `optimize`, and so are the other arguments of the same names.
        example_args: Positional arguments.
        mesh: The mesh.
        layout: A SpecTable or its path, a preset's name (`"fsdp"`), a list of rules
            (`"wq.1->model"`, pairs or `AxisRule`s), or a Plan.
        target: As for `optimize`.
        example_kwargs: Keyword arguments.
        static_argnums: As for `jax.jit`.
        static_argnames: As for `jax.jit`.
        donate_argnums: As for `jax.jit`.
        donate_argnames: As for `jax.jit`.
        carry: As for `optimize`.
        pins: As for `optimize`.
        user_constraints: As for `optimize`.
        compiler_options: As for `optimize`.
        constraints: `"anchors"` states the layout inside the function too, `"arguments"` on
            arguments and outputs only. A table or plan decides for itself.
        samples_per_step: How many samples a step has, for the throughput that `plan.explain()`
            prints.

    Returns:
        The plan. It is not verified: nothing is run here.

    Raises:
        TableError: If the table is for other mesh axes or another function, or cannot be read.
            Under other axis sizes, or for a model of another size, the table's rules give the
            specs, and the plan's notes say so.
        RuleError: If the preset or a logical axis does not exist here; the existing ones are named.
    """
    request, call = make_request(
        fn, example_args, mesh_on(target, mesh), example_kwargs=example_kwargs, carry=carry, pins=pins,
        jit=JitOptions(static_argnums, static_argnames, donate_argnums, donate_argnames),
        user_constraints=user_constraints,
    )  # fmt: skip
    if constraints not in ("anchors", "arguments"):
        raise ArgumentError(f"constraints={constraints!r}; use 'anchors' or 'arguments'.")
    samples = checked_samples(samples_per_step)
    prepared = prepare(request, call)
    if isinstance(layout, Path) or (
        isinstance(layout, str) and (layout.endswith(".json") or Path(layout).is_file())
    ):
        layout = SpecTable.load(layout)
    notes = list(prepared.notes)
    inside = constraints == "anchors"
    reason = "apply searches and runs nothing"
    problem = prepared.problem
    if isinstance(layout, Plan):
        rules, inside = layout.rules, layout.layout.inside
    elif isinstance(layout, SpecTable):
        derived = rebind_table(layout, prepared)
        problem, rules, inside = derived.layout.problem, derived.layout.rules, derived.layout.inside
        notes += derived.notes
        said = (
            f"table's word is stale: {derived.stale[0]}"
            if derived.stale
            else f"table says {layout.verified}"
        )
        reason = f"apply runs nothing; the {said}"
    elif isinstance(layout, str):
        rules = _preset_rules(layout, prepared)
    else:
        rules = tuple(map(_as_rule, layout))
    return Plan(
        user_fn=request.fn,
        options=request.options,
        traced=prepared.traced,
        layout=Layout(problem, rules, inside),
        mesh=request.mesh,
        carry=prepared.carry,
        verified=Verification(False, reason),
        notes=tuple(notes),
        compiler_options=compiler_options,
        samples_per_step=samples,
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
    raise RuleError(
        f"{rule!r} is no axis rule. Use 'logical axis->mesh axis', a pair (logical axis, mesh axis) or an AxisRule."
    )


def _preset_rules(name: str, prepared: Prepared) -> tuple[AxisRule, ...]:
    anything = hardware_for(
        "cpu"
    )  # only bytes are asked for, and they are the same on any hardware
    predictor = Predictor(prepared.problem, anything, prepared.traced.call.donated)
    made, skipped = presets(prepared.problem, predictor.sent_bytes)
    for preset in made:
        if preset.name == name:
            return preset.rules
    for left_out in skipped:
        if left_out.name == name:
            raise RuleError(
                f"preset {name!r} makes no sense here: {left_out.reason}. Use one of "
                f"{[p.name for p in made]}."
            )
    raise RuleError(
        f"{name!r} is no preset, and no file of that name exists. The presets are "
        f"{[p.name for p in made]}."
    )


def rebinder(request: Request) -> Callable[[Plan, Call], Plan]:
    """What a plan does for another signature: trace anew, apply the same rules, search nothing."""

    def rebind(plan: Plan, call: Call) -> Plan:
        try:
            prepared = prepare(request, call)
            known = {logical_axis.name for logical_axis in prepared.problem.logical_axes.axes}
            rules = tuple(rule for rule in plan.rules if rule.logical_axis in known)
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
            verified=Verification(
                False, "the rules of a plan for other shapes, applied without a search"
            ),
            compiler_options=plan.compiler_options,
            rebind=plan.rebind,
        )

    return rebind
