"""Keeps a worker alive: one that a candidate aborted, or the system killed, is started again.

Its claim is found stale by the others (or by itself), tried again, and given up after a few deaths,
so a candidate that kills its worker ends itself and not the job. Several processes that belong
together (`jax.distributed`) end together: where one is lost, jax ends the others, and each one's
supervisor starts it again.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from autoshard.processes.process_group import LOST

log = logging.getLogger("autoshard.jobs")

PAUSE_S = 1.0
"""Before a worker is started again, so that one that ends at once is not started a thousand times a
second. Chosen by hand; no test depends on it."""

SIGNAL_EXIT = 128
"""A shell's exit code of a process that a signal ended is this much above the signal's number."""


class _Stopped:
    """Whether somebody asked for the end of the worker."""

    def __init__(self) -> None:
        self.asked = False


def supervise(command: Sequence[str], restarts: int) -> int:
    """Runs a worker, again after each time it is lost; returns its exit code.

    Args:
        command: The worker's.
        restarts: How often it is started again.
    """
    stopped = _Stopped()
    for life in range(restarts + 1):
        worker = subprocess.Popen(command)
        with _signals_forwarded(worker, stopped):
            code = worker.wait()
        if stopped.asked or not _is_lost(code):
            return _exit_code(code)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if life == restarts:
            log.error("the worker ended (%s) %d times; not started again", how, life + 1)
            return _exit_code(code)
        log.warning("the worker ended (%s); starting it again", how)
        time.sleep(PAUSE_S)
    return 0


@contextmanager
def _signals_forwarded(worker: subprocess.Popen[bytes], stopped: _Stopped) -> Iterator[None]:
    """Within it signals that ask for an end go to the worker, which releases its task."""

    def forward(number: int, frame: FrameType | None) -> None:
        stopped.asked = True
        worker.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_lost(code: int) -> bool:
    """True for the exit code of a worker that did not end of its own accord."""
    return code < 0 or code == LOST


def _exit_code(code: int) -> int:
    """An exit code as a shell states it."""
    return code if code >= 0 else SIGNAL_EXIT - code
