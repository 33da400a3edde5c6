"""Shows that a worker lives: a process of its own renews the heartbeat of the claim that its worker
holds, whatever that one does.

A worker deep in a compiler may hold the interpreter's lock for minutes, so no thread of it can be
relied on. This process is told on its standard input which trial to keep alive and for how long,
and ends with its worker, when that pipe closes. It does not answer to the signals by which a whole
process group is pre-empted: its worker first releases its claim.

A worker that hangs does not keep its task: after the task's limit its heartbeat stops, and a worker
that is still at it a lease later is killed where it was to end at the limit.
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
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage

from autoshard.processes.child import START_LIMIT_S, end_with_parent, kill
from autoshard.search.study.claims import claim_of
from autoshard.search.study.storage import is_away, open_storage

WITHOUT_JAX = """
import sys, types
package = types.ModuleType("autoshard")
package.__path__ = [sys.argv.pop(1)]
sys.modules["autoshard"] = package
"""
"""Makes `autoshard.search` importable alone: importing jax would take most of a start."""

PROGRAM = WITHOUT_JAX + "from autoshard.search.study.heartbeat import main; main()"

HEARTBEAT = "heartbeat"
"""Attribute of a claim that changes with each heartbeat; its value means nothing to others."""

HEARTBEATS_PER_LEASE = 4
"""Three may be lost or late before a claim is stale. Chosen by hand; on an idle machine tests pass
with 1 as well."""

log = logging.getLogger("autoshard.jobs")


@dataclass(frozen=True, slots=True)
class Alive:
    """The claim to keep alive.

    Attributes:
        trial_id: Its trial.
        nonce: The claim's own: under that number may be another, of a storage that was put back.
        limit_s: How long at most.
        ends: The worker is killed if it is at the claim a lease later still.
    """

    trial_id: int
    nonce: str
    limit_s: float
    ends: bool


class Heartbeat:
    """The worker's end: starts the process, and says which claim to keep alive."""

    def __init__(self, where: str, lease_s: float) -> None:
        """Starts it.

        Args:
            where: The storage, as `open_storage` takes it.
            lease_s: A claim without a heartbeat for this long is given to another.
        """
        self._settings = {"storage": where, "lease_s": lease_s, "worker": os.getpid()}
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
                "no process for the heartbeat could be started (%s); a long task may be given to "
                "another worker",
                error,
            )
            self._process = None
            return
        self._ready = False
        self._send(self._settings)

    def wait(self) -> None:
        """Waits until it has opened the storage: a claim made before could be stale before its
        first heartbeat.
        """
        if self._ready or self._process is None or self._process.stdout is None:
            return
        self._ready = (
            True  # waited for once: a process that does not start would cost each task this
        )
        ready, _, _ = select.select([self._process.stdout], [], [], START_LIMIT_S)
        if not ready or not os.read(self._process.stdout.fileno(), 1):
            log.warning(
                "the process for the heartbeat did not start; a long task may be given to another "
                "worker"
            )

    def keep_alive(self, alive: Alive | None) -> None:
        """Renews the heartbeat of this claim from now on, or of none."""
        message = {"alive": None if alive is None else asdict(alive)}
        if not self._send(message) and alive is not None:
            # It died; the system may have killed it when memory ran out.
            self.close()
            self._start()
            self._send(message)

    def _send(self, message: dict[str, Any]) -> bool:
        """Sends a message; False where nobody is there to read it."""
        if self._process is None or self._process.stdin is None:
            return False
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # it died, or was closed
            return False
        return True

    def close(self) -> None:
        """Ends the process."""
        if self._process is None or self._process.stdin is None:
            return
        kill(self._process)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None


@dataclass
class _Orders:
    """What the worker has said so far, in the process for the heartbeat."""

    storage: BaseStorage | None = None
    lease_s: float = 1.0
    worker: int = 0
    alive: Alive | None = None
    since_s: float = 0.0

    def take(self, message: dict[str, Any]) -> None:
        """Notes a message of the worker, and says so once the storage is open."""
        if "storage" in message:
            self.lease_s, self.worker = message["lease_s"], message["worker"]
            threading.Thread(target=end_with_parent, args=[self.worker], daemon=True).start()
            self.storage = open_storage(message["storage"], patience_s=START_LIMIT_S)
            os.write(sys.stdout.fileno(), b"\n")  # what `Heartbeat.wait` waits for
        else:
            alive = message["alive"]
            self.alive = None if alive is None else Alive(**alive)
            self.since_s = time.monotonic()

    @property
    def pause_s(self) -> float | None:
        """How long to wait for a message; None for as long as it takes."""
        return None if self.alive is None else self.lease_s / HEARTBEATS_PER_LEASE

    def beat(self) -> None:
        """Renews the heartbeat of the claim, if there is one, until it is over."""
        if self.storage is None or self.alive is None:
            return
        past_s = time.monotonic() - self.since_s - self.alive.limit_s
        if past_s <= 0:
            if not renew(self.storage, self.alive):
                self.alive = None
        elif not self.alive.ends:
            self.alive = None
        elif past_s > self.lease_s:
            self.alive = None
            with contextlib.suppress(ProcessLookupError):
                if os.getppid() == self.worker:
                    os.kill(self.worker, signal.SIGKILL)


def renew(storage: BaseStorage, alive: Alive) -> bool:
    """Renews a heartbeat once; False where the claim is over. A storage that is away is tried again
    at the next one.
    """
    try:
        claim = claim_of(storage.get_trial(alive.trial_id))
        if claim is None or claim.nonce != alive.nonce:
            return False
        storage.set_trial_user_attr(alive.trial_id, HEARTBEAT, time.time_ns())
    except (UpdateFinishedTrialError, KeyError):
        return False
    except Exception as error:
        if not is_away(error):
            raise
    return True


def main() -> None:
    """Renews heartbeats until standard input closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Read from the descriptor: a buffered reader may hold messages of which `select` knows nothing.
    orders = _Orders()
    source, pending = sys.stdin.fileno(), b""
    while True:
        ready, _, _ = select.select([source], [], [], orders.pause_s)
        if ready:
            read = os.read(source, 65536)
            if not read:  # the worker has ended, however it did
                return
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                orders.take(json.loads(line))
        orders.beat()


if __name__ == "__main__":
    main()
