"""The process that `isolated` keeps beside the search: it partitions or compiles what it is sent.

Started as `python -m autoshard.compiler.worker WHERE MEMORY_BYTES FD`. WHERE is a platform, for the
devices that the process sees, a target as JSON, or empty where it only partitions. FD is one end of
a `multiprocessing.Pipe`: what compilers and libraries print cannot get between the messages. It
ends when the other end is closed, when nothing was asked of it for a while, and in the middle of a
compilation when the search's process has ended.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import jax
import msgspec

from autoshard.compiler.compile import Figures, figures_of
from autoshard.devices.target import Target
from autoshard.devices.topology import open_devices
from autoshard.jax_internals import executables
from autoshard.processes.child import end_with_parent
from autoshard.shardy.partition import Partitioned, PartitionFailure, partition_module

IDLE_LIMIT_S = 600.0
"""So long a process waits for its next program, then it gives its memory back (some 300 MB). A
notebook's next search comes sooner. Chosen by hand; no test depends on it."""

RETIRED = 75
"""Its exit status then: EX_TEMPFAIL of sysexits.h, "try again"."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to do with a program.

    Attributes:
        compile: Compile this.
        module: Else run Shardy's passes on this one (StableHLO bytecode).
        mesh_axes: For a mesh of these axes.
    """

    compile: executables.CompileRequest | None = None
    module: bytes = b""
    mesh_axes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a program.

    Attributes:
        figures: Of the compiled program.
        text: Of the compiled program.
        partitioned: What Shardy decided.
        error: What was raised instead.
    """

    figures: Figures | None = None
    text: str = ""
    partitioned: Partitioned | None = None
    error: str = ""


def main(where: str, memory_bytes: int, file_descriptor: int) -> None:
    """Serves requests until the other end is closed.

    Args:
        where: What to compile for: a platform, a target as JSON, or nothing.
        memory_bytes: The process may allocate no more than this; 0 for no limit.
        file_descriptor: The pipe's end.
    """
    threading.Thread(target=end_with_parent, args=[os.getppid()], daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the search decides what an interruption means
    with contextlib.suppress(OSError):
        # Where memory runs out, the kernel is to end this process (1000: first), not the search.
        Path("/proc/self/oom_score_adj").write_text("1000")
    connection: Connection = Connection(file_descriptor)
    devices: Mapping[int, jax.Device] = {}
    if where.startswith("{"):
        devices = open_devices(msgspec.json.decode(where, type=Target))
    elif where:
        devices = {device.id: device for device in jax.local_devices(backend=where)}
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    connection.send_bytes(msgspec.msgpack.encode(sorted(devices)))
    while True:
        if not connection.poll(IDLE_LIMIT_S):
            sys.exit(RETIRED)
        try:
            request = msgspec.msgpack.decode(connection.recv_bytes(), type=Request)
        except EOFError:
            return
        if request.compile is not None:
            reply = _compiled(request.compile, devices)
        else:
            reply = _partitioned(request)
        connection.send_bytes(msgspec.msgpack.encode(reply))


def _compiled(request: executables.CompileRequest, devices: Mapping[int, jax.Device]) -> Reply:
    start_s = time.perf_counter()
    try:
        executable = executables.compile_requested(request, devices)
        figures = figures_of(executable, time.perf_counter() - start_s)
        return Reply(figures, executable.as_text() or "")
    except Exception as error:
        return Reply(error=f"{type(error).__name__}: {error}")


def _partitioned(request: Request) -> Reply:
    try:
        with executables.parsed_module(request.module) as module:
            outcome = partition_module(module, request.mesh_axes)
    except Exception as error:
        return Reply(error=f"{type(error).__name__}: {error}")
    if isinstance(outcome, PartitionFailure):
        return Reply(error=outcome.reason)
    return Reply(partitioned=outcome)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
