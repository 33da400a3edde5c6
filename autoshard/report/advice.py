"""Advice: what a change of the program itself would gain, by the predictor's word.

A layout search takes the program as it is. Some programs could be laid out better if they were
written a little otherwise; for each kind of change below the problem is edited as if it had been
made, and the best layout of the edited problem (presets, and descent from them) is compared with
the plan's own prediction:

- *separate*: a weight that holds several (fused query, key and value; gate and up) is stored as
  separate arrays. In the edited problem its parts share the axis of the whole, so that cutting it
  moves nothing;
- *pad*: a dimension of the parameters that no mesh axis divides is padded, and the function traced
  at that size;
- *donate*: an argument that the step replaces is donated.

Only a gain of at least `WORTH` is mentioned. Every number is predicted, none is compiled or
measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import jax

from autoshard.axes.argument_groups import Group
from autoshard.axes.axis_classes import NO_AXIS, axis_classes
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

WORTH = 0.02
"""Share of the time or of the peak memory that a change must save to be mentioned."""

LANES = 128
"""Large dimensions are padded to a multiple of this: what accelerators' matrix units take at a
time."""

LARGE, MOST_PADDED = 1024, 2
"""From which size on `LANES` counts; and how many sizes are tried."""

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
        now: The prediction of the layout.
    """

    prepared: Prepared
    layout: Layout
    hardware: Hardware
    backend: Backend
    budget_bytes: int | None
    now: Prediction

    def best_of(self, problem: Problem) -> Prediction:
        """The best prediction of an edited problem, of presets and what descent from them finds."""
        predictor = Predictor(
            problem, self.hardware, self.prepared.traced.call.donated, self.backend
        )
        return (
            propose(problem, predictor, budget_bytes=self.budget_bytes, asks=0).ranked[0].prediction
        )

    def gain(self, then: Prediction) -> str:
        """What is gained, as text; empty where it is not worth a word."""
        fits = self.budget_bytes is None or then.peak_bytes <= max(
            self.budget_bytes, self.now.peak_bytes
        )
        if fits and then.time_s <= (1 - WORTH) * self.now.time_s:
            saved = 1 - then.time_s / self.now.time_s
            return (
                f"{saved:.0%} of the predicted step, {seconds_text(self.now.time_s)} -> "
                f"{seconds_text(then.time_s)} "
                f"({bytes_text(self.now.collective_bytes)} -> {bytes_text(then.collective_bytes)} "
                f"sent, peak "
                f"{bytes_text(self.now.peak_bytes)} -> {bytes_text(then.peak_bytes)})"
            )
        slower = then.time_s > (1 + WORTH) * self.now.time_s
        if not slower and then.peak_bytes <= (1 - WORTH) * self.now.peak_bytes:
            saved = 1 - then.peak_bytes / self.now.peak_bytes
            return (
                f"{saved:.0%} of the predicted peak memory, {bytes_text(self.now.peak_bytes)} -> "
                f"{bytes_text(then.peak_bytes)} a device"
            )
        return ""


def advise(case: Advised) -> tuple[str, ...]:
    """Advice on a plan, one line each; the changes that gain nothing are left out."""
    return tuple(line for kind in KINDS for line in kind(case))


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
    """The fused dimensions: those that slices or splits divide without rest, of axes that
    parameters have.
    """
    axes, program = problem.logical_axes.classes, problem.program
    leaves: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for path, value, group in zip(
        program.input_paths, program.body.inputs, problem.groups.of_input, strict=True
    ):
        for dim, axis in enumerate(axes.of_value[value.index]):
            if group is Group.PARAMETER and axis != NO_AXIS:
                leaves[axis].append((path, dim))
    parts: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for eqn in program.eqns:
        for dim in _cut_dims(eqn, axes.rules[eqn.index]):
            axis, size = axes.of_value[eqn.inputs[0].index][dim], eqn.inputs[0].shape[dim]
            if axis in leaves:
                parts[axis, size] |= set(_parts(eqn, dim))
    found = []
    for (axis, size), pieces in sorted(parts.items()):
        if len(pieces) > 1 and sum(length for _, length in pieces) == size:
            found.append(
                Fused(
                    axis, size, tuple(length for _, length in sorted(pieces)), tuple(leaves[axis])
                )
            )
    return tuple(found)


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
    """The problem as if the parts were separate arrays: cutting and joining them moves nothing.

    A part keeps the axis of the whole. Where the whole is first reshaped to (parts, rest), and
    parts are picked one by one, the axis goes on in the rest.
    """
    axes = problem.logical_axes.classes
    picked = {(f.axis, f.size) for f in fused if max(f.parts) == 1}
    cut = {(f.axis, f.size) for f in fused} - picked

    def dims_of(value: Value, among: set[tuple[int, int]]) -> frozenset[int]:
        found = zip(axes.of_value[value.index], value.shape, strict=True)
        return frozenset(dim for dim, place in enumerate(found) if place in among)

    def rule_for(eqn: Eqn) -> ShardingRule:
        rule = axes.rules[eqn.index]
        if eqn.primitive == "reshape" and len(eqn.inputs) == 1:
            before, after = (dims_of(v, picked) for v in (eqn.inputs[0], eqn.outputs[0]))
            if len(before) != len(after):  # here the parts become a dimension, or stop being one
                return reshape_rule(eqn.inputs[0].shape, eqn.outputs[0].shape, before, after)
        if eqn.primitive in (*_CUT, *_JOIN):
            (whole,), maps = (
                (eqn.inputs[:1], rule.operands)
                if eqn.primitive in _CUT
                else (eqn.outputs, rule.results)
            )
            joined = {maps[0][dim] for dim in dims_of(whole, cut)}
            return replace(
                rule,
                kinds=tuple(
                    FactorKind.PASS_THROUGH
                    if factor in joined and kind is FactorKind.PERMUTATION
                    else kind
                    for factor, kind in enumerate(rule.kinds)
                ),
            )
        return rule

    return Problem(
        find_logical_axes(axis_classes(axes.program, carry, rule_for)), problem.groups, problem.mesh_axes, problem.pins,
        disallowed=problem.disallowed,
    )  # fmt: skip


def _separate(case: Advised) -> Iterator[str]:
    fused = find_fused(case.prepared.problem)
    if not fused:
        return
    gain = case.gain(case.best_of(separated(case.prepared.problem, fused, case.prepared.carry)))
    if gain:
        named = dict.fromkeys(
            f"{path} (dimension {dim}: {_parts_text(f)})" for f in fused for path, dim in f.leaves
        )
        yield (
            f"store the parts of {_some(list(named))} as separate arrays: it would save {gain}; "
            f"assuming that each "
            f"part is then laid out as the whole is now, so that nothing moves when they are taken "
            f"apart"
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
    for size, places in list(_odd_sizes(prepared.problem).items())[:MOST_PADDED]:
        unit = LANES if size >= LARGE else devices
        padded = -(-size // unit) * unit
        problem = _traced_at(prepared, dict.fromkeys(places, (size, padded)))
        gain = "" if problem is None else case.gain(case.best_of(problem))
        if gain:
            yield (
                f"pad {_some(list(places.values()))} from {size} to {padded}: it would save "
                f"{gain}; assuming that the "
                f"function takes that size and leaves the padding out of its results itself"
            )


def _odd_sizes(problem: Problem) -> dict[int, dict[int, str]]:
    """By size that some mesh axis does not divide, the axes of parameters that have it: `dimension
    0 of embed`.
    """
    axes, program = problem.logical_axes.classes, problem.program
    ways = [ways for ways in problem.mesh_axes.values() if ways > 1]
    weight: dict[int, int] = defaultdict(int)
    places: dict[int, dict[int, str]] = defaultdict(dict)
    for path, value, group in zip(
        program.input_paths, program.body.inputs, problem.groups.of_input, strict=True
    ):
        for dim, (axis, size) in enumerate(
            zip(axes.of_value[value.index], value.shape, strict=True)
        ):
            odd = size > max(ways, default=1) and any(size % n for n in ways)
            if group is Group.PARAMETER and odd and axis not in axes.scanned:
                weight[size] += value.bytes
                places[size].setdefault(axis, f"dimension {dim} of {path}")
    least = WORTH * sum(v.bytes for v in program.body.inputs)
    return {
        size: places[size]
        for size in sorted(weight, key=lambda s: (-weight[s], s))
        if weight[size] >= least
    }


def _traced_at(prepared: Prepared, changed: Mapping[int, tuple[int, int]]) -> Problem | None:
    """The problem of the function traced with other sizes; None where it cannot be.

    Args:
        prepared: The function.
        changed: By axis class, the size that is another one, and which.
    """
    call, axes = prepared.traced.call, prepared.problem.logical_axes.classes
    avals = []
    for value, aval in zip(axes.program.body.inputs, call.avals, strict=True):
        dims = zip(axes.of_value[value.index], aval.shape, strict=True)
        shape = tuple(
            changed[axis][1] if changed.get(axis, (0, 0))[0] == size else size
            for axis, size in dims
        )
        avals.append(jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=bool(aval.weak_type)))
    try:
        return prepare(
            prepared.request, replace(call, leaves=tuple(avals), avals=tuple(avals))
        ).problem
    except AutoshardError:
        return None


# Donate -------------------------------------------------------------------------------------------


def _donate(case: Advised) -> Iterator[str]:
    traced, problem = case.prepared.traced, case.prepared.problem
    call = traced.call
    leaves: dict[int | str, set[int]] = defaultdict(set)
    for leaf, owner in enumerate(call.owners):
        leaves[owner].add(leaf)
    back = {source for source, _ in matching_state(traced, donated_only=False)}
    owners = [
        owner
        for owner, own in leaves.items()
        if own <= back and not all(call.donated[i] for i in own)
    ]
    if not owners:
        return
    donated = tuple(gone or call.owners[i] in owners for i, gone in enumerate(call.donated))
    gain = case.gain(Predictor(problem, case.hardware, donated, case.backend).predict(case.layout))
    if gain:
        numbers = ", ".join(
            str(owner) if isinstance(owner, int) else repr(owner) for owner in owners
        )
        yield f"donate argument {numbers}, which the function returns anew (donate_argnums): it would save {gain}"


KINDS: tuple[Callable[[Advised], Iterator[str]], ...] = (_separate, _pad, _donate)
"""Every kind of advice; a new one is a function here."""
