"""One process of several that search together, as a program; and ways to start them."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.jobs.crew import ROOT

DEVICES = 2
"""Of each process."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def ranks(
    count: int, scenario: str, folder: Path, **settings: Any
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts the processes; those still running at the end are killed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(DEVICES),
    }
    port, processes = free_port(), []
    try:
        for number in range(count):
            text = json.dumps({"scenario": scenario, "folder": str(folder), **settings})
            command = [
                sys.executable,
                "-m",
                "tests.jobs.ranks",
                str(number),
                str(count),
                str(port),
                text,
            ]
            with (folder / f"{number}.log").open(
                "w"
            ) as log:  # gloo and jax write a lot; pipes would fill
                processes.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdout=log, stderr=log, text=True
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def finish(processes: list[subprocess.Popen[str]], folder: Path, timeout_s: float) -> list[Any]:
    """What each process found, once all have ended; their exit codes must be 0.

    Raises:
        TimeoutExpired: If they have not ended in time.
    """
    end = time.monotonic() + timeout_s
    for number, process in enumerate(processes):
        code = process.wait(timeout=max(0.1, end - time.monotonic()))
        assert code == 0, f"process {number}: {said(folder, number)[-4000:]}"
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(len(processes))]


def said(folder: Path, number: int) -> str:
    return (folder / f"{number}.log").read_text()


# In the processes ---------------------------------------------------------------------------------


def small_demo() -> dict[str, Any]:
    """The demo's step at small sizes; every process makes the same values."""
    import jax
    import numpy as np

    from examples import transformer

    config = transformer.Config(layers=2, d_model=32, heads=4, d_ff=64, length=16, batch=8)
    params = transformer.init_params(jax.random.key(0), config)
    tokens = (
        np.random.default_rng(0)
        .integers(0, 256, (config.batch, config.length + 1))
        .astype(np.int32)
    )
    args = params, transformer.OPTIMIZER.init(params), tokens
    return {"fn": transformer.train_step, "example_args": args, "donate_argnums": (0, 1)}


def described(plan: Any) -> dict[str, Any]:
    candidates = [candidate.to_dict() for candidate in plan.candidates]
    return {
        "rules": [str(rule) for rule in plan.rules],
        "verified": [plan.verified.ok, plan.verified.reason],
        "candidates": candidates,
        "rejected": {t["name"]: t["reason"] for t in candidates if t["status"] == "rejected"},
        "notes": list(plan.notes),
        "table": plan.table.dumps(),
    }


def demo(mesh: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Searches in less memory than replication needs, saves, applies what was saved, takes steps
    with both plans."""
    import jax

    import autoshard

    given = small_demo()
    effort = autoshard.Effort(compiled=settings.get("compiled", 4), measured=2)
    plan = autoshard.optimize(
        mesh=mesh, effort=effort, memory_budget_bytes="600KiB", isolate=True, **given
    )
    table = Path(settings["folder"]) / f"table.{jax.process_index()}.json"
    plan.table.save(table)
    applied = autoshard.apply(mesh=mesh, layout=table, **given)
    params, state, tokens = given["example_args"]
    alone = jax.jit(given["fn"])
    losses: list[list[float]] = []
    for step in (alone, plan, applied):
        p, s, seen = params, state, []
        for _ in range(3):
            p, s, loss = step(p, s, tokens)
            seen.append(float(loss.addressable_data(0)))
        losses.append(seen)
    return {**described(plan), "losses": losses}


def manners(mesh: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Searches in which one process fails, lags, differs or is interrupted, one after another by
    the same processes."""
    import jax

    found = {}
    for name, case in CASES.items():
        start_s = time.monotonic()
        case_of = case(mesh, jax.process_index())
        found[name] = {**case_of, "seconds": time.monotonic() - start_s}
        print(
            f"{name}: {time.monotonic() - start_s:.1f} s, {case_of.get('text', '')[:200]}",
            file=sys.stderr,
        )
    return found


def search(mesh: Any, **changes: Any) -> dict[str, Any]:
    """A search for a small step, or its error."""
    import autoshard
    from autoshard.search.study.shared_study import Sharing
    from tests.models import mlp_args, mlp_step

    given: dict[str, Any] = {
        "fn": mlp_step, "example_args": mlp_args(), "donate_argnums": 0, "progress": False,
        "effort": autoshard.Effort(compiled=3, measured=2), "sharing": Sharing(patience_s=20),
    }  # fmt: skip
    try:
        return described(autoshard.optimize(mesh=mesh, **{**given, **changes}))
    except autoshard.AutoshardError as error:
        return {"error": type(error).__name__, "text": str(error)}


@contextmanager
def instead(where: Any, name: str, make: Callable[[Any], Any], *, on: bool) -> Iterator[None]:
    """Puts something else in the place of a function, on some processes."""
    before = getattr(where, name)
    if on:
        setattr(where, name, make(before))
    try:
        yield
    finally:
        setattr(where, name, before)


def nth(number: int, other: Callable[..., Any]) -> Callable[[Any], Any]:
    """Does something else at the nth call; `other` is given the function that it stands for, and
    its arguments."""

    def make(before: Any) -> Any:
        calls = []

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return (
                other(before, *args, **kwargs) if len(calls) == number else before(*args, **kwargs)
            )

        return call

    return make


def fail(before: Any, *args: Any, **kwargs: Any) -> Any:
    raise MemoryError("no memory on this host")


def global_arrays(mesh: Any, own: int) -> dict[str, Any]:
    """Arguments of which no process has the whole, keys among them."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from tests.models import mlp_args, mlp_step

    def spread(value: Any, *spec: Any) -> Any:
        value = np.asarray(value)
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def noisy_step(params: Any, x: Any, y: Any, keys: Any) -> Any:
        params, loss = mlp_step(params, x + 0.1 * jax.random.normal(keys[0], x.shape), y)
        return params, loss, jax.random.split(keys[1], 2)

    params, x, y = mlp_args()
    params = {
        "w1": spread(params["w1"], "data"),
        "b1": spread(params["b1"]),
        "w2": spread(params["w2"], "model", None),
    }
    keys = jax.random.wrap_key_data(
        spread(jax.random.key_data(jax.random.split(jax.random.key(3), 2)), "data")
    )
    return search(mesh, fn=noisy_step, example_args=(params, spread(x, ("data", "model")), y, keys))


def any_shape(mesh: Any, own: int) -> dict[str, Any]:
    import autoshard

    return search("4", effort=autoshard.Effort(compiled=1, measured=0))


def explicit_axes(mesh: Any, own: int) -> dict[str, Any]:
    import jax

    import autoshard

    explicit = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    return search(explicit, effort=autoshard.Effort(compiled=1, measured=1))


def compile_fails(mesh: Any, own: int) -> dict[str, Any]:
    from autoshard.evaluate import device_runner

    with instead(device_runner, "compile_built", nth(1, fail), on=own == 1):
        return search(mesh)


def placing_fails(mesh: Any, own: int) -> dict[str, Any]:
    from autoshard.evaluate import device_runner

    with instead(device_runner.DeviceRunner, "_run_and_compare", nth(1, fail), on=own == 1):
        return search(mesh)


def wrong_numbers(mesh: Any, own: int) -> dict[str, Any]:
    from autoshard.evaluate.verification.reference import Reference
    from autoshard.evidence.candidate import Verified

    def wrong(before: Any, *args: Any) -> Any:
        before(*args)
        return Verified(1.0, 0.5, "unsharded function", "leaf"), False

    with instead(Reference, "compare", nth(1, wrong), on=own == 1):
        return search(mesh)


def one_is_slow(mesh: Any, own: int) -> dict[str, Any]:
    from autoshard.evaluate.measure import _Runner

    with instead(_Runner, "_run", lambda before: lambda self: before(self) + 1.0, on=own == 1):
        return search(mesh)


def nothing_fits(mesh: Any, own: int) -> dict[str, Any]:
    import autoshard

    return search(mesh, memory_budget_bytes="1KiB", effort=autoshard.Effort(compiled=0, measured=0))


def other_values(mesh: Any, own: int) -> dict[str, Any]:
    from tests.models import mlp_args

    params, x, y = mlp_args()
    return search(mesh, example_args=(params, x + own, y))


def other_function(mesh: Any, own: int) -> dict[str, Any]:
    from tests.models import mlp_step

    return search(
        mesh, fn=mlp_step if own != 1 else lambda params, x, y: mlp_step(params, x + 1, y)
    )


def late(mesh: Any, own: int) -> dict[str, Any]:
    from autoshard.search.study.shared_study import Sharing

    time.sleep(8 if own == 1 else 0)
    return search(mesh, sharing=Sharing(patience_s=2))


def other_interrupted(mesh: Any, own: int) -> dict[str, Any]:
    """Ctrl-C reaches a process that does not lead."""
    import autoshard
    from autoshard.evaluate import device_runner

    def interrupted(before: Any, *args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return before(*args, **kwargs)

    def slowly(before: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.5)
            return before(*args, **kwargs)

        return call

    with (
        instead(device_runner, "compile_built", slowly, on=True),
        instead(device_runner, "compile_built", nth(1, interrupted), on=own == 1),
    ):
        return search(mesh, effort=autoshard.Effort(compiled=8, measured=2))


def leader_interrupted(mesh: Any, own: int) -> dict[str, Any]:
    """Ctrl-C reaches the leader while all measure."""
    from autoshard.evaluate.measure import _Runner

    def interrupted(before: Any, *args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return before(*args)

    with instead(_Runner, "_run", nth(7, interrupted), on=own == 0):
        return search(mesh)


CASES: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    case.__name__: case
    for case in (
        global_arrays,
        any_shape,
        explicit_axes,
        compile_fails,
        placing_fails,
        wrong_numbers,
        one_is_slow,
        nothing_fits,
        other_values,
        other_function,
        late,
        other_interrupted,
        leader_interrupted,
    )
}

SCENARIOS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "demo": demo,
    "manners": manners,
}


def main() -> None:
    number, count, port, text = sys.argv[1:5]
    import jax

    settings = json.loads(text)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    jax.distributed.initialize(
        f"127.0.0.1:{port}", int(count), int(number), initialization_timeout=60,
        heartbeat_timeout_seconds=settings.get("heartbeat_s", 60), shutdown_timeout_seconds=30,
    )  # fmt: skip
    mesh = jax.make_mesh(
        (int(count), DEVICES), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    found = SCENARIOS[settings["scenario"]](mesh, settings)
    (Path(settings["folder"]) / f"{number}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
