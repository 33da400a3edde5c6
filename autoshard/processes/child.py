"""Processes that this one keeps beside it: how long a start may take, and how they end."""

from __future__ import annotations

import os
import subprocess
import time

START_LIMIT_S = 120.0
"""How long a process may take to start. It takes a second or two from a local disk; a busy machine
and a network file system are allowed for. Chosen by hand; no test depends on it."""


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, whatever it is doing, and waits until it is gone."""
    process.kill()
    process.wait()


WATCH_S = 1.0
"""How often a process looks whether its parent lives. Chosen by hand; tests wait for it."""

ORPHANED = 143
"""Exit code of a process that ends with its parent (128 + SIGTERM, as if it had been asked to)."""


def end_with_parent(parent: int) -> None:
    """Waits until the parent of this process has ended, however it did, and ends this one; for a
    thread. A pipe that closes is noticed only by who reads it.

    Args:
        parent: Its process id.
    """
    wait_for_end_of(parent)
    os._exit(ORPHANED)


def wait_for_end_of(parent: int) -> None:
    """Returns once the process that started this one has ended."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
