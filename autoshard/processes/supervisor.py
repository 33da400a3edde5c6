"""Keeps a worker alive: one that a candidate aborted, or the system killed, is started again.

What it was at is found stale by the others (or by itself) and tried again, and given up after a few
deaths, so a candidate that kills its worker ends itself and not the job. Several processes that
belong together (`jax.distributed`) end together: where one is lost, jax ends the others, and each
one's supervisor starts it again.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Sequence
from types import FrameType

from autoshard.processes.process_group import LOST

log = logging.getLogger("autoshard.jobs")

PAUSE_S = 1.0


def supervise(command: Sequence[str], restarts: int) -> int:
    """Runs a worker, again after each time it is lost; returns its exit code.

    Args:
        command: The worker's.
        restarts: How often it is started again.
    """
    stopping = False
    for life in range(restarts + 1):
        worker = subprocess.Popen(command)

        def forward(
            number: int, frame: FrameType | None, worker: subprocess.Popen[bytes] = worker
        ) -> None:
            nonlocal stopping
            stopping = True
            worker.send_signal(number)

        before = {
            number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            code = worker.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if stopping or (code >= 0 and code != LOST):
            return code if code >= 0 else 128 - code
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if life == restarts:
            log.error("the worker ended (%s) %d times; not started again", how, life + 1)
            return 128 - code if code < 0 else code
        log.warning("the worker ended (%s); starting it again", how)
        time.sleep(PAUSE_S)
    return 0
