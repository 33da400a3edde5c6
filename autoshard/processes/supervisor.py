"""Keeps a worker alive: one that a candidate aborted, or the system killed, or that gave up a
storage which was away, is started again. A worker whose supervisor was killed ends as well.

Its claim is found stale by the others (or by itself), tried again, and given up after a few deaths,
so a candidate that kills its worker ends itself and not the job. Several processes that belong
together (`jax.distributed`) end together: where one is lost, jax ends the others, and each one's
supervisor starts it again.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from autoshard.processes.child import ORPHANED, wait_for_end_of
from autoshard.processes.process_group import LOST

log = logging.getLogger("autoshard.jobs")

PAUSE_S = 1.0
"""Before a worker is started again, so that one that ends at once is not started a thousand times a
second. Chosen by hand; no test depends on it."""

AWAY = 75
"""Exit code of a worker that gave up a storage which was away (EX_TEMPFAIL of sysexits.h)."""

LONGEST_PAUSE_S = 60.0
"""Before a worker is started again whose storage was away; doubled from `PAUSE_S` each time. Chosen
by hand: a full connection table is not filled further by those who wait."""

SUPERVISOR = "AUTOSHARD_SUPERVISOR"
"""Variable of the environment: the process id of a worker's supervisor."""

RELEASE_S = 30.0
"""How long a worker without a supervisor may take to release its task. Chosen by hand: it takes a
moment, but for one that is in the compiler; no test depends on it."""

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
    pause_s = PAUSE_S
    for life in range(restarts + 1):
        worker = subprocess.Popen(command, env={**os.environ, SUPERVISOR: str(os.getpid())})
        with _signals_forwarded(worker, stopped):
            code = worker.wait()
        if stopped.asked or not _is_lost(code):
            return _exit_code(code)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if life == restarts:
            log.error("the worker ended (%s) %d times; not started again", how, life + 1)
            return _exit_code(code)
        log.warning("the worker ended (%s); starting it again", how)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if code == AWAY else PAUSE_S
        time.sleep(pause_s)
    return 0


def end_with_supervisor() -> None:
    """Ends this process once its supervisor has ended, as a signal to terminate would; does nothing
    in a process without one.
    """
    supervisor = os.environ.get(SUPERVISOR, "")
    if not supervisor.isdecimal() or int(supervisor) != os.getppid():
        return

    def watch() -> None:
        wait_for_end_of(int(supervisor))
        log.error("the supervisor of this worker has ended; it ends as well")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(RELEASE_S)
        os._exit(ORPHANED)

    threading.Thread(target=watch, daemon=True).start()


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
    return code < 0 or code in (LOST, AWAY)


def _exit_code(code: int) -> int:
    """An exit code as a shell states it."""
    return code if code >= 0 else SIGNAL_EXIT - code
