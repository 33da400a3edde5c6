"""`apply`: a layout that is known already (a table, a preset, rules, another plan), bound to a
function; no search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from autoshard.arguments import check_arguments, check_kind
from autoshard.compiler.bound_plan import Verification
from autoshard.compiler.compile import CompilerOptions
from autoshard.devices.target import mesh_on
from autoshard.errors import (
    ArgumentError,
    PathError,
    RuleError,
    SignatureError,
)
from autoshard.evidence.throughput import checked_samples
from autoshard.layout.axis_rule import AxisRule
from autoshard.layout.kernel_notes import notes_on_kernels
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import JitOptions, Pins, Prepared, Request, make_request, prepare
from autoshard.plan import Plan
from autoshard.search.presets import presets
from autoshard.table.rebind import rebind_table
from autoshard.table.spec_table import SpecTable
from autoshard.tracing.carry import Carry
from autoshard.tracing.signature import Call

LayoutSource = Plan | SpecTable | str | Path | Sequence[AxisRule | str | tuple[str, str]]
UNSEARCHED = "the rules of a plan for other shapes, applied without a search"


def apply(  # noqa: PLR0913
    fn: Callable[..., Any],
    example_args: Sequence[Any] | Callable[[], Sequence[Any]],
    mesh: Mesh | str,
    layout: LayoutSource,
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
    check_arguments(dict(locals()))
    request, call = make_request(
        fn,
        example_args,
        mesh_on(target, mesh),
        example_kwargs=example_kwargs,
        jit=JitOptions(static_argnums, static_argnames, donate_argnums, donate_argnames),
        carry=carry,
        pins=pins,
        user_constraints=user_constraints,
    )
    if constraints not in ("anchors", "arguments"):
        raise ArgumentError(f"constraints={constraints!r}; use 'anchors' or 'arguments'.")
    samples = checked_samples(samples_per_step)
    prepared = prepare(request, call)
    known = _known_layout(layout, prepared, inside=constraints == "anchors")
    return Plan(
        user_fn=request.fn,
        options=request.options,
        traced=prepared.traced,
        layout=known.layout,
        mesh=request.mesh,
        carry=prepared.carry,
        verified=Verification(False, known.reason),
        notes=(*prepared.notes, *notes_on_kernels(known.layout), *known.notes),
        compiler_options=compiler_options,
        samples_per_step=samples,
        rebind=rebinder(request),
    )


@dataclass(frozen=True, eq=False)
class _KnownLayout:
    """A layout that is not searched for.

    Attributes:
        layout: It.
        reason: Why it is not verified.
        notes: What the user should know of it.
    """

    layout: Layout
    reason: str = "apply searches and runs nothing"
    notes: tuple[str, ...] = ()


def _known_layout(source: LayoutSource, prepared: Prepared, *, inside: bool) -> _KnownLayout:
    """The layout that a plan, a table, a preset's name or rules stand for here.

    Args:
        source: Of the layout.
        prepared: The function that it is bound to.
        inside: Of rules and presets: whether they are stated inside the function too.
    """
    problem = prepared.problem
    if isinstance(source, Plan):
        return _KnownLayout(Layout(problem, source.rules, source.layout.inside))
    if isinstance(source, str | Path) and _is_table_path(source):
        source = SpecTable.load(source)
    if isinstance(source, SpecTable):
        return _of_table(source, prepared)
    if isinstance(source, str):
        return _KnownLayout(Layout(problem, _preset_rules(source, prepared), inside))
    assert not isinstance(source, Path)  # it was loaded
    use = "a SpecTable, its path, a preset's name, a list of rules or a Plan"
    check_kind("layout", source, Sequence, use)
    return _KnownLayout(Layout(problem, tuple(map(_as_rule, source)), inside))


def _is_table_path(source: str | Path) -> bool:
    return isinstance(source, Path) or source.endswith(".json") or Path(source).is_file()


def _of_table(table: SpecTable, prepared: Prepared) -> _KnownLayout:
    rebound = rebind_table(table, prepared)
    reason = f"apply runs nothing; the table says {table.verified}"
    if rebound.stale:
        reason = f"apply runs nothing; the table is stale: {rebound.stale[0]}"
    return _KnownLayout(rebound.layout, reason, tuple(rebound.notes))


def _as_rule(rule: AxisRule | str | tuple[str, str]) -> AxisRule:
    if isinstance(rule, AxisRule):
        return rule
    if isinstance(rule, str):
        return AxisRule.parse(rule)
    pair: Any = rule
    if isinstance(pair, tuple) and len(pair) == 2:
        return AxisRule(str(pair[0]), str(pair[1]))
    raise RuleError(
        f"{rule!r} is no axis rule. Use 'logical axis->mesh axis', a pair (logical axis, mesh "
        f"axis) or an AxisRule."
    )


def _preset_rules(name: str, prepared: Prepared) -> tuple[AxisRule, ...]:
    """The rules of a preset.

    Raises:
        RuleError: If there is no such preset, or it makes no sense for this function.
    """
    available, skipped = presets(prepared.problem)
    names = [preset.name for preset in available]
    for preset in available:
        if preset.name == name:
            return preset.rules
    for left_out in skipped:
        if left_out.name == name:
            raise RuleError(
                f"preset {name!r} makes no sense here: {left_out.reason}. Use one of {names}."
            )
    raise RuleError(
        f"{name!r} is no preset, and no file of that name exists. The presets are {names}."
    )


def rebinder(request: Request) -> Callable[[Plan, Call], Plan]:
    """What a plan does for another signature: trace anew, apply the same rules, search nothing."""

    def rebind(plan: Plan, call: Call) -> Plan:
        try:
            prepared = prepare(request, call)
            names = {axis.name for axis in prepared.problem.logical_axes.axes}
            rules = tuple(rule for rule in plan.rules if rule.logical_axis in names)
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
            verified=Verification(False, UNSEARCHED),
            compiler_options=plan.compiler_options,
            rebind=plan.rebind,
        )

    return rebind
