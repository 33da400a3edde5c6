"""One worker at a time measures on a machine: a lock that ends with its process."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path


class MachineLock:
    """Held by at most one process of a user on a machine."""

    def __init__(self, path: Path | None = None) -> None:
        """Takes nothing yet.

        Args:
            path: Of the lock's file; by default one in the directory for temporary files.
        """
        self.path = path or Path(tempfile.gettempdir()) / f"autoshard-measure-{os.getuid()}.lock"
        self._file: int | None = None

    def take(self) -> bool:
        """Takes it if it is free; False where another process holds it."""
        if self._file is not None:
            return True
        # The folder is anybody's to write to: no link is followed, and nobody else may open it.
        file = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        return True

    def release(self) -> None:
        """Releases it, if it is held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
