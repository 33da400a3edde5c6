"""The lock of a journal file: a symbolic link beside it, which one process at a time can make.

Such a link is made by one host alone also on network file systems. It names its holder, so that
nobody releases another's, and a holder knows whether its lock was taken for a dead process's.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

LOCK_GRACE_S = 15.0
"""A lock that one holder has had for this long was left by one that was killed. Chosen by hand:
writing takes milliseconds; tests of killed workers set 1."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.5
"""Between two tries for a lock that another has, doubled each time. Chosen by hand: writing takes
milliseconds, and a dead process's lock stays for the grace."""


class JournalLock:
    """Held by one process at a time, but for one that stalls for longer than the grace."""

    def __init__(self, path: str, limit_s: float) -> None:
        """Takes nothing yet.

        Args:
            path: Of the link.
            limit_s: How long the lock is waited for.
        """
        self.path, self.limit_s = path, limit_s
        self._own = ""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds it within.

        Raises:
            TimeoutError: If it is not to be had.
        """
        self._acquire()
        try:
            yield
        finally:
            if self.is_own():
                with contextlib.suppress(OSError):
                    os.unlink(self.path)

    def is_own(self) -> bool:
        """False once it was taken for a dead process's."""
        try:
            return os.readlink(self.path) == self._own
        except OSError:
            return False

    def _acquire(self) -> None:
        self._own = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex}"
        start_s, pause_s = time.monotonic(), SHORTEST_PAUSE_S
        seen: tuple[object, ...] = ()
        since_s = start_s
        while True:
            with contextlib.suppress(FileExistsError):
                os.symlink(self._own, self.path)
                return
            now_s, holder = time.monotonic(), self._holder()
            if holder != seen:
                seen, since_s = holder, now_s
            elif holder and now_s - since_s > LOCK_GRACE_S:
                self._break()
            if now_s - start_s > self.limit_s:
                raise TimeoutError(
                    f"the lock {self.path} has been held for {self.limit_s:g} s; if nothing runs "
                    f"that uses the journal, remove it"
                )
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _holder(self) -> tuple[object, ...]:
        """Tells one holding from another; empty where nobody holds it."""
        try:
            status = os.lstat(self.path)
        except OSError:  # it was released
            return ()
        return status.st_ino, status.st_mtime_ns

    def _break(self) -> None:
        """Removes the lock of a dead process. Two may do so at once, and then two may write: the
        journal tells which one counts.
        """
        away = f"{self.path}.{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            os.rename(self.path, away)
            os.unlink(away)
