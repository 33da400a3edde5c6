"""Progress of a search: a live line on a terminal, plain lines elsewhere, nothing if not wanted.

It writes to a duplicate of standard error: while a candidate compiles, file descriptor 2 itself is
captured to read the partitioner's warnings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.status import Status

from autoshard.processes.interrupts import Interrupts
from autoshard.processes.stopwatch import Stopwatch


class Progress:
    """Says what is being done, and knows how long it took; a context manager.

    Attributes:
        stopwatch: Wall time by stage.
    """

    def __init__(self, enabled: bool, interrupts: Interrupts | None = None) -> None:
        """Says nothing yet.

        Args:
            enabled: Whether to say anything.
            interrupts: Checked at every step, so that a Ctrl-C whose exception was lost still ends
                the search.
        """
        self.stopwatch = Stopwatch()
        self._interrupts = interrupts
        self._console: Console | None = None
        self._line: Status | None = None
        self._enabled = enabled

    def __enter__(self) -> Progress:
        if self._enabled:
            self._file = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace")
            self._console = Console(file=self._file, highlight=False, markup=False)
            if self._console.is_terminal:
                self._line = self._console.status("autoshard")
                self._line.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._line is not None:
            self._line.stop()
        if self._console is not None:
            self._file.close()
            self._console = None

    @contextmanager
    def stage(self, name: str, text: str = "", status: str = "") -> Iterator[None]:
        """Within it time is that of a stage; says so first, as `doing` does."""
        self.doing(text or name, status)
        with self.stopwatch.stage(name):
            yield

    def spent(self, name: str) -> str:
        """How long a stage took so far, and its share of the time since the search began."""
        seconds, total_s = self.stopwatch.seconds.get(name, 0.0), self.stopwatch.total_s
        return f"{seconds:.2g} s, {seconds / max(total_s, 1e-9):.0%} of the time so far"

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._console is not None:
            self._console.print(f"autoshard: {text}", soft_wrap=True)

    def doing(self, text: str, status: str = "") -> None:
        """What is going on now: the live line on a terminal, else nothing (`say` says the stages).

        Args:
            text: The stage.
            status: Of the search, such as the best so far.
        """
        if self._interrupts is not None:
            self._interrupts.check()
        if self._line is not None:
            self._line.update(f"autoshard: {text}" + (f" [{status}]" if status else ""))
