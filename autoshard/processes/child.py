"""Processes that this one keeps beside it: how long a start may take, and how they are ended."""

from __future__ import annotations

import subprocess

START_LIMIT_S = 120.0
"""How long a process may take to start. It takes a second or two from a local disk; a busy machine
and a network file system are allowed for. Chosen by hand; no test depends on it."""


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, whatever it is doing, and waits until it is gone."""
    process.kill()
    process.wait()
