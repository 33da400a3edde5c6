"""Ctrl-C ends a search, also where the exception it raises is lost (inside a finaliser, or a
callback from C++).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Remembers SIGINT while it is open; a context manager. Outside the main thread it does
    nothing.
    """

    def __init__(self) -> None:
        self._seen = False
        self._held = False
        self._previous: Any = None

    def __enter__(self) -> Interrupts:
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if ours and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._held and not self._seen:
            self._seen = True
            return
        self._seen = True
        raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it a first Ctrl-C is kept for `check`: what is being done waits for others, or
        they for it.
        """
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    @property
    def seen(self) -> bool:
        """True if one came that was not raised by `check` yet."""
        return self._seen

    def check(self) -> None:
        """Raises KeyboardInterrupt if one came since it was last raised here."""
        if self._seen:
            self._seen = False
            raise KeyboardInterrupt
