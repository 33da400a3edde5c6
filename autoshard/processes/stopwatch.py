"""Where the wall time of a search goes, by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Wall time by stage. A stage within another has its time alone: the outer one stands still.

    Attributes:
        seconds: By stage.
        counts: How often each stage was entered.
    """

    def __init__(self) -> None:
        """Starts now."""
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self._began_s = self._since_s = time.monotonic()
        self._stages: list[str] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Within it time is that of a stage."""
        self._charge()
        self._stages.append(name)
        self.counts[name] = self.counts.get(name, 0) + 1
        try:
            yield
        finally:
            self._charge()
            self._stages.pop()

    def _charge(self) -> None:
        """Adds the time since the last change of stage to the stage that it was spent in."""
        now_s = time.monotonic()
        if self._stages:
            stage = self._stages[-1]
            self.seconds[stage] = self.seconds.get(stage, 0.0) + now_s - self._since_s
        self._since_s = now_s

    def mean_s(self, name: str) -> float:
        """Seconds of a stage each time; 0 of one that was never entered."""
        return self.seconds.get(name, 0.0) / max(1, self.counts.get(name, 0))

    @property
    def total_s(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._began_s
