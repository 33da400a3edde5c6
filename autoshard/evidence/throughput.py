"""How well a step uses its devices: efficiency, speed-up over one device, samples a second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.errors import ArgumentError

NO_TIME_S = 1e-30
"""Seconds of a step that takes none, so that its throughput is a number: an empty function is
predicted to take 0 s. Far below any time that is meant; no test depends on it."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """A step's predicted times, put in relation.

    Attributes:
        step_s: Seconds of the step.
        compute_s: Seconds of its computation.
        comm_s: Seconds of its collectives; what overlaps is in both.
        alone_s: Seconds of the step on one such device.
        samples_per_step: How many samples a step has, where the user said so.
    """

    step_s: float
    compute_s: float
    comm_s: float
    alone_s: float
    samples_per_step: float | None = None

    @property
    def efficiency(self) -> float:
        """Share of computation in computation and communication: `T_calc / (T_calc + T_comm)`; 1
        where neither takes any time.

        >>> Throughput(step_s=0.5, compute_s=0.375, comm_s=0.125, alone_s=1.5).efficiency
        0.75
        """
        total_s = self.compute_s + self.comm_s
        return self.compute_s / total_s if total_s else 1.0

    @property
    def speed_up(self) -> float:
        """How many times as fast as one device; 1 where nothing takes any time.

        >>> round(Throughput(step_s=0.4, compute_s=0.3, comm_s=0.1, alone_s=1.2).speed_up, 3)
        3.0
        """
        return self.alone_s / self.step_s if self.step_s else 1.0

    def per_s(self, step_s: float | None = None) -> Iterator[tuple[str, float]]:
        """Steps a second, and samples where it is known how many a step has.

        Args:
            step_s: Seconds of the step from elsewhere (compiled, measured); by default as here.
        """
        seconds = max(self.step_s if step_s is None else step_s, NO_TIME_S)
        yield "steps", 1 / seconds
        if self.samples_per_step is not None:
            yield "samples", self.samples_per_step / seconds


def checked_samples(samples_per_step: object, where: str = "") -> float | None:
    """A number of samples, or None.

    Raises:
        ArgumentError: If it is neither.
    """
    if samples_per_step is None:
        return None
    if not isinstance(samples_per_step, int | float) or not 0 < samples_per_step < float("inf"):
        raise ArgumentError(
            f"{where}samples_per_step={samples_per_step!r}; it must be more than 0, and finite."
        )
    return float(samples_per_step)
