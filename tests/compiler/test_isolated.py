"""A compilation that aborts, hangs, or eats the memory is a rejection with its reason; the search
goes on."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import Effort, optimize
from autoshard.compiler import isolated, worker_process
from autoshard.compiler.compile import build, compile_built
from autoshard.compiler.isolated import COMMAND, InProcess, Isolation
from autoshard.compiler.pool import CompilePool, Job, Outcome
from autoshard.compiler.worker import RETIRED, Reply
from autoshard.compiler.worker_process import Failure
from autoshard.devices.target import Target
from autoshard.evidence.candidate import CompiledEvidence
from autoshard.jax_internals import executables
from autoshard.layout.mesh import MeshInfo, resolve_mesh
from autoshard.plan import Plan
from autoshard.shardy.partition import Partitioned, PartitionFailure, partition
from autoshard.tracing.rewrite import Constraints
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
    reason = "it took longer than 0.5 s; the compiler's process was ended"
    assert outcome == Failure(reason, expired=True)


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


# One worker for many searches ---------------------------------------------------------------------


def kept_pids() -> list[int]:
    return [worker.process.pid for worker in worker_process._kept]


def test_the_next_search_finds_the_worker_of_the_last(mesh_4x2: Mesh) -> None:
    pids = []
    for seed in range(2):
        plan = optimize(
            mlp_step, mlp_args(), mesh_4x2, effort=Effort(1, 0), seed=seed, progress=False
        )
        assert plan.verified.ok
        pids.append(kept_pids())
    assert len(pids[0]) == 1
    assert pids[0] == pids[1]


def test_a_search_that_compiles_nothing_starts_no_worker(
    mesh_4x2: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object) -> Any:
        raise AssertionError("started")

    monkeypatch.setattr(isolated, "take", never)
    optimize(mlp_step, mlp_args(), mesh_4x2, effort=Effort(0, 0), progress=False)
    optimize(mlp_step, mlp_args(), mesh_4x2, effort=Effort(1, 0), isolate=False, progress=False)


def test_a_worker_of_other_devices_is_not_taken(plans: dict[str, Plan]) -> None:
    mesh = plans["dp"].mesh
    with Isolation(mesh) as isolation:
        assert isinstance(isolation.compile(plans["dp"].built), CompiledEvidence)
    (kept,) = worker_process._kept
    with Isolation(mesh, memory_bytes=2**36) as limited:
        assert limited._worker is not kept
        assert kept.process.poll() is not None  # one at a time
        with Isolation(mesh) as beside:  # as in another thread
            assert beside._worker is not limited._worker
    assert len(kept_pids()) == 1


def test_a_worker_without_work_gives_its_memory_back(plans: dict[str, Plan]) -> None:
    with Isolation(plans["dp"].mesh, command=real_worker("worker.IDLE_LIMIT_S = 0.2")) as isolation:
        lowered = plans["dp"].built.lower()
        assert isinstance(isolation.partition(lowered), Partitioned)
        assert isolation._worker is not None
        first = isolation._worker.process
        assert first.wait(60) == RETIRED
        assert isinstance(isolation.partition(lowered), Partitioned)
        assert isolation._worker.process is not first


PROGRAM = """
import os, sys, threading
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
import autoshard
from autoshard.compiler import worker_process

def search():
    x = np.ones((4, 8), np.float32)
    plan = autoshard.optimize(lambda x: x @ x.T, (x,), "data=2", effort=autoshard.Effort(1, 0))
    print(plan.verified.ok, [n for n in plan.notes if "isolated" in n], len(worker_process._kept))

search()
thread = threading.Thread(target=search)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("how", ["script", "option", "stdin"])
def test_no_program_needs_to_know_of_it(tmp_path: Path, how: str) -> None:
    """Not a script without `__main__` guard, whose lambdas no pickle would take, and in a thread
    neither."""
    script = tmp_path / "step.py"
    script.write_text(PROGRAM)
    arguments = {"script": [str(script)], "option": ["-c", PROGRAM], "stdin": ["-"]}[how]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=PROGRAM if how == "stdin" else "",
        cwd=tmp_path,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["True [] 1"] * 2, done.stderr


def test_a_program_frozen_into_one_file_compiles_itself(
    mesh_4x2: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its executable is the program: started as Python, it would search again, and start another."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    plan = optimize(mlp_step, mlp_args(), mesh_4x2, effort=Effort(1, 0), progress=False)
    assert plan.verified.ok
    assert [note for note in plan.notes if "isolated" in note] == [
        "compiled in the process of the search, not isolated: this program is frozen into one file"
    ]


# Accelerators -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class On(MeshInfo):
    """A mesh whose devices say that they are of another platform."""

    named: str = ""

    @property
    def platform(self) -> str:
        return self.named


@pytest.mark.parametrize("platform", ["tpu", "gpu", "unheard-of"])
def test_the_worker_takes_no_accelerator(mesh_4x2: Mesh, platform: str) -> None:
    where, settings = isolated._surroundings(On(mesh_4x2, mesh_4x2, platform))
    assert settings["JAX_PLATFORMS"] == "cpu"
    assert settings["CUDA_VISIBLE_DEVICES"] == ""
    assert where == ""


def test_for_gpus_it_compiles_by_their_description(
    mesh_4x2: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'device_description_str: "H100"'
    monkeypatch.setattr(executables, "gpu_target_config", lambda devices: text)
    monkeypatch.setattr(jax, "local_device_count", lambda platform: 8)
    where, settings = isolated._surroundings(On(mesh_4x2, mesh_4x2, "gpu"))
    target = msgspec.json.decode(where, type=Target)
    assert (target.platform, target.shape, target.description) == ("gpu", (1, 8), text)
    assert settings["JAX_PLATFORMS"] == "cpu"


def test_for_tpus_it_partitions_and_says_that_it_does_not_compile(plans: dict[str, Plan]) -> None:
    mesh = plans["fsdp"].mesh
    with Isolation(On(mesh.user, mesh.auto, "tpu")) as isolation:
        for _ in range(2):
            assert isinstance(isolation.partition(plans["fsdp"].built.lower()), Partitioned)
            outcome = isolation.compile(plans["fsdp"].built)
            assert isinstance(outcome, InProcess)
            assert "(tpu)" in outcome.reason


# A compiler that aborts ---------------------------------------------------------------------------

ABORTS = jax.__version_info__ < (0, 11)
"""XLA:CPU of jax 0.10.2 aborts on an FFT of three dimensions whose last is cut into more shards than
a shard has elements, where it has to split it itself."""


def spectra(x: Any) -> Any:
    return jnp.abs(jnp.fft.fft(x))


def planes(x: Any) -> Any:
    return jnp.abs(jnp.fft.fft2(x)) ** 2


def columns(x: Any) -> Any:
    return jnp.fft.fft(x, axis=1).real


@pytest.mark.parametrize(
    ("fn", "shape", "spec"),
    [
        (spectra, (4, 8, 16), P(None, None, ("data", "model"))),
        (planes, (4, 16, 16), P(None, None, ("data", "model"))),
        (columns, (4, 16, 8), P(None, ("data", "model"))),
    ],
)
def test_what_aborts_on_an_fft_along_a_split_axis_fails(
    mesh_4x2: Mesh, warm: Isolation, fn: Any, shape: tuple[int, ...], spec: P
) -> None:
    plan = autoshard.apply(fn, (np.ones(shape, np.float32),), mesh_4x2, [], pins={"x": spec})
    outcome = warm.compile(build(plan.traced, plan.layout, plan.mesh, Constraints({})))
    if not ABORTS:
        assert isinstance(outcome, CompiledEvidence)
        return
    assert isinstance(outcome, Failure)
    assert "SIGABRT" in outcome.reason
    assert "fft_handler" in outcome.reason
    assert "Check failed" in outcome.reason


def test_an_fft_along_a_split_axis_does_not_end_the_caller(mesh_4x2: Mesh) -> None:
    """It runs by pieces but where nothing is stated inside, and the compiler has to split it."""
    plan = optimize(
        spectra,
        (np.random.default_rng(0).standard_normal((4, 8, 16)).astype(np.float32),),
        mesh_4x2,
        pins={"x": P(None, None, ("data", "model"))},
        effort=Effort(16, 0),
        progress=False,
    )
    assert plan.verified.ok
    reasons = [c.reason for c in plan.candidates if c.status == "rejected"]
    assert any("SIGABRT" in reason for reason in reasons) == ABORTS
    assert all("fft_handler" in reason for reason in reasons)


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, check=False
    )


@pytest.mark.parametrize(
    ("end", "code"),
    [("os.abort()", -6), ("os.kill(os.getpid(), 9)", -9), ("os._exit(3)", 3)],
)
def test_the_last_words_of_a_compiler_here_reach_the_terminal(end: str, code: int) -> None:
    done = run(
        "import os, glob, tempfile\n"
        "from autoshard.compiler.captured_stderr import captured_stderr\n"
        "with captured_stderr() as written:\n"
        "    os.write(2, b'a warning of no interest\\n')\n"
        "print(repr(written()))\n"
        "with captured_stderr():\n"
        "    os.write(2, b'F0101 spmd.cc:42] Check failed: a == b\\n')\n"
        f"    {end}\n"
    )
    assert done.returncode == code
    assert done.stdout in ("", "'a warning of no interest\\n'\n")  # its buffer may be lost
    assert done.stderr == "F0101 spmd.cc:42] Check failed: a == b\n"


@pytest.mark.skipif(not ABORTS, reason="this compiler does not abort on it")
def test_a_compiler_that_aborts_here_says_why() -> None:
    done = run(
        "import os\nos.environ['JAX_PLATFORMS'] = 'cpu'\nimport jax, jax.numpy as jnp\n"
        "jax.config.update('jax_num_cpu_devices', 8)\nimport autoshard, numpy as np\n"
        "from jax.sharding import PartitionSpec as P\n"
        "from autoshard.compiler.compile import build, compile_built\n"
        "from autoshard.tracing.rewrite import Constraints\n"
        "plan = autoshard.apply(lambda x: jnp.fft.fft(x), (np.ones((4, 8, 16), np.float32),),\n"
        "    'data=4,model=2', [], pins={'x': P(None, None, ('data', 'model'))})\n"
        "compile_built(build(plan.traced, plan.layout, plan.mesh, Constraints({})), plan.mesh)\n"
    )
    assert done.returncode == -6
    assert "fft_handler.cc" in done.stderr
    assert "Check failed" in done.stderr
