"""Refits the predictor's coefficients to what programs were found to take, inside one search.

A step's seconds are those of its compute and of its collectives over each set of mesh axes, each
times a factor that is 1 where the hardware was described rightly. The factors are fitted to
relative errors by non-negative least squares with Huber's weights (one program that behaves oddly
does not bend them), and a prior that all factors are the same: where few programs were seen, or all
alike, only what they say together is taken from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from autoshard.cost_model.hardware.collectives import joint
from autoshard.cost_model.hardware.hardware import Hardware
from autoshard.evidence.collectives import Collective

ROUNDS = 20
"""Of reweighting; each is a few microseconds."""

PRIOR = 0.05
"""Weight of the prior against one program's relative error: with the noise of a clock (5 %), two
programs that disagree with it by half outweigh it."""

HUBER = 0.1
"""Relative errors beyond this count linearly: twice what the clock's noise explains."""

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """A step's seconds by what they are spent on.

    Attributes:
        compute_s: Compute.
        comm_s: Collectives, by the mesh axes they go over.
    """

    compute_s: float
    comm_s: Mapping[Axes, float]


@dataclass(frozen=True)
class Corrections:
    """What the parts of a step are multiplied by.

    Attributes:
        compute: Of compute.
        comm: Of collectives, by the mesh axes they go over.
        other: Of collectives over mesh axes that no program had.
        programs: How many programs they were fitted to.
    """

    compute: float = 1.0
    comm: Mapping[Axes, float] = field(default_factory=lambda: MappingProxyType({}))
    other: float = 1.0
    programs: int = 0

    def scaled(self, parts: Parts) -> Parts:
        """Parts times their factors."""
        comm = {axes: self.comm.get(axes, self.other) * s for axes, s in parts.comm_s.items()}
        return Parts(self.compute * parts.compute_s, comm)

    def __str__(self) -> str:
        named = ", ".join(
            f"collectives over {','.join(axes) or '?'} x{by:.3g}" for axes, by in self.comm.items()
        )
        return f"compute x{self.compute:.3g}" + (f", {named}" if named else "")


def time_s(parts: Parts, overlap: float) -> float:
    """Seconds of a step: compute + collectives - overlap * the smaller of the two.

    >>> time_s(Parts(1.0, {("data",): 2.0, ("model",): 1.0}), overlap=0.5)
    3.5
    """
    comm_s = sum(parts.comm_s.values())
    return parts.compute_s + comm_s - overlap * min(parts.compute_s, comm_s)


def parts_of(
    hardware: Hardware,
    mesh_axes: Mapping[str, int],
    compute_s: float,
    collectives: Iterable[Collective],
) -> Parts:
    """The parts of a step, from seconds of compute and a summary of its collectives.

    Args:
        hardware: Whose links.
        mesh_axes: The mesh.
        compute_s: Seconds of compute.
        collectives: By kind and mesh axes.
    """
    comm_s: dict[Axes, float] = defaultdict(float)
    for collective in collectives:
        comm_s[collective.axes] += summary_s(hardware, mesh_axes, collective)
    return Parts(compute_s, dict(comm_s))


def summary_s(hardware: Hardware, mesh_axes: Mapping[str, int], collective: Collective) -> float:
    """Alpha-beta seconds of a summary: all its bytes over the slowest link, a ring's steps for each
    one.
    """
    link, size = joint(hardware, mesh_axes, collective.axes or tuple(mesh_axes))
    steps = {"all_reduce": 2 * (size - 1), "collective_permute": 1}.get(collective.kind, size - 1)
    return collective.count * steps * link.alpha_s + collective.bytes / link.bytes_per_s


def refit(programs: Sequence[tuple[Parts, float]], overlap: float) -> Corrections:
    """The factors that explain what programs take.

    Args:
        programs: What the model says of each, and the seconds it was found to take, > 0.
        overlap: Share of the smaller of compute and communication that the other hides.

    Returns:
        Factors >= 0; all 1 without programs.

    Reference:
        Huber (1964), Robust estimation of a location parameter; Lawson and Hanson (1974), nnls.

    >>> slow_link = [(Parts(1.0, {("x",): s}), 1.0 + 10 * s) for s in (0.1, 0.5, 1.0)]
    >>> str(refit(slow_link, overlap=0.0))
    'compute x1.02, collectives over x x9.9'
    """
    known = [
        (parts, found_s)
        for parts, found_s in programs
        if found_s > 0 and time_s(parts, overlap) > 0
    ]
    if not known:
        return Corrections()
    axes = sorted({a for parts, _ in known for a in parts.comm_s})
    columns = np.array([[p.compute_s, *(p.comm_s.get(a, 0.0) for a in axes)] for p, _ in known])
    found = np.array([found_s for _, found_s in known])
    same = float(np.median(found / np.array([time_s(p, overlap) for p, _ in known])))
    corrections = np.full(columns.shape[1], same)
    for _ in range(ROUNDS):
        rows = _gradients(columns, corrections, overlap) / found[:, None]
        errors = np.abs(rows @ corrections - 1)
        weights = np.sqrt(np.minimum(1.0, HUBER / np.maximum(errors, 1e-12)))
        prior = PRIOR * np.eye(len(corrections)) / same
        wanted = np.concatenate([weights, PRIOR * np.ones(len(corrections))])
        before, (corrections, _) = (
            corrections,
            nnls(np.vstack([rows * weights[:, None], prior]), wanted),
        )
        if np.allclose(corrections, before, rtol=1e-6):
            break
    return Corrections(
        float(corrections[0]),
        dict(zip(axes, corrections[1:].tolist(), strict=True)),
        same,
        len(known),
    )


def _gradients(
    columns: NDArray[np.float64], corrections: NDArray[np.float64], overlap: float
) -> NDArray[np.float64]:
    """How each program's seconds change with each factor: the smaller of compute and communication
    is partly hidden.
    """
    compute_s = columns[:, 0] * corrections[0]
    comm_s = columns[:, 1:] @ corrections[1:]
    shown = np.ones_like(columns)
    shown[:, 0] -= overlap * (compute_s < comm_s)
    shown[:, 1:] -= (overlap * (compute_s >= comm_s))[:, None]
    return np.asarray(columns * shown, dtype=np.float64)
