"""A compilation that aborts, hangs, or eats the memory is a rejection with its reason; the search
goes on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import autoshard
from autoshard import Effort, optimize
from autoshard.compiler import isolated
from autoshard.compiler.compile import build, compile_built
from autoshard.compiler.isolated import COMMAND, Failure, InProcess, Isolation
from autoshard.compiler.pool import CompilePool, Job, Outcome
from autoshard.compiler.worker import Reply
from autoshard.evidence.candidate import CompiledEvidence
from autoshard.jax_internals import executables
from autoshard.layout.mesh import resolve_mesh
from autoshard.plan import Plan
from autoshard.shardy.partition import Partitioned, PartitionFailure, partition
from tests.models import mlp_args, mlp_step

HELLO = """
import os, resource, sys, time
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[3]))
connection.send_bytes(bytes([0x98, *range(8)]))  # msgpack: a list of eight device ids
"""
REQUEST = HELLO + "connection.recv_bytes()\n"


def worker(script: str) -> tuple[str, ...]:
    """The command of a worker that runs a script."""
    return (sys.executable, "-c", script)


def real_worker(patch: str) -> tuple[str, ...]:
    """The command of the real worker, in which a script first puts other functions in the place of
    its own."""
    return (
        *COMMAND[:2],
        "-c",
        "import os, sys, time\nfrom autoshard.compiler import worker\n"
        "from autoshard.jax_internals import executables\nreal = executables.compile_requested\n"
        f"{patch}\n"
        "worker.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))",
    )


@pytest.fixture(scope="module")
def plans(mesh_4x2: Mesh) -> dict[str, Plan]:
    return {
        name: autoshard.apply(mlp_step, mlp_args(), mesh_4x2, name, donate_argnums=0)
        for name in ("dp", "tp", "fsdp")
    }


@pytest.fixture(scope="module")
def warm(mesh_4x2: Mesh) -> Iterator[Isolation]:
    with Isolation(resolve_mesh(mesh_4x2)) as isolation:
        yield isolation


def figures(evidence: CompiledEvidence) -> dict[str, Any]:
    return {key: value for key, value in asdict(evidence).items() if key != "compile_s"}


@pytest.mark.parametrize("name", ["dp", "tp", "fsdp"])
@pytest.mark.parametrize("inside", [True, False])
def test_evidence_is_that_of_a_compilation_here(
    plans: dict[str, Plan], warm: Isolation, name: str, inside: bool
) -> None:
    plan = plans[name] if inside else autoshard.apply(
        mlp_step, mlp_args(), plans[name].mesh.user, name, donate_argnums=0, constraints="arguments"
    )  # fmt: skip
    built = build(plan.traced, plan.layout, plan.mesh)
    here = compile_built(built, plan.mesh, time_of=len).evidence
    there = warm.compile(built, time_of=len)
    assert isinstance(there, CompiledEvidence)
    assert figures(there) == figures(here)
    assert there.collectives
    assert there.compile_s > 0


@pytest.mark.parametrize("name", ["dp", "tp", "fsdp"])
def test_the_partitioner_says_the_same_there(
    plans: dict[str, Plan], warm: Isolation, name: str
) -> None:
    lowered = plans[name].built.lower()
    here, there = partition(lowered, plans[name].mesh.axes), warm.partition(lowered)
    assert isinstance(there, Partitioned)
    assert there == here
    assert there.collectives


def test_passes_that_abort_are_a_failure_and_those_that_fail_are_not(
    plans: dict[str, Plan],
) -> None:
    lowered, mesh = plans["fsdp"].built.lower(), plans["fsdp"].mesh
    abort = "worker.partition_module = lambda module, axes: os.abort()"
    with Isolation(mesh, command=real_worker(abort)) as isolation:
        ended = isolation.partition(lowered)
        assert isinstance(ended, Failure)
        assert "the compiler aborted the process (SIGABRT)" in ended.reason
        assert isinstance(
            isolation.compile(plans["fsdp"].built), CompiledEvidence
        )  # by the worker in its place
    refuse = (
        "worker.partition_module = lambda module, axes: worker.PartitionFailure('no such axis')"
    )
    with Isolation(mesh, command=real_worker(refuse)) as isolation:
        assert isolation.partition(lowered) == PartitionFailure("no such axis")


def test_one_worker_serves_all(plans: dict[str, Plan], warm: Isolation) -> None:
    process = warm._worker.process.pid if warm._worker else None
    assert isinstance(warm.compile(plans["fsdp"].built), CompiledEvidence)
    assert warm._worker is not None
    assert process in (None, warm._worker.process.pid)


def test_options_reach_the_compiler(plans: dict[str, Plan], warm: Isolation) -> None:
    built, mesh = plans["fsdp"].built, plans["fsdp"].mesh
    options = {"xla_llvm_disable_expensive_passes": True}
    here = compile_built(built, mesh, compiler_options=options).evidence
    there = warm.compile(built, compiler_options=options)
    assert isinstance(there, CompiledEvidence)
    assert figures(there) == figures(here)
    failure = warm.compile(built, compiler_options={"no_such_option": True})
    assert isinstance(failure, Failure)
    assert "no_such_option" in failure.reason


def test_a_custom_call_of_jax_itself(mesh_4x2: Mesh, warm: Isolation) -> None:
    """LAPACK's handlers exist in the worker although it never lowers anything."""
    plan = autoshard.apply(
        lambda x: jnp.linalg.cholesky(x @ x.T), (np.eye(8, dtype=np.float32),), mesh_4x2, []
    )
    assert isinstance(warm.compile(plan.built), CompiledEvidence)


def test_a_handler_that_only_this_process_has_is_no_failure(
    mesh_4x2: Mesh, warm: Isolation
) -> None:
    def fn(x: Any) -> Any:
        return jax.ffi.ffi_call("registered_elsewhere", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    outcome = warm.compile(autoshard.apply(fn, (np.ones(8, np.float32),), mesh_4x2, []).built)
    assert isinstance(outcome, InProcess)
    assert "registered_elsewhere" in outcome.reason


def test_programs_with_callbacks_compile_in_process(mesh_4x2: Mesh, warm: Isolation) -> None:
    def fn(x: Any) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1

    outcome = warm.compile(autoshard.apply(fn, (np.ones(8, np.float32),), mesh_4x2, []).built)
    assert outcome == InProcess("the program calls back into Python")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "os.write(2, b'warming up\\nF0101 07:00:00 spmd.cc:42] Check failed: a == b (1 vs. "
            "2)\\n"
            "*** Check failure stack trace: ***\\n    @     0x7f0  xla::f()\\n'); os.abort()",
            "the compiler aborted the process (SIGABRT): F0101 07:00:00 spmd.cc:42] Check failed: "
            "a == b (1 vs. 2)",
        ),
        (
            "os.kill(os.getpid(), 11)",
            "the compiler aborted the process (SIGSEGV): nothing on its standard error",
        ),
        (
            "os.kill(os.getpid(), 9)",
            "the compiler's process was killed (SIGKILL), as the system does when memory",
        ),
        ("raise SystemExit(3)", "the compiler ended the process (exit status 3)"),
        (
            "connection.send_bytes(b'\\x93 not a reply')",
            "the compiler's process sent what cannot be read",
        ),
        (
            "os.write(connection.fileno(), b'not a message'); sys.exit()",
            "the compiler ended the process (exit status 0)",
        ),
    ],
)
def test_ends(plans: dict[str, Plan], script: str, expected: str) -> None:
    with Isolation(plans["fsdp"].mesh, command=worker(REQUEST + script)) as isolation:
        for _ in range(2):  # a new worker takes the place of the one that died
            outcome = isolation.compile(plans["fsdp"].built)
            assert isinstance(outcome, Failure)
            assert outcome.reason.startswith(expected)


ONCE = """
if not os.path.exists(os.environ["ONCE"]):
    open(os.environ["ONCE"], "w").close()
    {function} = lambda *args: {deed}
"""
KILLED = "os.kill(os.getpid(), 9)"


@pytest.mark.parametrize("function", ["executables.compile_requested", "worker.partition_module"])
def test_a_process_that_the_system_kills_once_costs_no_candidate(
    function: str, plans: dict[str, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    patch = ONCE.format(function=function, deed=KILLED)
    built, mesh = plans["fsdp"].built, plans["fsdp"].mesh
    with Isolation(mesh, command=real_worker(patch)) as isolation:
        if "partition" in function:
            assert isolation.partition(built.lower()) == partition(built.lower(), mesh.axes)
        else:
            there = isolation.compile(built, time_of=len)
            assert isinstance(there, CompiledEvidence)
            assert figures(there) == figures(compile_built(built, mesh, time_of=len).evidence)


@pytest.mark.parametrize(
    ("deed", "deaths"),
    [(KILLED, 2), ("os.abort()", 1), ("os.kill(os.getpid(), 11)", 1), ("time.sleep(600)", 1)],
)
def test_only_what_the_system_kills_is_tried_once_more(
    deed: str, deaths: int, plans: dict[str, Plan], tmp_path: Path
) -> None:
    """An abort is the program's own, and so is the time it takes."""
    count = f"os.write(os.open({str(tmp_path / 'count')!r}, 0o2101, 0o600), b'x'); {deed}"
    mesh = plans["fsdp"].mesh
    with Isolation(mesh, timeout_s=1.0, command=worker(REQUEST + count)) as isolation:
        assert isinstance(isolation.compile(plans["fsdp"].built), Failure)
    assert (tmp_path / "count").read_text() == "x" * deaths


@pytest.mark.parametrize("kills", [0, 1, 2])
def test_a_pool_tries_what_was_killed_once_more_and_alone(
    kills: int, plans: dict[str, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of four programs is killed so many times."""
    beside: list[tuple[int, int]] = []
    running: list[int] = []
    deaths = [kills]

    def read(isolation: Isolation, request: Any) -> Failure:
        number = request.number
        running.append(number)
        time.sleep(0.05)
        beside.append((number, len(running)))
        running.remove(number)
        if number == 1 and deaths[0]:
            deaths[0] -= 1
            return Failure("killed", killed=True)
        return Failure(f"read {number}")

    def compile_request(lowered: object, options: dict[str, int]) -> Any:
        return SimpleNamespace(number=options["number"])

    monkeypatch.setattr(Isolation, "read", read)
    monkeypatch.setattr(executables, "compile_request", compile_request)
    target = resolve_mesh(autoshard.target("tpu:v5e:2x4", "data=8"))
    outcomes: dict[int, Outcome] = {}
    with CompilePool(target, workers=4) as pool:
        jobs = [Job(plans["fsdp"].built, {"number": number}) for number in range(4)]
        pool.compile(jobs, outcomes.__setitem__)
    expected = {number: Failure(f"read {number}") for number in range(4)}
    if kills == 2:
        expected[1] = Failure("killed", killed=True)
    assert outcomes == expected
    assert len(beside) == 4 + min(kills, 1)
    if kills:
        assert beside[-1] == (1, 1)


@pytest.mark.parametrize("script", [REQUEST, HELLO], ids=["compiling", "reading"])
def test_hangs(plans: dict[str, Plan], script: str) -> None:
    """Also one that never reads: the request is larger than what a pipe holds."""
    large = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)
    plan = autoshard.apply(
        lambda x: x @ large, (np.ones((8, 512), np.float32),), plans["fsdp"].mesh.user, []
    )
    with Isolation(
        plan.mesh, timeout_s=0.5, command=worker(script + "time.sleep(600)")
    ) as isolation:
        outcome = isolation.compile(plan.built)
    assert outcome == Failure("it took longer than 0.5 s; the compiler's process was ended")


def test_memory_limit(plans: dict[str, Plan]) -> None:
    """The compiler's allocations end at the limit, and the next worker is as good as the first."""
    patch = "executables.compile_requested = lambda *args: bytearray(2**33)"
    with Isolation(plans["fsdp"].mesh, memory_bytes=2**32, command=real_worker(patch)) as isolation:
        outcome = isolation.compile(plans["fsdp"].built)
        assert isinstance(outcome, Failure)
        assert outcome.reason.startswith("MemoryError")


@pytest.mark.parametrize(
    "command", [("/no/such/interpreter",), worker("raise SystemExit('no jax here')")]
)
def test_without_a_worker_the_search_compiles_itself(
    plans: dict[str, Plan], command: tuple[str, ...]
) -> None:
    with Isolation(plans["fsdp"].mesh, command=command) as isolation:
        for _ in range(2):
            outcome = isolation.compile(plans["fsdp"].built)
            assert isinstance(outcome, InProcess)
            assert outcome.reason.startswith("no process to compile in could be started")


def test_an_interruption_ends_the_worker(
    plans: dict[str, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that comes later must not be taken for that to the next request."""

    def interrupted(*args: object, **kwargs: object) -> Any:
        raise KeyboardInterrupt

    with Isolation(plans["fsdp"].mesh) as isolation:
        with monkeypatch.context() as patched:
            patched.setattr(isolated.msgspec.msgpack, "decode", interrupted)
            with pytest.raises(KeyboardInterrupt):
                isolation.compile(plans["fsdp"].built)
        assert isinstance(isolation.compile(plans["fsdp"].built), CompiledEvidence | InProcess)


def test_an_interruption_while_the_time_limit_starts_leaves_nothing_behind(
    plans: dict[str, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of a limit that nobody ends would keep the process for as long as the limit is."""
    start = threading.Timer.start

    def interrupted(timer: threading.Timer) -> None:
        start(timer)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Timer, "start", interrupted)
    with Isolation(plans["fsdp"].mesh) as isolation, pytest.raises(KeyboardInterrupt):
        isolation.compile(plans["fsdp"].built)
    left = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    for timer in left:
        timer.join(10.0)
    assert not any(timer.is_alive() for timer in left)


def test_replies_survive_the_pipe() -> None:
    packed = isolated.msgspec.msgpack.encode(Reply(error="x"))
    assert isolated.msgspec.msgpack.decode(packed, type=Reply) == Reply(error="x")


# In a search --------------------------------------------------------------------------------------


def test_a_search_goes_on_after_an_abort(mesh_4x2: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third program that the worker sees aborts it; a new worker compiles the rest."""
    patch = (
        "seen = []\n"
        "def compile_requested(request, devices):\n"
        "    seen.append(request)\n"
        "    if len(seen) == 3:\n"
        "        os.write(2, b'F0101 07:00:00 spmd.cc:42] Check failed: groups == 4\\n')\n"
        "        os.abort()\n"
        "    return real(request, devices)\n"
        "executables.compile_requested = compile_requested"
    )
    monkeypatch.setattr(Isolation.__init__, "__kwdefaults__", {
        "timeout_s": 600.0, "memory_bytes": None, "command": real_worker(patch),
    })  # fmt: skip
    plan = optimize(
        mlp_step,
        mlp_args(),
        mesh_4x2,
        donate_argnums=0,
        isolate=True,
        effort=Effort(5, 0),
        progress=False,
    )
    rejected = [t for t in plan.candidates if t.status == "rejected"]
    assert [t.reason for t in rejected] == [
        "compilation failed: the compiler aborted the process (SIGABRT): F0101 07:00:00 "
        "spmd.cc:42] "
        "Check failed: groups == 4"
    ]
    assert sum(t.compiled is not None for t in plan.candidates) == 4
    assert plan.verified.ok


def test_a_search_goes_on_after_an_abort_of_the_partitioner(
    mesh_4x2: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third program that is partitioned aborts the worker; it is rejected, the others go on."""
    patch = (
        "seen, passes = [], worker.partition_module\n"
        "def partition_module(module, axes):\n"
        "    seen.append(axes)\n"
        "    return os.abort() if len(seen) == 3 else passes(module, axes)\n"
        "if not os.path.exists(os.environ['ABORTED']):\n"
        "    open(os.environ['ABORTED'], 'w').close()\n"
        "    worker.partition_module = partition_module"
    )
    monkeypatch.setenv("ABORTED", str(tmp_path / "aborted"))
    monkeypatch.setattr(Isolation.__init__, "__kwdefaults__", {
        "timeout_s": 600.0, "memory_bytes": None, "command": real_worker(patch),
    })  # fmt: skip
    plan = optimize(
        mlp_step,
        mlp_args(),
        mesh_4x2,
        donate_argnums=0,
        isolate=True,
        effort=Effort(4, 0),
        progress=False,
    )
    rejected = [t.reason for t in plan.candidates if t.status == "rejected"]
    assert rejected == [
        "partitioning failed: the compiler aborted the process (SIGABRT): nothing on its standard "
        "error"
    ]
    assert sum(t.compiled is not None for t in plan.candidates) == 3
    assert plan.verified.ok


def test_an_isolated_search_finds_what_the_other_finds(mesh_4x2: Mesh) -> None:
    def search(**how: Any) -> Plan:
        return optimize(
            mlp_step,
            mlp_args(),
            mesh_4x2,
            donate_argnums=0,
            effort=Effort(4, 0),
            progress=False,
            **how,
        )

    here, there = search(), search(isolate=True)
    assert here.specs == there.specs
    assert [(t.key, t.compiled and figures(t.compiled)) for t in here.candidates] == [
        (t.key, t.compiled and figures(t.compiled)) for t in there.candidates
    ]
    assert there.verified.ok
    assert not any("isolated" in note for note in there.notes)


def test_a_search_with_callbacks_says_that_it_was_not_isolated(mesh_4x2: Mesh) -> None:
    def fn(x: Any) -> Any:
        return (
            jax.pure_callback(
                np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
            )
            * 2
        )

    x = np.ones((8, 8), np.float32)
    plan = optimize(fn, (x,), mesh_4x2, isolate=True, effort=Effort(1, 0), progress=False)
    assert [n for n in plan.notes if "isolated" in n] == [
        "compiled in the process of the search, not isolated: the program calls back into Python"
    ]


@pytest.mark.parametrize(
    "bad",
    [
        {"compile_timeout_s": 0},
        {"compile_timeout_s": float("nan")},
        {"compile_memory_bytes": "lots"},
    ],
)
def test_limits_are_checked(mesh_4x2: Mesh, bad: dict[str, Any]) -> None:
    with pytest.raises(autoshard.ArgumentError, match=next(iter(bad))):
        optimize(mlp_step, mlp_args(), mesh_4x2, isolate=True, progress=False, **bad)


def test_the_worker_sees_what_this_process_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plans: Any
) -> None:
    """Also from another directory, in which a file has the name of a module of the standard
    library."""
    (tmp_path / "signal.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    with Isolation(plans["dp"].mesh) as isolation:
        assert isinstance(isolation.compile(plans["dp"].built), CompiledEvidence)
