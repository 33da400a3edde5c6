"""How much evidence a search gathers."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.arguments import check_kind
from autoshard.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Effort:
    """How much evidence a search gathers.

    Attributes:
        compiled: Candidates compiled at most (more only where none of them fits the budget or gives
            right numbers, or where the clock says that others should be faster); up to half of them
            presets. The last third is chosen by what the programs of the others say. For a TPU that
            is not here, at the compiler's quick level.
        measured: Candidates measured at most, and as many again where the clock says that they
            should be faster; the best preset is among them if it is two or more. On a target none
            is.
        seconds: Start nothing new so long after the call, in no stage: what is not reached (layouts
            to predict, candidates to partition, compile, verify, measure) is said. One candidate is
            compiled all the same. None for as long as it takes.
        full: On a target, candidates compiled at the compiler's full level, of those that
            `compiled` left; up to half of them presets.
        partitioned: Candidates partitioned (every preset is), by default twice `compiled`.
    """

    compiled: int = 12
    measured: int = 4
    seconds: float | None = None
    full: int = 6
    partitioned: int | None = None

    @property
    def counts(self) -> str:
        """The numbers that decide what is chosen, as text."""
        return f"{self.compiled} {self.measured} {self.full} {self.partitioned}"

    def __post_init__(self) -> None:
        for name in ("compiled", "measured", "full", "partitioned"):
            value = getattr(self, name)
            if value is not None or name != "partitioned":
                check_kind(f"Effort: {name}", value, int, "a whole number, such as 4")
        if self.seconds is not None:
            check_kind("Effort: seconds", self.seconds, (int, float), "a number, such as 600")
        counts = (
            self.compiled,
            self.measured,
            self.seconds or 0,
            self.full - 1,
            self.partitioned or 0,
        )
        if not all(count >= 0 for count in counts):  # false of nan, too
            raise ArgumentError(f"{self!r}: all numbers must be >= 0, and full at least 1.")
        if self.measured > self.compiled:
            raise ArgumentError(
                f"{self!r}: what is measured must be compiled first. Use compiled >= measured."
            )
