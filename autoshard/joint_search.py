"""One search over several: shapes of the mesh over the same devices, or variants of the function.

Each alternative is first searched by prediction alone; the best by prediction then get the whole
search, and its evidence decides. The objective is the step time, per sample where the user says
how many samples a step has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from autoshard.errors import ArgumentError, MeshError, NoFeasiblePlanError, SearchFailedError
from autoshard.evaluate.effort import Effort
from autoshard.evidence.candidate import Candidate, winner_of
from autoshard.evidence.throughput import checked_samples
from autoshard.plan import Plan
from autoshard.text import bytes_text, first_line, seconds_text

AXIS_NAMES = ("data", "model"), ("data", "fsdp", "model")
CLOSE = 1.25
"""Alternatives whose predicted objective is within this ratio of the best get the whole search,
`SEARCHED` at most: predictions of different programs err by more than those of one program.
Chosen by hand; `tests/test_joint_search.py` has alternatives on both sides."""

SEARCHED = 3
"""Whole searches of variants; each takes as long as a search of its own. Chosen by hand."""

Search = Callable[..., Plan]
Variant = Callable[..., Any] | tuple[Callable[..., Any], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of those searched over.

    Attributes:
        name: For people.
        arguments: What `optimize` is called with.
        samples: Samples of a step; what is compared is the time of one.
    """

    name: str
    arguments: Mapping[str, Any]
    samples: float = 1.0


def mesh_shapes(devices: int, axes: int = 3) -> tuple[tuple[int, ...], ...]:
    """Every way to write a number of devices as a product of 1 to 3 sizes > 1, in every order.

    >>> mesh_shapes(8)
    ((8,), (2, 4), (4, 2), (2, 2, 2))
    """

    def factors(rest: int, count: int) -> Iterator[tuple[int, ...]]:
        if count == 1:
            yield (rest,)
            return
        for first in range(2, rest // 2 + 1):
            if rest % first == 0:
                yield from (
                    (first, *others)
                    for others in factors(rest // first, count - 1)
                    if min(others) > 1
                )

    return tuple(shape for count in range(1, axes + 1) for shape in factors(devices, count))


def axis_names(shape: Sequence[int]) -> tuple[str, ...]:
    """Names of the mesh axes of a shape.

    >>> axis_names((4, 2))
    ('data', 'model')
    """
    return AXIS_NAMES[0][: len(shape)] if len(shape) < 3 else AXIS_NAMES[1]


def device_count(mesh: Any) -> int | None:
    """The number of devices, where `mesh` is just that, as text or number."""
    if isinstance(mesh, int) and not isinstance(mesh, bool):
        return mesh
    return int(mesh) if isinstance(mesh, str) and mesh.strip().isdecimal() else None


def over_mesh_shapes(search: Search, given: Mapping[str, Any]) -> Plan:
    """Searches every shape of a mesh over so many devices.

    Args:
        search: `optimize`.
        given: Its arguments; `mesh` is a number of devices.

    Raises:
        MeshError: If there are not so many devices.
        NoFeasiblePlanError: If no shape has a plan that fits.
    """
    count = device_count(given["mesh"])
    assert count is not None
    if count < 1:
        raise MeshError(f"mesh={given['mesh']!r}: a mesh has at least 1 device.")
    alternatives = []
    for shape in mesh_shapes(count):
        names = axis_names(shape)
        text = ",".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))
        alternatives.append(
            Alternative(text, {**given, "mesh": _mesh(text, shape, given["target"])})
        )
    return _best(search, alternatives, "mesh shape")


def _mesh(text: str, shape: tuple[int, ...], target: str | None) -> Mesh | str:
    """The first devices in that shape; on a target it is made from the text."""
    devices = jax.devices()
    count = math.prod(shape)
    if target is not None or count >= len(devices):
        return text  # too few devices are refused where meshes are made
    grid = np.array(devices[:count]).reshape(shape)
    return Mesh(grid, axis_names(shape), axis_types=(AxisType.Auto,) * len(shape))


def over_variants(
    search: Search, given: Mapping[str, Any], variants: Mapping[str, Variant]
) -> Plan:
    """Searches variants of a function under the same budget.

    Args:
        search: `optimize`.
        given: Its arguments; `samples_per_step` is a number, or one for each variant.
        variants: Functions by name, or (function, example arguments).

    Raises:
        ArgumentError: If a variant is neither, or the samples are not those of the variants.
        NoFeasiblePlanError: If no variant has a plan that fits.
    """
    if not variants:
        raise ArgumentError("variants={}: give at least one function by name.")
    samples = given["samples_per_step"]
    if isinstance(samples, Mapping) and set(samples) != set(variants):
        raise ArgumentError(
            f"samples_per_step has {sorted(samples)}, but the variants are {sorted(variants)}."
        )
    alternatives = []
    for name, variant in variants.items():
        given_args: Any = given["example_args"]
        pair: tuple[Any, ...] = variant if isinstance(variant, tuple) else (variant, given_args)
        fn, args = pair if len(pair) == 2 else (None, None)
        if args is None or not callable(fn):
            raise ArgumentError(
                f"variant {name!r}: give a function, or (function, example arguments), and "
                f"example_args for the others."
            )
        of_step = samples[name] if isinstance(samples, Mapping) else samples
        of_step = checked_samples(of_step, f"variant {name!r}: ")
        arguments = {**given, "fn": fn, "example_args": args, "samples_per_step": of_step}
        alternatives.append(Alternative(name, arguments, of_step or 1.0))
    return _best(search, alternatives, "variant")


@dataclass(frozen=True, eq=False)
class _Predicted:
    """An alternative that fits by prediction.

    Attributes:
        alternative: It.
        plan: Of the search by prediction alone.
        sample_s: Predicted seconds of one sample.
        text: The prediction for people.
    """

    alternative: Alternative
    plan: Plan
    sample_s: float
    text: str


def _best(search: Search, alternatives: Sequence[Alternative], what: str) -> Plan:
    """The best plan of all alternatives, with a note on each."""
    failures: list[str] = []
    predicted: list[_Predicted] = []
    for alternative in alternatives:
        try:
            predicted.append(_by_prediction(search, alternative))
        except NoFeasiblePlanError as error:
            reason = first_line(str(error))
            failures.append(f"{what} {alternative.name}: does not fit by prediction ({reason})")
    predicted.sort(key=lambda one: one.sample_s)

    plans: dict[str, Plan] = {}
    count = _count_to_search(predicted, what)
    for number, one in enumerate(predicted):
        if number >= count and plans:
            break  # the others are for when nothing of what looked best holds
        name = one.alternative.name
        try:
            plans[name] = _searched(search, one)
        except (NoFeasiblePlanError, SearchFailedError) as error:
            failures.append(f"{what} {name}: {one.text}; {first_line(str(error))}")
    if not plans:
        raise NoFeasiblePlanError(f"no {what} has a plan that fits:\n  " + "\n  ".join(failures))

    seconds = {
        one.alternative.name: _sample_s(plans[one.alternative.name], one)
        for one in predicted
        if one.alternative.name in plans
    }
    chosen = min(seconds, key=seconds.__getitem__)
    notes = [f"{what} {chosen} was chosen of {len(alternatives)}"]
    notes += [f"{what} {_note(one, seconds)}" for one in predicted]
    plan = plans[chosen]
    return replace(plan, notes=(*plan.notes, *notes, *failures), chosen=chosen)


def _by_prediction(search: Search, alternative: Alternative) -> _Predicted:
    """An alternative searched by prediction alone.

    Raises:
        NoFeasiblePlanError: If it does not fit.
    """
    alone = {"effort": Effort(0, 0), "storage": None, "progress": False}
    plan = search(**{**alternative.arguments, **alone})
    prediction = _winner(plan).predicted
    assert prediction is not None
    sample_s = prediction.time_s / alternative.samples
    text = f"{seconds_text(sample_s)} predicted, peak {bytes_text(prediction.peak_bytes)}"
    return _Predicted(alternative, plan, sample_s, text)


def _count_to_search(predicted: Sequence[_Predicted], what: str) -> int:
    """How many of the alternatives that are predicted best get the whole search.

    Different shapes of one mesh differ by little more than names where links are alike: there the
    first one is searched.
    """
    at_most = SEARCHED if what == "variant" else 1
    return sum(one.sample_s <= CLOSE * predicted[0].sample_s for one in predicted[:at_most])


def _searched(search: Search, one: _Predicted) -> Plan:
    """The plan of the whole search; that by prediction where nothing more is wanted."""
    effort: Effort = one.alternative.arguments["effort"] or Effort()
    return search(**_in_a_study(one.alternative)) if effort.compiled else one.plan


def _sample_s(plan: Plan, one: _Predicted) -> float:
    """Seconds of one sample: measured, else compiled, else predicted."""
    winner, samples = _winner(plan), one.alternative.samples
    if winner.measured is not None:
        return winner.measured.median_s / samples
    if winner.compiled is not None:
        return winner.compiled.time_s / samples
    return one.sample_s


def _note(one: _Predicted, seconds: Mapping[str, float]) -> str:
    """What came of an alternative."""
    name = one.alternative.name
    note = f"{name}: {one.text}"
    if name in seconds:
        note += f", {seconds_text(seconds[name])} after its search"
    if one.alternative.samples != 1:
        note += " per sample"
    return note


def _in_a_study(alternative: Alternative) -> dict[str, Any]:
    """The arguments of a whole search; each alternative has a study of its own."""
    given = dict(alternative.arguments)
    return {**given, "study": f"{given['study']} {alternative.name}"} if given["study"] else given


def _winner(plan: Plan) -> Candidate:
    winner = winner_of(plan.candidates)
    assert winner is not None
    return winner
