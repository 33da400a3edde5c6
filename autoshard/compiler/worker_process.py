"""The process of `compiler.worker` as this one holds it: a pipe to it, what it wrote, why it ended.

A search leaves its process behind, warm, for the next search of this process: starting one takes a
second or two. One is kept at most, and it ends by itself after a while without work.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import TypeVar

import msgspec

from autoshard.compiler.worker import RETIRED
from autoshard.processes.child import START_LIMIT_S, kill

END_LIMIT_S = 10.0
"""How long a process that closed its end of the pipe may take to end: writing a core file, say.
Chosen by hand; no test depends on it."""

LAST_WORDS_CHARS = 300
"""A reason is cut here: lines of compilers hold whole shapes. Chosen by hand; no test depends on
it."""

_CAUSE = re.compile(r"Check failed|^F\d{4} |terminate called|what\(\):|Error: ")
"""Lines that say why a process ended: glog's fatal ones, C++ exceptions, Python's last line."""

_STACK_LINE = re.compile(r"^\s*(@\s+0x|\*\*\*)")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Failure:
    """The program does not compile; the candidate is to be rejected with this reason.

    Attributes:
        reason: In one line.
        killed: The system killed the process, which may have been for another's memory.
        expired: It was ended here, for taking too long.
    """

    reason: str
    killed: bool = False
    expired: bool = False


class WorkerProcess:
    """A process, the pipe to it, and the file that its standard output and error go to.

    Attributes:
        process: The process.
        device_ids: Numbers of the devices that it compiles for; None until it said so.
    """

    def __init__(self, command: Sequence[str], settings: Mapping[str, str]) -> None:
        """Starts it.

        Args:
            command: The file descriptor of the pipe is appended.
            settings: Its environment, where that is not this process's.

        Raises:
            OSError: If it cannot be started.
        """
        self.device_ids: list[int] | None = None
        self._started_as = tuple(command), dict(settings)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._start = 0
        self._connection, other = Pipe()
        try:
            # Closed here once the worker has it, or its end would not be seen as the pipe's.
            with other:
                self.process = subprocess.Popen(
                    [*command, str(other.fileno())],
                    env={**os.environ, "PYTHONPATH": _python_path(), **settings},
                    stdin=subprocess.DEVNULL,
                    stdout=self._stderr,
                    stderr=self._stderr,
                    pass_fds=[other.fileno()],
                )
        except OSError:
            self._close()
            raise

    def started_as(self, command: Sequence[str], settings: Mapping[str, str]) -> bool:
        """True if it was started by this command, with these settings.

        What else changed in this process since, its environment or its path, was for the start.
        """
        return self._started_as == (tuple(command), dict(settings))

    def wait_until_ready(self) -> str:
        """Why it cannot take requests; "" once it can."""
        if self.device_ids is None:
            answer = self.exchange(None, list[int], START_LIMIT_S)
            if isinstance(answer, Failure):
                return f"no process to compile in could be started ({answer.reason})"
            self.device_ids = answer
        return ""

    @property
    def retired(self) -> bool:
        """True if it ended because nobody had work for it."""
        return self.process.poll() == RETIRED

    def end(self) -> None:
        """Ends the process, whatever it is doing."""
        kill(self.process)
        self._close()

    def _close(self) -> None:
        self._connection.close()
        self._stderr.close()

    def exchange(self, message: bytes | None, expected: type[_T], timeout_s: float) -> _T | Failure:
        """Sends a message, if any, and waits for one; after a Failure the worker is of no more
        use.
        """
        self._start += len(self.written())
        limit = _TimeLimit(self.process, timeout_s)
        try:
            limit.start()
            if message is not None:
                self._connection.send_bytes(message)
            return msgspec.msgpack.decode(self._connection.recv_bytes(), type=expected)
        except (EOFError, OSError):
            if limit.expired:
                reason = f"it took longer than {timeout_s:.3g} s; the compiler's process was ended"
                return Failure(reason, expired=True)
            reason = self._why_it_ended()
            return Failure(reason, killed=self.process.returncode == -signal.SIGKILL)
        except msgspec.DecodeError as error:
            return Failure(f"the compiler's process sent what cannot be read ({error})")
        except BaseException:
            # Interrupted: an answer may still come, and be taken for that to the next request.
            kill(self.process)
            raise
        finally:
            limit.cancel()

    def written(self) -> str:
        """What the process wrote since the last message was sent."""
        size = os.fstat(self._stderr.fileno()).st_size
        # Not read(): the position of the file is the worker's too. Latin-1 reads any bytes, one
        # character each, by which `_start` counts.
        return os.pread(self._stderr.fileno(), size - self._start, self._start).decode("latin-1")

    def _why_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "the compiler's process stopped answering"
        words = last_words(self.written())
        if code == -signal.SIGKILL:
            return (
                "the compiler's process was killed (SIGKILL), as the system does when memory runs "
                "out"
            )
        if code < 0:
            return f"the compiler aborted the process ({signal.Signals(-code).name}): {words}"
        return f"the compiler ended the process (exit status {code}): {words}"


class _TimeLimit:
    """Kills a process after a while, which ends any waiting for it, to send or to receive."""

    def __init__(self, process: subprocess.Popen[bytes], timeout_s: float) -> None:
        self.expired = False
        self._process = process
        self._timer = threading.Timer(timeout_s, self._expire)
        # A Ctrl-C while it starts leaves it running: it must not keep this process.
        self._timer.daemon = True

    def start(self) -> None:
        """Begins to count."""
        self._timer.start()

    def cancel(self) -> None:
        """Lets the process live."""
        self._timer.cancel()

    def _expire(self) -> None:
        self.expired = True
        self._process.kill()


def last_words(stderr: str) -> str:
    r"""The line of standard error that tells best why a process ended: a cause, else the last one.

    >>> trace = "*** Check failure stack trace: ***\n    @  0x7f  f()\n"
    >>> last_words(f"F0101 a.cc:7] Check failed: x == y\n{trace}")
    'F0101 a.cc:7] Check failed: x == y'
    """
    lines = []
    for line in stderr.splitlines():
        if line.strip() and not _STACK_LINE.match(line):
            lines.append(line.strip())
    causes = [line for line in lines if _CAUSE.search(line)]
    return (causes or lines or ["nothing on its standard error"])[-1][:LAST_WORDS_CHARS]


def _python_path() -> str:
    """The path of this process, which may have been changed since it started."""
    return os.pathsep.join(os.fspath(path) or os.getcwd() for path in sys.path)


# Kept for the next search ------------------------------------------------------------------------

_kept: list[WorkerProcess] = []
_lock = threading.Lock()


def take(command: Sequence[str], settings: Mapping[str, str]) -> WorkerProcess:
    """The process that an earlier search left behind, if it was started alike, else a new one.

    Raises:
        OSError: If none can be started.
    """
    with _lock:
        worker = _kept.pop() if _kept else None
    if worker is not None:
        if worker.started_as(command, settings) and worker.process.poll() is None:
            return worker
        worker.end()
    return WorkerProcess(command, settings)


def keep(worker: WorkerProcess) -> None:
    """Leaves a process to the next search; it ends where another one is kept already."""
    with _lock:
        if not _kept and worker.process.poll() is None:
            _kept.append(worker)
            return
    worker.end()


def _end_kept() -> None:
    while _kept:
        _kept.pop().end()


atexit.register(_end_kept)
os.register_at_fork(after_in_child=_kept.clear)  # it answers one process only
