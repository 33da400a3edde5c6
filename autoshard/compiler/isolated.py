"""Partitions and compiles in another process: what aborts, hangs or eats memory ends there.

Forking a process that has used jax hangs, so the worker is a fresh interpreter. It is sent
StableHLO bytecode and XLA's compile options, and answers with the program's text and memory
figures, from which the evidence is read as for a program compiled here. Starting costs a second or
two; one worker is kept warm, and replaced when it dies.

Not covered: programs that call back into Python (`InProcess` says so), and lowering, which is jax's
own Python.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from types import TracebackType
from typing import Any, TypeVar

import jax
import msgspec

from autoshard.compiler.compile import Built, CompilerOptions, Reading, evidence_of, read_program
from autoshard.compiler.worker import Reply, Request
from autoshard.devices import topology
from autoshard.devices.platforms import facts_of
from autoshard.evidence.candidate import CompiledEvidence
from autoshard.jax_internals import executables
from autoshard.layout.mesh import MeshInfo
from autoshard.processes.child import START_LIMIT_S, kill
from autoshard.shardy.partition import Partitioned, PartitionFailure

log = logging.getLogger("autoshard")

COMMAND = (sys.executable, "-P", "-m", "autoshard.compiler.worker")

END_LIMIT_S = 10.0
"""How long a process that closed its end of the pipe may take to end: writing a core file, say.
Chosen by hand; no test depends on it."""

LAST_WORDS_CHARS = 300
"""A reason is cut here: lines of compilers hold whole shapes. Chosen by hand; no test depends on
it."""

_MISSING_HERE = re.compile(r"\b(NOT_FOUND|UNIMPLEMENTED)\b")
"""Errors that may say only that a handler registered in this process (`jax.ffi`) does not exist in
the worker."""

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
    """

    reason: str
    killed: bool = False


@dataclass(frozen=True, slots=True)
class InProcess:
    """The program has to be compiled in this process, for this reason."""

    reason: str


class Isolation:
    """A worker process that compiles; a context manager.

    The worker starts at once and is waited for at first use.
    """

    def __init__(
        self,
        mesh: MeshInfo,
        *,
        timeout_s: float = 600.0,
        memory_bytes: int | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Starts nothing yet.

        Args:
            mesh: Of the programs to come.
            timeout_s: A compilation that takes longer has failed.
            memory_bytes: The worker may allocate no more than this; None for no limit.
            command: The worker; WHERE, MEMORY_BYTES and FD are appended.
        """
        self.mesh, self.timeout_s = mesh, timeout_s
        where = msgspec.json.encode(mesh.target).decode() if mesh.target else mesh.platform
        self._command = (*command, where, str(memory_bytes or 0))
        self._worker: _Worker | None = None
        self._ready = False
        self._unavailable = ""

    def __enter__(self) -> Isolation:
        if jax.process_count() > 1:
            self._unavailable = "the mesh belongs to several processes"
        else:
            self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def compile(
        self,
        built: Built,
        *,
        compiler_options: CompilerOptions | None = None,
        time_of: Callable[[Sequence[Any]], float] | None = None,
    ) -> CompiledEvidence | Failure | InProcess:
        """The evidence that `compile_built` would give, or why there is none.

        Args:
            built: From `build`.
            compiler_options: Passed to XLA as they are.
            time_of: Seconds of a step given the program's collectives.
        """
        try:
            request = executables.compile_request(built.lower(), compiler_options)
        except Exception as error:
            return Failure(f"{type(error).__name__}: {error}")
        if request is None:
            return InProcess("the program calls back into Python")
        reading = _once_more_if_killed(lambda: self.read(request))
        if not isinstance(reading, Reading):
            return reading
        return evidence_of(reading, self.mesh, time_of)

    def read(self, request: executables.CompileRequest) -> Reading | Failure | InProcess:
        """What the compiled program says, or why there is none; tried once."""
        worker = self._ready_worker(request.device_ids)
        if worker is None:
            return InProcess(self._unavailable)
        reply = self._reply(worker, Request(compile=request))
        if isinstance(reply, Failure):
            return reply
        if reply.figures is None:
            may_work_here = _MISSING_HERE.search(reply.error)
            return InProcess(reply.error) if may_work_here else Failure(reply.error)
        return read_program(reply.text, reply.figures, worker.written(), self.mesh)

    def partition(
        self, lowered: jax.stages.Lowered
    ) -> Partitioned | PartitionFailure | Failure | InProcess:
        """What `partition` would give; a Failure where the passes ended the process."""
        request = Request(module=executables.module_bytes(lowered), mesh_axes=dict(self.mesh.axes))

        def ask() -> Reply | Failure | InProcess:
            worker = self._ready_worker(())
            if worker is None:
                return InProcess(self._unavailable)
            return self._reply(worker, request)

        reply = _once_more_if_killed(ask)
        if not isinstance(reply, Reply):
            return reply
        return reply.partitioned or PartitionFailure(reply.error)

    def _reply(self, worker: _Worker, request: Request) -> Reply | Failure:
        """The worker's answer; after a Failure another worker takes its place."""
        reply = worker.exchange(msgspec.msgpack.encode(request), Reply, self.timeout_s)
        if isinstance(reply, Failure):
            self._start()
        return reply

    def kill(self) -> None:
        """Ends the worker, from another thread too; a `read` under way returns a Failure."""
        if self._worker is not None:
            self._worker.process.kill()

    def _ready_worker(self, device_ids: Sequence[int]) -> _Worker | None:
        """A worker with these devices; None where none can be had, which is not tried again."""
        if self._worker is None and not self._unavailable:
            self._start()
        if self._ready and self._worker is not None and self._worker.process.poll() is not None:
            self._start()  # it died while idle
        if self._worker is not None and not self._ready:
            self._unavailable = self._wait_until_ready(self._worker, device_ids)
            self._ready = not self._unavailable
        return self._worker if self._ready else None

    def _wait_until_ready(self, worker: _Worker, device_ids: Sequence[int]) -> str:
        """Why a worker that was started cannot compile for these devices; "" once it can."""
        ids = worker.exchange(None, list[int], START_LIMIT_S)
        if isinstance(ids, Failure):
            return f"no process to compile in could be started ({ids.reason})"
        if not set(device_ids) <= set(ids):
            return f"a process of its own sees devices {ids}, not {list(device_ids)}"
        return ""

    def _start(self) -> None:
        self._stop()
        try:
            self._worker = _Worker(self._command, _environment(self.mesh))
        except OSError as error:
            self._unavailable = f"no process to compile in could be started ({error})"

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.end()
        self._worker, self._ready = None, False


def _once_more_if_killed(ask: Callable[[], _T]) -> _T:
    """An answer; where the system killed the process, that to the same question asked again.

    The process is the first that the system ends for want of memory, whoever took it, so one death
    says little of the program. This search compiles nothing else meanwhile.
    """
    answer = ask()
    if isinstance(answer, Failure) and answer.killed:
        log.warning("the compiler's process was killed; its program is tried once more")
        answer = ask()
    return answer


class _Worker:
    """A process, the pipe to it, and the file that its standard output and error go to."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._start = 0
        self._connection, other = Pipe()
        try:
            # Closed here once the worker has it, or its end would not be seen as the pipe's.
            with other:
                self.process = subprocess.Popen(
                    [*command, str(other.fileno())],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=self._stderr,
                    stderr=self._stderr,
                    pass_fds=[other.fileno()],
                )
        except OSError:
            self._close()
            raise

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
                return Failure(
                    f"it took longer than {timeout_s:g} s; the compiler's process was ended"
                )
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


def _environment(mesh: MeshInfo) -> dict[str, str]:
    """The environment of a process that imports what this one imports and sees the same devices."""
    environment = dict(os.environ)
    # Of the whole path, since it may have been changed here; `-P` keeps the current folder out.
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # This process holds the memory of the accelerators already.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if mesh.target is not None:
        return environment | topology.environment(mesh.target)
    environment["JAX_PLATFORMS"] = getattr(jax.config, "jax_platforms", None) or ""
    if facts_of(mesh.platform).on_host:
        environment["JAX_PLATFORMS"] = "cpu"
        environment["JAX_NUM_CPU_DEVICES"] = str(jax.local_device_count("cpu"))
    return environment
