"""Partitions and compiles candidates in another process: one that aborts, hangs or eats the memory
ends there.

Forking a process that has used jax hangs, so the worker is a fresh interpreter. It is given
StableHLO bytecode and XLA's compile options, and gives back the program's text and memory figures,
from which the evidence is read as for a program compiled here. Starting costs a second or two; one
worker is kept warm, and replaced when it dies.

Not covered: programs that call back into Python (`InProcess` says so), and lowering, which is jax's
own Python.
"""

from __future__ import annotations

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
from autoshard.evidence.candidate import CompiledEvidence
from autoshard.jax_internals import executables
from autoshard.layout.mesh import MeshInfo
from autoshard.shardy.partition import Partitioned, PartitionFailure

COMMAND = (sys.executable, "-P", "-m", "autoshard.compiler.worker")

START_LIMIT_S = 120.0
"""Starting takes a second or two from a local disk; a busy machine and a network file system are
allowed for."""

END_LIMIT_S = 10.0
"""A process that closed its end of the pipe without ending is given this long."""

_LACKING = re.compile(r"\b(NOT_FOUND|UNIMPLEMENTED)\b")
"""Errors that may say only that a handler registered in this process (`jax.ffi`) does not exist in
the worker."""

_TELLING = re.compile(r"Check failed|^F\d{4} |terminate called|what\(\):|Error: ")
_STACK = re.compile(r"^\s*(@\s+0x|\*\*\*)")


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Failure:
    """The program does not compile; the candidate is to be rejected with this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class InProcess:
    """The program has to be compiled in this process, for this reason."""

    reason: str


class Isolation:
    """A worker process that compiles; a context manager. The worker starts at once and is waited
    for at first use.
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
        found = self.read(request)
        return evidence_of(found, self.mesh, time_of) if isinstance(found, Reading) else found

    def read(self, request: executables.CompileRequest) -> Reading | Failure | InProcess:
        """What the compiled program says, or why there is none."""
        worker = self._ready_worker(request.device_ids)
        if worker is None:
            return InProcess(self._unavailable)
        reply = self._reply(worker, Request(compile=request))
        if isinstance(reply, Failure):
            return reply
        if reply.figures is None:
            return InProcess(reply.error) if _LACKING.search(reply.error) else Failure(reply.error)
        return read_program(reply.text, reply.figures, worker.written(), self.mesh)

    def partition(
        self, lowered: jax.stages.Lowered
    ) -> Partitioned | PartitionFailure | Failure | InProcess:
        """What `partition` would find, or why there is nothing: a Failure where the passes ended
        the process.
        """
        worker = self._ready_worker(())
        if worker is None:
            return InProcess(self._unavailable)
        request = Request(module=executables.module_bytes(lowered), mesh_axes=dict(self.mesh.axes))
        reply = self._reply(worker, request)
        if isinstance(reply, Failure):
            return reply
        return reply.partitioned or PartitionFailure(reply.error)

    def _reply(self, worker: _Worker, request: Request) -> Reply | Failure:
        """The worker's answer; after a Failure another worker takes its place."""
        reply = worker.exchange(msgspec.msgpack.encode(request), Reply, self.timeout_s)
        if isinstance(reply, Failure):
            self._start()
        return reply

    def kill(self) -> None:
        """Ends the worker from another thread, whatever it is doing; `read` then returns a
        Failure.
        """
        if self._worker is not None:
            self._worker.process.kill()

    def _ready_worker(self, device_ids: Sequence[int]) -> _Worker | None:
        """A worker with these devices; None where none can be had, which is not tried again."""
        if self._worker is None and not self._unavailable:
            self._start()
        if self._ready and self._worker is not None and self._worker.process.poll() is not None:
            self._start()  # it died while idle
        if self._worker is not None and not self._ready:
            found = self._worker.exchange(None, list[int], START_LIMIT_S)
            if isinstance(found, Failure):
                self._unavailable = f"no process to compile in could be started ({found.reason})"
            elif not set(device_ids) <= set(found):
                self._unavailable = (
                    f"a process of its own sees devices {found}, not {list(device_ids)}"
                )
            self._ready = not self._unavailable
        return self._worker if self._ready else None

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


class _Worker:
    """A process, the pipe to it, and the file that its standard output and error go to."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._start = 0
        self._connection, other = Pipe()
        try:
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
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        self._connection.close()
        self._stderr.close()

    def exchange(self, message: bytes | None, expected: type[_T], timeout_s: float) -> _T | Failure:
        """Sends a message, if any, and waits for one; after a Failure the worker is of no more
        use.
        """
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self.process.kill()  # which ends the waiting below, be it to send or to receive

        self._start += len(self.written())
        timer = threading.Timer(timeout_s, expire)
        timer.daemon = (
            True  # a Ctrl-C while it starts leaves it running: it must not keep the process
        )
        try:
            timer.start()
            if message is not None:
                self._connection.send_bytes(message)
            return msgspec.msgpack.decode(self._connection.recv_bytes(), type=expected)
        except (EOFError, OSError):
            if expired.is_set():
                return Failure(
                    f"it took longer than {timeout_s:g} s; the compiler's process was ended"
                )
            return Failure(self._why_it_ended())
        except msgspec.DecodeError as error:
            return Failure(f"the compiler's process sent what cannot be read ({error})")
        except (
            BaseException
        ):  # interrupted: an answer may still come, and would be taken for that to the next request
            self.process.kill()
            self.process.wait()
            raise
        finally:
            timer.cancel()

    def written(self) -> str:
        """What the process wrote since the last message was sent."""
        size = os.fstat(self._stderr.fileno()).st_size
        # Not read(): the position of the file is the worker's too.
        return os.pread(self._stderr.fileno(), size - self._start, self._start).decode("latin-1")

    def _why_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "the compiler's process stopped answering"
        said = last_words(self.written())
        if code == -signal.SIGKILL:
            return "the compiler's process was killed (SIGKILL), as the system does when memory runs out"
        if code < 0:
            return f"the compiler aborted the process ({signal.Signals(-code).name}): {said}"
        return f"the compiler ended the process (exit status {code}): {said}"


def last_words(stderr: str) -> str:
    r"""The line of standard error that tells best why a process ended: a failed check, else the
    last one.

    >>> last_words("F0101 a.cc:7] Check failed: x == y\n*** Check failure stack trace: ***\n    @  0x7f  f()\n")
    'F0101 a.cc:7] Check failed: x == y'
    """
    lines = [
        line.strip() for line in stderr.splitlines() if line.strip() and not _STACK.match(line)
    ]
    telling = [line for line in lines if _TELLING.search(line)]
    return (telling or lines or ["nothing on its standard error"])[-1][:300]


def _environment(mesh: MeshInfo) -> dict[str, str]:
    """The environment of a process that imports what this one imports and sees the same devices."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = (
        "false"  # this process holds the memory of the accelerators
    )
    if mesh.target is not None:
        return environment | topology.environment(mesh.target)
    environment["JAX_PLATFORMS"] = getattr(jax.config, "jax_platforms", None) or ""
    if mesh.platform == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
        environment["JAX_NUM_CPU_DEVICES"] = str(jax.local_device_count("cpu"))
    return environment
