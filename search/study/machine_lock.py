"""One worker at a time measures on a machine: a lock that ends with its process.

It lies where nobody but the user can write: the runtime folder that the system gives to a user
(XDG Base Directory Specification), else a folder of the user's own among the temporary files.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from autoshard.errors import StudyError

NAME = "autoshard-measure.lock"
OTHERS = 0o077
"""Bits of a mode by which others may read, write or enter; the specification allows none."""


class MachineLock:
    """Held by at most one process of a user on a machine."""

    def __init__(self, path: Path | None = None) -> None:
        """Takes nothing yet.

        Args:
            path: Of the lock's file; by default in `runtime_folder()`.
        """
        self.path = path or runtime_folder() / NAME
        self._file: int | None = None

    def take(self) -> bool:
        """Takes it if it is free; False where another process holds it.

        Raises:
            StudyError: If the file or its folder cannot be made, or is not this user's alone.
        """
        if self._file is not None:
            return True
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            fault = _fault_of(self.path.parent, stat.S_ISDIR)
            if fault:
                raise _unusable(self.path.parent, fault)
            flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise _unusable(self.path, error.strerror or str(error)) from None
        if not self._locked(file):
            os.close(file)
            return False
        self._file = file
        return True

    def _locked(self, file: int) -> bool:
        fault = _fault_of(self.path, stat.S_ISREG, file)
        if fault:
            os.close(file)
            raise _unusable(self.path, fault)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Releases it, if it is held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def runtime_folder() -> Path:
    """The user's own folder for what runs; not made here.

    The system's is used where the environment does not name it, too: a batch job and a login of
    one user are to find the same lock. One that is another user's (after `su`) is passed over.
    """
    user = os.geteuid()
    for named in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{user}"):
        folder = Path(named)
        if folder.is_absolute() and not _fault_of(folder, stat.S_ISDIR):
            return folder
    return Path(tempfile.gettempdir()) / f"autoshard-{user}"


def _fault_of(path: Path, is_kind: Callable[[int], bool], file: int | None = None) -> str:
    """Why a file or folder is not this user's alone, "" if it is; links are not followed."""
    try:
        status = os.lstat(path) if file is None else os.fstat(file)
    except OSError as error:
        return error.strerror or str(error)
    if not is_kind(status.st_mode):
        return "it is something else, perhaps a link"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & OTHERS:
        return f"others may use it (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _unusable(path: Path, reason: str) -> StudyError:
    return StudyError(
        f"the lock by which one worker at a time measures on this machine cannot be used: {path}: "
        f"{reason}. Remove it, or set XDG_RUNTIME_DIR to a folder of yours with mode 0700."
    )
