"""Advice: what a change of the program itself would gain, as predicted.

A layout search takes the program as it is. Some programs could be laid out better if they were
written differently; for each kind of change below the problem is edited as if it had been made, and
the best layout of the edited problem (presets, and descent from them) is compared with the plan's
own prediction:

- *separate*: a weight that holds several (fused query, key and value; gate and up) becomes separate
  arrays. In the edited problem its parts share the axis of the whole, so that cutting it moves
  nothing, and neither does joining what becomes the gradient of the whole. What the function itself
  joins again, such as the halves of a rotary embedding, it would still have to join: that is paid;
- *pad*: a dimension of the parameters that no mesh axis divides is padded, and the function traced
  at that size;
- *donate*: an argument that the step replaces is donated.

Only a gain of at least `WORTH` is mentioned: of the step, against what the same search predicts of
the program as it is, where the peak memory does not rise; or, for a donation, which does nothing
else, of the peak memory. Every number is predicted, none is compiled or measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from autoshard.axes.argument_groups import Group
from autoshard.axes.axis_classes import NO_AXIS, AxisClasses, axis_classes
from autoshard.axes.logical_axes import find_logical_axes
from autoshard.axes.sharding_rules import FactorKind, ShardingRule, reshape_rule
from autoshard.cost_model.hardware.backend import Backend
from autoshard.cost_model.hardware.hardware import Hardware
from autoshard.cost_model.predict import Prediction, Predictor
from autoshard.errors import AutoshardError
from autoshard.layout.layout import Layout
from autoshard.layout.prepare import Prepared, prepare
from autoshard.layout.problem import Problem
from autoshard.search.proposer import propose
from autoshard.text import bytes_text, seconds_text
from autoshard.tracing.carry import matching_state
from autoshard.tracing.program import Eqn, Value
from autoshard.tracing.source_lines import name_stack_of

WORTH = 0.02
"""Share of the step, or for a donation of the peak memory, that a change must save to be mentioned:
below it lies what the predictor cannot tell apart. Chosen by hand; tests/report/test_advice.py pins
it."""

LANES = 128
"""Large dimensions are padded to a multiple of this: the side of a TPU's matrix unit (v2 to v5;
Jouppi et al. 2020, A Domain-Specific Supercomputer for Training), and a multiple of what tensor
cores take. Without it the test that pads 5003 to 5120 fails."""

LARGE = 1024
"""From which size on a dimension is padded to `LANES`, smaller ones to the number of devices: there
`LANES` could add an eighth. Chosen by hand; above 5003 the same test fails."""

MOST_PADDED = 2
"""How many sizes are tried; each costs a trace and a search. Chosen by hand, no test depends on
it."""

_CUT = ("slice", "split")
_JOIN = ("pad", "concatenate")


@dataclass(frozen=True, eq=False)
class Advised:
    """What advice is given on: a layout of a prepared program with its prediction.

    Attributes:
        prepared: The program.
        layout: The plan's layout.
        hardware: What it is predicted for.
        backend: Of the devices.
        budget_bytes: The memory budget per device, None for none.
        prediction: Of the layout.
    """

    prepared: Prepared
    layout: Layout
    hardware: Hardware
    backend: Backend
    budget_bytes: int | None
    prediction: Prediction

    def best_of(self, problem: Problem, within_bytes: int | None = None) -> Prediction:
        """The best prediction of an edited problem, of presets and descent from them.

        Args:
            problem: The problem.
            within_bytes: Peak memory that it may need; by default as much as the budget.
        """
        donated = self.prepared.traced.call.donated
        predictor = Predictor(problem, self.hardware, donated, self.backend)
        # Presets and descent take a moment; a study would take as long as the search itself.
        budget_bytes = self.budget_bytes if within_bytes is None else within_bytes
        proposals = propose(problem, predictor, budget_bytes=budget_bytes, asks=0)
        return proposals.ranked[0].prediction

    def step_gain(self, problem: Problem) -> str:
        """What the best layout of an edited problem gains of the step, with no more memory than the
        plan, as text; empty where that is less than `WORTH`, or where a search of the program as it
        is would gain it too.
        """
        plan = self.prediction
        changed = self.best_of(problem, plan.peak_bytes)
        if changed.peak_bytes > plan.peak_bytes or not _is_worth(changed.time_s, plan.time_s):
            return ""
        # The plan was chosen by compiled programs, and need not be the best by prediction.
        if not _is_worth(
            changed.time_s, self.best_of(self.prepared.problem, plan.peak_bytes).time_s
        ):
            return ""
        return (
            f"{1 - changed.time_s / plan.time_s:.0%} of the predicted step, "
            f"{seconds_text(plan.time_s)} -> {seconds_text(changed.time_s)} "
            f"({bytes_text(plan.collective_bytes)} -> {bytes_text(changed.collective_bytes)} "
            f"sent, peak {bytes_text(plan.peak_bytes)} -> {bytes_text(changed.peak_bytes)})"
        )

    def peak_gain(self, changed: Prediction) -> str:
        """What the plan's layout gains of the peak memory by a change, as text; empty where that is
        less than `WORTH`.
        """
        before, after = self.prediction.peak_bytes, changed.peak_bytes
        if not _is_worth(after, before):
            return ""
        return (
            f"{1 - after / before:.0%} of the predicted peak memory, {bytes_text(before)} -> "
            f"{bytes_text(after)} a device"
        )


def _is_worth(after: float, before: float) -> bool:
    """True for a saving of at least `WORTH`."""
    return after <= (1 - WORTH) * before


def advise(case: Advised) -> tuple[str, ...]:
    """Advice on a plan, one line each; the changes that gain nothing are left out."""
    return tuple(line for kind in KINDS for line in kind(case))


def _parameters(problem: Problem) -> Iterator[tuple[str, Value]]:
    """Leaf path and value of each parameter."""
    program = problem.program
    for path, value, group in zip(
        program.input_paths, program.body.inputs, problem.groups.of_input, strict=True
    ):
        if group is Group.PARAMETER:
            yield path, value


# Separate -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fused:
    """A dimension of the parameters that the program cuts into parts.

    Attributes:
        axis: Its axis class.
        size: The size of the dimension that is cut.
        parts: Sizes of the parts.
        leaves: Leaf path and dimension of the parameters that have it.
    """

    axis: int
    size: int
    parts: tuple[int, ...]
    leaves: tuple[tuple[str, int], ...]


def find_fused(problem: Problem) -> tuple[Fused, ...]:
    """The dimensions of parameters that slices or splits divide without rest."""
    leaves = _leaves_by_axis(problem)
    fused = []
    for (axis, size), parts in sorted(_parts_by_dimension(problem, leaves).items()):
        lengths = tuple(length for _, length in sorted(parts))
        if len(lengths) > 1 and sum(lengths) == size:
            fused.append(Fused(axis, size, lengths, tuple(leaves[axis])))
    return tuple(fused)


def _leaves_by_axis(problem: Problem) -> dict[int, list[tuple[str, int]]]:
    """By axis class, leaf path and dimension of the parameters that have it."""
    leaves: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for path, value in _parameters(problem):
        for dim, axis in enumerate(problem.logical_axes.classes.of_value[value.index]):
            if axis != NO_AXIS:
                leaves[axis].append((path, dim))
    return leaves


def _parts_by_dimension(
    problem: Problem, axes: Iterable[int]
) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """By axis class (one of `axes`) and size of what is cut, (start, size) of each part."""
    classes = problem.logical_axes.classes
    parts: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for eqn in problem.program.eqns:
        for dim in _cut_dims(eqn, classes.rules[eqn.index]):
            whole = eqn.inputs[0]
            axis = classes.of_value[whole.index][dim]
            if axis in axes:
                parts[axis, whole.shape[dim]] |= set(_parts(eqn, dim))
    return parts


def _cut_dims(eqn: Eqn, rule: ShardingRule) -> tuple[int, ...]:
    if eqn.primitive not in _CUT or not rule.operands:
        return ()
    return tuple(
        dim
        for dim, factor in enumerate(rule.operands[0])
        if rule.kinds[factor] is FactorKind.PERMUTATION
    )


def _parts(eqn: Eqn, dim: int) -> Iterator[tuple[int, int]]:
    """(start, size) of each part along a dimension."""
    if eqn.primitive == "slice":
        yield int(eqn.params["start_indices"][dim]), eqn.outputs[0].shape[dim]
        return
    start = 0
    for result in eqn.outputs:
        yield start, result.shape[dim]
        start += result.shape[dim]


def separated(
    problem: Problem, fused: tuple[Fused, ...], carry: tuple[tuple[int, int], ...]
) -> Problem:
    """The problem as if the parts were separate arrays: cutting them moves nothing, and joining
    them does not where that is the transpose of a cut.

    A part keeps the axis of the whole. Where the whole is first reshaped to (parts, rest), and
    parts are picked one by one, the axis goes on in the rest.
    """
    classes = problem.logical_axes.classes
    # Parts of size 1 are picked one by one out of a dimension of parts, others are cut out.
    picked = frozenset((f.axis, f.size) for f in fused if max(f.parts) == 1)
    cut = frozenset((f.axis, f.size) for f in fused) - picked

    def rule_for(eqn: Eqn) -> ShardingRule:
        rule = classes.rules[eqn.index]
        if eqn.primitive == "reshape" and len(eqn.inputs) == 1:
            whole, reshaped = eqn.inputs[0], eqn.outputs[0]
            before, after = (_dims_of(classes, value, picked) for value in (whole, reshaped))
            if len(before) != len(after):  # here the parts become a dimension, or stop being one
                return reshape_rule(whole.shape, reshaped.shape, before, after)
        elif eqn.primitive in _CUT and not _is_transposed(eqn):
            return _passing(rule, rule.operands, _dims_of(classes, eqn.inputs[0], cut))
        elif eqn.primitive in _JOIN and _is_transposed(eqn):
            return _passing(rule, rule.results, _dims_of(classes, eqn.outputs[0], cut))
        return rule

    return Problem(
        find_logical_axes(axis_classes(classes.program, carry, rule_for)),
        problem.groups,
        problem.mesh_axes,
        problem.pins,
        disallowed=problem.disallowed,
    )


def _is_transposed(eqn: Eqn) -> bool:
    """True in the backward pass, for what is not the forward pass computed again."""
    stack = name_stack_of(eqn)
    return "transpose(" in stack and "rematted_computation" not in stack


def _dims_of(
    classes: AxisClasses, value: Value, dimensions: frozenset[tuple[int, int]]
) -> frozenset[int]:
    """Dimensions of a value that have one of these axis classes and sizes."""
    pairs = zip(classes.of_value[value.index], value.shape, strict=True)
    return frozenset(dim for dim, pair in enumerate(pairs) if pair in dimensions)


def _passing(
    rule: ShardingRule, places: Sequence[tuple[int, ...]], dims: frozenset[int]
) -> ShardingRule:
    """The rule with the permuted factors of these dimensions of its first value passed through."""
    factors = {places[0][dim] for dim in dims}
    kinds = list(rule.kinds)
    for factor in factors:
        if kinds[factor] is FactorKind.PERMUTATION:
            kinds[factor] = FactorKind.PASS_THROUGH
    return replace(rule, kinds=tuple(kinds))


def _separate(case: Advised) -> Iterator[str]:
    problem = case.prepared.problem
    fused = find_fused(problem)
    if not fused:
        return
    gain = case.step_gain(separated(problem, fused, case.prepared.carry))
    if gain:
        weights = dict.fromkeys(
            f"{path} (dimension {dim}: {_parts_text(f)})" for f in fused for path, dim in f.leaves
        )
        yield (
            f"store the parts of {_some(list(weights))} as separate arrays: it would save {gain}; "
            f"assuming that each part is then laid out as the whole is now, so that nothing moves "
            f"when they are taken apart"
        )


def _parts_text(fused: Fused) -> str:
    """`32 + 32 + 32`, or `3 parts`."""
    few = max(fused.parts) > 1 and len(fused.parts) <= 4
    return " + ".join(map(str, fused.parts)) if few else f"{len(fused.parts)} parts"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# Pad ----------------------------------------------------------------------------------------------


def _pad(case: Advised) -> Iterator[str]:
    prepared = case.prepared
    devices = math.prod(prepared.problem.mesh_axes.values())
    for size, dimensions in list(_odd_sizes(prepared.problem).items())[:MOST_PADDED]:
        unit = LANES if size >= LARGE else devices
        padded = -(-size // unit) * unit
        problem = _traced_at(prepared, dict.fromkeys(dimensions, (size, padded)))
        gain = "" if problem is None else case.step_gain(problem)
        if gain:
            yield (
                f"pad {_some(list(dimensions.values()))} from {size} to {padded}: it would save "
                f"{gain}; assuming that the function takes that size and leaves the padding out of "
                f"its results itself"
            )


def _odd_sizes(problem: Problem) -> dict[int, dict[int, str]]:
    """Sizes that some mesh axis does not divide, those of most parameter bytes first.

    By size, the axis classes of parameters that have it, each with the first dimension of it:
    `dimension 0 of embed`. Sizes of few bytes are left out.
    """
    classes = problem.logical_axes.classes
    mesh_sizes = [size for size in problem.mesh_axes.values() if size > 1]
    bytes_of: dict[int, int] = defaultdict(int)
    dimensions: dict[int, dict[int, str]] = defaultdict(dict)
    for path, value in _parameters(problem):
        axes = classes.of_value[value.index]
        for dim, (axis, size) in enumerate(zip(axes, value.shape, strict=True)):
            if _is_odd(size, mesh_sizes) and axis not in classes.scanned:
                bytes_of[size] += value.bytes
                dimensions[size].setdefault(axis, f"dimension {dim} of {path}")

    least_bytes = WORTH * sum(leaf.bytes for leaf in problem.program.body.inputs)
    most_bytes_first = sorted(bytes_of, key=lambda size: (-bytes_of[size], size))
    return {size: dimensions[size] for size in most_bytes_first if bytes_of[size] >= least_bytes}


def _is_odd(size: int, mesh_sizes: list[int]) -> bool:
    """True for a size that could be split over any mesh axis, but that some does not divide."""
    return size > max(mesh_sizes, default=1) and any(size % ways for ways in mesh_sizes)


def _traced_at(prepared: Prepared, padding: Mapping[int, tuple[int, int]]) -> Problem | None:
    """The problem of the function traced with padded dimensions; None where it cannot be.

    Args:
        prepared: The function.
        padding: By axis class, the size that is padded, and to which.
    """
    call, classes = prepared.traced.call, prepared.problem.logical_axes.classes
    avals = []
    for value, aval in zip(classes.program.body.inputs, call.avals, strict=True):
        shape = list(aval.shape)
        for dim, axis in enumerate(classes.of_value[value.index]):
            size, padded = padding.get(axis, (0, 0))
            if shape[dim] == size:
                shape[dim] = padded
        avals.append(jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=bool(aval.weak_type)))
    leaves = tuple(avals)
    try:
        return prepare(prepared.request, replace(call, leaves=leaves, avals=leaves)).problem
    except AutoshardError:  # its size is written into the function, say
        return None


# Donate -------------------------------------------------------------------------------------------


def _donate(case: Advised) -> Iterator[str]:
    call = case.prepared.traced.call
    owners = _returned_arguments(case.prepared)
    if not owners:
        return
    donated = tuple(
        already or owner in owners for already, owner in zip(call.donated, call.owners, strict=True)
    )
    predictor = Predictor(case.prepared.problem, case.hardware, donated, case.backend)
    gain = case.peak_gain(predictor.predict(case.layout))
    if gain:
        names = [str(owner) if isinstance(owner, int) else repr(owner) for owner in owners]
        yield (
            f"donate argument {', '.join(names)}, which the function returns anew "
            f"(donate_argnums): it would save {gain}"
        )


def _returned_arguments(prepared: Prepared) -> list[int | str]:
    """Arguments all of whose leaves the step returns anew, and that are not all donated yet."""
    traced = prepared.traced
    returned = {leaf for leaf, _ in matching_state(traced, donated_only=False)}
    leaves: dict[int | str, set[int]] = defaultdict(set)
    for leaf, owner in enumerate(traced.call.owners):
        leaves[owner].add(leaf)
    return [
        owner
        for owner, own in leaves.items()
        if own <= returned and not all(traced.call.donated[leaf] for leaf in own)
    ]


KINDS: tuple[Callable[[Advised], Iterator[str]], ...] = (_separate, _pad, _donate)
"""Every kind of advice; a new one is a function here."""
