"""Presets: the layouts experts use, as short rule lists over the *discovered* axis classes.

Nothing here looks at names. The batch is the axis that data arguments bring and no parameter has;
the residual axis is the parameter axis that most parameter bytes have (FSDP's usual choice); the
inner axes (heads, mlp, vocabulary) are the other parameter axes, picked greedily until every large
parameter is covered (Megatron's pairing: column split, then row split, because both weights share
the inner axis). In a network of one block the hidden axis is the one that most bytes have; of the
two readings the one whose tensor parallelism sends fewer bytes is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from autoshard.axes.argument_groups import Group
from autoshard.axes.axis_classes import NO_AXIS
from autoshard.axes.sharding_rules import FactorKind
from autoshard.evidence.candidate import Skipped
from autoshard.layout.axis_rule import EVERYWHERE, OPTIMIZER, AxisRule, Scope
from autoshard.layout.problem import Problem
from autoshard.tracing.program import Value

ORDER = ("replicated", "dp", "zero1", "fsdp", "tp", "fsdp+tp", "tp+sequence")
LARGE = 0.01
"""Tensor parallelism splits weights that hold at least this share of all parameter bytes (so no
norm scales)."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A named rule list."""

    name: str
    rules: tuple[AxisRule, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """Logical axes by what experts would call them; names of roles.

    Attributes:
        batch: Brought by the data, in no parameter.
        residual: The parameter axes that together cover all parameters, widest first; the first is
            the residual axis.
        inner: Parameter axes other than the residual one, one per weight, in order of the bytes
            they cover.
        paired: The same with the residual axis among them, for networks of one block.
        sequence: The next axis after the batch that most activations have and no parameter has.
    """

    batch: str | None
    residual: tuple[str, ...]
    inner: tuple[str, ...]
    paired: tuple[str, ...]
    sequence: str | None


class _Facts:
    """Counts that the choice of logical axes rests on."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        program, groups = problem.program, problem.groups
        self.parameters = [
            v
            for v, g in zip(program.body.inputs, groups.of_input, strict=True)
            if g is Group.PARAMETER
        ]
        self.data = [
            v for v, g in zip(program.body.inputs, groups.of_input, strict=True) if g is Group.DATA
        ]
        self.activation_bytes: dict[int, float] = defaultdict(float)
        self.batched: dict[int, int] = defaultdict(int)
        for eqn, trip_count in program.walk():
            for value in eqn.outputs:
                for logical_axis in set(self.logical_axes(value)):
                    self.activation_bytes[logical_axis] += trip_count * value.bytes
            if eqn.primitive == "dot_general":
                rule = problem.logical_axes.classes.rules[eqn.index]
                for i, (logical_axis, _) in enumerate(problem.logical_axes.factors(eqn)):
                    in_both = i in rule.operands[0] and i in rule.operands[1]
                    if rule.kinds[i] is FactorKind.PASS_THROUGH and in_both:
                        self.batched[logical_axis] += 1

    def logical_axes(self, value: Value) -> tuple[int, ...]:
        """Logical axes of a value that rules may use: not scanned ones."""
        return tuple(
            r for r in self.problem.logical_axes.of_value[value.index]
            if r != NO_AXIS and not self.problem.logical_axes.axes[r].scanned
        )  # fmt: skip

    def fits(self, logical_axis: int, sizes: Iterable[int]) -> bool:
        """True if some size of the logical axis is divided by some of the mesh axes."""
        return any(
            size % axis == 0
            for size in self.problem.logical_axes.axes[logical_axis].sizes
            for axis in sizes
        )


def find_parts(problem: Problem) -> Parts:
    """Finds what experts would call batch, residual, inner and sequence axes."""
    facts = _Facts(problem)
    names = [logical_axis.name for logical_axis in problem.logical_axes.axes]
    sizes = [size for size in problem.mesh_axes.values() if size > 1]
    in_parameters = {r for v in facts.parameters for r in facts.logical_axes(v)}

    def leftmost(logical_axis: int) -> int:
        return min(
            (
                facts.logical_axes(v).index(logical_axis)
                for v in facts.data
                if logical_axis in facts.logical_axes(v)
            ),
            default=9,
        )

    brought = {r for v in facts.data for r in facts.logical_axes(v)} - in_parameters
    ranked = sorted(
        (r for r in brought if facts.fits(r, sizes)),
        key=lambda r: (leftmost(r), -facts.activation_bytes[r], r),
    )
    batch = ranked[0] if ranked else None
    others = {
        r
        for r in facts.activation_bytes
        if r not in in_parameters and r != batch and facts.fits(r, sizes)
    }
    sequence = max(
        (r for r in others if r in brought or len(problem.logical_axes.axes[r].classes) == 1),
        key=lambda r: (facts.activation_bytes[r], -r),
        default=None,
    )
    cover = _cover(
        facts,
        [r for r in in_parameters if facts.fits(r, sizes)],
        facts.parameters,
        prefer_batched=False,
    )
    rest = [r for r in in_parameters if facts.fits(r, sizes) and r not in cover[:1]]
    total = sum(v.bytes for v in facts.parameters)
    large = [v for v in facts.parameters if v.bytes >= LARGE * total]
    inner = _cover(facts, rest, large, prefer_batched=True)
    paired = _cover(
        facts, [r for r in in_parameters if facts.fits(r, sizes)], large, prefer_batched=True
    )
    return Parts(
        batch=None if batch is None else names[batch],
        residual=tuple(names[r] for r in cover),
        inner=tuple(names[r] for r in inner),
        paired=tuple(names[r] for r in paired),
        sequence=None if sequence is None else names[sequence],
    )


def _cover(
    facts: _Facts, logical_axes: list[int], values: list[Value], *, prefer_batched: bool
) -> list[int]:
    """Logical axes picked greedily until every value that can be covered is, by bytes still uncovered.

    Logical axes that are batch loops of contractions (heads) come before equal ones (head size) if asked:
    splitting them needs no collective inside attention.
    """
    left = [v for v in values if v.shape]
    chosen: list[int] = []
    while True:
        gain: dict[int, int] = defaultdict(int)
        for value in left:
            for logical_axis in set(facts.logical_axes(value)) & set(logical_axes):
                gain[logical_axis] += value.bytes
        if not gain:
            return chosen
        best = max(gain, key=lambda r: (gain[r], facts.batched[r] if prefer_batched else 0, -r))
        chosen.append(best)
        left = [v for v in left if best not in facts.logical_axes(v)]


def presets(
    problem: Problem, sent_bytes: Callable[[tuple[AxisRule, ...]], int], parts: Parts | None = None
) -> tuple[tuple[Preset, ...], tuple[Skipped, ...]]:
    """The presets that make sense for a problem, and those that do not, with the reason.

    Args:
        problem: The problem.
        sent_bytes: Predicted collective bytes of a rule list; decides which axes tensor parallelism
            splits.
        parts: From `find_parts`, if they are known.
    """
    parts = parts or find_parts(problem)
    axes = [name for name, size in problem.mesh_axes.items() if size > 1]
    model = axes[-1:] if axes else []
    data = axes[:-1] or axes
    made: list[Preset] = [Preset("replicated", ())]
    skipped: list[Skipped] = []

    def rules(
        logical_axes: Iterable[str], over: Iterable[str], where: Scope = EVERYWHERE
    ) -> tuple[AxisRule, ...]:
        over = tuple(over)
        return tuple(
            AxisRule(logical_axis, axis, where=where)
            for logical_axis in logical_axes
            for axis in over
        )

    def batch(over: Iterable[str]) -> tuple[AxisRule, ...]:
        return rules([] if parts.batch is None else [parts.batch], over)

    def tensor_parallel(logical_axes: tuple[str, ...]) -> tuple[AxisRule, ...]:
        return (batch(data) if len(axes) > 1 else ()) + rules(logical_axes, model)

    readings = [logical_axes for logical_axes in (parts.inner, parts.paired) if logical_axes]
    inner = min(
        readings, key=lambda logical_axes: sent_bytes(tensor_parallel(logical_axes)), default=()
    )
    residual = tuple(r for r in parts.residual if r not in inner) or parts.residual
    has_optimizer = Group.OPTIMIZER in problem.groups.of_input
    no_mesh = "no mesh axis has more than one device" if not axes else ""
    no_batch = (
        ""
        if parts.batch
        else "no axis comes with the data alone (no batch) that a mesh axis divides"
    )
    no_parameters = (
        "" if parts.residual else "no parameter has a dimension that a mesh axis divides"
    )
    no_inner = "" if inner else "no large parameter has a dimension that a mesh axis divides"
    no_optimizer = "" if has_optimizer else "no argument is optimizer state"
    no_sequence = "" if parts.sequence else "activations have no further axis that no parameter has"
    no_second = "" if len(axes) > 1 else "it needs two mesh axes"
    recipes: Mapping[str, tuple[str, Callable[[], tuple[AxisRule, ...]]]] = {
        "dp": (no_mesh or no_batch, lambda: batch(axes)),
        "zero1": (
            no_mesh or no_batch or no_optimizer or no_parameters,
            lambda: batch(axes) + rules(parts.residual, axes, OPTIMIZER),
        ),
        "fsdp": (no_mesh or no_parameters, lambda: batch(axes) + rules(parts.residual, axes)),
        "tp": (
            no_mesh or no_inner,
            lambda: tensor_parallel(inner),
        ),
        "fsdp+tp": (
            no_mesh or no_second or no_inner or no_parameters,
            lambda: batch(data) + rules(inner, model) + rules(residual, data),
        ),
        "tp+sequence": (
            no_mesh or no_inner or no_sequence,
            lambda: tensor_parallel((*inner, str(parts.sequence))),
        ),
    }
    for name, (why_not, recipe) in recipes.items():
        if why_not:
            skipped.append(Skipped(name, why_not))
        else:
            made.append(Preset(name, recipe()))
    return tuple(made), tuple(skipped)
