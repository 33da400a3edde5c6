"""Compiles many candidates for a target at once, in their own processes, with a cache on disk."""

from __future__ import annotations

import logging
import os
import queue
import re
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType

from autoshard.compiler.cache import CompileCache, Refusal, Stored, program_key
from autoshard.compiler.compile import Built, CompilerOptions, Reading
from autoshard.compiler.isolated import Isolation
from autoshard.compiler.worker_process import Failure
from autoshard.errors import TargetError
from autoshard.jax_internals import executables
from autoshard.layout.mesh import MeshInfo
from autoshard.text import BINARY_UNITS

log = logging.getLogger("autoshard")

_NUMBER = r"([\d.]+)([KMGT]?)"
_REFUSALS = (
    re.compile(rf"\({_NUMBER}\) exceeds available HBM \({_NUMBER}\)"),
    re.compile(rf"Used {_NUMBER} of {_NUMBER} hbm", re.IGNORECASE),
)


@dataclass(frozen=True, slots=True)
class Job:
    """A candidate to compile: the layout as a jitted function, and options of the compiler."""

    built: Built
    options: CompilerOptions


Outcome = Reading | Refusal | Failure


class CompilePool:
    """Processes that compile for one target; a context manager. Each is started when it is first
    needed.
    """

    def __init__(
        self,
        mesh: MeshInfo,
        *,
        workers: int | None = None,
        timeout_s: float = 600.0,
        memory_bytes: int | None = None,
        cache: CompileCache | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            mesh: Of a target.
            workers: Processes, by default one per core of this machine.
            timeout_s: A compilation that takes longer has failed.
            memory_bytes: What each process may allocate; None for no limit.
            cache: Of outcomes; None for none.
        """
        if mesh.target is None:
            raise TargetError("a CompilePool compiles for targets; this mesh has real devices.")
        self._mesh, self._target, self._cache = mesh, mesh.target, cache
        count = workers or len(os.sched_getaffinity(0))
        self._workers = [
            Isolation(mesh, timeout_s=timeout_s, memory_bytes=memory_bytes) for _ in range(count)
        ]
        self._idle: queue.SimpleQueue[Isolation] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.close()

    def compile(
        self,
        jobs: Sequence[Job],
        on_done: Callable[[int, Outcome], None],
        late: Callable[[], bool] = lambda: False,
    ) -> None:
        """Compiles; each outcome is handed over as soon as it is known. Where the system killed the
        process, which may have been for the memory of those beside it, that is once more and alone,
        after all others.

        Args:
            jobs: In order of importance.
            on_done: Called in this thread with the number of a job and its outcome.
            late: True once nothing new is to be started.
        """
        running: dict[Future[Outcome], int] = {}
        started = 0
        killed: list[int] = []
        with ThreadPoolExecutor(len(self._workers)) as threads:
            try:
                while True:
                    # No job is started ahead: `late` decides as late as it can.
                    while started < len(jobs) and len(running) < len(self._workers) and not late():
                        running[threads.submit(self._outcome, jobs[started])] = started
                        started += 1
                    if not running:
                        break
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in sorted(done, key=running.__getitem__):
                        number, outcome = running.pop(future), future.result()
                        if isinstance(outcome, Failure) and outcome.killed:
                            killed.append(number)
                        else:
                            on_done(number, outcome)
                for number in killed:
                    log.warning("a compiler's process was killed; its program is tried once more")
                    on_done(number, threads.submit(self._outcome, jobs[number]).result())
            except BaseException:
                for worker in self._workers:
                    worker.kill()  # else leaving the threads would wait for their compilations
                raise

    def _outcome(self, job: Job) -> Outcome:
        try:
            lowered = job.built.lower()
            key = program_key(lowered.as_text(), job.options, self._mesh.axes, self._target)
            stored = self._cache.get(key) if self._cache is not None else None
            if stored is not None:
                outcome = stored.reading or stored.refusal
                if outcome is not None:
                    return outcome
            request = executables.compile_request(lowered, job.options)
        except Exception as error:
            return Failure(f"{type(error).__name__}: {error}")
        if request is None:
            return Failure(
                "the program calls back into Python, which no compiler does for hardware that is "
                "not here"
            )
        worker = self._idle.get()
        try:
            reply = worker.read(request)
        finally:
            self._idle.put(worker)
        if isinstance(reply, Reading):
            self._store(key, Stored(reading=reply))
            return reply
        refusal = read_refusal(reply.reason)
        if refusal is None:
            return reply if isinstance(reply, Failure) else Failure(reply.reason)
        self._store(key, Stored(refusal=refusal))
        return refusal

    def _store(self, key: str, stored: Stored) -> None:
        if self._cache is not None:
            self._cache.put(key, stored)


def read_refusal(message: str) -> Refusal | None:
    """The numbers in the compiler's message that a program does not fit; None in another message.

    >>> read_refusal("RESOURCE_EXHAUSTED: temporaries (186.22G) exceeds available HBM (15.75G).")
    Refusal(needed_bytes=199952202465, available_bytes=16911433728)
    """
    for form in _REFUSALS:
        if match := form.search(message):
            return Refusal(_bytes_of(match[1], match[2]), _bytes_of(match[3], match[4]))
    return None


def _bytes_of(number: str, prefix: str) -> int:
    """Bytes of a size as XLA writes it, with the prefix of a binary unit alone: `15.75G`."""
    return int(float(number) * BINARY_UNITS[f"{prefix}iB" if prefix else "B"])
