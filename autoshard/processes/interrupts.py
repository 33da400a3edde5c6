"""Ctrl-C ends a search, also where its exception is lost (in finalisers, callbacks from C++)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Remembers SIGINT while it is open; a context manager. Only the main thread can have it."""

    def __init__(self) -> None:
        self._seen = False
        self._held = False
        self._previous: Any = None

    def __enter__(self) -> Interrupts:
        # A handler that the user has installed stays.
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if default and threading.current_thread() is threading.main_thread():
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
        if self._held and not self._seen:  # a second one means it: it is not kept
            self._seen = True
            return
        self._seen = True
        raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it a first Ctrl-C is kept for `check`: other processes wait for this one."""
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
