"""One search over several: shapes of the mesh over the same devices, or variants of the function.

Each alternative is first searched by prediction alone; the best by prediction then get the whole
search, and its evidence decides. The objective is the step time, per sample where the person says
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
from autoshard.evidence.candidate import Candidate, Predicted, winner_of
from autoshard.evidence.throughput import checked_samples
from autoshard.plan import Plan
from autoshard.text import bytes_text, seconds_text

AXIS_NAMES = ("data", "model"), ("data", "fsdp", "model")
CLOSE = 1.25
"""Alternatives whose predicted objective is within this ratio of the best get the whole search,
`SEARCHED` at most."""

SEARCHED = 3
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
        fn, args = variant if isinstance(variant, tuple) else (variant, given_args)
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


def _best(search: Search, alternatives: Sequence[Alternative], what: str) -> Plan:
    """The best plan of all alternatives, with a note on each."""
    predicted: list[tuple[float, Alternative, str]] = []
    by_prediction: dict[str, Plan] = {}
    failures: list[str] = []
    for alternative in alternatives:
        try:
            plan = by_prediction[alternative.name] = search(
                **{
                    **alternative.arguments,
                    "effort": Effort(0, 0),
                    "storage": None,
                    "progress": False,
                }
            )
        except NoFeasiblePlanError as error:
            failures.append(
                f"{what} {alternative.name}: does not fit by prediction "
                f"({str(error).splitlines()[0]})"
            )
            continue
        found = _predicted(_winner(plan))
        per = found.time_s / alternative.samples
        predicted.append(
            (
                per,
                alternative,
                f"{seconds_text(per)} predicted, peak {bytes_text(found.peak_bytes)}",
            )
        )
    if not predicted:
        raise NoFeasiblePlanError(f"no {what} has a plan that fits:\n  " + "\n  ".join(failures))
    predicted.sort(key=lambda item: item[0])
    least = predicted[0][0]
    effort: Effort = alternatives[0].arguments["effort"] or Effort()
    # Different shapes of one mesh differ by little more than names where links are alike: the first
    # is searched.
    count = SEARCHED if what == "variant" else 1
    close = sum(per <= CLOSE * least for per, _, _ in predicted[:count])
    plans: list[tuple[float, Plan, str]] = []
    for number, (per, alternative, text) in enumerate(predicted):
        if number >= close and plans:
            break  # the others are for when nothing of what looked best holds
        try:
            plan = (
                search(**_in_a_study(alternative))
                if effort.compiled
                else by_prediction[alternative.name]
            )
        except (NoFeasiblePlanError, SearchFailedError) as error:
            failures.append(f"{what} {alternative.name}: {text}; {str(error).splitlines()[0]}")
            continue
        plans.append(
            (
                _seconds(_winner(plan), per * alternative.samples) / alternative.samples,
                plan,
                alternative.name,
            )
        )
    if not plans:
        raise NoFeasiblePlanError(f"no {what} has a plan that fits:\n  " + "\n  ".join(failures))
    _, plan, name = min(plans, key=lambda item: item[0])
    searched = {called: per for per, _, called in plans}
    notes = [f"{what} {name} was chosen of {len(alternatives)}"]
    for _, alternative, text in predicted:
        also = (
            f", {seconds_text(searched[alternative.name])} after its search"
            if alternative.name in searched
            else ""
        )
        notes.append(
            f"{what} {alternative.name}: {text}{also}"
            + (" per sample" if alternative.samples != 1 else "")
        )
    return replace(plan, notes=(*plan.notes, *notes, *failures), chosen=name)


def _in_a_study(alternative: Alternative) -> dict[str, Any]:
    """The arguments of a whole search; each alternative has a study of its own."""
    given = dict(alternative.arguments)
    return {**given, "study": f"{given['study']} {alternative.name}"} if given["study"] else given


def _winner(plan: Plan) -> Candidate:
    winner = winner_of(plan.candidates)
    assert winner is not None
    return winner


def _predicted(candidate: Candidate) -> Predicted:
    assert candidate.predicted is not None
    return candidate.predicted


def _seconds(candidate: Candidate, predicted_s: float) -> float:
    """Measured seconds, else compiled, else predicted."""
    if candidate.measured is not None:
        return candidate.measured.median_s
    return candidate.compiled.time_s if candidate.compiled is not None else predicted_s
