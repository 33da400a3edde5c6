"""Where the wall time of a search went."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall seconds of a search by stage: `timings["compile"]`, `dict(timings.seconds)`.

    The stages are `trace`, `axes`, `search`, `start` (of the process that compiles), `lower` and
    `partition` (candidates, before any is compiled), `compile`, `verify`, `measure`, `advice`; one
    that was not entered is missing.

    Attributes:
        seconds: By stage, none counted twice.
        counts: How often each stage was entered: of those of one candidate, how many candidates.
        total_s: Of the whole search; more than the sum by what belongs to no stage.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    total_s: float = 0.0

    def __getitem__(self, stage: str) -> float:
        return self.seconds[stage]

    def __iter__(self) -> Iterator[str]:
        return iter(self.seconds)

    def __len__(self) -> int:
        return len(self.seconds)

    def share(self, stage: str) -> float:
        """Of the total, 0 for a stage that was not entered."""
        return self.seconds.get(stage, 0.0) / self.total_s if self.total_s else 0.0
