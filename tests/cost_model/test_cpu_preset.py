"""Where the numbers of the `cpu` preset come from; `make bench` prints them, and fails if they are
far from it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.cost_model.hardware.collectives import collective_s
from autoshard.cost_model.hardware.hardware import cpu

pytestmark = pytest.mark.bench
# a busy machine, or another one; and the model gives a collective_permute one step, XLA:CPU a
# rendezvous
FAR = 30.0
RUNS = 20  # in one program, so that the time of a call does not count


def median_s(fn: Callable[..., Any], *args: Any) -> float:
    """Median wall seconds of 15 calls after two."""
    seconds = []
    for _ in range(17):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def near(measured: float, preset: float) -> bool:
    """True if the preset is of the right order."""
    return preset / FAR < measured < preset * FAR


@pytest.fixture(scope="module")
def line() -> Mesh:
    """All 8 devices on one mesh axis."""
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def test_matmul_rate(line: Mesh) -> None:
    for size in (128, 256, 512):
        rows = jax.device_put(jnp.ones((8 * size, size)), NamedSharding(line, PartitionSpec("x")))
        weights = jax.device_put(jnp.ones((size, size)), NamedSharding(line, PartitionSpec()))
        step = jax.jit(lambda a, b: jax.lax.fori_loop(0, RUNS, lambda _, a: (a @ b) * 1e-3, a))
        rate = RUNS * 2 * size**3 / median_s(step, rows, weights)
        print(f"\nmatmul of {size} rows: {rate:.1e} flops/s a device", end="")
        assert near(rate, cpu.peak_flops_per_s["float32"])


def test_memory_rate(line: Mesh) -> None:
    for mib in (1, 4, 16):
        x = jax.device_put(jnp.ones((8 * mib * 2**18,)), NamedSharding(line, PartitionSpec("x")))
        step = jax.jit(lambda x: jax.lax.fori_loop(0, RUNS, lambda _, x: x * 1.0001 + 1, x))
        rate = RUNS * 2 * mib * 2**20 / median_s(step, x)
        print(f"\nstreaming {mib} MiB: {rate:.1e} bytes/s a device", end="")
        assert near(rate, cpu.memory_bytes_per_s)


def collectives(group: int) -> Iterator[tuple[str, Callable[[jax.Array], jax.Array]]]:
    """Collectives over `x` that keep the shape of a replicated vector."""
    yield "all_reduce", lambda v: jax.lax.psum(v, "x") * 0.1
    yield (
        "all_gather",
        lambda v: jax.lax.all_gather(v[: v.shape[0] // group], "x", tiled=True) * 0.5,
    )
    ring = [(i, (i + 1) % group) for i in range(group)]
    yield "collective_permute", lambda v: jax.lax.ppermute(v, "x", ring) * 0.5


@pytest.mark.parametrize("group", [2, 4, 8])
def test_links(group: int) -> None:
    mesh = jax.make_mesh((8 // group, group), ("y", "x"), axis_types=(AxisType.Auto,) * 2)

    def run(op: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
        def body(x: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, RUNS, lambda _, x: op(x), x)

        spec = PartitionSpec(None)
        return median_s(
            jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)),
            x,
        )

    for full_bytes in (2**6, 2**16, 2**20, 2**22):
        x = jax.device_put(jnp.zeros((full_bytes // 4,)), NamedSharding(mesh, PartitionSpec(None)))
        nothing_s = run(lambda v: v * 0.5, x)
        for kind, op in collectives(group):
            measured_s = (run(op, x) - nothing_s) / RUNS
            predicted_s = collective_s(kind, full_bytes, cpu.link, group)
            print(
                f"\n{kind} of {full_bytes} bytes over {group}: {measured_s:.1e} s, "
                f"{predicted_s:.1e} s",
                end="",
            )
            assert near(max(measured_s, 1e-9), predicted_s)
