"""Partitions and compiles in another process: what aborts, hangs or eats memory ends there.

Forking a process that has used jax hangs, so the worker is a fresh interpreter. It is sent
StableHLO bytecode and XLA's compile options, and answers with the program's text and memory
figures, from which the evidence is read as for a program compiled here. Starting costs a second or
two; one worker is kept warm, from one search to the next, and replaced when it dies.

It takes no accelerator: for GPUs it compiles as for a target, by the description that the compiler
gives of those of this process; for TPUs it partitions only, since a TPU belongs to one process.

Not covered: programs that call back into Python (`InProcess` says so), and lowering, which is jax's
own Python.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import jax
import msgspec

from autoshard.compiler.compile import Built, CompilerOptions, Reading, evidence_of, read_program
from autoshard.compiler.worker import Reply, Request
from autoshard.compiler.worker_process import Failure, WorkerProcess, keep, take
from autoshard.devices import topology
from autoshard.devices.platforms import facts_of
from autoshard.devices.target import Target
from autoshard.evidence.candidate import CompiledEvidence
from autoshard.jax_internals import executables
from autoshard.layout.mesh import MeshInfo
from autoshard.shardy.partition import Partitioned, PartitionFailure

log = logging.getLogger("autoshard")

COMMAND = (sys.executable or "", "-P", "-m", "autoshard.compiler.worker")

_MISSING_HERE = re.compile(r"\b(NOT_FOUND|UNIMPLEMENTED)\b")
"""Errors that may say only that a handler registered in this process (`jax.ffi`) does not exist in
the worker."""

_T = TypeVar("_T")


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
        where, self._settings = _surroundings(mesh)
        self._command = (*command, where, str(memory_bytes or 0))
        self._worker: WorkerProcess | None = None
        self._unavailable = ""

    def __enter__(self) -> Isolation:
        if jax.process_count() > 1:
            self._unavailable = "the mesh belongs to several processes"
        elif getattr(sys, "frozen", False):  # its executable is the whole program, not Python
            self._unavailable = "this program is frozen into one file"
        else:
            self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            keep(worker)

    def close(self) -> None:
        """Ends the worker; nothing is kept for a next search."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

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
        worker = self._ready_worker()
        if worker is None:
            return InProcess(self._unavailable)
        if not set(request.device_ids) <= set(worker.device_ids or ()):
            return InProcess(
                f"a process of its own has devices {worker.device_ids}, not "
                f"{list(request.device_ids)} ({self.mesh.platform})"
            )
        reply = self._reply(worker, Request(compile=request))
        if isinstance(reply, Failure):
            return reply
        if reply.figures is None:
            may_work_here = _MISSING_HERE.search(reply.error)
            return InProcess(reply.error) if may_work_here else Failure(reply.error)
        return read_program(reply.text, reply.figures, worker.written(), self.mesh)

    def ready(self) -> bool:
        """Waits until the worker takes requests; False where none can be had."""
        return self._ready_worker() is not None

    def partition(
        self, lowered: jax.stages.Lowered, limit_s: float | None = None
    ) -> Partitioned | PartitionFailure | Failure | InProcess:
        """What `partition` would give; a Failure where the passes ended the process.

        Args:
            lowered: As there.
            limit_s: So long they may take, if that is less than a compilation may. Taking longer
                says nothing against a program: that is a PartitionFailure.
        """
        request = Request(module=executables.module_bytes(lowered), mesh_axes=dict(self.mesh.axes))

        def ask() -> Reply | Failure | InProcess:
            worker = self._ready_worker()
            if worker is None:
                return InProcess(self._unavailable)
            return self._reply(worker, request, limit_s)

        reply = _once_more_if_killed(ask)
        if isinstance(reply, Failure) and reply.expired:
            return PartitionFailure(reply.reason, expired=True)
        if not isinstance(reply, Reply):
            return reply
        return reply.partitioned or PartitionFailure(reply.error)

    def _reply(
        self, worker: WorkerProcess, request: Request, limit_s: float | None = None
    ) -> Reply | Failure:
        """The worker's answer; after a Failure another worker takes its place."""
        message = msgspec.msgpack.encode(request)
        timeout_s = self.timeout_s if limit_s is None else min(limit_s, self.timeout_s)
        reply = worker.exchange(message, Reply, timeout_s)
        if isinstance(reply, Failure) and worker.retired:  # just before it was asked
            next_worker = self._ready_worker()
            if next_worker is not None:
                reply = next_worker.exchange(message, Reply, timeout_s)
        if isinstance(reply, Failure):
            self._start()
        return reply

    def kill(self) -> None:
        """Ends the worker, from another thread too; a `read` under way returns a Failure."""
        if self._worker is not None:
            self._worker.process.kill()

    def _ready_worker(self) -> WorkerProcess | None:
        """A worker that takes requests; None where none can be had, which is not tried again."""
        if self._unavailable:
            return None
        worker = self._worker
        if worker is None or (worker.device_ids is not None and worker.process.poll() is not None):
            self._start()  # it is the first, or the one before died while idle
        if self._worker is not None:
            self._unavailable = self._worker.wait_until_ready()
        return None if self._unavailable else self._worker

    def _start(self) -> None:
        self.close()
        try:
            self._worker = take(self._command, self._settings)
        except OSError as error:
            self._unavailable = f"no process to compile in could be started ({error})"


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


def _surroundings(mesh: MeshInfo) -> tuple[str, dict[str, str]]:
    """WHERE of `compiler.worker`, and its environment where that is not this process's."""
    if mesh.target is not None:
        return _as_json(mesh.target), topology.environment(mesh.target)
    if facts_of(mesh.platform).on_host:
        count = str(jax.local_device_count("cpu"))
        return mesh.platform, {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": count}
    # The accelerators are this process's, and so is their memory.
    none = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "CUDA_VISIBLE_DEVICES": ""}
    attached = _attached_gpus(mesh)
    return _as_json(attached) if attached else "", none


def _as_json(target: Target) -> str:
    return msgspec.json.encode(target).decode()


def _attached_gpus(mesh: MeshInfo) -> Target | None:
    """The GPUs of this process, as a target that is compiled for without them; None for others."""
    devices = list(mesh.user.devices.flat)
    try:
        description = executables.gpu_target_config(devices)
    except RuntimeError:  # a compiler that does not describe its devices
        return None
    if description is None:
        return None
    count = jax.local_device_count(mesh.platform)
    return Target("gpu", mesh.device_kind, (1, count), description=description)
