"""Refits the predictor's coefficients to what programs turned out to take, inside one search.

A step's seconds are those of its compute and of its collectives over each set of mesh axes, each
times a correction factor that is 1 where the hardware was described rightly. The factors are fitted
robustly to relative errors (`robust_fit`), with a prior that all factors are the same: where few
programs were seen, or all alike, only what they say together is taken from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_model.hardware.robust_fit import robust_fit
from autoshard.cost_model.hardware.step_components import Axes, StepComponents

PRIOR = 0.05
"""Weight of the prior against one program's relative error: with the noise of a measurement (5 %),
two programs that disagree with it by half outweigh it. The example of `refit` shows its pull."""

HUBER = 0.1
"""Relative errors beyond this count linearly: twice what the noise of a measurement explains.
`test_one_odd_program_does_not_bend_the_factors` fails where all count by their squares."""


@dataclass(frozen=True)
class Corrections:
    """What the components of a step are multiplied by.

    Attributes:
        compute: Factor of compute.
        comm: Factors of collectives, by the mesh axes that they span.
        other: Factor of collectives over mesh axes that no program had.
        programs: How many programs they were fitted to.
    """

    compute: float = 1.0
    comm: Mapping[Axes, float] = field(default_factory=lambda: MappingProxyType({}))
    other: float = 1.0
    programs: int = 0

    def scaled(self, step: StepComponents) -> StepComponents:
        """Components times their factors."""
        comm_s = {axes: self.comm.get(axes, self.other) * s for axes, s in step.comm_s.items()}
        return StepComponents(self.compute * step.compute_s, comm_s)

    def __str__(self) -> str:
        factors = [f"compute x{self.compute:.3g}"]
        for axes, factor in self.comm.items():
            factors.append(f"collectives over {','.join(axes) or '?'} x{factor:.3g}")
        return ", ".join(factors)


def refit(programs: Sequence[tuple[StepComponents, float]], overlap: float) -> Corrections:
    """The factors that explain what programs take.

    Args:
        programs: What the model says of each, and the seconds that it turned out to take.
        overlap: Share of the shorter of compute and communication that the other hides.

    Returns:
        Factors >= 0; all 1 without programs. Programs of no seconds say nothing.

    >>> slow_link = [(StepComponents(1.0, {("x",): s}), 1.0 + 10 * s) for s in (0.1, 0.5, 1.0)]
    >>> str(refit(slow_link, overlap=0.0))
    'compute x1.02, collectives over x x9.9'
    """
    usable = [(step, s) for step, s in programs if s > 0 and step.step_s(overlap) > 0]
    if not usable:
        return Corrections()

    spans = sorted({axes for step, _ in usable for axes in step.comm_s})
    # [programs, 1 + spans]: predicted seconds of compute, then of the collectives over each span
    components = np.array([_row(step, spans) for step, _ in usable])
    measured_s = np.array([s for _, s in usable])
    predicted_s = np.array([step.step_s(overlap) for step, _ in usable])
    common = float(np.median(measured_s / predicted_s))

    compute, *comm = robust_fit(
        lambda factors: _slopes(components, factors, overlap),
        measured_s,
        np.full(1 + len(spans), common),
        huber=HUBER,
        prior=PRIOR,
    ).tolist()
    return Corrections(compute, dict(zip(spans, comm, strict=True)), common, len(usable))


def _row(step: StepComponents, spans: Sequence[Axes]) -> list[float]:
    return [step.compute_s, *(step.comm_s.get(axes, 0.0) for axes in spans)]


def _slopes(
    components: NDArray[np.float64], factors: NDArray[np.float64], overlap: float
) -> NDArray[np.float64]:
    """[programs, factors] how each program's seconds change with each factor.

    The shorter of compute and communication counts only where it is not hidden, so the step is
    linear in the factors on each side of where the two are equally long.
    """
    compute_s = components[:, 0] * factors[0]
    comm_s = components[:, 1:] @ factors[1:]
    counted = np.ones_like(components)
    counted[:, 0] -= overlap * (compute_s < comm_s)
    counted[:, 1:] -= (overlap * (compute_s >= comm_s))[:, None]
    return np.asarray(components * counted, dtype=np.float64)
