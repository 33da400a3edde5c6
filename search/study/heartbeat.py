"""Shows that a worker lives: a process of its own that beats for the claim its worker holds,
whatever that one does.

A worker deep in a compiler may hold the interpreter's lock for minutes, so no thread of it can be
relied on. This process is told on its standard input which trial to beat for, and ends with its
worker, when that pipe closes. It does not answer to the signals by which a whole process group is
pre-empted: its worker first hands its claim back.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage

from autoshard.search.study.storage import is_away, open_storage

WITHOUT_JAX = """
import sys, types
package = types.ModuleType("autoshard")
package.__path__ = [sys.argv.pop(1)]
sys.modules["autoshard"] = package
"""
"""Makes `autoshard.search` importable alone: autoshard itself imports jax, which takes most of a
start."""

PROGRAM = WITHOUT_JAX + "from autoshard.search.study.heartbeat import main; main()"

BEAT = "beat"
BEATS_PER_LEASE = 4

START_LIMIT_S = 120.0
"""Starting takes a second or two from a local disk; a busy machine and a network file system are
allowed for."""

log = logging.getLogger("autoshard.jobs")


class Heartbeat:
    """The worker's end: starts the process, and says what to beat for."""

    def __init__(self, where: str, lease_s: float) -> None:
        """Starts it.

        Args:
            where: The storage, as `open_storage` takes it.
            lease_s: A claim without a beat for this long is given to another.
        """
        self._first = {"storage": where, "interval_s": lease_s / BEATS_PER_LEASE}
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._start()

    def _start(self) -> None:
        command = (sys.executable, "-P", "-c", PROGRAM, sys.modules["autoshard"].__path__[0])
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            log.warning(
                "no process to beat could be started (%s); a long task may be given to another "
                "worker",
                error,
            )
            self._process = None
            return
        self._ready = False
        self._tell(self._first)

    def wait(self) -> None:
        """Waits until it can beat: a claim made before would be stale before its first beat."""
        if self._ready or self._process is None or self._process.stdout is None:
            return
        self._ready = True
        ready, _, _ = select.select([self._process.stdout], [], [], START_LIMIT_S)
        if not ready or not os.read(self._process.stdout.fileno(), 1):
            log.warning(
                "the process to beat did not start; a long task may be given to another worker"
            )

    def _tell(self, message: dict[str, Any]) -> bool:
        if self._process is None or self._process.stdin is None:
            return False
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # it died, or was closed
            return False
        return True

    def beat_for(self, trial_id: int | None) -> None:
        """Beats for this trial from now on, or for none."""
        if not self._tell({"trial_id": trial_id}) and trial_id is not None:
            self.close()
            self._start()
            self._tell({"trial_id": trial_id})

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.kill()
            self._process.wait()
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None


def beat(storage: BaseStorage, trial_id: int) -> bool:
    """Beats once; False where the claim is over. A storage that is away is tried again at the next
    beat.
    """
    try:
        storage.set_trial_user_attr(trial_id, BEAT, time.time_ns())
    except (UpdateFinishedTrialError, KeyError):
        return False
    except Exception as error:
        if not is_away(error):
            raise
    return True


def main() -> None:
    """Beats until standard input closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    source, pending = sys.stdin.fileno(), b""
    storage: BaseStorage | None = None
    interval_s, trial_id = 1.0, None
    while True:
        ready, _, _ = select.select([source], [], [], interval_s if trial_id is not None else None)
        if ready:
            read = os.read(source, 65536)
            if not read:
                return
            *lines, pending = (pending + read).split(b"\n")
            for message in map(json.loads, lines):
                if "storage" in message:
                    storage, interval_s = open_storage(message["storage"]), message["interval_s"]
                    os.write(sys.stdout.fileno(), b"\n")
                else:
                    trial_id = message["trial_id"]
        if storage is not None and trial_id is not None and not beat(storage, trial_id):
            trial_id = None


if __name__ == "__main__":
    main()
